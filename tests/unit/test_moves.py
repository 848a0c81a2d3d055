"""How far weights move, and sums that follow: of every bit pattern, eager and compiled, against casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from awex_delta.detection import moves as product
from awex_delta.detection.moves import factors, moves, sums
from awex_delta.lines.bits import step_code

CPU = torch.device("cpu")
EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
Expression = Callable[..., Any]


@pytest.fixture(params=["eager", "compiled"])
def form(request: pytest.FixtureRequest) -> Callable[..., Expression]:
    def of(function: Expression, *given: torch.Tensor) -> Expression:
        best = product.best(function, *given, compiled=request.param == "compiled")
        assert (best is function) == (request.param == "eager"), "this machine needs a compiler for it"
        return best

    return of


def masters_beside(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 beside the weights, or anything: midpoints, one unit beside those, any pattern."""
    bits = weights.float().view(torch.int32)
    near = bits + torch.randint(-3, 4, bits.shape, generator=generator, dtype=torch.int32) * 0x8000
    near = near + torch.randint(-1, 2, bits.shape, generator=generator, dtype=torch.int32)
    other = torch.randint(-(1 << 31), (1 << 31) - 1, bits.shape, generator=generator, dtype=torch.int32)
    return torch.where(torch.rand(bits.shape, generator=generator) < 0.8, near, other).view(torch.float32)


def summed(weights: torch.Tensor) -> list[int]:
    """The sums by whole numbers of any size, from the definition."""
    bits = weights.view(torch.int16).numpy().astype(np.int64)
    number = np.where(bits < 0, bits ^ 0x7FFF, bits)
    factor = factors(CPU)[: weights.numel()].numpy().astype(np.int64)
    other = ((factor ^ (factor >> 15)) * 0x2C1B3C6D + (1 << 31)) % (1 << 32) - (1 << 31)
    totals = [int((number * one).sum()) for one in (factor, other)]
    return [(total + (1 << 31)) % (1 << 32) - (1 << 31) for total in totals]


@pytest.mark.timeout(240)
def test_moves_to_rounded_masters_are_those_of_casts(form: Callable[..., Expression]) -> None:
    generator = torch.Generator().manual_seed(3)
    old = EVERY.repeat(8)[5:]  # the last vector is not full
    factor = factors(CPU)[: old.numel()]
    new = masters_beside(old, generator)
    code, *moved = form(moves, old, new, factor)(old, new, factor)
    rounded = torch.where(new.isnan(), old, new.bfloat16())
    assert torch.equal(code, step_code(old, rounded))
    assert int(code.count_nonzero()) > 100_000
    difference = [after - before for after, before in zip(summed(rounded), summed(old), strict=True)]
    assert [(int(one) - other) % (1 << 32) for one, other in zip(moved, difference, strict=True)] == [0, 0]


@pytest.mark.timeout(240)
def test_moves_between_any_two_weights_and_sums_of_all(form: Callable[..., Expression]) -> None:
    old, new = EVERY[1:], EVERY[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(5))][1:]
    factor = factors(CPU)[: old.numel()]
    code, *moved = form(moves, old, new, factor)(old, new, factor)
    seen = torch.where(new.isnan(), old, new)
    assert torch.equal(code, step_code(old, seen))
    found = [[int(one) for one in form(sums, weights, factor)(weights, factor)] for weights in (old, seen)]
    assert found == [summed(old), summed(seen)]
    assert [(int(move) + a - b) % (1 << 32) for move, a, b in zip(moved, *found, strict=True)] == [0, 0]


def test_a_single_move_always_shows_and_a_swap_of_two() -> None:
    weight = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    factor = factors(CPU)[: weight.numel()]
    before = [int(one) for one in sums(weight, factor)]
    for place in range(0, 1 << 16, 997):
        for write in (-weight[place], weight[place] * 2, torch.tensor(float("nan")), torch.tensor(0.0)):
            other = weight.clone()
            other[place] = write
            first, _ = sums(other, factor)
            assert int(first) != before[0]
        swapped = weight.clone()
        swapped[[place, place + 1]] = weight[[place + 1, place]]
        if weight[place] != weight[place + 1]:
            assert [int(one) for one in sums(swapped, factor)] != before
