"""Runs converters without data: do they talk to other ranks, and is anything lost or made twice?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from awex_delta.errors import UnsupportedError
from awex_delta.trainers.view import WeightInfo


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


def check_conversion(
    infos: Iterable[WeightInfo],
    convert: Callable[[str, torch.Tensor], Sequence[tuple[str, torch.Tensor]]],
) -> None:
    """Convert every weight once without data, so that nothing is found missing during an update.

    Args:
        infos: all weights of a trainer rank.
        convert: `TrainerView.convert` of that trainer.

    Raises:
        UnsupportedError: a weight cannot be converted, or only together with another one; two make the same
            HF tensor; or one that is trained makes none, as layers for multi-token prediction.
    """
    source: dict[str, str] = {}
    for info in infos:
        meta = torch.empty(info.shape, dtype=info.dtype, device="meta")
        try:
            with Alone(info.param):
                first, second = convert(info.key, meta), convert(info.key, meta)
        except (NotImplementedError, ValueError, RuntimeError, AssertionError) as error:
            raise UnsupportedError(f"AWEX cannot convert {info.param} {info.shape}: {error}") from error
        if [(name, out.shape) for name, out in first] != [(name, out.shape) for name, out in second]:
            raise UnsupportedError(f"AWEX's converter joins {info.param} with another parameter")
        if info.trained and not first:
            raise UnsupportedError(
                f"AWEX's converter drops {info.param}, which is trained, so that engines would never get it: "
                "freeze it, or build the model without it"
            )
        for name, _ in first:
            if name in source:
                raise UnsupportedError(f"{name} would be made of both {source[name]} and {info.param}")
            source[name] = info.param
