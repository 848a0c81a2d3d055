"""Frames: one bucket of what a sender tells a receiver in one dtype round.

    header (120 bytes, little-endian)  magic, protocol, codec, dtype, identity, span, lengths, checksum
    region table                       uint32 a region in the span: changed elements, or WHOLE
    codec body                         the sparse regions, as the codec packs them
    whole values                       the regions that are sent whole, one after the other
    guard                              in frames that have one: digests of what they replace, see `wire.guard`

The regions of a pair, one after the other, are one line of elements. Each frame covers a span of it, the
next frame begins where it ends, and the last ends where the line does: so no frame can be repeated, left
out or exchanged unseen. Every part but the guard begins at a multiple of 8 bytes. The checksum (xxh3, 64 bit)
covers the header with the checksum field zeroed and everything after it. Damaged, foreign and misplaced
frames are told apart: the checksum is verified first, identity second, the span third.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from awex_delta.errors import (
    CorruptFrameError,
    MissingFrameError,
    RepeatedFrameError,
    StaleFrameError,
    WireError,
)
from awex_delta.wire.codec import Codec, Context, RegionChange, as_bytes, body_limit, padding
from awex_delta.wire.guard import Guard, guard_bytes, guard_limit, read_guard
from awex_delta.wire.spans import Span, Window, windows_of

MAGIC = b"AWEXDLTA"
PROTOCOL_VERSION = 3
WHOLE = 0xFFFF_FFFF

_HEADER = struct.Struct("<8sHHHxx16sqqQIIIIQQQQQQ")
_CHECKSUM_OFFSET = _HEADER.size - 8
_DTYPES = {torch.bfloat16: 1, torch.float32: 2, torch.float16: 3, torch.int64: 4, torch.int32: 5}


_IDENTITY_NAMES = (
    *("protocol", "codec", "dtype", "regions"),
    *("run_id", "base_version", "target_version", "plan", "sender", "receiver"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameIdentity:
    """What a frame belongs to. Sender and receiver build it alone; a frame must carry the same.

    run_id: 32 hexadecimal digits, the trainer's life.
    base_version, target_version: the version the frame applies to and the one it makes.
    plan: digest of the regions agreed at connect.
    sender, receiver: transfer ranks.
    dtype: wire dtype.
    """

    run_id: str
    base_version: int
    target_version: int
    plan: int
    sender: int
    receiver: int
    dtype: torch.dtype

    def fields(self) -> tuple[object, ...]:
        """The identity as the header stores it."""
        versions = self.base_version, self.target_version
        return (bytes.fromhex(self.run_id), *versions, self.plan, self.sender, self.receiver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """A frame taken apart: where its span ends, the change of each window in it, and its guard, if any."""

    end: int
    windows: tuple[Window, ...]
    changes: tuple[RegionChange, ...]
    guard: Guard | None = None


def frame_limit(num_windows: int, body_bytes: int, whole_bytes: int) -> int:
    """Bytes of a frame with so many windows, a body of that many bytes, and whole values. Collective: no."""
    table = 4 * num_windows
    return _HEADER.size + table + padding(table) + body_bytes + whole_bytes


def pack_frame(
    identity: FrameIdentity,
    codec: Codec,
    changes: Sequence[RegionChange],
    span: Span | None = None,
    guard: Guard | None = None,
) -> torch.Tensor:
    """Build one frame.

    Args:
        identity: what the frame belongs to.
        codec: packs the sparse regions.
        changes: one entry a window of the span, in its order; without elements none.
        span: what the frame covers; None for one frame that holds all regions.
        guard: of these changes; None for a frame without.

    Returns:
        uint8 [n] on the CPU.

    Raises:
        WireError: more elements of a region changed than the region table can count.

    Collective: no.
    """
    if span is None:
        span = Span(begin=0, end=sum(change.numel for change in changes), num_regions=len(changes))
        changes = [change for change in changes if change.numel]
    sparse = [change for change in changes if change.index is not None]
    if any(change.value.numel() >= WHOLE for change in sparse):
        raise WireError(f"a region changed in {WHOLE} elements or more: its count does not fit the table")
    table = torch.tensor(
        [WHOLE if change.index is None else change.value.numel() for change in changes], dtype=torch.int64
    ).to(torch.uint32)
    whole = [change.value.detach() for change in changes if change.index is None]
    tail_bytes = sum(value.numel() for value in whole) * identity.dtype.itemsize
    body_start = frame_limit(len(changes), 0, 0)
    most = body_limit(codec, sparse, identity.dtype)
    guarding = torch.empty(0, dtype=torch.uint8) if guard is None else guard_bytes(guard)
    frame = torch.empty(body_start + most + tail_bytes + guarding.numel(), dtype=torch.uint8)
    table_bytes = as_bytes(table)
    frame[_HEADER.size : body_start] = 0
    frame[_HEADER.size : _HEADER.size + table_bytes.numel()] = table_bytes
    body = codec.encode(sparse, identity.dtype, frame[body_start : body_start + most])
    tail_start = body_start + body.numel()
    tail_end = tail_start + tail_bytes
    frame = frame[: tail_end + guarding.numel()]
    _fill(frame[tail_start:tail_end].view(identity.dtype), whole)
    frame[tail_end:] = guarding
    guarded = 0 if guard is None else 1 + guard.unstated.numel()
    lengths = sum(change.value.numel() for change in changes), body.numel(), tail_bytes
    _head(frame, identity, codec, span, (guarded, *lengths))
    return frame


def _head(
    frame: torch.Tensor, identity: FrameIdentity, codec: Codec, span: Span, counts: tuple[int, int, int, int]
) -> None:
    """Write the header over all that follows it. counts: guard, changes, bytes of body and tail."""
    guarded, *lengths = counts
    numbers = PROTOCOL_VERSION, codec.number, _DTYPES[identity.dtype]
    where = span.num_regions, guarded, span.begin, span.end
    header = bytearray(_HEADER.pack(MAGIC, *numbers, *identity.fields(), *where, *lengths, 0))
    struct.pack_into("<Q", header, _CHECKSUM_OFFSET, _checksum(bytes(header), frame[_HEADER.size :]))
    frame[: _HEADER.size] = torch.frombuffer(header, dtype=torch.uint8)


def _fill(tail: torch.Tensor, whole: Sequence[torch.Tensor]) -> None:
    """Write whole values from where they are, without a copy between."""
    place = 0
    for value in whole:
        tail[place : place + value.numel()].copy_(value.reshape(-1))
        place += value.numel()


def unpack_frame(
    frame: torch.Tensor,
    identity: FrameIdentity,
    codecs: Sequence[Codec],
    numels: Sequence[int],
    contexts: Sequence[Context | None] = (),
) -> list[RegionChange]:
    """Check one frame that holds all regions, and take it apart: `unpack_bucket` of the only bucket.

    Returns:
        One entry a region, in the order of the plan.

    Raises:
        MissingFrameError: the frame does not hold all of them.

    Collective: no.
    """
    found = unpack_bucket(frame, identity, codecs, numels, begin=0, contexts=contexts)
    check_complete(found.end, numels)
    none = torch.empty(0, dtype=identity.dtype)
    changes = [RegionChange(numel=numel, value=none, index=torch.empty(0).long()) for numel in numels]
    for window, change in zip(found.windows, found.changes, strict=True):
        changes[window.region] = change
    return changes


def check_complete(end: int, numels: Sequence[int]) -> None:
    """Refuse to go on where the last frame of a pair ends before its regions do.

    Raises:
        MissingFrameError: elements are missing.

    Collective: no.
    """
    if end != sum(numels):
        raise MissingFrameError(f"frames end at element {end} of {sum(numels)}: the last ones did not come")


def unpack_bucket(
    frame: torch.Tensor,
    identity: FrameIdentity,
    codecs: Sequence[Codec],
    numels: Sequence[int],
    *,
    begin: int,
    contexts: Sequence[Context | None] = (),
) -> Unpacked:
    """Check one frame and take it apart. Nothing is written anywhere.

    Args:
        frame: uint8 [n] on the CPU, as received.
        identity: what the receiver expects.
        codecs: those that the frame may be packed by; its header says which one it is.
        numels: elements of each region, in the order of the plan.
        begin: where the frame before this one ended, 0 for the first.
        contexts: of each region, for encodings that need them; empty for none.

    Returns:
        What the frame holds; tensors may alias `frame`. Changes that carry codes have no values yet: see
        `settle`.

    Raises:
        CorruptFrameError: the frame is damaged.
        StaleFrameError: the frame is whole, but of another run, version, plan or pair.
        RepeatedFrameError, MissingFrameError: it is not the next one.

    Collective: no.
    """
    protocol, codec_number, dtype_number, *rest = _whole_header(frame)
    found, (num_regions, guarded, start, end, *lengths) = tuple(rest[:6]), rest[6:]
    payload = frame[_HEADER.size :]
    codec = next((codec for codec in codecs if codec.number == codec_number), codecs[0])
    expected = (PROTOCOL_VERSION, codec.number, _DTYPES[identity.dtype], len(numels), *identity.fields())
    _check_identity((protocol, codec_number, dtype_number, num_regions, *found), expected)
    _check_span(start, end, begin, sum(numels))
    windows = windows_of(numels, start, end)
    inner = [contexts[w.region] for w in windows] if contexts else [None] * len(windows)
    parts = [c and c.window(w.start, w.stop) for c, w in zip(inner, windows, strict=True)]
    num_elements, body_bytes, tail_bytes = lengths
    guard_start = _guard_start(payload.numel(), len(windows), guarded)
    changes = _regions(
        payload[:guard_start],
        codec,
        identity.dtype,
        [window.numel for window in windows],
        parts,
        (body_bytes, tail_bytes),
    )
    if sum(change.value.numel() for change in changes) != num_elements:
        raise CorruptFrameError(
            f"frame holds another number of elements than its header says ({num_elements})"
        )
    guard = None
    if guarded:
        num_sparse = sum(change.value.numel() for change in changes if change.index is not None)
        guard = read_guard(payload[guard_start:].clone(), len(windows), guarded - 1, num_sparse)
    return Unpacked(end=end, windows=windows, changes=tuple(changes), guard=guard)


def _whole_header(frame: torch.Tensor) -> list[Any]:
    """The header's fields between magic and checksum, both of which are right."""
    if frame.numel() < _HEADER.size:
        raise CorruptFrameError(
            f"frame of {frame.numel()} bytes is shorter than its header of {_HEADER.size}"
        )
    header = bytearray(frame[: _HEADER.size].numpy().tobytes())
    magic, *fields, checksum = _HEADER.unpack(header)
    if magic != MAGIC:
        raise CorruptFrameError(f"frame begins with {magic!r}, not {MAGIC!r}")
    struct.pack_into("<Q", header, _CHECKSUM_OFFSET, 0)
    if _checksum(bytes(header), frame[_HEADER.size :]) != checksum:
        raise CorruptFrameError("frame checksum differs: bytes were damaged on the way")
    return fields


