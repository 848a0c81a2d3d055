"""Tells whether a converter talks to other ranks, before any of them could wait for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from awex_delta.errors import UnsupportedError


class Alone(TorchDispatchMode):
    """Held around a converter: nothing leaves this rank inside.

    Every operation on a process group of torch passes torch's dispatcher, whichever group it is. On meta
    tensors it moves nothing and is noted; anything else is refused before it is sent.

    Attributes:
        communicates: an operation on a process group was called.

    Raises:
        UnsupportedError: an operation on a process group was called with data.
    """

    def __init__(self, param: str) -> None:
        """`param` is the name that a refusal gives."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False
        self._param = param

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation of torch, and do it."""
        if "c10d" in func.namespace:
            self.communicates = True
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            if not tensors or not all(tensor.is_meta for tensor in tensors):
                raise UnsupportedError(
                    f"the converter of {self._param} calls {func} on a process group with other tensors than "
                    "the one it converts, so that it cannot be foreseen who waits for whom. Train the model "
                    "in a layout that needs no such call, such as without tensor parallelism"
                )
        return func(*args, **(kwargs or {}))
