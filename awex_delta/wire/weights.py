"""What `wire.context` walks: the weights that both sides know, in blocks, and the changes among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import WireError
from awex_delta.numerics.ulp import UNSTATED
from awex_delta.wire.codec import Context, RegionChange

Ints = NDArray[np.int64]

BLOCK = 1 << 22
"""Weights that are read at a time."""


def index_of(change: RegionChange) -> Ints:
    """Positions of the changes, int64 [n].

    Raises:
        WireError: the region travels whole.
    """
    if change.index is None:
        raise WireError("a whole region has no positions")
    index: Ints = change.index.cpu().numpy()
    return index


def bits_of(weights: torch.Tensor) -> NDArray[np.uint16]:
    """bf16 [n] as patterns on the CPU."""
    patterns: NDArray[np.uint16] = weights.detach().cpu().contiguous().view(torch.int16).numpy()
    return patterns.view(np.uint16)


def segments_of(context: Context | None, left_out: Ints) -> Ints:
    """The owned ranges without single positions, int64 [k, 2], all ascending."""
    if context is None or not context.owned:
        return np.empty((0, 2), np.int64)
    starts, stops = np.array(context.owned, np.int64).T
    inside = np.searchsorted(starts, left_out, side="right") - 1
    cuts = left_out[(inside >= 0) & (left_out < stops[np.maximum(inside, 0)])]
    starts = np.sort(np.concatenate([starts, cuts + 1]))
    stops = np.sort(np.concatenate([stops, cuts]))
    return np.ascontiguousarray(np.stack([starts, stops], axis=1)[starts < stops])


def blocks_of(context: Context | None, segments: Ints) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Where a block begins, and its patterns; only what lies between the first and the last segment."""
    if context is None or not len(segments):
        return
    start, end = int(segments[0, 0]), int(segments[-1, 1])
    while start < end:
        stop = min(start + BLOCK, end)
        yield start, bits_of(context.weights(start, stop))
        start = stop


def stated_codes(change: RegionChange) -> torch.Tensor:
    """int8 on the CPU; UNSTATED where nothing is known of the base."""
    if change.context is None or change.code is None:
        return torch.full(change.value.shape, UNSTATED, dtype=torch.int8)
    return change.code.cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The changes of one region that state a step, and the positions of the others."""

    context: Context | None
    index: Ints
    new: NDArray[np.uint16]
    code: NDArray[np.int8]
    aside: Ints

    @classmethod
    def of(cls, change: RegionChange) -> Stated:
        """Part the changes of a region."""
        code, index, new = stated_codes(change).numpy(), index_of(change), bits_of(change.value)
        stated = code != UNSTATED
        if stated.all():
            return cls(context=change.context, index=index, new=new, code=code, aside=index[:0])
        aside = index[~stated]
        return cls(
            context=change.context, index=index[stated], new=new[stated], code=code[stated], aside=aside
        )


def unstated_of(changes: Sequence[RegionChange]) -> RegionChange:
    """What is left out of the walk, all regions as one."""
    index, value, offset = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.bfloat16)], 0
    for change in changes:
        none = stated_codes(change) == UNSTATED
        index.append(torch.from_numpy(index_of(change))[none] + offset)
        value.append(change.value.cpu()[none])
        offset += change.numel
    return RegionChange(numel=offset, index=torch.cat(index), value=torch.cat(value))