def _check_identity(got: tuple[object, ...], expected: tuple[object, ...]) -> None:
    pairs = list(zip(_IDENTITY_NAMES, got, expected, strict=True))
    wrong = [f"{n}={g!r} (expected {e!r})" for n, g, e in pairs if g != e]
    if wrong:
        raise StaleFrameError(f"frame belongs elsewhere: {', '.join(wrong)}")


def _check_span(start: int, end: int, begin: int, total: int) -> None:
    if start < begin:
        raise RepeatedFrameError(
            f"a frame begins at element {start}, but all up to {begin} came: it was sent twice"
        )
    if start > begin:
        raise MissingFrameError(
            f"a frame begins at element {start}, but the last one ended at {begin}: one is missing or late"
        )
    if not start < end <= total and total:
        raise CorruptFrameError(f"a frame covers elements {start} to {end} of {total}")


def _guard_start(length: int, num_windows: int, guarded: int) -> int:
    """Where the rest of a payload ends; `guarded` as in the header."""
    start = length - (guard_limit(num_windows, guarded - 1) if guarded else 0)
    if start < 0:
        raise CorruptFrameError(f"frame carries {length} bytes, which cannot hold its guard")
    return start


def _regions(
    payload: torch.Tensor,
    codec: Codec,
    dtype: torch.dtype,
    numels: Sequence[int],
    contexts: Sequence[Context | None],
    lengths: tuple[int, int],
) -> list[RegionChange]:
    body_bytes, tail_bytes = lengths
    table_bytes = 4 * len(numels)
    body_start = table_bytes + padding(table_bytes)
    length = body_start + body_bytes + tail_bytes
    if payload.numel() != length:
        raise CorruptFrameError(f"frame carries {payload.numel()} bytes, its header speaks of {length}")
    counts = payload[:table_bytes].view(torch.uint32).to(torch.int64).tolist()
    sparse = [place for place, count in enumerate(counts) if count != WHOLE]
    whole = [place for place, count in enumerate(counts) if count == WHOLE]
    if tail_bytes != sum(numels[place] for place in whole) * dtype.itemsize:
        raise CorruptFrameError(f"{tail_bytes} bytes of whole values do not fit the regions sent whole")
    decoded = codec.decode(
        payload[body_start : body_start + body_bytes],
        [counts[place] for place in sparse],
        [numels[place] for place in sparse],
        dtype,
        [contexts[place] for place in sparse],
    )
    changes = dict(zip(sparse, decoded, strict=True))
    tail = payload[body_start + body_bytes :].view(dtype)
    for place, value in zip(whole, torch.split(tail, [numels[place] for place in whole]), strict=True):
        changes[place] = RegionChange(numel=numels[place], value=value)
    return [changes[place] for place in range(len(numels))]


def _checksum(header: bytes, payload: torch.Tensor) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(payload.numpy().data)
    return digest.intdigest()
