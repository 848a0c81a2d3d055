"""Owned ranges of parameters with their optimizer state, and what detection says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from awex_delta.errors import UnsupportedError
from awex_delta.lines.changes import Changes
from awex_delta.lines.storages import unreadable
from awex_delta.protocol.verdict import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSlice:
    """The range of one local parameter whose optimizer state this rank holds.

    All tensors are flat, of `stop - start` elements, on one device, and alias live storage.

    param: canonical Megatron name on this rank (unique together with `chunk`).
    chunk: index of the model chunk (virtual pipeline stage) that holds the parameter.
    start, stop: half-open flat element range in the local (tensor-parallel) parameter.
    begin: position of its first element in the trainer's line.
    main: fp32 master weight, or int16, what it has beyond the weight (`stored.whole`); None when the
        optimizer keeps none.
    weight: the model's own weight over the same range: bf16, or fp32 where the model computes with its
        rounding to bf16, as FSDP2 does with what the optimizer steps.
    exp_avg, exp_avg_sq: AdamW moments, in fp32, bf16, fp16 or fp8 (E4M3); None before the first step.
    step: the optimizer's own step counter for this parameter now, 0 before the first step.
    exp_avg_scale, exp_avg_sq_scale: fp32, one element: what moments in fp16 and fp8 are multiples of.
    """

    param: str
    chunk: int
    start: int
    stop: int
    begin: int
    main: torch.Tensor | None
    weight: torch.Tensor
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    step: int
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """Identity of the parameter on this rank."""
        return param_key(self.param, self.chunk)

    def unreadable(self, *names: str) -> str:
        """Why one of the named tensors cannot be read beside the weight; empty if all can, or are None."""
        device = self.weight.device
        for name in names:
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            why = unreadable(tensor)
            if not why and tensor.device != device:
                why = f"it lies on {tensor.device}, the weight on {device}"
            if why:
                return f"{self.key}: {name}: {why}"
        return ""


def unusable(key: str, **tensors: torch.Tensor | None) -> UnsupportedError:
    """Why the tensors of a parameter, by name, do not make an `OwnedSlice`."""
    for name, tensor in tensors.items():
        why = "" if tensor is None else unreadable(tensor)
        if tensor is not None and not why and not tensor.is_contiguous():
            why = f"it is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        if why:
            return UnsupportedError(f"{key}: {name}: {why}")
    shapes = {name: None if tensor is None else tuple(tensor.shape) for name, tensor in tensors.items()}
    return UnsupportedError(f"{key}: these do not make a slice: {shapes}")


def param_key(param: str, chunk: int) -> str:
    """Identity of a local parameter: its canonical Megatron name and its model chunk."""
    return f"{chunk}/{param}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What detection found on one rank: changed elements, or the reason why a full sync is needed.

    changes: in the trainer's line, with codes: a certified superset of what changed. They have values
        if detection read those anyway.
    """

    changes: Changes = field(default_factory=Changes.none)
    reason: Reason = Reason.NONE
    detail: str = ""
    num_owned: int = 0

    @property
    def num_changed(self) -> int:
        """How many elements are listed."""
        return self.changes.num_changed


BF16_OR_ROUNDED = (torch.bfloat16, torch.float32)
"""Dtypes of a weight that a model computes with in bf16."""

OwnedSlices = Callable[[], Iterable[OwnedSlice]]
"""The owned slices of a trainer, as they stand now, in the order of the trainer's line."""


def bf16_slices(slices: Iterable[OwnedSlice]) -> list[OwnedSlice]:
    """Those that have elements. Raises UnsupportedError if a weight has no bf16 bits, or cannot be read."""
    filled = [owned for owned in slices if owned.stop > owned.start]
    for owned in filled:
        if away := owned.unreadable("weight"):
            raise UnsupportedError(away)
        if owned.weight.dtype not in BF16_OR_ROUNDED:
            raise UnsupportedError(
                f"{owned.key}: only bits of bf16 are compared, not of {owned.weight.dtype}"
            )
    return filled
