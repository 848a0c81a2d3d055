"""Where a long frame is cut: buckets that none of the encodings makes larger than a limit, and of which two
fit into two limits together with what packing and unpacking one of them takes.

A cut goes between regions or through one, between two changed elements. What lies on each side is encoded as
a region of its own, so no encoding has to know of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from awex_delta.errors import WireError
from awex_delta.wire.codec import Codec, RegionChange
from awex_delta.wire.frame import frame_limit
from awex_delta.wire.guard import guard_limit
from awex_delta.wire.pieces import SCRATCH_BYTES
from awex_delta.wire.spans import Span, Window

MIN_BUCKET_BYTES = 1024
"""Holds a changed element in every encoding, with the frame around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One window of a bucket, and which changes of its region lie in it (of a whole region: unused)."""

    window: Window
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one frame is made of. guarded: there is room for a guard, so it has one."""

    span: Span
    parts: tuple[Part, ...]
    guarded: bool = False

    def changes(self, regions: Sequence[RegionChange]) -> list[RegionChange]:
        """The changes in the bucket, one entry a window; its `start` is the window's.

        Args:
            regions: what the bucket was cut from.

        Collective: no.
        """
        return [_cut_out(regions[part.window.region], part) for part in self.parts]


def frame_bytes(bucket_bytes: int) -> int:
    """The most bytes of a frame: a bucket less half of what does not grow with frames, but an eighth at most.

    Collective: no.
    """
    return bucket_bytes - min(SCRATCH_BYTES // 2, bucket_bytes // 8)


def cut(
    regions: Sequence[RegionChange],
    codec: Codec,
    dtype: torch.dtype,
    bucket_bytes: int,
    *,
    unstated: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Cut the changes of one pair into buckets.

    Args:
        regions: one entry a region, in the order of the plan.
        codec: what will pack them.
        dtype: wire dtype.
        bucket_bytes: half of what two frames may take, one that travels and one that is packed or unpacked,
            with all that is needed for it beside positions and values; at least MIN_BUCKET_BYTES.
        unstated: by region, the changes that guards leave out; None where frames have no guard.

    Returns:
        Buckets whose spans follow each other from the first element to the last.

    Raises:
        WireError: not even one element fits.

    Collective: no.
    """
    cutter = _Cutter(codec, dtype, bucket_bytes, len(regions), guarded=unstated is not None)
    counts = [0] * len(regions) if unstated is None else unstated
    for place, (region, count) in enumerate(zip(regions, counts, strict=True)):
        cutter.add(place, region, count)
    return cutter.finish()


class _Cutter:
    """Fills one bucket after the other."""

    def __init__(
        self, codec: Codec, dtype: torch.dtype, bucket_bytes: int, num_regions: int, *, guarded: bool
    ) -> None:
        self._codec, self._dtype, self._bucket_bytes = codec, dtype, bucket_bytes
        self._limit = frame_bytes(bucket_bytes)
        self._num_regions = num_regions
        self._guarded = guarded
        self._done: list[Bucket] = []
        self._begin = 0
        self._start_bucket()

    def _start_bucket(self) -> None:
        self._parts: list[Part] = []
        self._count = self._sparse = self._whole = self._unstated = 0

    def add(self, place: int, region: RegionChange, unstated: int) -> None:
        """Put one region into this bucket, and what does not fit into the next ones."""
        start = first = 0
        self._unstated += unstated
        while start < region.numel:
            if region.index is None:
                stop = last = start + self._whole_room(region.numel - start)
            else:
                last = first + self._room(region.value.numel() - first, region.numel - start)
                stop = region.numel if last == region.value.numel() else int(region.index[last])
                fits = self._fits(last - first, stop - start)
                stop = stop if fits and (last > first or stop == region.numel) else start
            if stop > start:
                window = Window(region=place, start=start, stop=stop)
                self._parts.append(Part(window=window, first=first, last=last))
                self._count += 0 if region.index is None else last - first
                self._sparse += 0 if region.index is None else stop - start
                self._whole += stop - start if region.index is None else 0
                start, first = stop, last
            elif not self._parts:
                raise WireError(f"a frame of {self._bucket_bytes} bytes cannot hold one changed element")
            if start < region.numel:
                self._flush()
                self._unstated = unstated

    def finish(self) -> tuple[Bucket, ...]:
        """Close the last bucket. Collective: no."""
        if self._parts:
            self._flush()
        return tuple(self._done)

    def _flush(self) -> None:
        end = self._begin + sum(part.window.numel for part in self._parts)
        span = Span(begin=self._begin, end=end, num_regions=self._num_regions)
        self._done.append(Bucket(span=span, parts=tuple(self._parts), guarded=self._guarded))
        self._begin = end
        self._start_bucket()

    def _size(self, count: int, sparse: int, whole: int) -> int:
        """The most that the bucket with one more window of so many changes and elements counts for."""
        count, sparse, whole = self._count + count, self._sparse + sparse, self._whole + whole
        body = self._codec.limit(count, sparse, self._dtype) if count else 0
        body += self._codec.work(count, sparse, self._dtype) // 2 if count else 0
        windows = len(self._parts) + 1
        guard = guard_limit(windows, min(count, self._unstated)) if self._guarded else 0
        return frame_limit(windows, body, whole * self._dtype.itemsize) + guard

    def _fits(self, count: int, numel: int) -> bool:
        return self._size(count, numel, 0) <= self._limit

    def _room(self, count: int, numel: int) -> int:
        """How many of `count` further changes fit, should they lie among `numel` elements."""
        return bisect_right(range(1, count + 1), self._limit, key=lambda n: self._size(n, numel, 0))

    def _whole_room(self, numel: int) -> int:
        room = self._limit - self._size(0, 0, 0)
        return max(0, min(numel, room // self._dtype.itemsize))


def _cut_out(region: RegionChange, part: Part) -> RegionChange:
    window = part.window
    if window.numel == region.numel:
        return region
    if region.index is None:
        return RegionChange(numel=window.numel, value=region.value[window.start : window.stop])
    here = slice(part.first, part.last)
    return replace(
        region,
        numel=window.numel,
        value=region.value[here],
        index=region.index[here],
        code=None if region.code is None else region.code[here],
        context=None if region.context is None else region.context.window(window.start, window.stop),
        start=window.start,
    )
