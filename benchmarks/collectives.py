"""Count what process groups carry, instead of believing it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of this thread on process groups: all of them pass torch's dispatcher, but for
    those in the groups of a `Comm`.

    Compiled functions run uncompiled under it, so do not time it. `num_calls` and `num_bytes` are by name of
    the group, the bytes those of the tensors handed to them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls: dict[str, int] = defaultdict(int)
        self.num_bytes: dict[str, int] = defaultdict(int)
        self._stance: Any = None

    def __enter__(self) -> Self:
        self._stance = torch.compiler.set_stance("force_eager")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("c10d"):
            leaves = tree_leaves((args, kwargs or {}))
            name = next((_name(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject)), "")
            self.num_calls[name] += 1
            self.num_bytes[name] += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _name(group: torch.ScriptObject) -> str:
    return str(dist.ProcessGroup.unbox(group).group_name)
