"""`ulp_context`: positions as gaps among the weights of one exponent, which both sides know.

Small weights change most. Sender and receiver walk the weights of the base in the same order, through the
whole span, and count them by exponent; a gap is the number of unchanged weights of the *same* exponent since
the last change among them. Gaps and steps of one exponent then have a narrow distribution of their own, and
are packed together.

The sender knows the base: the weight itself if it did not change, the weight less the step if it did. It does
not know what a change without a step replaces, so such changes travel beside the others with plain positions,
and both sides leave them out of the walk.

    number of groups, int64
    classes         an int64 for each exponent that occurs: exponent, shift << 8, changes << 16
    gap, low bits   `shift` bits of each gap
    gap, 32 bit     what is left of each gap that escapes, which is beyond 254
    unstated        changes without a step, as a body of their own (`gaps`, packed)
    for each group  gap without its low bits, 255 for an escape; steps, two streams, see `wire.steps`

The shift keeps the mean of what is left between 16 and 31, whatever the exponent: escapes are rare, and
exponents that occur seldom can share a group, which saves the tables of the compressor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import CorruptFrameError, WireError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.wire.classes import MAX_SHIFT, NUM_CLASSES, Classes, group_limit, load_loops, read_classes
from awex_delta.wire.codec import body_room, check_count
from awex_delta.wire.finder import find
from awex_delta.wire.gaps import Entries, GapCodec, gaps_of
from awex_delta.wire.pieces import BLOCK, bits_of, blocks, on_cpu, pieces, places_of, slices
from awex_delta.wire.spans import Read, Span
from awex_delta.wire.steps import ESCAPE, step_limits, step_streams
from awex_delta.wire.streams import StreamReader, StreamWriter, check_read, open_streams

_FIXED_STREAMS = 4


def numba_is_installed() -> bool:
    """True when the loops can be compiled."""
    return importlib.util.find_spec("numba") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCodec:
    """The encoding that the head of this module describes."""

    name: str = "ulp_context"
    number: int = 5

    @property
    def needs_context(self) -> bool:
        """See `Codec.needs_context`."""
        return True

    @property
    def idempotent(self) -> bool:
        """See `Codec.idempotent`."""
        return False

    def size(self, changes: Changes, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.size`. The size without context; context saves a quarter of it."""
        return _PLAIN_STEPS.size(changes, numel, dtype)

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`. A change without a step takes less than one with a step, wide gaps aside."""
        plain = _PLAIN.limit(count, numel, dtype)
        if dtype is not torch.bfloat16 or not count:
            return plain
        streams = _FIXED_STREAMS + 3 * group_limit(count)
        stated = 8 + 24 * streams + 8 * min(count, NUM_CLASSES) + _stated_limit(count, numel)
        return stated + plain - 3 * count

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.work`: gaps and steps by slot on the sender, unpacked streams on the receiver."""
        if dtype is not torch.bfloat16:
            return _PLAIN.work(count, numel, dtype)
        by_slot = count * (torch.uint32.itemsize + 1)
        return max(by_slot, _stated_limit(count, numel), _PLAIN.work(count, numel, dtype))

    def encode(
        self,
        changes: Changes,
        span: Span,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
        read: Read | None = None,
    ) -> torch.Tensor:
        """See `Codec.encode`."""
        if dtype is not torch.bfloat16 or not changes.num_changed:
            return _PLAIN.encode(changes, span, dtype, out=out)
        room = body_room(self, changes.num_changed, span, dtype, out)
        body = _encoded(changes, span, _needed(read), room)
        return body if out is not None else body.clone()

    def decode(
        self, body: torch.Tensor, count: int, span: Span, dtype: torch.dtype, *, read: Read | None = None
    ) -> Changes:
        """See `Codec.decode`. Gives values, not codes: the walk has seen the weights."""
        check_count(count, span)
        if dtype is not torch.bfloat16 or not count:
            return _PLAIN.decode(body, count, span, dtype)
        streams = _streams(body, count, span.numel)
        classes = read_classes(streams[0], count)
        num_stated = int(classes.counts.sum())
        beside = _PLAIN.open(streams[3].read_all(torch.uint8), count - num_stated, span, dtype)
        if sum(stream.left for stream in streams[_FIXED_STREAMS::3]) != num_stated:
            raise CorruptFrameError(
                f"the table lists {num_stated} changes, and the frame holds another number of gaps"
            )
        pos = torch.empty(count, dtype=torch.int64, device="cpu")
        value = torch.empty(count, dtype=dtype, device="cpu")
        (values,) = _PLAIN.read_positions(beside, span, pos[num_stated:])
        values.read_into(value[num_stated:].view(torch.uint8))
        check_read([values])
        lower, groups = streams[1:3], streams[_FIXED_STREAMS:]
        if num_stated:  # else all are in their place
            find(classes, lower, groups, blocks(_needed(read), span), pos, value)
        return Changes(pos=pos, value=value)


_PLAIN = GapCodec(name="gaps of unstated", number=0, steps=False, compress=True)
_PLAIN_STEPS = GapCodec(name="gaps and steps", number=0, steps=True, compress=True)


def _needed(read: Read | None) -> Read:
    if read is None:
        raise WireError("ulp_context needs the weights of the span")
    return read


def _stated_limit(count: int, numel: int) -> int:
    """The most bytes of gaps and steps.

    A gap takes one byte, and four more if it escapes, which one in eight does at most; a step takes up to one
    and a half. Lower bits come on top.
    """
    shift = max(0, (numel // (16 * max(count, 1))).bit_length())
    return count * 4 + (count * shift) // 8 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the sender's walk found: the exponents, and by slot the gap and the step."""

    classes: Classes
    gaps: NDArray[np.uint32]
    steps: NDArray[np.int8]


