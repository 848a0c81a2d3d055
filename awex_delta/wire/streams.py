"""Byte streams beside each other in one codec body, as they are or packed by zstd.

    directory       int64 [2 k]: the bytes of each of k streams unpacked, then those that each takes here
    stream 0 .. k-1 one after the other, each padded to 8 bytes

A stream whose two numbers in the directory differ is one zstd frame, with a window of at most 512 KiB.
Otherwise it lies there as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import zstandard

from awex_delta.errors import CorruptFrameError
from awex_delta.wire.codec import as_bytes, padding

ZSTD_LEVEL = 1
ZSTD_WINDOW = 1 << 19
"""The window of level 1. A stream with a larger one is not unpacked: a reader holds the window in memory."""


class StreamWriter:
    """Fills streams piece by piece, in the place where the body will lie."""

    def __init__(self, out: torch.Tensor, limits: Sequence[int], *, compress: bool) -> None:
        """Start with empty streams.

        Args:
            out: uint8, at least `streams_limit(limits)`, beginning at a multiple of 8 in its storage.
            limits: the most bytes that each stream will have.
            compress: pack each by zstd if that makes it smaller.
        """
        self._out, self._compress = out, compress
        self._directory = 16 * len(limits)
        rooms = (limit + padding(limit) for limit in limits)
        self._starts = [*accumulate(rooms, initial=self._directory)][:-1]
        self._ends = list(self._starts)

    def room(self, place: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `count` entries of one stream, for the caller to fill."""
        start = self._ends[place]
        self._ends[place] = start + count * dtype.itemsize
        return self._out[start : self._ends[place]].view(dtype)

    def put(self, place: int, entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Append to one stream, as `dtype`. Returns what is there now."""
        return self.room(place, entries.numel(), dtype).copy_(entries)

    def cut(self, place: int, length: int) -> None:
        """Keep only the first `length` bytes of one stream: the caller did not fill the rest."""
        self._ends[place] = self._starts[place] + length

    def finish(self) -> torch.Tensor:
        """Move the streams together and pack them.

        Returns:
            The begin of `out`, uint8 [n], a multiple of 8 bytes.
        """
        body, end = self._out.numpy().data, self._directory
        raw = [stop - start for start, stop in zip(self._starts, self._ends, strict=True)]
        stored = []
        for start, length in zip(self._starts, raw, strict=True):
            stream = body[start : start + length]
            packed = _deflated(stream) if self._compress else stream
            stored.append(len(packed))
            body[end : end + len(packed)] = packed  # moves what overlaps
            end += len(packed)
            body[end : end + padding(len(packed))] = bytes(padding(len(packed)))
            end += padding(len(packed))
        self._out[: self._directory] = as_bytes(
            torch.tensor([*raw, *stored], dtype=torch.int64, device="cpu")
        )
        return self._out[:end]


class StreamReader:
    """Gives out one stream from its begin, piece by piece."""

    def __init__(self, stored: torch.Tensor, numel: int) -> None:
        """Read one stream.

        Args:
            stored: uint8 [n], as it lies in the body.
            numel: bytes that it has unpacked.

        Raises:
            CorruptFrameError: it is packed, and says another length.
        """
        self._stored, self.left = stored, numel
        self._unpacked: zstandard.ZstdDecompressionReader | None = None
        if stored.numel() == numel:
            return
        packed = stored.numpy().data
        try:
            promised = zstandard.frame_content_size(packed)
        except zstandard.ZstdError as error:
            raise CorruptFrameError(f"a stream cannot be unpacked: {error}") from error
        if promised != numel:
            raise CorruptFrameError(f"a stream unpacks to {promised} bytes, its directory says {numel}")
        self._unpacked = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(packed)

    def read(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `count` entries.

        Returns:
            [count]; aliases the body if the stream is not packed.

        Raises:
            CorruptFrameError: there are not as many, or what is there cannot be unpacked.
        """
        length = count * dtype.itemsize
        self._check(length)  # before memory is allocated
        if self._unpacked is not None:
            return self.read_into(torch.empty(length, dtype=torch.uint8, device="cpu")).view(dtype)
        start = self._stored.numel() - self.left
        self.left -= length
        return self._stored[start : start + length].view(dtype)

    def read_all(self, dtype: torch.dtype) -> torch.Tensor:
        """What is left of it; as `read`."""
        if self.left % dtype.itemsize:
            raise CorruptFrameError(f"a stream of {self.left} bytes holds no whole number of {dtype}")
        return self.read(self.left // dtype.itemsize, dtype)

    def read_into(self, out: torch.Tensor) -> torch.Tensor:
        """As `read`, of as many bytes as `out` has, uint8 [n]. Returns it."""
        if self._unpacked is None:
            return out.copy_(self.read(out.numel(), torch.uint8))
        self._check(out.numel())
        try:
            found = self._unpacked.readinto(out.numpy().data) if out.numel() else 0
        except zstandard.ZstdError as error:
            raise CorruptFrameError(f"a stream cannot be unpacked: {error}") from error
        if found != out.numel():
            raise CorruptFrameError(f"a stream ends {out.numel() - found} bytes before its directory says")
        self.left -= found
        return out

    def _check(self, length: int) -> None:
        if length > self.left:
            raise CorruptFrameError(f"a stream ends {length - self.left} bytes before its last entry")


def check_read(streams: Sequence[StreamReader]) -> None:
    """Refuse streams that hold more than was asked for.

    Raises:
        CorruptFrameError: bytes are left.
    """
    left = [stream.left for stream in streams]
    if any(left):
        raise CorruptFrameError(f"streams have {left} bytes more than their entries")


def streams_limit(limits: Sequence[int]) -> int:
    """The most bytes of a body whose streams have `limits`."""
    return sum(16 + limit + padding(limit) for limit in limits)


def open_streams(body: torch.Tensor, limits: Sequence[int]) -> list[StreamReader]:
    """Take apart what a `StreamWriter` put together.

    Args:
        body: uint8 [n], beginning at a multiple of 8 in its storage.
        limits: the most bytes that each stream can have; checked before memory is allocated.

    Raises:
        CorruptFrameError: the directory and the streams do not fit each other or the limits.
    """
    start = 16 * len(limits)
    if body.numel() < start:
        raise CorruptFrameError(f"{body.numel()} bytes cannot hold the directory of {len(limits)} streams")
    lengths = body[:start].view(torch.int64).tolist()
    raw, stored = lengths[: len(limits)], lengths[len(limits) :]
    if any(not 0 <= s <= r <= limit for r, s, limit in zip(raw, stored, limits, strict=True)):
        raise CorruptFrameError(f"streams of {raw} bytes, stored in {stored}, are over their limits {limits}")
    if body.numel() != start + sum(length + padding(length) for length in stored):
        raise CorruptFrameError(f"a body of {body.numel()} bytes cannot hold streams of {stored} bytes")
    streams = []
    for numel, length in zip(raw, stored, strict=True):
        streams.append(StreamReader(body[start : start + length], numel))
        start += length + padding(length)
    return streams


def _deflated(stream: memoryview) -> memoryview | bytes:
    if not len(stream):
        return stream
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(stream)
    return packed if len(packed) < len(stream) else stream


def entropy_bytes(frequency: torch.Tensor) -> int:
    """What an ideal order-0 coder takes for symbols of such frequencies, without the cost of its table.

    Args:
        frequency: int64 [k], how often each symbol occurs.
    """
    total = int(frequency.sum())
    share = frequency[frequency > 0].double() / max(total, 1)
    return math.ceil(-float((share * share.log2()).sum()) * total / 8)
