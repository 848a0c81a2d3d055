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

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import CorruptFrameError, WireError
from awex_delta.numerics.ulp import UNSTATED
from awex_delta.wire.codec import Context, RegionChange, as_bytes, check_counts
from awex_delta.wire.gaps import GapCodec
from awex_delta.wire.steps import stated_steps, step_limits, step_streams
from awex_delta.wire.streams import join_streams, split_streams
from awex_delta.wire.weights import Ints, Stated, blocks_of, index_of, segments_of, unstated_of

GROUP = 4096
"""Changes of a group at least, but for the last one."""

MAX_SHIFT = 48
_CLASSES = 256
_FIXED_STREAMS = 4


def numba_is_installed() -> bool:
    """True when the loops can be compiled. Collective: no."""
    return importlib.util.find_spec("numba") is not None


def load_loops() -> Any:
    """The compiled loops, compiled or loaded when first needed: most who import this package never walk.

    Collective: no.
    """
    return importlib.import_module("awex_delta.wire.walk")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Classes:
    """The exponents that occur among the changes, ascending: where their slots end, and their shifts."""

    kinds: Ints
    counts: Ints
    shifts: Ints

    @property
    def ends(self) -> Ints:
        """Where the slots of each exponent end."""
        return np.cumsum(self.counts)

    def groups(self) -> list[slice]:
        """The slots of each group: whole exponents, GROUP changes at least, what is left in the last."""
        groups, begin = [], 0
        for end in self.ends.tolist():
            if end - begin >= GROUP:
                groups.append(slice(begin, end))
                begin = end
        total = int(self.counts.sum())
        if begin < total and groups:
            groups[-1] = slice(groups[-1].start, total)
        elif begin < total:
            groups.append(slice(0, total))
        return groups

    def by_class(self, values: Ints, fill: int) -> Ints:
        """One value for each of all exponents."""
        table = np.full(_CLASSES, fill, np.int64)
        table[self.kinds] = values
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCodec:
    """See the module."""

    name: str = "ulp_context"
    number: int = 5

    @property
    def needs_context(self) -> bool:
        """See `Codec.needs_context`."""
        return True

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """See `Codec.size`. What it would be without the context, which saves a quarter."""
        return _PLAIN_STEPS.size(change, dtype)

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`."""
        shift = max(0, (numel // (16 * max(count, 1))).bit_length())
        streams = _FIXED_STREAMS + 3 * (count // GROUP + 1)
        stated = 8 + 24 * streams + 8 * min(count, _CLASSES) + count * 4 + (count * shift) // 8 + 8
        return stated + _PLAIN.limit(count, numel, dtype)

    def encode(self, changes: Sequence[RegionChange], dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.encode`."""
        if dtype is not torch.bfloat16:
            return _PLAIN.encode(changes, dtype)
        if not any(change.value.numel() for change in changes):
            return torch.empty(0, dtype=torch.uint8)
        found = _walk_sender(changes)
        classes, steps = found.classes, torch.from_numpy(found.steps)
        high, low, wide = _split(classes, found.gaps)
        table = classes.kinds | classes.shifts << 8 | classes.counts << 16
        streams = [*map(torch.from_numpy, (table, low, wide)), _PLAIN.encode([unstated_of(changes)], dtype)]
        groups = classes.groups()
        for group in groups:
            streams += [torch.from_numpy(high[group]), *step_streams(steps[group])]
        head = as_bytes(torch.tensor([len(groups)]))
        return torch.cat([head, join_streams([as_bytes(stream) for stream in streams], compress=True)])

    def decode(
        self,
        body: torch.Tensor,
        counts: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
        contexts: Sequence[Context | None] = (),
    ) -> list[RegionChange]:
        """See `Codec.decode`."""
        if dtype is not torch.bfloat16:
            return _PLAIN.decode(body, counts, numels, dtype)
        total = sum(counts)
        check_counts(counts, numels)
        if not total:
            return _PLAIN.decode(body, counts, numels, dtype)
        streams = _streams(body, total, sum(numels))
        classes = _classes(streams[0], total)
        high, steps = _grouped(classes, streams[_FIXED_STREAMS:])
        gaps = _join(classes, high, streams[1], streams[2])
        num_unstated = total - int(classes.counts.sum())
        (unstated,) = _PLAIN.decode(streams[3], [num_unstated], [sum(numels)], dtype)
        shapes = list(zip(counts, numels, strict=True))
        inner = list(contexts) or [None] * len(numels)
        return _walk_receiver(shapes, inner, unstated, classes, gaps, steps)


_PLAIN = GapCodec(name="gaps of unstated", number=0, steps=False, compress=True)
_PLAIN_STEPS = GapCodec(name="gaps and steps", number=0, steps=True, compress=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the sender's walk found: the exponents, and by slot the gap and the step."""

    classes: _Classes
    gaps: Ints
    steps: NDArray[np.int8]


