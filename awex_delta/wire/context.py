"""`ulp_context`: positions as gaps among the weights of one exponent, which both sides know.

Small weights change most. Sender and receiver walk the weights of the base in the same order and count them
by exponent; a gap is the number of unchanged weights of the *same* exponent since the last change among them.
Gaps and steps of one exponent then have a narrow distribution of their own, and are packed together.

The sender knows the base where it owns the optimizer state: the weight itself where it did not change, the
weight less the step where it did. Where no step is stated it does not, so such elements travel beside the
others with plain positions, and both sides leave them out of the walk.

    number of groups, int64
    classes         int64 an exponent that occurs: exponent, shift << 8, changes << 16
    gap, low bits   `shift` bits a gap
    gap, int64      what is left of a gap beyond 254, for each escape
    unstated        what has no step, as the body of one region (`gaps`, packed)
    of each group   gap without its low bits, 255 for an escape; steps, two streams, see `wire.steps`

The shift keeps the mean of what is left between 16 and 31, whatever the exponent: escapes are rare, and
exponents that occur seldom can share a group, which saves the tables of the compressor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import CorruptFrameError, WireError
from awex_delta.lines.bits import UNSTATED
from awex_delta.wire.classes import MAX_SHIFT, NUM_CLASSES, Classes, group_limit, load_loops, read_classes
from awex_delta.wire.codec import Context, RegionChange, body_room, check_counts
from awex_delta.wire.finder import Finder
from awex_delta.wire.gaps import GapCodec
from awex_delta.wire.pieces import slices
from awex_delta.wire.steps import ESCAPE, step_limits, step_streams
from awex_delta.wire.streams import StreamReader, StreamWriter, check_read, open_streams
from awex_delta.wire.weights import blocks_of, listed, segments_of, unstated

_FIXED_STREAMS = 4


def numba_is_installed() -> bool:
    """True when the loops can be compiled. Collective: no."""
    return importlib.util.find_spec("numba") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCodec:
    """See the module."""

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

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """See `Codec.size`. What it would be without the context, which saves a quarter."""
        return _PLAIN_STEPS.size(change, dtype)

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`. What states no step takes less than what does, but for its wide gaps."""
        plain = _PLAIN.limit(count, numel, dtype)
        if dtype is not torch.bfloat16:
            return plain
        streams = _FIXED_STREAMS + 3 * group_limit(count)
        stated = 8 + 24 * streams + 8 * min(count, NUM_CLASSES) + _stated_limit(count, numel)
        return stated + plain - 3 * count

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.work`: gaps and steps by slot, or the streams that the receiver walks along."""
        if dtype is not torch.bfloat16:
            return _PLAIN.work(count, numel, dtype)
        by_slot = count * (_gap_dtype(numel).itemsize + 1)
        return max(by_slot, _stated_limit(count, numel), _PLAIN.work(count, numel, dtype))

    def encode(
        self, changes: Sequence[RegionChange], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Codec.encode`."""
        if dtype is not torch.bfloat16:
            return _PLAIN.encode(changes, dtype, out)
        room = body_room(self, changes, dtype, out)
        body = _encoded(changes, room) if any(change.value.numel() for change in changes) else room[:0]
        return body if out is not None else body.clone()

    def decode(
        self,
        body: torch.Tensor,
        counts: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
        contexts: Sequence[Context | None] = (),
    ) -> list[RegionChange]:
        """See `Codec.decode`. Gives values, not codes: the walk has seen the weights."""
        total = sum(counts)
        check_counts(counts, numels)
        if dtype is not torch.bfloat16 or not total:
            return _PLAIN.decode(body, counts, numels, dtype)
        index, value = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=dtype)
        streams = _streams(body, total, sum(numels))
        classes = read_classes(streams[0], total)
        num_stated = int(classes.counts.sum())
        beside = streams[3].read_all(torch.uint8)
        aside = [total - num_stated], [sum(numels)]
        (values,) = _PLAIN.read_positions(beside, *aside, dtype, index[num_stated:])
        values.read_into(value[num_stated:].view(torch.uint8))
        check_read([values])
        finder = Finder(classes, streams[1:3], streams[_FIXED_STREAMS:], index, value)
        inner = list(contexts) or [None] * len(numels)
        for count, numel, context in zip(counts, numels, inner, strict=True):
            finder.region(count, numel, context)
        finder.finish()
        sizes = list(counts)
        parts = zip(numels, torch.split(index, sizes), torch.split(value, sizes), strict=True)
        return [RegionChange(numel=numel, index=i, value=v) for numel, i, v in parts]


_PLAIN = GapCodec(name="gaps of unstated", number=0, steps=False, compress=True)
_PLAIN_STEPS = GapCodec(name="gaps and steps", number=0, steps=True, compress=True)


def _gap_dtype(numel: int) -> np.dtype[Any]:
    """What holds any gap among `numel` elements."""
    return np.dtype(np.uint32 if numel < 2**32 else np.int64)


def _stated_limit(count: int, numel: int) -> int:
    """The most bytes of gaps and steps: a byte a gap, an escape an eighth of them, one and a half a step."""
    shift = max(0, (numel // (16 * max(count, 1))).bit_length())
    return count * 4 + (count * shift) // 8 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the sender's walk found: the exponents, and by slot the gap and the step."""

    classes: Classes
    gaps: NDArray[Any]
    steps: NDArray[np.int8]


