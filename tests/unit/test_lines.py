"""Spaces and maps between lines, against tensors that are really viewed, cut and moved."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.lines import boxes as boxes_module
from awex_delta.lines.boxes import Boxes, BoxMap
from awex_delta.lines.space import Space


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[slice, slice]]:
    """A matrix, and a rectangle in it."""
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rows, columns = (sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape)
    return shape, (slice(*rows), slice(*columns))


def boxes_of(layout: list[tuple[tuple[int, int], tuple[slice, slice]]]) -> tuple[Boxes, torch.Tensor, int]:
    """The table of rectangles that are cut out of matrices that lie one after the other.

    The target holds the rectangles one after the other, in reverse order. Returns the boxes, for each target
    position its source position, and the length of the source line.
    """
    columns: list[list[int]] = []
    wanted: list[torch.Tensor] = []
    start = 0
    for shape, cut in layout:
        whole = torch.arange(start, start + shape[0] * shape[1]).view(shape)
        inner = whole[cut]
        if inner.numel():
            columns.append([int(inner[0, 0]), shape[1], inner.shape[0], inner.shape[1]])
            wanted.append(inner.reshape(-1))
        start += shape[0] * shape[1]
    ends = torch.tensor([w.numel() for w in reversed(wanted)], dtype=torch.int64).cumsum(0)
    targets = [int(end) - w.numel() for end, w in zip(ends, reversed(wanted), strict=True)][::-1]
    table = torch.tensor(columns, dtype=torch.int64).view(-1, 4).unbind(1)
    boxes = Boxes(
        source=table[0],
        source_pitch=table[1],
        target=torch.tensor(targets, dtype=torch.int64),
        target_pitch=table[3],
        rows=table[2],
        width=table[3],
    )
    source_of = torch.cat([torch.empty(0, dtype=torch.int64), *reversed(wanted)])
    return boxes, source_of, start


@given(st.lists(cuts(), max_size=5), st.randoms(), st.integers(1, 7))
def test_a_map_finds_what_a_view_shows(
    layout: list[tuple[tuple[int, int], tuple[slice, slice]]], random: object, block: int
) -> None:
    boxes, source_of, numel = boxes_of(layout)
    chosen = torch.tensor([p for p in range(numel) if random.random() < 0.5], dtype=torch.int64)  # type: ignore[attr-defined]
    before, boxes_module._BLOCK = boxes_module._BLOCK, block
    try:
        found, pick = BoxMap(boxes).map(chosen)
        pairs = [torch.stack(pair) for pair in BoxMap(boxes).everything()]
        back, back_pick = BoxMap(boxes.turned()).map(torch.arange(source_of.numel()))
    finally:
        boxes_module._BLOCK = before
    expected = [(t, p) for t, p in enumerate(source_of.tolist()) if p in set(chosen.tolist())]
    assert list(zip(found.tolist(), chosen[pick].tolist(), strict=True)) == expected
    every = torch.cat([torch.empty(2, 0, dtype=torch.int64), *pairs], 1)
    assert every.tolist() == [list(range(source_of.numel())), source_of.tolist()]
    order = torch.argsort(source_of)
    assert back.tolist() == source_of[order].tolist()
    assert back_pick.tolist() == order.tolist()


def test_boxes_that_interleave_in_the_source_are_all_found() -> None:
    whole = torch.arange(24).view(4, 6)
    left, right = whole[:, :2].reshape(-1), whole[:, 3:].reshape(-1)
    boxes = Boxes(
        source=torch.tensor([0, 3]),
        source_pitch=torch.tensor([6, 6]),
        target=torch.tensor([0, 8]),
        target_pitch=torch.tensor([2, 3]),
        rows=torch.tensor([4, 4]),
        width=torch.tensor([2, 3]),
    )
    found, pick = BoxMap(boxes).map(torch.arange(24))
    assert found.tolist() == list(range(20))
    assert pick.tolist() == torch.cat((left, right)).tolist()


def test_a_space_names_the_tensors_of_positions() -> None:
    space = Space.of([("a", 3), ("none", 0), ("b", 4)])
    assert space.numel == 7
    assert space.counts(torch.tensor([0, 2, 3, 4, 6])).tolist() == [2, 0, 3]
    assert space.names_at(torch.tensor([3, 6])) == ["b"]