def _walk_sender(changes: Sequence[RegionChange]) -> _Found:
    """Find the gap of each stated change of a frame.

    Raises:
        WireError: an element changed that the sender does not own.
    """
    loops, regions = load_loops(), [Stated.of(change) for change in changes if change.value.numel()]
    num, kinds = np.zeros(_CLASSES, np.int64), []
    for region in regions:
        kinds.append(np.empty(len(region.code), np.uint8))
        loops.classify(region.new, region.code, kinds[-1], num)
    total = int(num.sum())
    gaps, steps = np.empty(total, np.int64), np.empty(total, np.int8)
    since, slot = np.zeros(4 * _CLASSES, np.int64), np.cumsum(num) - num
    for region, kind in zip(regions, kinds, strict=True):
        segments = segments_of(region.context, region.aside)
        at, inside = np.zeros(2, np.int64), True
        for base, bits in blocks_of(region.context, segments):
            inside &= loops.count_gaps(
                bits, base, segments, at, region.index, kind, region.code, since, slot, gaps, steps
            )
        if not inside or at[1] != len(region.index):
            raise WireError("an element changed that its sender does not own")
    present = np.flatnonzero(num)
    counts = num[present]
    sums = np.add.reduceat(gaps, np.cumsum(counts) - counts) if total else counts
    # A mean of 16 to 31 is left: two in a million of such gaps escape.
    shifts = [min(max(0, mean.bit_length() - 5), MAX_SHIFT) for mean in (sums // counts).tolist()]
    classes = _Classes(kinds=present, counts=counts, shifts=np.array(shifts, np.int64))
    return _Found(classes=classes, gaps=gaps, steps=steps)


def _walk_receiver(
    shapes: Sequence[tuple[int, int]],
    contexts: Sequence[Context | None],
    unstated: RegionChange,
    classes: _Classes,
    gaps: Ints,
    steps: NDArray[np.int8],
) -> list[RegionChange]:
    """Find the changes of each region, `shapes` giving how many there are and its elements.

    Raises:
        CorruptFrameError: they do not lie where the table says.
    """
    loops, aside_of_all = load_loops(), index_of(unstated)
    begins = classes.ends - classes.counts
    left = classes.by_class(gaps[begins], 2**62)
    slot, last = classes.by_class(begins, 0), classes.by_class(classes.ends, 0)
    changes, offset = [], 0
    for (count, numel), context in zip(shapes, contexts, strict=True):
        first, stop = np.searchsorted(aside_of_all, (offset, offset + numel)).tolist()
        aside = aside_of_all[first:stop] - offset
        segments = segments_of(context, aside) if count else np.empty((0, 2), np.int64)
        places, codes = np.empty(count, np.int64), np.empty(count, np.int8)
        at, stated = np.zeros(2, np.int64), count - len(aside)
        room = places[: max(stated, 0)]
        for base, bits in blocks_of(context, segments):
            loops.find_changes(bits, base, segments, at, left, slot, last, gaps, steps, room, codes)
        if at[1] != stated:
            raise CorruptFrameError(f"{at[1]} changes with a step lie in a region of {stated}")
        loops.insert_unstated(places, codes, stated, aside, UNSTATED)
        code, value = torch.from_numpy(codes), unstated.value.new_zeros(count)
        # As integers: a mask that meets a single value is filled by a number, which loses a NaN's payload.
        value.view(torch.int16)[code == UNSTATED] = unstated.value[first:stop].view(torch.int16)
        changes.append(RegionChange(numel=numel, index=torch.from_numpy(places), value=value, code=code))
        offset += numel
    if slot[classes.kinds].tolist() != classes.ends.tolist():
        raise CorruptFrameError("fewer changes lie among the weights than the frame lists")
    return changes


def _split(classes: _Classes, gaps: Ints) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Ints]:
    high, wide = np.empty(len(gaps), np.uint8), np.empty(len(gaps), np.int64)
    low = np.zeros((int((classes.counts * classes.shifts).sum()) + 7) // 8, np.uint8)
    escaped = load_loops().split_gaps(gaps, classes.ends, classes.shifts, high, low, wide)
    return high, low, wide[:escaped]


def _join(classes: _Classes, high: NDArray[np.uint8], low: torch.Tensor, wide: torch.Tensor) -> Ints:
    bits = int((classes.counts * classes.shifts).sum())
    if low.numel() != (bits + 7) // 8 or wide.numel() % 8:
        raise CorruptFrameError(f"{low.numel()} bytes of lower bits and {wide.numel()} of escapes do not fit")
    gaps, escapes = np.empty(len(high), np.int64), wide.view(torch.int64).numpy()
    if load_loops().join_gaps(high, classes.ends, classes.shifts, low.numpy(), escapes, gaps) != len(escapes):
        raise CorruptFrameError(f"{len(escapes)} wide gaps do not fit the escapes")
    if len(gaps) and not 0 <= int(gaps.min()) <= int(gaps.max()) < 2**62:
        raise CorruptFrameError("a gap is negative or out of range")
    return gaps


def _streams(body: torch.Tensor, total: int, numel: int) -> list[torch.Tensor]:
    """The streams of a body, unpacked."""
    num_groups = int(body[:8].view(torch.int64)) if body.numel() >= 8 else -1
    if not 0 <= num_groups <= min(_CLASSES, total // GROUP + 1):
        raise CorruptFrameError(f"a body of {body.numel()} bytes speaks of {num_groups} groups")
    fixed = [8 * _CLASSES, total * MAX_SHIFT // 8 + 1, 8 * total, _PLAIN.limit(total, numel, torch.bfloat16)]
    return split_streams(body[8:], [*fixed, *([total, *step_limits(total)] * num_groups)])


def _classes(stream: torch.Tensor, total: int) -> _Classes:
    """Read the table, and refuse one that makes no sense."""
    if stream.numel() % 8:
        raise CorruptFrameError("the table of exponents is cut short")
    table = stream.view(torch.int64).numpy()
    kinds, shifts, counts = table & 255, (table >> 8) & 255, table >> 16
    ordered = (
        bool((np.diff(kinds) > 0).all()) and bool((counts > 0).all()) and bool((shifts <= MAX_SHIFT).all())
    )
    if not ordered or any(count > total for count in counts.tolist()) or int(counts.sum()) > total:
        raise CorruptFrameError("the table of exponents makes no sense")
    return _Classes(kinds=kinds, counts=counts, shifts=shifts)


def _grouped(
    classes: _Classes, streams: Sequence[torch.Tensor]
) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """Upper gap bytes and steps of all slots."""
    groups = classes.groups()
    if 3 * len(groups) != len(streams):
        raise CorruptFrameError(f"{len(streams)} streams for {len(groups)} groups")
    high, steps = [np.empty(0, np.uint8)], [np.empty(0, np.int8)]
    for place, group in enumerate(groups):
        gap, *step = streams[3 * place : 3 * place + 3]
        if gap.numel() != group.stop - group.start:
            raise CorruptFrameError(f"{gap.numel()} gaps for {group.stop - group.start} changes")
        high.append(gap.numpy())
        steps.append(stated_steps(step, gap.numel()).numpy())
    return np.concatenate(high), np.concatenate(steps)
