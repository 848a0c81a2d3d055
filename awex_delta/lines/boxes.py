"""From positions in one line to positions in another: a table of boxes, in a handful of tensor operations.

A box is `rows` x `width` elements; at either end its rows lie a pitch apart. A run of elements is a box of
one row, and a tensor-parallel cut along columns is one box, where runs would be one a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Positions at a time: on a CPU what stays in a cache, on a device what hides the cost of a call.
_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Which elements of a source line are which elements of a target line. Each tensor is int64 [n].

    source, target: where the first element of each box lies.
    source_pitch, target_pitch: from one row of a box to the next.
    rows, width: of each box, at least 1.
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

    Boxes may overlap, in any way, in the source line. In the target line no box begins before the one before
    it has ended, in the order of their first elements: otherwise the result is not ascending.
    """

    def __init__(self, boxes: Boxes) -> None:
        """Put the boxes in the order of the target line."""
        self._boxes = boxes.take(torch.argsort(boxes.target))
        self._plain = bool((self._boxes.rows == 1).all())
        self._numel = int(self._boxes.numels.sum())

    @property
    def numel(self) -> int:
        """Elements of all boxes."""
        return self._numel

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

    def everything(self, device: torch.device | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All elements, a block at a time, in the order of the target line.

        Args:
            device: where the positions are to lie; None for the CPU.

        Yields:
            Positions in the target line and in the source line, int64 [k] each.
        """
        boxes = self._on(device or torch.device("cpu"))
        for block in _blocks(boxes.numels):
            inside = block.inside()
            target, source = block.spread(boxes.target), block.spread(boxes.source)
            if self._plain:
                yield target.add_(inside), source.add_(inside)
                continue
            row = torch.div(inside, block.spread(boxes.width), rounding_mode="floor")
            # A row begins a pitch after the one before it, of which the width is in `inside` already.
            target += row * block.spread(boxes.target_pitch - boxes.width)
            source += row * block.spread(boxes.source_pitch - boxes.width)
            yield target.add_(inside), source.add_(inside)

    def _mapped(self, pos: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        boxes = self._on(pos.device)
        first = torch.searchsorted(pos, boxes.source)
        last = boxes.source + (boxes.rows - 1) * boxes.source_pitch + boxes.width
        count = torch.searchsorted(pos, last) - first
        for block in _blocks(count):
            pick = block.inside().add_(block.spread(first))
            if self._plain:
                yield pos[pick].add_(block.spread(boxes.target - boxes.source)), pick
                continue
            inside = pos[pick].sub_(block.spread(boxes.source))
            row = torch.div(inside, block.spread(boxes.source_pitch), rounding_mode="floor")
            column = inside - row * block.spread(boxes.source_pitch)
            target = block.spread(boxes.target) + row * block.spread(boxes.target_pitch) + column
            kept = (column < block.spread(boxes.width)).nonzero().view(-1)
            yield target[kept], pick[kept]

    def _on(self, device: torch.device) -> Boxes:
        if self._boxes.source.device != device:
            self._boxes = self._boxes.to(device)
        return self._boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Successive elements of boxes, when all elements of all boxes are numbered one after the other.

    begin, end: their range.
    starts: int64 [n], the number of the first element of each box.
    counts: int64 [n], how many elements of each box lie in the range.
    """

    begin: int
    end: int
    starts: torch.Tensor
    counts: torch.Tensor

    def inside(self) -> torch.Tensor:
        """The number of each element in its box, int64 [end - begin]."""
        return torch.arange(self.begin, self.end, device=self.starts.device).sub_(self.spread(self.starts))

    def spread(self, column: torch.Tensor) -> torch.Tensor:
        """The entry of its box for each element, int64 [end - begin]."""
        return torch.repeat_interleave(column, self.counts, output_size=self.end - self.begin)


def _blocks(counts: torch.Tensor) -> Iterator[_Block]:
    """The elements of boxes that have `counts`, a block at a time."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    starts = ends - counts
    size = _BLOCK if counts.device.type == "cpu" else _DEVICE_BLOCK
    for begin in range(0, total, size):
        end = min(begin + size, total)
        here = (ends.clamp(max=end) - starts.clamp(min=begin)).clamp_(min=0)
        yield _Block(begin=begin, end=end, starts=starts, counts=here)
