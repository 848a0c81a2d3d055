"""Positions as gaps of one byte, values as they are or as steps: `gaps`, `ulp` and `ulp_zstd`.

A gap is the number of unchanged elements between a changed element and the one before it in the span, or
the begin of the span. A body has these streams:

    gap, 8 bit      one for each changed element; 255 says that the gap is in the next stream
    gap, 16 bit     65535 says that it is in the next one
    gap, 32 bit
    steps           two streams, see `wire.steps`; not in `gaps`, nor for other dtypes than bf16
    value           one for each changed element without a step

The streams lie in the body as `wire.streams` says. A step needs the exact base to make a value of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.wire.codec import body_room, check_count
from awex_delta.wire.pieces import pieces, places_of, slices
from awex_delta.wire.spans import Read, Span
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

LEVELS: tuple[Level, ...] = ((torch.uint8, 2**8 - 1), (torch.uint16, 2**16 - 1))
"""The gap streams but the last, whose uint32 holds any gap in a span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCodec:
    """The encodings that send gaps.

    steps: send the steps that are stated; False sends every new value, which is idempotent.
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

    def size(self, changes: Changes, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.size`. For packed streams it is their entropy, which they come close to."""
        count = changes.num_changed
        gap_bytes = _position_entropy(count, numel) if self.compress else count
        if not self._has_steps(dtype):
            return gap_bytes + count * dtype.itemsize
        frequency = _frequency(changes)
        num_unstated, wide = int(frequency[0]), count - int(frequency[_NARROW].sum())
        step_bytes = entropy_bytes(frequency) if self.compress else (count + 1) // 2 + wide
        return gap_bytes + step_bytes + num_unstated * dtype.itemsize

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`."""
        return streams_limit(self._limits(count, numel, dtype)) if count else 0

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.work`: the packed copy of a stream, or the steps that were read."""
        packed = max(self._limits(count, numel, dtype)) if self.compress else 0
        return max(packed, count if self._has_steps(dtype) else 0)

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
        del read
        room = body_room(self, changes.num_changed, span, dtype, out)
        if not changes.num_changed:
            return room[:0]
        found = _entries(changes, span.begin, steps=self._has_steps(dtype))
        body = self.encode_entries(found, changes.num_changed, span.numel, dtype, room)
        return body if out is not None else body.clone()

    def encode_entries(
        self, found: Iterable[Entries], count: int, numel: int, dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        """`encode`, of `count` changes among `numel` elements as they come.

        Args:
            found: gap, value and step of successive changes; with steps an even number, but the last time.
            count: all of them, at least 1.
            numel, dtype, out: see `encode`.
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
        self, body: torch.Tensor, count: int, span: Span, dtype: torch.dtype, *, read: Read | None = None
    ) -> Changes:
        """See `Codec.decode`."""
        del read
        streams = self.open(body, count, span, dtype)
        pos, code = torch.empty(count, dtype=torch.int64, device="cpu"), None
        *steps, stated = self.read_positions(streams, span, pos)
        if steps:
            code, value = (
                torch.empty(count, dtype=torch.int8, device="cpu"),
                torch.zeros(count, dtype=dtype, device="cpu"),
            )
            for piece in slices(count):
                code[piece] = read_steps(steps[0], steps[1], piece.stop - piece.start)
                places = places_of(code[piece], UNSTATED)
                value[places + piece.start] = stated.read(places.numel(), dtype)
        else:
            value = stated.read(count, dtype)
        check_read([*steps, stated])
        return Changes(pos=pos, code=code, value=value)

    def open(self, body: torch.Tensor, count: int, span: Span, dtype: torch.dtype) -> list[StreamReader]:
        """The streams of a body; nothing is allocated in proportion to `count`.

        Args:
            body, count, span, dtype: see `decode`.

        Raises:
            CorruptFrameError: the body cannot hold so many changes.
        """
        check_count(count, span)
        limits = self._limits(count, span.numel, dtype)
        if not count:
            if body.numel():
                raise CorruptFrameError(f"{body.numel()} bytes for no changed element")
            return [StreamReader(body, 0) for _ in limits]
        streams = open_streams(body, limits)
        if streams[0].left != count * self.levels[0][0].itemsize:
            raise CorruptFrameError(f"{streams[0].left} bytes of gaps for {count} changed elements")
        return streams

    def read_positions(
        self, streams: Sequence[StreamReader], span: Span, pos: torch.Tensor
    ) -> Sequence[StreamReader]:
        """Read all gaps.

        Args:
            streams: of `open`.
            span: see `decode`.
            pos: int64 [count], to be filled with positions in the pair's line.

        Returns:
            The streams of steps, if there are any, and of values.

        Raises:
            CorruptFrameError: the streams do not fit each other, or a position lies beyond the span.
        """
        end = span.begin  # one beyond the last position
        gaps, rest = streams[: len(self.levels) + 1], streams[len(self.levels) + 1 :]
        for piece in slices(pos.numel()):
            here = pos[piece]
            torch.cumsum(self._read_gaps(gaps, 0, here.numel()).add_(1), 0, out=here)
            here += end - 1
            end = int(here[-1]) + 1
            if end > span.end:
                raise CorruptFrameError(f"position {end - 1} is beyond a span that ends at {span.end}")
        check_read(gaps)
        return rest

    def _has_steps(self, dtype: torch.dtype) -> bool:
        return self.steps and dtype is torch.bfloat16

    def _limits(self, count: int, numel: int, dtype: torch.dtype) -> list[int]:
        """The most bytes of each stream. A gap that escapes a level is at least as long as its limit."""
        limits = [count * self.levels[0][0].itemsize]
        widths = [level.itemsize for level, _ in self.levels[1:]] + [torch.uint32.itemsize]
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
            writer.put(len(self.levels), gap, torch.uint32)

    def _read_gaps(self, streams: Sequence[StreamReader], level: int, count: int) -> torch.Tensor:
        """The next gaps of a level, int64 [count], with those that escape from it."""
        if level == len(self.levels):
            return streams[level].read(count, torch.uint32).to(torch.int64)
        dtype, limit = self.levels[level]
        narrow = streams[level].read(count, dtype)
        gap, escaped = narrow.to(torch.int64), places_of(narrow, limit)
        if escaped.numel():
            gap[escaped] = self._read_gaps(streams, level + 1, escaped.numel())
        return gap


