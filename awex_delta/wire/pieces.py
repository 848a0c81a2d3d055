"""Changes a piece at a time, so that packing them takes little memory beside the frame that is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from awex_delta.lines.bits import UNSTATED
from awex_delta.wire.codec import RegionChange

PIECE = 1 << 16
"""Changes that are packed or unpacked at a time: an even number; what it takes stays in the cache."""

SCRATCH_BYTES = 8 << 20
"""More than packing and unpacking take beside what grows with a frame: pieces, zstd, blocks of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Successive changes of sparse regions, as ranges of the changes of each: (region, first, last)."""

    parts: tuple[tuple[RegionChange, int, int], ...]

    @property
    def index(self) -> torch.Tensor:
        """int64 [n] on the CPU: positions, each from the begin of its region or window."""
        return _joined([_from_start(change, change.index, first, last) for change, first, last in self.parts])

    @property
    def value(self) -> torch.Tensor:
        """[n] on the CPU."""
        return _joined([change.value[first:last] for change, first, last in self.parts])

    @property
    def code(self) -> torch.Tensor:
        """int8 [n] on the CPU: steps, UNSTATED where there are none."""
        return _joined([_codes(change, first, last) for change, first, last in self.parts])

    @property
    def gap(self) -> torch.Tensor:
        """int64 [n] on the CPU: unchanged elements before each change, since the last one of its region."""
        index = self.index.numpy()
        heads = list(accumulate((last - first for _, first, last in self.parts[:-1]), initial=0))
        gap = np.empty_like(index)
        np.subtract(index[1:], index[:-1], out=gap[1:])
        gap[heads] = index[heads] - [_before(change, first) for change, first, _ in self.parts]
        gap -= 1
        return torch.from_numpy(gap)


def pieces(changes: Sequence[RegionChange]) -> Iterator[Piece]:
    """All changes of sparse regions, PIECE at a time; only the last piece has fewer.

    Args:
        changes: index is not None.

    Collective: no.
    """
    parts: list[tuple[RegionChange, int, int]] = []
    room = PIECE
    for change in changes:
        first, total = 0, change.value.numel()
        while first < total:
            last = min(total, first + room)
            parts.append((change, first, last))
            room -= last - first
            first = last
            if not room:
                yield Piece(parts=tuple(parts))
                parts, room = [], PIECE
    if parts:
        yield Piece(parts=tuple(parts))


def slices(total: int) -> Iterator[slice]:
    """The ranges of `total` changes that make a piece each. Collective: no."""
    return (slice(first, min(first + PIECE, total)) for first in range(0, total, PIECE))


def places_of(entries: torch.Tensor, entry: int) -> torch.Tensor:
    """Where integers on the CPU are `entry`, int64 [n]; some times faster than torch finds it."""
    return torch.from_numpy(np.flatnonzero(entries.numpy() == entry))


def _from_start(change: RegionChange, index: torch.Tensor | None, first: int, last: int) -> torch.Tensor:
    if index is None:
        raise ValueError("a whole region has no positions")
    return index[first:last] - change.start if change.start else index[first:last]


def _before(change: RegionChange, first: int) -> int:
    """The position before a change of one region, -1 before the first."""
    return int(_from_start(change, change.index, first - 1, first)) if first else -1


def _codes(change: RegionChange, first: int, last: int) -> torch.Tensor:
    value = change.value[first:last]
    if change.code is None or value.dtype is not torch.bfloat16:
        return torch.full(value.shape, UNSTATED, dtype=torch.int8, device=value.device)
    return change.code[first:last]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).cpu()
