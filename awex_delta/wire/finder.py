"""The receiver's way through the weights of a frame of `wire.context`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import CorruptFrameError
from awex_delta.wire.classes import NUM_CLASSES, Classes, load_loops
from awex_delta.wire.codec import Context
from awex_delta.wire.steps import step_limits
from awex_delta.wire.streams import StreamReader, check_read
from awex_delta.wire.weights import blocks_of, segments_of


class Finder:
    """The receiver's way through the weights of a frame."""

    def __init__(
        self,
        classes: Classes,
        lower: Sequence[StreamReader],
        groups: Sequence[StreamReader],
        index: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Read the streams.

        Args:
            classes: the exponents that occur.
            lower: lower bits of gaps, and what escaped.
            groups: the streams of each group.
            index, value: int64 and bf16, of all regions one after the other, to be filled; at their end is
                what states no step, with positions in all regions as one.

        Raises:
            CorruptFrameError: the streams do not fit each other.
        """
        self._loops = load_loops()
        self._high, self._pairs, self._wide_steps = _grouped(classes, groups)
        self._low = lower[0].read_all(torch.uint8).numpy()
        self._wide_gaps = lower[1].read_all(torch.int64).numpy()
        self._places, self._new = index.numpy(), value.view(torch.int16).numpy().view(np.uint16)
        self._cursors = classes.cursors()
        totals = np.empty(2, np.int64)
        self._loops.find_escapes(self._high, self._pairs, self._cursors, totals)
        sizes = len(self._wide_steps), len(self._wide_gaps), len(self._low)
        if sizes != (*totals.tolist(), classes.low_bytes):
            raise CorruptFrameError(
                f"{sizes} wide steps, wide gaps and bytes of lower bits do not fit the rest"
            )
        if self._wide_steps.max(initial=0) == 255:
            raise CorruptFrameError("a change among those with a step has none")
        gap = self._loops.next_gap
        self._left = np.array(
            [gap(own, self._cursors, self._high, self._low, self._wide_gaps) for own in range(NUM_CLASSES)]
        )
        self._at = np.array([0, 0, classes.counts.sum()], np.int64)
        self._offset = self._done = 0

    def region(self, count: int, numel: int, context: Context | None) -> None:
        """Find the changes of the next region.

        Raises:
            CorruptFrameError: there are not as many.
        """
        segments = segments_of(context if count else None)
        streams = self._high, self._low, self._pairs, self._wide_steps, self._wide_gaps
        self._at[0] = 0
        for base, bits in blocks_of(context, segments, 0, numel):
            place = self._offset, self._left, self._cursors
            self._loops.find_changes(
                bits, base, segments, self._at, *place, *streams, self._places, self._new
            )
        self._loops.merge_unstated(self._offset, numel, self._at, self._places, self._new)
        self._offset, self._done = self._offset + numel, self._done + count
        if self._at[1] != self._done:
            raise CorruptFrameError(f"{self._at[1] - self._done + count} changes lie in a region of {count}")

    def finish(self) -> None:
        """Refuse changes that were not found.

        Raises:
            CorruptFrameError: some are left.
        """
        if self._at[1] != len(self._places):
            raise CorruptFrameError("fewer changes lie among the weights than the frame lists")


def _grouped(
    classes: Classes, streams: Sequence[StreamReader]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Upper gap bytes by slot, and both streams of steps; the pairs of each group begin with a byte."""
    groups = classes.groups()
    if 3 * len(groups) != len(streams):
        raise CorruptFrameError(f"{len(streams)} streams for {len(groups)} groups")
    sizes = [group.stop - group.start for group in groups]
    wanted = [sizes, [step_limits(size)[0] for size in sizes], [stream.left for stream in streams[2::3]]]
    found = []
    for kind, lengths in enumerate(wanted):
        joined, start = torch.empty(sum(lengths), dtype=torch.uint8), 0
        for stream, length in zip(streams[kind::3], lengths, strict=True):
            stream.read_into(joined[start : start + length])
            start += length
        found.append(joined.numpy())
    check_read(streams)
    return found[0], found[1], found[2]
