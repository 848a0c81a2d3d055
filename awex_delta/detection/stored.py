"""Masters and moments that are kept in less than fp32: what they stand for, and how far off they may be.

A kernel steps in fp32 and rounds moments to nearest only to keep them, so the step that is over used others
than those that are there now. Transformer Engine's FusedAdam keeps them as bf16, or as fp16 or fp8 (E4M3) in
units of one scale for each tensor, and of a master the 16 bits that its bf16 weight lacks.
`docs/en/numerics.md` derives what follows from that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_delta.detection import adamw
from awex_delta.detection.adamw import AdamWStep, Inversion
from awex_delta.detection.pieces import Piece, Scratch
from awex_delta.detection.slices import OwnedSlice
from awex_delta.lines.bits import round_to_bf16

_SCALING = 2.0**-20  # relative: a quotient, two products and a reciprocal in fp32, with a margin of four
_FLUSH = 2.0**-124  # absolute: results below the normal range of fp32, each flushed to zero
_QUOTIENT = 2.0**-18  # relative: two quotients evaluated in fp32, whose difference is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How far a value may be from what is kept of it: the larger one of two bounds.

    relative: to what is kept.
    absolute: in units of the scale, half the distance of the smallest numbers.
    scaled: the tensor has a scale.
    """

    relative: float
    absolute: float
    scaled: bool


MOMENTS: Mapping[torch.dtype, Rounding] = {
    torch.float32: Rounding(relative=0.0, absolute=0.0, scaled=False),
    # Its subnormal numbers are as far apart as those of fp32 are flushed.
    torch.bfloat16: Rounding(relative=2.0**-8, absolute=0.0, scaled=False),
    torch.float16: Rounding(relative=2.0**-11 + _SCALING, absolute=2.0**-25 + 2.0**-40, scaled=True),
    torch.float8_e4m3fn: Rounding(relative=2.0**-4 + _SCALING, absolute=2.0**-10 + 2.0**-25, scaled=True),
}
"""What moments may be kept in."""

REMAINDER = torch.int16
"""dtype of what a master has beyond its weight, to which it was rounded with ties away from zero."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storage:
    """The dtypes in which the state of some slices is kept. `kept_in` gives one object for each."""

    main: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype

    @property
    def is_split(self) -> bool:
        """Masters are weights and remainders."""
        return self.main is REMAINDER

    @property
    def is_scaled(self) -> bool:
        """Some moment has a scale, so that its error is another one in each tensor."""
        return MOMENTS[self.exp_avg].scaled or MOMENTS[self.exp_avg_sq].scaled

    @property
    def is_exact(self) -> bool:
        """The moments are those that the step used."""
        return self.exp_avg is self.exp_avg_sq is torch.float32

    def invert(self, step: AdamWStep) -> Inversion:
        """How to invert a step; with moments that have a scale, `slack` adds what they are off.

        Raises:
            NumericsError: as `adamw.invert`.
        """
        if self.is_scaled:
            return adamw.invert(step)
        first, second = MOMENTS[self.exp_avg].relative, MOMENTS[self.exp_avg_sq].relative
        return adamw.invert(step, moment_error=(1.0 + first) / math.sqrt(1.0 - second) - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Elements of one moment.

    values: fp32 [n], what is kept.
    dtype: what it is kept in.
    scale: fp32 [n] or [1], of each element; None without one.
    """

    values: torch.Tensor
    dtype: torch.dtype
    scale: torch.Tensor | None

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor | None]) -> Moment:
        """Read parts of tensors of one dtype, one after the other.

        Args:
            parts: flat, at least one.
            scales: fp32, one element, of each part; None for a dtype without one.
        """
        stored = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        values, given = stored.float(), [scale.view(1) for scale in scales if scale is not None]
        if not given:
            return cls(values=values, dtype=stored.dtype, scale=None)
        scale = torch.cat(given)
        if len(parts) > 1:
            counts = torch.tensor([part.numel() for part in parts], dtype=torch.int64, device="cpu")
            counts = counts.to(scale.device)
            scale = scale.repeat_interleave(counts, output_size=values.numel())
        return cls(values=values * scale, dtype=stored.dtype, scale=scale)

    @property
    def error(self) -> torch.Tensor:
        """How far each value may be from the one that the step used: fp32 [n]."""
        rounding = MOMENTS[self.dtype]
        error = rounding.relative * self.values.abs()
        return error if self.scale is None else torch.maximum(error, rounding.absolute * self.scale) + _FLUSH


