"""Why the step of a slice cannot be inverted, as far as that shows without reading its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.slices import BF16_OR_ROUNDED, OwnedSlice
from awex_delta.detection.stored import MOMENTS, REMAINDER, is_served
from awex_delta.errors import UnsupportedError
from awex_delta.protocol.verdict import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why one slice cannot be inverted."""

    reason: Reason
    detail: str


def refusals(owned: OwnedSlice, numel: int, planned: AdamWStep | Reason | None) -> Iterator[Refusal]:
    """What speaks against inverting a step.

    Args:
        owned: the slice, of `numel` elements.
        planned: the step, as `detect_changes` was told of it.

    Raises:
        UnsupportedError: the weight is not bf16, or it or the master does not have the length of the slice.
    """
    main, weight = owned.main, owned.weight
    away = owned.unreadable("weight")
    if away:
        raise UnsupportedError(away)
    if weight.dtype not in BF16_OR_ROUNDED or weight.numel() != numel:
        raise UnsupportedError(f"{owned.key}: detection needs {numel} bf16 weights, not {_describe(weight)}")
    if main is not None and main.numel() != numel:
        raise UnsupportedError(f"{owned.key}: the master of {numel} weights is {_describe(main)}")
    if main is None or main.dtype not in (torch.float32, REMAINDER):
        yield Refusal(reason=Reason.NO_FP32_MASTER, detail=f"{owned.key}: master is {_describe(main)}")
    elif away := owned.unreadable("main"):
        yield Refusal(reason=Reason.STATE_AWAY, detail=away)
    if planned is None:
        # Before the first counted step the moments are looked at, too: they have to be zero.
        if owned.step < 1 and (away := owned.unreadable("exp_avg", "exp_avg_sq")):
            yield Refusal(reason=Reason.STATE_AWAY, detail=away)
        return
    if isinstance(planned, Reason):
        yield Refusal(reason=planned, detail=owned.key)
        return
    yield from _refused_moments(owned, numel)
    if planned.step != owned.step:
        detail = f"{owned.key}: step {planned.step} was recorded, the optimizer counts {owned.step}"
        yield Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=detail)


def _refused_moments(owned: OwnedSlice, numel: int) -> Iterator[Refusal]:
    for name, moment, scale in (
        ("exp_avg", owned.exp_avg, owned.exp_avg_scale),
        ("exp_avg_sq", owned.exp_avg_sq, owned.exp_avg_sq_scale),
    ):
        if moment is None or moment.numel() != numel:
            detail = f"{owned.key}: {name} is {_describe(moment)}"
            yield Refusal(reason=Reason.MOMENTS_MISSING, detail=detail)
        elif moment.dtype is not torch.float32 and not is_served(moment.dtype, scale):
            without = " without a scale" if moment.dtype in MOMENTS else ""
            detail = f"{owned.key}: {name} is {_describe(moment)}{without}"
            yield Refusal(reason=Reason.MOMENTS_INVALID, detail=detail)
    if away := owned.unreadable("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        yield Refusal(reason=Reason.STATE_AWAY, detail=away)


def _describe(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.numel()} elements of {tensor.dtype}"
