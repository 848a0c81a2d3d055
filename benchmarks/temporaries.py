"""Which temporary tensors a piece of code makes, counted exactly and on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestNew(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest storage that an operation makes, in bytes. Views and writes in place make none.

    Attributes:
        num_bytes: of the largest one so far.
        num_operations: that were seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.num_operations += 1
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
