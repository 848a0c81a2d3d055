"""Cuts a pair's line into buckets, each of which makes one frame that keeps to a limit.

While one frame travels, another one is packed or unpacked. Two buckets of memory must hold both frames and
the working memory for one. So each frame has to fit one bucket together with half of its working memory.

The part that always travels whole comes first. The rest is cut between two changed elements. If all values of
such a bucket take fewer bytes than its changes, they are sent.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from awex_delta.errors import WireError
from awex_delta.lines.changes import Changes
from awex_delta.wire.codec import Codec
from awex_delta.wire.guard import guard_limit
from awex_delta.wire.pieces import SCRATCH_BYTES
from awex_delta.wire.spans import MAX_SPAN, Span

HEADER_BYTES = 120
"""The header of a frame."""

MIN_BUCKET_BYTES = 1024
"""Holds a changed element in every encoding, with the frame around it."""

_MOST_BYTES_OF_POSITION = 8  # about, in any encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one frame is made of.

    span: the elements that it covers.
    first, last: which changes lie in them, by number among those of the pair.
    whole: all values of the span are sent, and no positions.
    guarded: the frame has a guard.
    """

    span: Span
    first: int = 0
    last: int = 0
    whole: bool = False
    guarded: bool = False

    @property
    def num_sent(self) -> int:
        """Elements whose values the frame carries."""
        return self.span.numel if self.whole else self.last - self.first


def frame_bytes(bucket_bytes: int) -> int:
    """The most bytes that a frame and half of its working memory may take together.

    That is a bucket less half of SCRATCH_BYTES, which a frame of any size needs. Frames of small buckets need
    less: an eighth of the bucket is left for them.
    """
    return bucket_bytes - min(SCRATCH_BYTES // 2, bucket_bytes // 8)


def cut(
    changes: Changes,
    codec: Codec,
    dtype: torch.dtype,
    numel: int,
    bucket_bytes: int,
    *,
    whole_prefix: int = 0,
    unstated: int | None = None,
) -> tuple[Bucket, ...]:
    """Cut the changes of one pair into buckets.

    Args:
        changes: all changes of the pair, with values.
        codec: what will pack them.
        dtype: wire dtype.
        numel: elements of the pair's line.
        bucket_bytes: half of the memory that two frames and the working memory for one may take together,
            beside the changes; at least MIN_BUCKET_BYTES.
        whole_prefix: how many elements at the begin of the line always travel whole. What changes say of
            them is not used.
        unstated: how many changes guards leave out; None if frames have no guard.

    Returns:
        Buckets whose spans follow each other from the first element of the line to the last.

    Raises:
        WireError: not even one element fits.
    """
    room = frame_bytes(bucket_bytes)
    step = (room - HEADER_BYTES) // dtype.itemsize
    if step < 1:
        raise _too_small(bucket_bytes)
    starts = range(0, whole_prefix, step)
    found = [Bucket(span=Span(at, min(at + step, whole_prefix)), whole=True) for at in starts]
    cutter = _Cutter(changes=changes, codec=codec, dtype=dtype, bucket_bytes=bucket_bytes, unstated=unstated)
    begin, first = whole_prefix, cutter.number_at(whole_prefix)
    while begin < numel:
        found.append(cutter.next(begin, first, min(begin + MAX_SPAN, numel)))
        begin, first = found[-1].span.end, found[-1].last
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutter:
    """Cuts the part that travels as changes. See `cut`."""

    changes: Changes
    codec: Codec
    dtype: torch.dtype
    bucket_bytes: int
    unstated: int | None

    @property
    def room(self) -> int:
        """See `frame_bytes`."""
        return frame_bytes(self.bucket_bytes)

    def next(self, begin: int, first: int, reach: int) -> Bucket:
        """The bucket from position `begin` and change `first` on, which ends at `reach` or before."""
        count = self.number_at(reach) - first

        def stop(taken: int) -> int:
            return reach if taken == count else int(self.changes.pos[first + taken])

        taken = bisect_right(
            range(1, count + 1), self.room, key=lambda taken: self._size(taken, stop(taken) - begin)
        )
        if count and not taken:
            raise _too_small(self.bucket_bytes)
        span, last = Span(begin, stop(taken)), first + taken
        whole = self._whole_is_smaller(self.changes.part(first, last), span.numel)
        guarded = self.unstated is not None and not whole
        return Bucket(span=span, first=first, last=last, whole=whole, guarded=guarded)

    def number_at(self, position: int) -> int:
        """How many changes lie before a position."""
        return int(torch.searchsorted(self.changes.pos, position))

    def _size(self, count: int, numel: int) -> int:
        """The most bytes of a frame of `count` changes in `numel` elements and half of its working memory."""
        body = self.codec.limit(count, numel, self.dtype)
        guard = 0 if self.unstated is None else guard_limit(min(count, self.unstated))
        return HEADER_BYTES + body + guard + self.codec.work(count, numel, self.dtype) // 2

    def _whole_is_smaller(self, changes: Changes, numel: int) -> bool:
        """True if all values of a span take fewer bytes than its changes."""
        whole = numel * self.dtype.itemsize
        if changes.num_changed * (_MOST_BYTES_OF_POSITION + self.dtype.itemsize) <= whole:
            return False  # so few that nothing needs to be estimated
        return whole + HEADER_BYTES <= self.room and whole < self.codec.size(changes, numel, self.dtype)


def _too_small(bucket_bytes: int) -> WireError:
    return WireError(
        f"weight_update_bucket_bytes={bucket_bytes} cannot hold one changed element and the work on its frame"
    )
