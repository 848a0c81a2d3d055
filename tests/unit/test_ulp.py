"""bf16 patterns and steps between them, for every pattern there is."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from awex_delta.lines.bits import (
    MAX_STEP,
    UNSTATED,
    apply_code,
    from_ordered,
    ordered,
    round_to_bf16,
    step_code,
)

ALL = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int16)


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_order_is_one_to_one_and_its_own_inverse() -> None:
    order = ordered(ALL)
    assert sorted(order.tolist()) == list(range(-32768, 32768))
    assert torch.equal(bits(from_ordered(order)), bits(ALL))


def test_order_is_that_of_the_numbers() -> None:
    numbers = ALL[~ALL.isnan()]
    in_order = numbers[ordered(numbers).argsort()].float()
    assert bool((in_order.diff() >= 0).all())
    assert int((in_order.diff() == 0).sum()) == 1  # -0 and +0
    assert ordered(bf16(-0.0, 0.0)).tolist() == [-1, 0]


def test_nans_lie_beyond_the_infinities() -> None:
    nans = ordered(ALL[ALL.isnan()])
    low, high = ordered(bf16(-math.inf, math.inf)).tolist()
    assert bool(((nans < low) | (nans > high)).all())


@pytest.mark.parametrize("step", [-126, -3, -1, 0, 1, 2, 126])
def test_every_pattern_steps_and_steps_back(step: int) -> None:
    target = ordered(ALL).to(torch.int32) + step
    inside = (target >= -32768) & (target <= 32767)
    old, new = ALL[inside], from_ordered(target[inside].to(torch.int16))
    code = step_code(old, new)
    assert code.dtype == torch.int8
    assert bool((code == step).all())
    assert torch.equal(bits(apply_code(old, code)), bits(new))


def test_longer_steps_are_not_stated() -> None:
    old = bf16(1.0)
    limit = from_ordered(ordered(old) + MAX_STEP)
    beyond = from_ordered(ordered(old) + MAX_STEP + 1)
    assert step_code(old, limit).tolist() == [MAX_STEP]
    assert step_code(limit, old).tolist() == [-MAX_STEP]
    assert step_code(old, beyond).tolist() == [UNSTATED]
    assert step_code(beyond, old).tolist() == [UNSTATED]
    # The two patterns that lie farthest apart, both NaN: the difference does not wrap around.
    farthest = from_ordered(torch.tensor([-32768, 32767], dtype=torch.int16))
    assert step_code(farthest, farthest.flip(0)).tolist() == [UNSTATED, UNSTATED]


def test_steps_cross_zero_one_pattern_at_a_time() -> None:
    tiny = 2.0**-133
    path = bf16(-tiny, -0.0, 0.0, tiny)
    assert step_code(path[:-1], path[1:]).tolist() == [1, 1, 1]


def test_steps_cross_powers_of_two_and_the_largest_number() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert step_code(bf16(1.0, largest), bf16(1.0 - 2.0**-8, math.inf)).tolist() == [-1, 1]


def reference_rounding(pattern: int) -> int:
    """bf16 bits of an fp32 pattern by exact arithmetic on integers."""
    exact = pattern & 0xFFFF
    kept = pattern >> 16
    if (pattern & 0x7FFFFFFF) > 0x7F800000:
        return kept | 0x40
    up = exact > 0x8000 or (exact == 0x8000 and kept % 2 == 1)
    return kept + int(up)


def test_rounding_for_every_upper_half_and_the_edges_of_the_lower() -> None:
    upper = torch.arange(-32768, 32768, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        value = (upper | lower).view(torch.float32)
        rounded = bits(round_to_bf16(value)).to(torch.int32) & 0xFFFF
        expected = [reference_rounding(pattern & 0xFFFFFFFF) for pattern in (upper | lower).tolist()]
        assert rounded.tolist() == expected


def test_rounding_agrees_with_the_cast() -> None:
    value = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int32).view(torch.float32)
    value = value[value.isfinite()]
    assert torch.equal(bits(round_to_bf16(value)), bits(value.to(torch.bfloat16)))


def test_rounding_keeps_subnormals_where_the_processor_flushes_them() -> None:
    subnormal = torch.tensor([struct.unpack("f", struct.pack("I", 0x00400000))[0]])
    torch.set_flush_denormal(True)
    try:
        assert bits(round_to_bf16(subnormal)).tolist() == [0x0040]
    finally:
        torch.set_flush_denormal(False)