def gaps_of(pos: torch.Tensor, before: int) -> torch.Tensor:
    """Unchanged elements before each of some positions, int64 [n].

    Args:
        pos: int64 [n] on the CPU, ascending, at least one.
        before: the position of the change before them, or one less than where their span begins.
    """
    places = pos.numpy()
    gap = np.empty_like(places)
    np.subtract(places[1:], places[:-1], out=gap[1:])
    gap[0] = places[0] - before
    gap -= 1
    return torch.from_numpy(gap)


def _entries(changes: Changes, begin: int, *, steps: bool) -> Iterator[Entries]:
    before = begin - 1
    for pos, value, code in pieces(changes):
        yield gaps_of(pos, before), value, code if steps else None
        before = int(pos[-1])


_NARROW = slice(-UNSTATED - (ESCAPE + 1) // 2 + 1, -UNSTATED + ESCAPE // 2 + 1)
"""Where `_frequency` has the steps that need no escape."""


def _frequency(changes: Changes) -> torch.Tensor:
    """How often each step from -128 to 127 occurs among the changes."""
    frequency = torch.zeros(256, dtype=torch.int64, device="cpu")
    for _, _, code in pieces(changes):
        frequency += torch.bincount(code.to(torch.int16) - UNSTATED, minlength=256)
    return frequency


def _position_entropy(count: int, numel: int) -> int:
    """Bytes to say which `count` of `numel` elements are meant, if all choices are equally likely."""
    share = count / max(numel, 1)
    if share in (0, 1):
        return 0
    return math.ceil(-numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8)
