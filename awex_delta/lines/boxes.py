"""From positions in one line to positions in another: a table of boxes, in a handful of tensor operations.

A box is `rows` x `width` elements; at either end its rows lie a pitch apart. A run of elements is a box of
one row. A tensor-parallel cut along columns is one box, while it would be one run for each row.

Elements are picked by `index_select`, which on a CPU is several times as fast as indexing by a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

# Positions at a time: on a CPU as many as stay in a cache, on a device enough to hide the cost of a call.
_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 22
_LONG_ROW = 1 << 12  # a longer one is read in parts, so that few widths differ and a block holds many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Which elements of a source line are which elements of a target line. Each tensor is int64 [n].

    source, target: where the first element of each box lies.
    source_pitch, target_pitch: from one row of a box to the next.
    rows, width: the size of each box, at least 1.
    """

    source: torch.Tensor
    source_pitch: torch.Tensor
    target: torch.Tensor
    target_pitch: torch.Tensor
    rows: torch.Tensor
    width: torch.Tensor

    @property
    def numels(self) -> torch.Tensor:
        """Elements of each box, int64 [n]."""
        return self.rows * self.width

    @property
    def source_ends(self) -> torch.Tensor:
        """One beyond the last element of each box in the source line, int64 [n]."""
        return self.source + (self.rows - 1) * self.source_pitch + self.width

    @property
    def target_ends(self) -> torch.Tensor:
        """One beyond the last element of each box in the target line, int64 [n]."""
        return self.turned().source_ends

    def turned(self) -> Boxes:
        """The same elements, from the target line to the source line."""
        return Boxes(
            source=self.target,
            source_pitch=self.target_pitch,
            target=self.source,
            target_pitch=self.source_pitch,
            rows=self.rows,
            width=self.width,
        )

    def take(self, index: torch.Tensor) -> Boxes:
        """Some of the boxes, in the order of `index`, int64 [k]."""
        return Boxes(
            source=self.source[index],
            source_pitch=self.source_pitch[index],
            target=self.target[index],
            target_pitch=self.target_pitch[index],
            rows=self.rows[index],
            width=self.width[index],
        )

    def to(self, device: torch.device) -> Boxes:
        """The table on `device`."""
        return Boxes(
            source=self.source.to(device),
            source_pitch=self.source_pitch.to(device),
            target=self.target.to(device),
            target_pitch=self.target_pitch.to(device),
            rows=self.rows.to(device),
            width=self.width.to(device),
        )