def _walked(changes: Changes, span: Span, read: Read) -> _Found:
    """Find the gap of each change that states a step."""
    loops, num = load_loops(), np.zeros(NUM_CLASSES, np.int64)
    for _, value, code in pieces(changes):
        loops.classify(bits_of(value), code.contiguous().numpy(), num)
    total, slot = int(num.sum()), np.cumsum(num) - num
    gaps, steps = np.empty(total, np.uint32), np.empty(total, np.int8)
    sums, since = np.zeros(NUM_CLASSES, np.int64), np.zeros(4 * NUM_CLASSES, np.int64)
    ends = torch.arange(span.begin + BLOCK, span.end + BLOCK, BLOCK, device=changes.pos.device)
    first = 0
    lasts = torch.searchsorted(changes.pos, ends).tolist() if total else []
    for last, (start, weights) in zip(lasts, blocks(read, span), strict=False):
        pos, value, code = on_cpu(changes.part(first, last))
        listed = pos.contiguous().numpy(), bits_of(value), code.contiguous().numpy()
        loops.count_gaps(bits_of(weights), start, *listed, since, slot, sums, gaps, steps)
        first = last
    present = np.flatnonzero(num)
    # A mean of 16 to 31 is left: two in a million of such gaps escape.
    means = (sums[present] // num[present]).tolist()
    shifts = [min(max(0, mean.bit_length() - 5), MAX_SHIFT) for mean in means]
    classes = Classes(kinds=present, counts=num[present], shifts=np.array(shifts, np.int64))
    return _Found(classes=classes, gaps=gaps, steps=steps)


def _encoded(changes: Changes, span: Span, read: Read, out: torch.Tensor) -> torch.Tensor:
    """The body of changes, at the begin of `out`."""
    found, loops = _walked(changes, span, read), load_loops()
    classes, groups = found.classes, found.classes.groups()
    kinds = list(zip(classes.slots(), classes.shifts.tolist(), strict=True))
    escaped = sum(loops.count_escapes(found.gaps[slots], shift) for slots, shift in kinds)
    num_unstated = changes.num_changed - len(found.gaps)
    plain = _PLAIN.limit(num_unstated, span.numel, torch.bfloat16)
    limits = [8 * len(kinds), classes.low_bytes, torch.uint32.itemsize * escaped, plain]
    for group in groups:
        size, wide = group.stop - group.start, _num_wide(found.steps[group])
        limits += [size, step_limits(size)[0], wide]
    writer = StreamWriter(out[8:], limits, compress=True)
    out[:8].view(torch.int64)[0] = len(groups)
    writer.put(0, torch.from_numpy(classes.table), torch.int64)
    low = writer.room(1, classes.low_bytes, torch.uint8).zero_().numpy()
    wide_gaps = writer.room(2, escaped, torch.uint32).numpy()
    beside = writer.room(3, plain, torch.uint8)
    if num_unstated:
        entries = _unstated(changes, span.begin)
        beside = _PLAIN.encode_entries(entries, num_unstated, span.numel, torch.bfloat16, beside)
    writer.cut(3, beside.numel())
    high = [
        writer.room(_FIXED_STREAMS + 3 * place, g.stop - g.start, torch.uint8)
        for place, g in enumerate(groups)
    ]
    at = np.zeros(2, np.int64)
    for slots, shift in kinds:
        place = next(place for place, group in enumerate(groups) if slots.stop <= group.stop)
        begin = groups[place].start
        into = high[place].numpy()[slots.start - begin : slots.stop - begin]
        loops.split_gaps(found.gaps[slots], shift, at, into, low, wide_gaps)
    for place, group in enumerate(groups):
        _write_steps(writer, _FIXED_STREAMS + 3 * place + 1, found.steps[group])
    del found
    return out[: 8 + writer.finish().numel()]


def _unstated(changes: Changes, begin: int) -> Iterator[Entries]:
    """Gaps and values of the changes without a step, a piece at a time."""
    before = begin - 1
    for pos, value, code in pieces(changes):
        places = places_of(code, UNSTATED)
        if places.numel():
            found = pos[places]
            yield gaps_of(found, before), value[places], None
            before = int(found[-1])


def _num_wide(steps: NDArray[np.int8]) -> int:
    """How many steps do not fit half a byte."""
    return sum(int((np.abs(steps[piece]) > ESCAPE // 2).sum()) for piece in slices(len(steps)))


def _write_steps(writer: StreamWriter, first: int, steps: NDArray[np.int8]) -> None:
    for piece in slices(len(steps)):
        for place, stream in enumerate(step_streams(torch.from_numpy(steps[piece])), first):
            writer.put(place, stream, torch.uint8)


def _streams(body: torch.Tensor, total: int, numel: int) -> list[StreamReader]:
    """The streams of a body."""
    num_groups = int(body[:8].view(torch.int64)) if body.numel() >= 8 else -1
    if not 0 <= num_groups <= min(NUM_CLASSES, group_limit(total)):
        raise CorruptFrameError(f"a body of {body.numel()} bytes speaks of {num_groups} groups")
    fixed = [
        8 * NUM_CLASSES,
        total * MAX_SHIFT // 8 + 1,
        torch.uint32.itemsize * total,
        _PLAIN.limit(total, numel, torch.bfloat16),
    ]
    return open_streams(body[8:], [*fixed, *([total, *step_limits(total)] * num_groups)])
