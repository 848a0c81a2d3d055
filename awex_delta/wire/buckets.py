"""Where the line of a pair is cut: into buckets of which each makes a frame that keeps to a limit.

Two buckets must hold two frames, of which one travels, and what packing or unpacking the other takes. Each
frame is counted with half of that work, so it fits one bucket together with that half.

The part that always travels whole comes first. The rest is cut between two changed elements. If all values of
such a bucket take fewer bytes than its changes, they are sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
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
    """The most bytes of a frame with half of the work on it.

    A bucket less half of SCRATCH_BYTES, which are at work whatever the size of a frame; small buckets, in
    which the work is small as well, leave an eighth for them.
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
        changes: of the pair, with values.
        codec: what will pack them.
        dtype: wire dtype.
        numel: elements of the pair's line.
        bucket_bytes: half of the memory that two frames may take together with the work on one of them,
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
    prefix = [Bucket(span=Span(at, min(at + step, whole_prefix)), whole=True) for at in starts]
    rest = Span(whole_prefix, numel)
    return (*prefix, *_sparse_buckets(changes, codec, dtype, rest, bucket_bytes, unstated))


def _sparse_buckets(
    changes: Changes, codec: Codec, dtype: torch.dtype, rest: Span, bucket_bytes: int, unstated: int | None
) -> Iterator[Bucket]:
    """Buckets of the part that travels as changes."""
    room = frame_bytes(bucket_bytes)
    begin, first = rest.begin, _number_at(changes, rest.begin)
    while begin < rest.end:
        reach = min(begin + MAX_SPAN, rest.end)
        count = _number_at(changes, reach) - first

        def stop(taken: int, first: int = first, count: int = count, reach: int = reach) -> int:
            return reach if taken == count else int(changes.pos[first + taken])

        def size(taken: int, begin: int = begin) -> int:
            guard = 0 if unstated is None else guard_limit(min(taken, unstated))
            return _frame_size(codec, taken, stop(taken) - begin, dtype) + guard

        taken = bisect_right(range(1, count + 1), room, key=size)
        if size(0) > room or (count and not taken):
            raise _too_small(bucket_bytes)
        span = Span(begin, stop(taken))
        here = changes.part(first, first + taken)
        whole = _whole_is_smaller(codec, here, span.numel, dtype, room)
        guarded = unstated is not None and not whole
        yield Bucket(span=span, first=first, last=first + taken, whole=whole, guarded=guarded)
        begin, first = span.end, first + taken


def _number_at(changes: Changes, position: int) -> int:
    """How many changes lie before a position."""
    return int(torch.searchsorted(changes.pos, position))


def _frame_size(codec: Codec, count: int, numel: int, dtype: torch.dtype) -> int:
    """The most bytes of a frame without guard, with half of the work on it."""
    if not count:
        return HEADER_BYTES
    return HEADER_BYTES + codec.limit(count, numel, dtype) + codec.work(count, numel, dtype) // 2


def _whole_is_smaller(codec: Codec, changes: Changes, numel: int, dtype: torch.dtype, room: int) -> bool:
    """True if all values of a span take fewer bytes than its changes."""
    whole = numel * dtype.itemsize
    if changes.num_changed * (_MOST_BYTES_OF_POSITION + dtype.itemsize) <= whole:
        return False  # so few that nothing needs to be estimated
    return whole + HEADER_BYTES <= room and whole < codec.size(changes, numel, dtype)


def _too_small(bucket_bytes: int) -> WireError:
    return WireError(
        f"weight_update_bucket_bytes={bucket_bytes} cannot hold one changed element and the work on its frame"
    )
