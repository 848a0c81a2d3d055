"""Byte streams beside each other in one codec body, as they are or packed by zstd.

    directory       int64 [2 k]: bytes of each of k streams, then the bytes that each takes here
    stream 0 .. k-1 one after the other, each padded to 8 bytes

A stream that takes fewer bytes than it has is one zstd frame; otherwise it lies there as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import zstandard

from awex_delta.errors import CorruptFrameError
from awex_delta.wire.codec import as_bytes, pad_to_word, padding

ZSTD_LEVEL = 1


def join_streams(streams: Sequence[torch.Tensor], *, compress: bool) -> torch.Tensor:
    """Put streams beside each other.

    Args:
        streams: uint8 [n] each, on the CPU.
        compress: pack each by zstd where that makes it smaller.

    Returns:
        uint8 [n], a multiple of 8 bytes.

    Collective: no.
    """
    stored = [_deflated(stream) for stream in streams] if compress else list(streams)
    lengths = [stream.numel() for stream in (*streams, *stored)]
    directory = as_bytes(torch.tensor(lengths, dtype=torch.int64))
    return torch.cat([directory, *(pad_to_word(stream) for stream in stored)])


def split_streams(body: torch.Tensor, limits: Sequence[int]) -> list[torch.Tensor]:
    """Take apart what `join_streams` put together.

    Args:
        body: uint8 [n], beginning at a multiple of 8 in its storage.
        limits: the most bytes that each stream can have; checked before memory is allocated.

    Returns:
        uint8 [n] each, beginning at a multiple of 8 bytes; those that were not packed alias `body`.

    Raises:
        CorruptFrameError: the directory and the streams do not fit each other or the limits.

    Collective: no.
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
        stream = body[start : start + length]
        streams.append(stream if length == numel else _inflated(stream, numel))
        start += length + padding(length)
    return streams


def entropy_bytes(stream: torch.Tensor) -> int:
    """What an ideal order-0 coder makes of a stream of bytes, uint8 [n], without the cost of its table."""
    frequency = torch.bincount(stream.view(-1), minlength=256).double()
    share = frequency[frequency > 0] / max(stream.numel(), 1)
    return math.ceil(-float((share * share.log2()).sum()) * stream.numel() / 8)


def _deflated(stream: torch.Tensor) -> torch.Tensor:
    if not stream.numel():
        return stream
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(stream.numpy().data)
    if len(packed) >= stream.numel():
        return stream
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _inflated(stream: torch.Tensor, numel: int) -> torch.Tensor:
    packed, out = stream.numpy().data, torch.empty(numel, dtype=torch.uint8)
    try:
        promised = zstandard.frame_content_size(packed)
        with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
            found = reader.readinto(out.numpy().data) if promised == numel else promised
    except zstandard.ZstdError as error:
        raise CorruptFrameError(f"a stream cannot be unpacked: {error}") from error
    if found != numel:
        raise CorruptFrameError(f"a stream unpacks to {found} bytes, its directory says {numel}")
    return out
