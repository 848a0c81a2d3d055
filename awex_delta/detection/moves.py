"""How far each bf16 weight moves, and sums that follow the moves, in one pass over memory.

Weights are numbered in their order (`lines.bits.ordered`), and summed up with a factor for each place, modulo
2^32, twice. Such sums are linear: those of the new weights are those of the old ones plus those of the moves.
So whoever adds up the moves that he sees knows what the weights have to sum up to, and a weight that moved
in any other way shows.

Each expression compiles to one pass over memory. As in `adamw.codes`, bit patterns are rounded and compared
as 32-bit integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from awex_delta.lines.bits import MAX_STEP
from awex_delta.lines.compiling import SHORTEST_COMPILED, compiled_or_none

MOST = 1 << 21
"""So many weights are looked at together. A pass over them takes one more byte for each."""

_MULTIPLIER = 0x2C1B3C6D
_INFINITY = 0x7F800000
# What is used several times and takes more operations than this is a part of its own, joined again with the
# others in one loop. If all parts read bf16, inductor doubles its vectors, and compilers for CPUs take their
# bits through memory, three times slower. If it is so few that a sum is cut apart, there is a second loop.
_LONGEST = {"moves": 20, "sums": 14}


@functools.cache
def factors(device: torch.device) -> torch.Tensor:
    """A factor for each place: int32 [MOST]. They are drawn once for all.

    They are odd, so a move that is the only one always shows. Several go unseen with a chance of 2^-31.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(1 << 30), 1 << 30, (MOST,), generator=generator, dtype=torch.int32, device="cpu")
    return (2 * drawn + 1).to(device)


def moves(
    old: torch.Tensor, new: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far each weight moves, if it becomes its rounded master.

    A weight whose master is not a number is taken to stay, as which NaN a cast makes of it depends on the
    device. So a weight that stays NaN costs nothing, and one that becomes NaN shows in the sums.

    Args:
        old: bf16 [n].
        new: fp32 [n], the masters; or bf16 [n], the new weights themselves.
        factor: int32 [n], of `factors`.

    Returns:
        int8 [n], the codes as `lines.bits.step_code` makes them, and two sums of the moves, int32 scalars.
    """
    bits, now = new.float().view(torch.int32), old.float().view(torch.int32) >> 16
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (_INFINITY - (bits & 0x7FFFFFFF)) >> 31
    step = (_ordered(rounded) - _ordered(now)) & ~is_nan
    far = (MAX_STEP - step.abs()) >> 31
    return ((step & ~far) | (far << 7)).to(torch.int8), *_sums(step, factor)


def sums(weight: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of some weights: int32 scalars. weight: bf16 [n]; factor: int32 [n], of `factors`."""
    return _sums(_ordered(weight.float().view(torch.int32) >> 16), factor)


def _sums(number: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    other = (factor ^ (factor >> 15)) * _MULTIPLIER  # quicker than reading another table
    return (number * factor).sum(dtype=torch.int32), (number * other).sum(dtype=torch.int32)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    return bits ^ ((bits >> 31) & 0x7FFF)


def best(function: Callable[..., Any], *given: torch.Tensor, compiled: bool) -> Callable[..., Any]:
    """The compiled form of `moves` or `sums` for such arguments, or the function itself."""
    if not compiled or given[0].numel() < SHORTEST_COMPILED:
        return function
    return _compiled(function, given[0].device.type, tuple(one.dtype for one in given)) or function


@functools.cache
def _compiled(
    function: Callable[..., Any], device_type: str, dtypes: tuple[torch.dtype, ...]
) -> Callable[..., Any] | None:
    """Compiled once in a process for all sizes; None if that fails."""
    given = tuple(torch.zeros(SHORTEST_COMPILED, device=device_type, dtype=dtype) for dtype in dtypes)
    options = {"realize_opcount_threshold": _LONGEST[function.__name__]}
    return compiled_or_none(function, [given], what="steps are captured", options=options)
