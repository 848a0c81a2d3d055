"""Cuts the overlaps of parts of tensors into boxes, for very many parts at once.

Each row of an array is one overlap. A box has `rows` x `width` elements; at either end its rows lie a pitch
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from awex_delta.plan.columns import Ints

Mask = NDArray[np.bool_]


def padded(shapes: Sequence[tuple[int, ...]], num_dims: int, fill: int) -> Ints:
    """Shapes or offsets as int64 [n, num_dims]; dimensions that are missing come first, as `fill`."""
    rows = [(fill,) * (num_dims - len(shape)) + shape for shape in shapes]
    return np.array(rows, np.int64).reshape(len(rows), num_dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Boxes of overlaps, int64 [k] each.

    overlap: which overlap each box belongs to.
    sent, stored: where its first element lies in the sender's and in the receiver's part, row by row.
    sent_pitch, stored_pitch: from one row of the box to the next.
    """

    overlap: Ints
    sent: Ints
    sent_pitch: Ints
    stored: Ints
    stored_pitch: Ints
    rows: Ints
    width: Ints

    def take(self, index: Any) -> Cut:
        """The boxes at `index`, which may name a box several times."""
        return Cut(
            overlap=self.overlap[index],
            sent=self.sent[index],
            sent_pitch=self.sent_pitch[index],
            stored=self.stored[index],
            stored_pitch=self.stored_pitch[index],
            rows=self.rows[index],
            width=self.width[index],
        )


def cut_overlaps(sent: tuple[Ints, Ints], stored: tuple[Ints, Ints]) -> Cut:
    """Cut the overlaps of parts of the same tensors into boxes.

    Args:
        sent, stored: offset and shape of each part, int64 [n, dims] each; row i of both is one tensor.

    Returns:
        The boxes: one for each overlap that is not empty, or several if more than two dimensions are cut.
    """
    low = np.maximum(sent[0], stored[0])
    extent = np.minimum(sent[0] + sent[1], stored[0] + stored[1]) - low
    overlap = np.flatnonzero((extent > 0).all(axis=1))
    extent, low = extent[overlap], low[overlap]
    sent_strides, stored_strides = _strides(sent[1][overlap]), _strides(stored[1][overlap])
    ones = np.ones(len(overlap), np.int64)
    cut = Cut(
        overlap=overlap,
        sent=((low - sent[0][overlap]) * sent_strides).sum(axis=1),
        sent_pitch=ones,
        stored=((low - stored[0][overlap]) * stored_strides).sum(axis=1),
        stored_pitch=ones,
        rows=ones,
        width=ones,
    )
    origin = np.arange(len(overlap))  # which row of the strides each box has
    for dim in reversed(range(extent.shape[1])):
        cut, repeats = _grown(
            cut, extent[origin, dim], sent_strides[origin, dim], stored_strides[origin, dim]
        )
        origin = np.repeat(origin, repeats)
    flat = cut.rows == 1
    return replace(
        cut,
        sent_pitch=np.where(flat, cut.width, cut.sent_pitch),
        stored_pitch=np.where(flat, cut.width, cut.stored_pitch),
    )


def _grown(cut: Cut, extent: Ints, sent_stride: Ints, stored_stride: Ints) -> tuple[Cut, Ints]:
    """The boxes extended over one more dimension, and how many boxes each of them became."""
    together = (cut.rows == 1) & (cut.width == sent_stride) & (cut.width == stored_stride)
    first = ~together & (cut.rows == 1)
    more = ~together & ~first
    more &= (cut.rows * cut.sent_pitch == sent_stride) & (cut.rows * cut.stored_pitch == stored_stride)
    grows = extent > 1
    apart = grows & ~together & ~first & ~more
    cut = replace(
        cut,
        width=np.where(grows & together, cut.width * extent, cut.width),
        rows=np.where(grows & (first | more), cut.rows * extent, cut.rows),
        sent_pitch=np.where(grows & first, sent_stride, cut.sent_pitch),
        stored_pitch=np.where(grows & first, stored_stride, cut.stored_pitch),
    )
    repeats = np.where(apart, extent, 1)
    if not apart.any():
        return cut, repeats
    number = ranges(np.zeros_like(repeats), repeats)
    cut = cut.take(np.repeat(np.arange(len(repeats)), repeats))
    sent_stride, stored_stride = np.repeat(sent_stride, repeats), np.repeat(stored_stride, repeats)
    return replace(
        cut, sent=cut.sent + number * sent_stride, stored=cut.stored + number * stored_stride
    ), repeats


def clip(cut: Cut, low: Ints, high: Ints) -> Cut:
    """The elements of boxes whose position in the sender's part lies in [low, high), a range for each box.

    A box becomes up to three: a part of its first row, whole rows, and a part of its last row.
    """
    begin = np.maximum(low - cut.sent, 0)
    end = np.minimum(high - cut.sent, (cut.rows - 1) * cut.sent_pitch + cut.width)
    first, head = _row_and_column(begin, cut)
    last, tail = _row_and_column(np.maximum(end, 0), cut)
    any_left = (first < last) | ((first == last) & (head < tail))
    whole = first + (head > 0)
    single = first == last
    zeros, ones = np.zeros_like(cut.rows), np.ones_like(cut.rows)
    return _concatenated(
        [
            _part(cut, any_left & (head > 0), first, ones, head, np.where(single, tail, cut.width) - head),
            _part(cut, any_left & (last > whole), whole, last - whole, zeros, cut.width),
            _part(cut, any_left & (tail > 0) & (last >= whole), last, ones, zeros, tail),
        ]
    )


def _row_and_column(place: Ints, cut: Cut) -> tuple[Ints, Ints]:
    """Row and column at a distance from the first element of a box; between rows, the begin of the next."""
    row = place // cut.sent_pitch
    column = place - row * cut.sent_pitch
    over = column >= cut.width
    return row + over, np.where(over, 0, column)


def _part(cut: Cut, keep: Mask, row: Ints, rows: Ints, column: Ints, width: Ints) -> Cut:
    inner = replace(
        cut,
        sent=cut.sent + row * cut.sent_pitch + column,
        stored=cut.stored + row * cut.stored_pitch + column,
        rows=rows,
        width=width,
    )
    return inner.take(keep)


def _concatenated(cuts: list[Cut]) -> Cut:
    return Cut(**{f.name: np.concatenate([getattr(cut, f.name) for cut in cuts]) for f in fields(Cut)})


def ranges(start: Ints, count: Ints) -> Ints:
    """The numbers start .. start + count - 1 of each entry, one after the other."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if ends.size else 0
    found: Ints = np.arange(total) - np.repeat(ends - count - start, count)
    return found


def _strides(shape: Ints) -> Ints:
    """Row-major strides of shapes, int64 [n, dims]."""
    inner = np.concatenate([shape[:, 1:], np.ones((len(shape), 1), np.int64)], axis=1)
    strides: Ints = np.cumprod(inner[:, ::-1], axis=1)[:, ::-1]
    return strides