def slack(exp_avg: Moment, exp_avg_sq: Moment, inversion: Inversion) -> torch.Tensor:
    """How far moments that were rounded for storage may move the master before the step: fp32 [n].

    The update is largest for the largest |exp_avg| with the smallest exp_avg_sq that may have been, and
    smallest for the opposite. Infinite or NaN if nothing bounds it.
    """
    m, v = exp_avg.values.abs(), exp_avg_sq.values
    m_error, v_error = exp_avg.error, exp_avg_sq.error

    def quotient(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return m / (v.sqrt() * inversion.root_scale + inversion.eps)

    least = v - v_error
    least = torch.where(least > inversion.min_sq, least, 0.0)  # a kernel may have flushed it
    most = quotient(m + m_error, least)
    lowest = quotient(m - m_error, torch.where(m >= m_error, v + v_error, least))
    kept = quotient(m, v)
    off = torch.maximum(most - kept, kept - lowest) + _QUOTIENT * most
    return inversion.update_scale * inversion.err_slack * off


def needless(state: adamw.State, coefficients: torch.Tensor) -> torch.Tensor:
    """About how many weights did not change, although that is not certain: int64 scalar.

    Those that rounding the middle of the interval of old masters gives, and those of which the interval says
    nothing: they lie in it, and it is wider than the move.

    Args:
        state: elements whose old weight is not certain.
        coefficients: as of `adamw.codes`.
    """
    tensors = (state.main, state.exp_avg, state.exp_avg_sq, coefficients, state.slack)
    first, last = adamw.old_masters(*tensors)
    middle = (first + last) / 2
    stayed = round_to_bf16(middle) == state.weight
    outside = (round_to_bf16(last) < state.weight) | (round_to_bf16(first) > state.weight)
    narrow = last - first <= (middle - state.main).abs()  # false for what is not a number
    return (stayed | ~(narrow | outside)).sum()


def whole(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Masters of their two halves.

    Args:
        weight: bf16 [n].
        remainder: int16 [n].

    Returns:
        fp32 [n]. A negative remainder is one whose upper half was rounded up, in magnitude.
    """
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return (upper + remainder).view(torch.float32)


def state_of(piece: Piece, scratch: Scratch, storage: Storage, inversion: Inversion) -> adamw.State:
    """What a piece holds, in fp32.

    Args:
        piece: all its slices are kept in `storage`.
        scratch: gives memory to tensors that are read as they are.
        inversion: of the step that moved it.
    """
    weight = scratch.tensor(piece, "weight")
    main = scratch.tensor(piece, "main")
    if storage.is_split:
        main = whole(weight, main)
    if not storage.is_scaled:
        first, second = (scratch.tensor(piece, name).float() for name in ("exp_avg", "exp_avg_sq"))
        return adamw.State(main=main, exp_avg=first, exp_avg_sq=second, weight=weight)
    exp_avg, exp_avg_sq = (_moment(piece, name) for name in ("exp_avg", "exp_avg_sq"))
    return adamw.State(
        main=main,
        exp_avg=exp_avg.values,
        exp_avg_sq=exp_avg_sq.values,
        weight=weight,
        slack=slack(exp_avg, exp_avg_sq, inversion),
    )


def _moment(piece: Piece, name: str) -> Moment:
    tensors = [getattr(owned, name) for owned in piece.slices]
    if len(tensors) == 1:
        tensors = [tensors[0][piece.first : piece.last]]
    return Moment.of(tensors, [getattr(owned, f"{name}_scale") for owned in piece.slices])


def is_served(dtype: torch.dtype, scale: torch.Tensor | None) -> bool:
    """Whether moments of a dtype, with their scale, can be inverted."""
    return dtype in MOMENTS and (scale is not None or not MOMENTS[dtype].scaled)


def kept_in(owned: OwnedSlice) -> Storage | None:
    """The dtypes in which the state of a slice is kept; None if it has no such state, or it is not served."""
    main, first, second = owned.main, owned.exp_avg, owned.exp_avg_sq
    if main is None or first is None or second is None:
        return None
    return _storage(main.dtype, first.dtype, second.dtype)


@functools.cache
def _storage(main: torch.dtype, exp_avg: torch.dtype, exp_avg_sq: torch.dtype) -> Storage | None:
    known = exp_avg in MOMENTS and exp_avg_sq in MOMENTS
    return Storage(main=main, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq) if known else None
