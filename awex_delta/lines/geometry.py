"""Boxes inside tensors, and flat element positions in and out of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor: where it begins and its shape, one value a dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index a tensor with this to get the box as a view."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """True when the box lies within a tensor of `shape`."""
        return len(shape) == len(self.shape) and all(
            a >= 0 and n >= 0 and a + n <= size
            for a, n, size in zip(self.start, self.shape, shape, strict=True)
        )

    def ranges_inside(
        self, ranges: Sequence[tuple[int, int]], shape: tuple[int, ...]
    ) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of flat positions in a tensor of `shape`, as ranges of positions in the box.

        Row by row, the elements of a box keep their order, so each range stays one.
        """
        inside = ((self._num_before(a, shape), self._num_before(b, shape)) for a, b in ranges)
        return tuple((a, b) for a, b in inside if a < b)

    def _num_before(self, position: int, shape: tuple[int, ...]) -> int:
        """How many elements of the box come before a flat position of the tensor."""
        if position >= math.prod(shape):
            return self.numel
        before, rows = 0, self.numel
        stride = math.prod(shape)
        for size, start, extent in zip(shape, self.start, self.shape, strict=True):
            stride //= size
            rows //= max(extent, 1)
            coordinate, position = divmod(position, stride)
            before += min(max(coordinate - start, 0), extent) * rows
            if not start <= coordinate < start + extent:
                return before
        return before


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The positions that fall into a box.

    inner: int64 [k], ascending flat positions in the box; may alias the given ones.
    pick: int64 [k] or a slice: which of the given positions these are.
    """

    inner: torch.Tensor
    pick: torch.Tensor | slice


def row_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The flat range [start, stop) of a box that is contiguous in its tensor, else None."""
    if box.start[1:] != (0,) * (len(shape) - 1) or box.shape[1:] != shape[1:]:
        return None
    row = math.prod(shape[1:])
    first = box.start[0] * row if shape else 0
    return first, first + box.numel


def select(index: torch.Tensor, shape: tuple[int, ...], box: Box) -> Selection:
    """Find which flat positions of a tensor fall into a box.

    Args:
        index: int64 [n], ascending flat positions in a contiguous tensor of `shape`.
        shape: shape of that tensor.
        box: the part asked for.

    Returns:
        Positions in the box (ascending, C order of the box) and which of `index` they are.
    """
    bounds = row_range(box, shape)
    if bounds is not None:
        edges = torch.searchsorted(index, torch.tensor(bounds, dtype=torch.int64, device=index.device))
        first, last = edges.tolist()
        inner = index[first:last] - bounds[0] if bounds[0] else index[first:last]
        return Selection(inner=inner, pick=slice(first, last))
    inner = torch.zeros_like(index)
    keep = torch.ones_like(index, dtype=torch.bool)
    rest, stride = index, 1
    for size, start, extent in zip(reversed(shape), reversed(box.start), reversed(box.shape), strict=True):
        coordinate = rest % size - start
        rest = torch.div(rest, size, rounding_mode="floor")
        keep &= (coordinate >= 0) & (coordinate < extent)
        inner += coordinate * stride
        stride *= extent
    pick = keep.nonzero().squeeze(1)
    return Selection(inner=inner[pick], pick=pick)
