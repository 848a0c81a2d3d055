"""Positions as gaps of one byte, values as they are or as steps: `gaps`, `ulp` and `ulp_zstd`.

A gap is the number of unchanged elements between a changed element and the one before it in its region,
or the begin of the region. Gaps and values of all regions of a frame share their streams:

    gap, 8 bit      one for each changed element; 255 says that the gap is in the next stream
    gap, 16 bit     65535 says that it is in the next one
    gap, 32 bit     and so on
    gap, 64 bit
    steps           two streams, see `wire.steps`; not in `gaps`, nor for other dtypes than bf16
    value           one for each changed element without a step

The streams lie in the body as `wire.streams` says. A step needs the exact base to make a value of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED
from awex_delta.wire.codec import Context, RegionChange, body_room, check_counts
from awex_delta.wire.pieces import pieces, places_of, slices
from awex_delta.wire.steps import ESCAPE, read_steps, step_limits, step_streams
from awex_delta.wire.streams import (
    StreamReader,
    StreamWriter,
    check_read,
    entropy_bytes,
    open_streams,
    streams_limit,
)

Level = tuple[torch.dtype, int]
"""Dtype of a gap stream, and the value in it that refers to the next stream."""

Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Gaps, values, and steps if any."""

LEVELS: tuple[Level, ...] = ((torch.uint8, 2**8 - 1), (torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1))
"""The gap streams but the last, whose int64 holds any gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCodec:
    """The encodings that send gaps.

    steps: send steps where they are stated; otherwise every new value, which is idempotent.
    compress: pack each stream by zstd.
    levels: see LEVELS.
    """

    name: str
    number: int
    steps: bool
    compress: bool
    levels: tuple[Level, ...] = LEVELS

    @property
    def needs_context(self) -> bool:
        """See `Codec.needs_context`."""
        return False

    @property
    def idempotent(self) -> bool:
        """See `Codec.idempotent`."""
        return not self.steps

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """See `Codec.size`. Where streams are packed, the entropy that they come close to."""
        count = change.value.numel()
        gap_bytes = _position_entropy(count, change.numel) if self.compress else count
        if not self._has_steps(dtype):
            return gap_bytes + count * dtype.itemsize
        frequency = _frequency(change)
        num_unstated, wide = int(frequency[0]), count - int(frequency[_NARROW].sum())
        step_bytes = entropy_bytes(frequency) if self.compress else (count + 1) // 2 + wide
        return gap_bytes + step_bytes + num_unstated * dtype.itemsize

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`."""
        return streams_limit(self._limits(count, numel, dtype))

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.work`: a packed stream beside the one that it is made from, or what steps were read."""
        packed = max(self._limits(count, numel, dtype)) if self.compress else 0
        return max(packed, count if self._has_steps(dtype) else 0)

    def encode(
        self, changes: Sequence[RegionChange], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Codec.encode`."""
        changes = [change for change in changes if change.value.numel()]
        count, numel = sum(c.value.numel() for c in changes), sum(c.numel for c in changes)
        room = body_room(self, changes, dtype, out)
        found = ((p.gap, p.value, p.code if self._has_steps(dtype) else None) for p in pieces(changes))
        body = self.encode_pieces(found, count, numel, dtype, room) if count else room[:0]
        return body if out is not None else body.clone()

    def encode_pieces(
        self, found: Iterable[Entries], count: int, numel: int, dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        """`encode`, of `count` changes among `numel` elements as they come.

        Args:
            found: gap, value and step of successive changes; with steps an even number, but the last time.
            count, numel, dtype, out: see there.

        Collective: no.
        """
        writer = StreamWriter(out, self._limits(count, numel, dtype), compress=self.compress)
        for gap, value, code in found:
            self._write_gaps(writer, gap)
            if code is not None:
                for place, stream in enumerate(step_streams(code), len(self.levels) + 1):
                    writer.put(place, stream, torch.uint8)
            writer.put(-1, value if code is None else value[places_of(code, UNSTATED)], dtype)
        return writer.finish()

    def decode(
        self,
        body: torch.Tensor,
        counts: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
        contexts: Sequence[Context | None] = (),
    ) -> list[RegionChange]:
        """See `Codec.decode`."""
        del contexts
        check_counts(counts, numels)  # before memory is allocated
        total = sum(counts)
        index, code = torch.empty(total, dtype=torch.int64), None
        *steps, stated = self.read_positions(body, counts, numels, dtype, index)
        if steps:
            code, value = torch.empty(total, dtype=torch.int8), torch.zeros(total, dtype=dtype)
            for piece in slices(total):
                code[piece] = read_steps(steps[0], steps[1], piece.stop - piece.start)
                where = places_of(code[piece], UNSTATED)
                value[where + piece.start] = stated.read(where.numel(), dtype)
        else:
            value = stated.read(total, dtype)
        check_read([*steps, stated])
        sizes = list(counts)
        codes = [None] * len(sizes) if code is None else torch.split(code, sizes)
        parts = zip(numels, torch.split(index, sizes), torch.split(value, sizes), codes, strict=True)
        return [RegionChange(numel=numel, index=i, value=v, code=c) for numel, i, v, c in parts]

    def read_positions(
        self,
        body: torch.Tensor,
        counts: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
        index: torch.Tensor,
    ) -> list[StreamReader]:
        """The first half of `decode`.

        Args:
            body, counts, numels, dtype: see there; no more changes than elements.
            index: int64 [sum of counts], to be filled with the positions of all regions.

        Returns:
            The streams of steps, if there are any, and of values.

        Collective: no.
        """
        total, num_levels = sum(counts), len(self.levels) + 1
        if not total:
            if body.numel():
                raise CorruptFrameError(f"{body.numel()} bytes for no changed element")
            return [StreamReader(body, 0)]
        streams = open_streams(body, self._limits(total, sum(numels), dtype))
        self._read_positions(streams[:num_levels], counts, numels, index)
        check_read(streams[:num_levels])
        return streams[num_levels:]

    def _has_steps(self, dtype: torch.dtype) -> bool:
        return self.steps and dtype is torch.bfloat16

    def _limits(self, count: int, numel: int, dtype: torch.dtype) -> list[int]:
        """The most bytes of each stream. A gap that escapes a level is at least as long as its limit."""
        limits = [count * self.levels[0][0].itemsize]
        widths = [level.itemsize for level, _ in self.levels[1:]] + [torch.int64.itemsize]
        for (_, limit), width in zip(self.levels, widths, strict=True):
            limits.append(min(count, numel // limit) * width)
        limits += step_limits(count) if self._has_steps(dtype) else []
        return [*limits, count * dtype.itemsize]

    def _write_gaps(self, writer: StreamWriter, gap: torch.Tensor) -> None:
        """Append gaps, each to the first stream that holds it."""
        for place, (dtype, limit) in enumerate(self.levels):
            if not gap.numel():
                break
            narrow = writer.put(place, gap.clamp(max=limit), dtype)
            gap = gap[places_of(narrow, limit)]
        else:
            writer.put(len(self.levels), gap, torch.int64)

    def _read_gaps(
        self, streams: Sequence[StreamReader], level: int, count: int, longest: int
    ) -> torch.Tensor:
        """The next gaps of a level, int64 [count], with those that escape from it."""
        if level == len(self.levels):
            gap = streams[level].read(count, torch.int64).clone()
            if bool(((gap < 0) | (gap >= longest)).any()):
                raise CorruptFrameError("a gap is negative or larger than every region")
            return gap
        dtype, limit = self.levels[level]
        narrow = streams[level].read(count, dtype)
        gap, escaped = narrow.to(torch.int64), places_of(narrow, limit)
        if escaped.numel():
            gap[escaped] = self._read_gaps(streams, level + 1, escaped.numel(), longest)
        return gap

    def _read_positions(
        self,
        streams: Sequence[StreamReader],
        counts: Sequence[int],
        numels: Sequence[int],
        index: torch.Tensor,
    ) -> None:
        """Positions of all regions, each in its region.

        Raises:
            CorruptFrameError: the streams do not fit each other, or a position lies beyond its region.
        """
        longest, end = max(numels), 0  # one beyond the last position, were all regions one
        filled = iter([(count, numel) for count, numel in zip(counts, numels, strict=True) if count])
        left, numel, begin = 0, 0, 0
        for piece in slices(index.numel()):
            here = index[piece]
            torch.cumsum(self._read_gaps(streams, 0, here.numel(), longest).add_(1), 0, out=here)
            before, first = end, 0
            while first < here.numel():
                if not left:
                    left, numel, begin = *next(filled), end
                last = min(first + left, here.numel())
                end = before + int(here[last - 1])
                if end - begin > numel:
                    raise CorruptFrameError(
                        f"position {end - begin - 1} is beyond a region of {numel} elements"
                    )
                here[first:last] += before - begin - 1
                left -= last - first
                first = last


_NARROW = slice(-UNSTATED - (ESCAPE + 1) // 2 + 1, -UNSTATED + ESCAPE // 2 + 1)
"""Where `_frequency` has the steps that need no escape."""


def _frequency(change: RegionChange) -> torch.Tensor:
    """How often each step from -128 to 127 occurs among the changes."""
    frequency = torch.zeros(256, dtype=torch.int64)
    for piece in pieces([change]):
        frequency += torch.bincount(piece.code.to(torch.int16) - UNSTATED, minlength=256)
    return frequency


def _position_entropy(count: int, numel: int) -> int:
    """Bytes to say which `count` of `numel` elements are meant, were all sets equally likely."""
    share = count / max(numel, 1)
    if share in (0, 1):
        return 0
    return math.ceil(-numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8)
