"""Changes and weights a piece at a time, so that packing takes little memory beside the frame it makes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import WireError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.wire.spans import Read, Span

PIECE = 1 << 16
"""How many changes are packed or unpacked at a time: an even number, whose tensors stay in the cache."""

BLOCK = 1 << 19
"""How many weights are read at a time."""

SCRATCH_BYTES = 8 << 20
"""Bounds the working memory whose size does not depend on the frame: pieces, blocks, what zstd allocates."""

Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""On the CPU: positions int64 [n], values [n], codes int8 [n]."""


def slices(total: int) -> Iterator[slice]:
    """The ranges of `total` changes, one for each piece."""
    return (slice(first, min(first + PIECE, total)) for first in range(0, total, PIECE))


def pieces(changes: Changes) -> Iterator[Piece]:
    """All changes, PIECE at a time; only the last piece has fewer.

    Every code is UNSTATED if the changes have none, or if their values are not bf16, whose steps codes count.

    Raises:
        WireError: the changes have no values.
    """
    for here in slices(changes.num_changed):
        yield on_cpu(changes.part(here.start, here.stop))


def on_cpu(changes: Changes) -> Piece:
    """Positions, values and codes of changes; see `pieces`."""
    if changes.value is None:
        raise WireError("changes cannot be packed without their values")
    value = changes.value.detach().cpu()
    if changes.code is None or value.dtype is not torch.bfloat16:
        return changes.pos.cpu(), value, torch.full(value.shape, UNSTATED, dtype=torch.int8, device="cpu")
    return changes.pos.cpu(), value, changes.code.cpu()


def blocks(read: Read, span: Span) -> Iterator[tuple[int, torch.Tensor]]:
    """The values of a span, BLOCK at a time: the position of the first, and the values."""
    for start in range(span.begin, span.end, BLOCK):
        yield start, read(start, min(start + BLOCK, span.end))


def elements(read: Read, span: Span) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As `blocks`, with the position of each value: int64 [k] and values [k], on the CPU."""
    for start, values in blocks(read, span):
        yield torch.arange(start, start + values.numel(), device="cpu"), values


def bits_of(weights: torch.Tensor) -> NDArray[np.uint16]:
    """The bit patterns of bf16 [n], on the CPU."""
    patterns: NDArray[np.int16] = weights.detach().cpu().contiguous().view(torch.int16).numpy()
    return patterns.view(np.uint16)


def places_of(entries: torch.Tensor, entry: int) -> torch.Tensor:
    """Where integers on the CPU are `entry`, int64 [n]; several times as fast as with torch."""
    return torch.from_numpy(np.flatnonzero(entries.numpy() == entry))