class BoxMap:
    """Maps ascending positions of the source line of some boxes to ascending positions of the target line.

    In the source line boxes may overlap in any way. In the target line they must not: in the order of their
    first elements each box ends before the next one begins. Otherwise the result would not ascend.
    """

    def __init__(self, boxes: Boxes) -> None:
        """Put the boxes in the order of the target line."""
        self._boxes = boxes.take(torch.argsort(boxes.target))
        self._plain = bool((self._boxes.rows == 1).all())

    def map(self, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find where elements go.

        Args:
            pos: int64 [n], ascending positions in the source line.

        Returns:
            Ascending positions in the target line, int64 [k], and for each the place in `pos` of the element
            that goes there, int64 [k]. An element outside of all boxes is left out; one that lies in
            several goes to each of their places.
        """
        found = list(self._mapped(pos))
        if len(found) == 1:
            return found[0]
        empty = torch.empty(0, dtype=torch.int64, device=pos.device)
        return torch.cat([empty, *(one for one, _ in found)]), torch.cat([empty, *(one for _, one in found)])

    def rows(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """All elements, as rows that lie next to each other in both lines: many of one width at a time.

        Args:
            device: where the positions are to lie.

        Yields:
            Where rows begin in the target line and in the source line, int64 [r] each, and their width, box
            after box as they begin in the target line. A box of one long row comes in parts.
        """
        for boxes, width in _by_width(self._on(device)):
            for block in _blocks(boxes.rows, width):
                row = block.number()
                target = (row * block.spread(boxes.target_pitch)).add_(block.spread(boxes.target))
                yield (
                    target,
                    row.mul_(block.spread(boxes.source_pitch)).add_(block.spread(boxes.source)),
                    width,
                )

    def _mapped(self, pos: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        boxes = self._on(pos.device)
        first = torch.searchsorted(pos, boxes.source)
        count = torch.searchsorted(pos, boxes.source_ends) - first
        for block in _blocks(count):
            pick = block.number(first)
            if self._plain:
                yield pos.index_select(0, pick).add_(block.spread(boxes.target - boxes.source)), pick
                continue
            inside = pos.index_select(0, pick).sub_(block.spread(boxes.source))
            pitch = block.spread(boxes.source_pitch)
            row = torch.div(inside, pitch, rounding_mode="floor")
            column = inside - row * pitch
            kept = (column < block.spread(boxes.width)).nonzero().view(-1)
            target = block.spread(boxes.target) + row * block.spread(boxes.target_pitch) + column
            yield target.index_select(0, kept), pick.index_select(0, kept)

    def _on(self, device: torch.device) -> Boxes:
        if self._boxes.source.device != device:
            self._boxes = self._boxes.to(device)
        return self._boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A range of elements, when the elements of all boxes are numbered, one box after the other.

    begin, end: the range.
    starts: int64 [n], the number of the first element of each box.
    boxes: the boxes that they lie in.
    counts: int64, how many elements of the range lie in each of these boxes.
    """

    begin: int
    end: int
    starts: torch.Tensor
    boxes: slice
    counts: torch.Tensor

    def number(self, column: torch.Tensor | None = None) -> torch.Tensor:
        """The number of each element in its box, plus the box's entry in a column: int64 [end - begin]."""
        starts = self.starts if column is None else self.starts - column
        return torch.arange(self.begin, self.end, device=starts.device).sub_(self.spread(starts))

    def spread(self, column: torch.Tensor) -> torch.Tensor:
        """For each element the entry of its box in a column, int64 [end - begin]."""
        return spread(column[self.boxes], self.counts, self.end - self.begin)


def spread(column: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    """Repeat each entry of a column as often as `counts` says, which gives `total` entries.

    On a CPU numpy is five times as fast as torch.
    """
    if column.device.type == "cpu":
        return torch.from_numpy(np.repeat(column.numpy(), counts.numpy()))
    return torch.repeat_interleave(column, counts, output_size=total)


def _by_width(boxes: Boxes) -> Iterator[tuple[Boxes, int]]:
    """The boxes of each width, in the order they are in. One long row becomes several, and a rest."""
    parts = torch.where(boxes.rows == 1, boxes.width // _LONG_ROW, 0)
    long = parts.nonzero().view(-1)
    if long.numel():
        pitch = torch.full_like(long, _LONG_ROW)
        cut = replace(boxes.take(long), rows=parts[long], width=pitch)
        yield replace(cut, source_pitch=pitch, target_pitch=pitch), _LONG_ROW
    done = parts * _LONG_ROW
    left = boxes.width - done
    rest = replace(boxes, source=boxes.source + done, target=boxes.target + done, width=left)
    widths, order = torch.sort(left, stable=True)
    widths, counts = torch.unique_consecutive(widths, return_counts=True)
    for width, some in zip(widths.tolist(), torch.split(order, counts.tolist()), strict=True):
        if width:
            yield rest.take(some), width


def _blocks(counts: torch.Tensor, width: int = 1) -> Iterator[_Block]:
    """All items of boxes with `counts` items each, in blocks. Waits for a device once, then at each.

    An item is an element, or a row of `width` elements.
    """
    ends = counts.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    starts = ends - counts
    size = max(1, (_BLOCK if counts.device.type == "cpu" else _DEVICE_BLOCK) // width)
    for begin in range(0, total, size):
        end = min(begin + size, total)
        edge = torch.tensor([begin, end - 1], device=counts.device, dtype=torch.int64)
        first, last = torch.searchsorted(ends, edge, right=True).tolist()
        boxes = slice(first, last + 1)
        here = ends[boxes].clamp(max=end) - starts[boxes].clamp(min=begin)
        yield _Block(begin=begin, end=end, starts=starts, boxes=boxes, counts=here)
