"""Spaces and maps between lines, against tensors that are really viewed, cut and moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.errors import LayoutError
from awex_delta.lines import boxes as boxes_module
from awex_delta.lines.boxes import Boxes, BoxMap
from awex_delta.lines.ends import LineEnd
from awex_delta.lines.space import Space
from awex_delta.lines.storages import Storages, bits


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


@contextmanager
def blocks_of(elements: int) -> Iterator[None]:
    """Blocks, and the parts of long rows, as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes_module, "_BLOCK", elements)
        patch.setattr(boxes_module, "_LONG_ROW", max(1, elements // 2))
        yield


@given(st.lists(cuts(), max_size=5), st.randoms(), st.integers(1, 7))
def test_a_map_finds_what_a_view_shows(
    layout: list[tuple[tuple[int, int], tuple[slice, slice]]], random: object, block: int
) -> None:
    boxes, source_of, numel = boxes_of(layout)
    chosen = torch.tensor([p for p in range(numel) if random.random() < 0.5], dtype=torch.int64)  # type: ignore[attr-defined]
    with blocks_of(block):
        found, pick = BoxMap(boxes).map(chosen)
        rows = list(BoxMap(boxes).rows(torch.device("cpu")))
        back, back_pick = BoxMap(boxes.turned()).map(torch.arange(source_of.numel()))
    expected = [(t, p) for t, p in enumerate(source_of.tolist()) if p in set(chosen.tolist())]
    assert list(zip(found.tolist(), chosen[pick].tolist(), strict=True)) == expected
    assert all(target.diff().ge(width).all() for target, _, width in rows)
    every = {
        t + place: p + place
        for target, source, width in rows
        for t, p in zip(target.tolist(), source.tolist(), strict=True)
        for place in range(width)
    }
    assert every == dict(enumerate(source_of.tolist()))
    assert sum(target.numel() * width for target, _, width in rows) == len(every)
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


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.dtype, torch.Tensor, Boxes]:
    """Live tensors, the dtype of a pair's line, where its elements lie in the engine's line, and its boxes.

    Each matrix gives a block of columns, between which lie those of other pairs, or all of it. The blocks
    follow each other in the line in any order. Some matrices are transposed or part of a larger storage.
    """
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    live: list[torch.Tensor] = []
    blocks: list[tuple[torch.Tensor, int]] = []
    start = 0
    for _ in range(draw(st.integers(1, 3))):
        rows, columns = draw(st.integers(1, 5)), draw(st.integers(2, 6))
        kind = draw(st.sampled_from(["plain", "transposed", "sliced"]))
        shape = {"plain": (rows, columns), "transposed": (columns, rows), "sliced": (2, rows, columns + 3)}[
            kind
        ]
        held = (torch.arange(torch.Size(shape).numel()) * 257 + start).to(torch.int16).view(torch.bfloat16)
        whole = held.view(shape)
        views = {"plain": whole, "transposed": whole.transpose(-1, -2), "sliced": whole[-1, ..., 2:-1]}
        live.append(views[kind])
        place = torch.arange(start, start + rows * columns).view(rows, columns)
        edge = draw(st.integers(1, columns - 1))
        blocks.append((draw(st.sampled_from([place[:, :edge], place[:, edge:], place])), columns))
        start += rows * columns
    order = draw(st.permutations(range(len(blocks))))
    chosen = [blocks[one] for one in order]
    sizes = torch.tensor([0, *(block.numel() for block, _ in chosen)]).cumsum(0)[:-1]
    table = [(int(block[0, 0]), pitch, block.shape[0], block.shape[1]) for block, pitch in chosen]
    target, target_pitch, count, width = torch.tensor(table, dtype=torch.int64).view(-1, 4).unbind(1)
    boxes = Boxes(
        source=sizes, source_pitch=width, target=target, target_pitch=target_pitch, rows=count, width=width
    )
    return live, dtype, torch.cat([block.reshape(-1) for block, _ in chosen]), boxes


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(bits(one), bits(other))


@given(lines(), st.randoms(), st.integers(1, 9))
def test_one_end_of_a_line_is_plain_indexing(
    made: tuple[list[torch.Tensor], torch.dtype, torch.Tensor, Boxes], random: Random, block: int
) -> None:
    live, dtype, there, boxes = made
    end = LineEnd(boxes, lambda: Storages(live), dtype)
    values = torch.cat([tensor.reshape(-1) for tensor in live])[there].to(dtype)
    pos = torch.tensor([one for one in range(there.numel()) if random.random() < 0.5], dtype=torch.int64)
    assert same(end.gather(pos), values[pos])
    start, stop = sorted(random.randint(0, there.numel()) for _ in range(2))
    assert same(end.read(start, stop), values[start:stop])
    with blocks_of(block):
        pieces = [(pos[:, None] + torch.arange(value.shape[1]), value) for pos, value in end.rows()]
    found = torch.cat([one.view(-1) for one, _ in pieces])
    assert found.sort().values.tolist() == list(range(there.numel()))
    assert all(there[pos].view(-1).diff().gt(0).all() for pos, _ in pieces), "read in the order of memory"
    assert same(torch.cat([one.reshape(-1) for _, one in pieces]), values[found])


@given(lines(), st.randoms())
def test_what_one_end_of_a_line_writes_is_where_plain_indexing_puts_it(
    made: tuple[list[torch.Tensor], torch.dtype, torch.Tensor, Boxes], random: Random
) -> None:
    live, dtype, there, boxes = made
    pos = torch.tensor([one for one in range(there.numel()) if random.random() < 0.5], dtype=torch.int64)
    value = torch.tensor([random.randint(-(2**15), 2**15 - 1) for _ in pos], dtype=torch.int16)
    expected = torch.cat([bits(tensor).reshape(-1) for tensor in live])
    end = LineEnd(boxes, lambda: Storages(live), dtype)
    if dtype is torch.float32 and pos.numel():
        with pytest.raises(LayoutError, match="float32"):
            end.scatter(pos, torch.zeros(pos.numel()))
    elif dtype is torch.bfloat16:
        expected[there[pos]] = value
        end.scatter(pos, value.view(torch.bfloat16))
    assert torch.cat([bits(tensor).reshape(-1) for tensor in live]).equal(expected)


def test_an_end_of_a_line_looks_for_its_memory_each_time() -> None:
    weight = torch.zeros(4).bfloat16()
    one = torch.tensor([1])
    boxes = Boxes(
        source=one * 0, source_pitch=one * 4, target=one * 0, target_pitch=one * 4, rows=one, width=one * 4
    )
    end = LineEnd(boxes, lambda: Storages([weight]), torch.bfloat16)
    end.scatter(torch.tensor([0]), torch.ones(1).bfloat16())
    weight.data = weight.data.clone()
    end.scatter(torch.tensor([1]), torch.ones(1).bfloat16())
    assert weight.tolist() == [1, 1, 0, 0]
    assert end.read(0, 4).tolist() == [1, 1, 0, 0]


def test_elements_that_lie_twice_in_a_line_are_read_twice() -> None:
    """An embedding that also makes the head: both stand in the line of one pair."""
    embedding, norm = torch.arange(12).bfloat16().view(4, 3), torch.arange(50, 53).bfloat16()
    twice = Boxes(
        source=torch.tensor([0, 8, 16]),
        source_pitch=torch.tensor([2, 2, 3]),
        target=torch.tensor([1, 1, 12]),
        target_pitch=torch.tensor([3, 3, 3]),
        rows=torch.tensor([4, 4, 1]),
        width=torch.tensor([2, 2, 3]),
    )
    end = LineEnd(twice, lambda: Storages([embedding, norm]), torch.bfloat16)
    columns = embedding[:, 1:].reshape(-1)
    line = torch.cat([columns, columns, norm])
    assert end.read(0, 19).equal(line)
    assert end.gather(torch.tensor([3, 9, 11, 17])).equal(line[[3, 9, 11, 17]])
    assert end.read(5, 18).equal(line[5:18])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_rows_of_tensors_that_share_a_storage_in_another_order(order: tuple[int, ...]) -> None:
    whole = torch.arange(12).to(torch.bfloat16)
    tensors = [*(whole.view(3, 4)[place] for place in order), torch.arange(50, 54).to(torch.bfloat16)]
    got = Storages(tensors).gather_rows(torch.arange(0, 16, 4), 4, torch.bfloat16)
    assert same(got, torch.stack(tensors))
    twice = Storages(tensors).gather_rows(torch.tensor([0, 2, 0, 2, 8, 12, 12]), 2, torch.bfloat16)
    first, third, last = tensors[0].view(2, 2), tensors[2][:2], tensors[3][:2]
    assert same(twice, torch.stack([*first, *first, third, last, last]))