def _walk_sender(changes: Sequence[RegionChange]) -> _Found:
    """Find the gap of each stated change of a frame.

    Raises:
        WireError: an element changed that the sender does not own.
    """
    loops, num = load_loops(), np.zeros(NUM_CLASSES, np.int64)
    for change in changes:
        for _, new, code in listed(change):
            loops.classify(new, code, num)
    total, slot = int(num.sum()), np.cumsum(num) - num
    gaps = np.empty(total, _gap_dtype(sum(change.numel for change in changes)))
    steps, sums, since = (
        np.empty(total, np.int8),
        np.zeros(NUM_CLASSES, np.int64),
        np.zeros(4 * NUM_CLASSES, np.int64),
    )
    for change in changes:
        if change.value.numel():
            _walk_region(change, since, slot, sums, gaps, steps)
    present = np.flatnonzero(num)
    # A mean of 16 to 31 is left: two in a million of such gaps escape.
    means = (sums[present] // num[present]).tolist()
    shifts = [min(max(0, mean.bit_length() - 5), MAX_SHIFT) for mean in means]
    classes = Classes(kinds=present, counts=num[present], shifts=np.array(shifts, np.int64))
    return _Found(classes=classes, gaps=gaps, steps=steps)


def _walk_region(change: RegionChange, *by_class_and_slot: NDArray[Any]) -> None:
    """Walk the weights of one region up to the last change of each piece, and then to the end."""
    count_gaps, segments = load_loops().count_gaps, segments_of(change.context)
    at, place = np.zeros(2, np.int64), 0
    for index, new, code in listed(change):
        at[1], stop, inside = 0, int(index[-1]) + 1, True
        for base, bits in blocks_of(change.context, segments, place, stop):
            inside &= count_gaps(bits, base, segments, at, index, new, code, *by_class_and_slot)
        if not inside or (code[at[1] :] != UNSTATED).any():
            raise WireError("an element changed that its sender does not own")
        place = stop
    for base, bits in blocks_of(change.context, segments, place, change.numel):
        count_gaps(bits, base, segments, at, index[:0], new[:0], code[:0], *by_class_and_slot)


def _encoded(changes: Sequence[RegionChange], out: torch.Tensor) -> torch.Tensor:
    """The body of changes, at the begin of `out`."""
    count, numel = sum(change.value.numel() for change in changes), sum(change.numel for change in changes)
    found, loops = _walk_sender(changes), load_loops()
    classes, groups = found.classes, found.classes.groups()
    kinds = list(zip(classes.slots(), classes.shifts.tolist(), strict=True))
    escaped = sum(loops.count_escapes(found.gaps[slots], shift) for slots, shift in kinds)
    num_unstated = count - len(found.gaps)
    plain = _PLAIN.limit(num_unstated, numel, torch.bfloat16)
    limits = [8 * len(kinds), classes.low_bytes, 8 * escaped, plain]
    for group in groups:
        size, wide = group.stop - group.start, _num_wide(found.steps[group])
        limits += [size, step_limits(size)[0], wide]
    writer = StreamWriter(out[8:], limits, compress=True)
    out[:8].view(torch.int64)[0] = len(groups)
    writer.put(0, torch.from_numpy(classes.table), torch.int64)
    low = writer.room(1, classes.low_bytes, torch.uint8).zero_().numpy()
    wide_gaps = writer.room(2, escaped, torch.int64).numpy()
    beside = writer.room(3, plain, torch.uint8)
    if num_unstated:
        beside = _PLAIN.encode_pieces(unstated(changes), num_unstated, numel, torch.bfloat16, beside)
    writer.cut(3, beside.numel() if num_unstated else 0)
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
        8 * total,
        _PLAIN.limit(total, numel, torch.bfloat16),
    ]
    return open_streams(body[8:], [*fixed, *([total, *step_limits(total)] * num_groups)])
