"""bf16 bit patterns as integers in numeric order, and steps between them. Exact for every pattern."""

from __future__ import annotations

import torch

UNSTATED = -128
"""The code of an element that changed, or may have changed, by an amount that is not stated."""

MAX_STEP = 126
"""The longest step that a code states."""


def ordered(value: torch.Tensor) -> torch.Tensor:
    """Map bf16 values to integers that have the same order.

    Neighbouring values map to neighbouring integers: -0 is -1, +0 is 0, the smallest positive
    subnormal is 1. NaNs lie beyond the infinities, by payload, so the map is one to one.

    Args:
        value: bf16, any shape.

    Returns:
        int16, same shape.
    """
    return _flip_negative(value.view(torch.int16))


def from_ordered(order: torch.Tensor) -> torch.Tensor:
    """Undo `ordered`.

    Args:
        order: int16, any shape.

    Returns:
        bf16, same shape.
    """
    return _flip_negative(order).view(torch.bfloat16)


def step_code(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How many units in the last place lie between two bf16 values.

    Args:
        old: bf16, any shape.
        new: bf16, same shape.

    Returns:
        int8, same shape: 0 for equal bits, a step in ±1..±126, and -128 for every longer step.
    """
    step = ordered(new).to(torch.int32) - ordered(old).to(torch.int32)
    return torch.where(step.abs() <= MAX_STEP, step, UNSTATED).to(torch.int8)


def apply_code(old: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Undo `step_code`: the new values, from the old ones and the codes.

    Args:
        old: bf16, any shape.
        code: int8, same shape. For -128 the result means nothing: the caller has to put the
            new value there.

    Returns:
        bf16, same shape.
    """
    return from_ordered(ordered(old) + code.to(torch.int16))


def add_codes(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The code of two moves, one after the other.

    Args:
        first: int8, any shape.
        second: int8, same shape.

    Returns:
        int8, same shape: their sum if both are stated and the sum is no longer than MAX_STEP, else -128.
        A sum of 0 means that the element is certainly back where it was.
    """
    total = first.to(torch.int16) + second
    stated = (first != UNSTATED) & (second != UNSTATED) & (total.abs() <= MAX_STEP)
    return torch.where(stated, total, UNSTATED).to(torch.int8)


def round_to_bf16(value: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, to nearest, ties to even, by integer arithmetic alone.

    Unlike a cast it keeps subnormals on every device and in every floating-point mode. A NaN keeps
    its sign and upper payload, and becomes quiet.

    Args:
        value: fp32, any shape.

    Returns:
        bf16, same shape.
    """
    bits = value.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, quiet_nan, rounded).to(torch.int16).view(torch.bfloat16)


def _flip_negative(bits: torch.Tensor) -> torch.Tensor:
    # The sign bit of int16 decides: for negative patterns the lower 15 bits are inverted, which is
    # its own inverse.
    return bits ^ ((bits >> 15) & 0x7FFF)
