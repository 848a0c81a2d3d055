"""Boxes: positions in and out, against indexing a tensor of element ids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.lines.geometry import Box, row_range, select


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(draw(st.integers(1, size - a)) for size, a in zip(shape, start, strict=True))
    return shape, Box(start=start, shape=extent)


@given(boxes(), st.integers(0, 2**16))
def test_selected_positions_are_those_of_the_sliced_tensor(
    case: tuple[tuple[int, ...], Box], seed: int
) -> None:
    shape, box = case
    ids = torch.arange(math.prod(shape))
    index = ids[torch.rand(ids.numel(), generator=torch.Generator().manual_seed(seed)) < 0.5]
    chosen = select(index, shape, box)
    inside = ids.view(shape)[box.slices].reshape(-1)
    assert inside[chosen.inner].tolist() == index[chosen.pick].tolist()
    assert set(index[chosen.pick].tolist()) == set(index.tolist()) & set(inside.tolist())
    assert chosen.inner.tolist() == sorted(chosen.inner.tolist())


def test_rows_are_one_range_and_columns_are_not() -> None:
    assert row_range(Box(start=(2, 0), shape=(3, 5)), (7, 5)) == (10, 25)
    assert row_range(Box(start=(2, 1), shape=(3, 4)), (7, 5)) is None
    assert row_range(Box(start=(4,), shape=(2,)), (7,)) == (4, 6)


def test_a_scalar_has_one_position() -> None:
    chosen = select(torch.tensor([0]), (), Box(start=(), shape=()))
    assert chosen.inner.tolist() == [0]


@pytest.mark.parametrize(
    ("start", "shape", "inside"),
    [((0, 0), (4, 5), True), ((1, 0), (4, 5), False), ((-1, 0), (1, 1), False), ((0,), (4,), False)],
)
def test_a_box_knows_whether_it_fits(start: tuple[int, ...], shape: tuple[int, ...], inside: bool) -> None:
    assert Box(start=start, shape=shape).inside((4, 5)) is inside
