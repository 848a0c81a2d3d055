"""What `wire.context` walks: the weights that both sides know, in blocks, and the changes among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.lines.bits import UNSTATED
from awex_delta.wire.codec import Context, RegionChange
from awex_delta.wire.pieces import pieces

Ints = NDArray[np.int64]
Bits = NDArray[np.uint16]

BLOCK = 1 << 19
"""Weights that are read at a time."""


def bits_of(weights: torch.Tensor) -> Bits:
    """bf16 [n] as patterns on the CPU."""
    patterns: NDArray[np.int16] = weights.detach().cpu().contiguous().view(torch.int16).numpy()
    return patterns.view(np.uint16)


def segments_of(context: Context | None) -> Ints:
    """The owned ranges, int64 [k, 2], ascending."""
    owned = () if context is None else context.owned
    return np.array(owned, np.int64).reshape(-1, 2)


def blocks_of(context: Context | None, segments: Ints, start: int, stop: int) -> Iterator[tuple[int, Bits]]:
    """Where a block begins, and its patterns; of what lies between the first and the last segment.

    Args:
        context: of the region.
        segments: its segments.
        start, stop: half-open range of positions, that a block does not leave.

    Collective: no.
    """
    if context is None or not len(segments):
        return
    place, end = max(start, int(segments[0, 0])), min(stop, int(segments[-1, 1]))
    while place < end:
        until = min(place + BLOCK, end)
        yield place, bits_of(context.weights(place, until))
        place = until


def listed(change: RegionChange) -> Iterator[tuple[Ints, Bits, NDArray[np.int8]]]:
    """Positions, patterns and steps of a region's changes, a piece at a time; without context no steps."""
    for piece in pieces([change]):
        code = piece.code if change.context is not None else torch.full(piece.value.shape, UNSTATED).char()
        yield piece.index.numpy(), bits_of(piece.value), code.contiguous().numpy()


def unstated(changes: Sequence[RegionChange]) -> Iterator[tuple[torch.Tensor, torch.Tensor, None]]:
    """Gaps and values of what states no step, all regions as one, a piece at a time."""
    offset, before = 0, -1
    for change in changes:
        for index, bits, code in listed(change):
            none = np.flatnonzero(code == UNSTATED)
            places = index[none] + offset
            gap = np.diff(places, prepend=before) - 1
            before = int(places[-1]) if len(places) else before
            value = torch.from_numpy(bits[none].view(np.int16)).view(torch.bfloat16)
            yield torch.from_numpy(gap), value, None
        offset += change.numel
