"""The receiver's way through the weights of a span of `wire.context`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import CorruptFrameError
from awex_delta.wire.classes import NUM_CLASSES, Classes, load_loops
from awex_delta.wire.pieces import bits_of
from awex_delta.wire.steps import step_limits
from awex_delta.wire.streams import StreamReader, check_read


def find(
    classes: Classes,
    lower: Sequence[StreamReader],
    groups: Sequence[StreamReader],
    weights: Iterable[tuple[int, torch.Tensor]],
    pos: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Find the changes among the weights of the base.

    Args:
        classes: the exponents that occur.
        lower: lower bits of gaps, and what escaped.
        groups: the streams of each group.
        weights: all of the span, a block at a time: where it begins, and bf16 values.
        pos, value: int64 and bf16, to be filled with all changes in ascending order; at their end stand those
            that state no step, ascending.

    Raises:
        CorruptFrameError: the streams do not fit each other, or not the weights.
    """
    loops = load_loops()
    high, pairs, wide_steps = _grouped(classes, groups)
    low, wide_gaps = lower[0].read_all(torch.uint8).numpy(), lower[1].read_all(torch.uint32).numpy()
    cursors, totals = classes.cursors(), np.empty(2, np.int64)
    loops.find_escapes(high, pairs, cursors, totals)
    sizes = len(wide_steps), len(wide_gaps), len(low)
    if sizes != (*totals.tolist(), classes.low_bytes):
        raise CorruptFrameError(f"{sizes} wide steps, wide gaps and bytes of lower bits do not fit the frame")
    if wide_steps.max(initial=0) == 255:
        raise CorruptFrameError("a change that should state its step states none")
    streams = high, low, pairs, wide_steps, wide_gaps
    left = np.array([loops.next_gap(own, cursors, high, low, wide_gaps) for own in range(NUM_CLASSES)])
    at = np.array([0, classes.counts.sum()], np.int64)
    places, new = pos.numpy(), value.view(torch.int16).numpy().view(np.uint16)
    for start, block in weights:
        loops.find_changes(bits_of(block), start, at, left, cursors, *streams, places, new)
    if at[0] != len(places):
        raise CorruptFrameError(f"{at[0]} changes lie among the weights, the frame lists {len(places)}")


def _grouped(
    classes: Classes, streams: Sequence[StreamReader]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Upper gap bytes by slot, and both streams of steps; each group begins with a new byte."""
    groups = classes.groups()
    if 3 * len(groups) != len(streams):
        raise CorruptFrameError(f"{len(streams)} streams for {len(groups)} groups")
    sizes = [group.stop - group.start for group in groups]
    wanted = [sizes, [step_limits(size)[0] for size in sizes], [stream.left for stream in streams[2::3]]]
    found = []
    for kind, lengths in enumerate(wanted):
        joined, start = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu"), 0
        for stream, length in zip(streams[kind::3], lengths, strict=True):
            stream.read_into(joined[start : start + length])
            start += length
        found.append(joined.numpy())
    check_read(streams)
    return found[0], found[1], found[2]
