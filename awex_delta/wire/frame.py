"""A frame: one bucket of what a sender tells a receiver in the round of one dtype.

    header (120 bytes, little-endian)  magic, protocol, codec, dtype, identity, span, lengths, checksum
    body                               the changes in the span, as the codec packs them; or, with codec 0,
                                       the values of all elements of the span
    guard                              in some frames: which changes its digest leaves out, see `wire.guard`

Each frame covers a span of the pair's line, the next frame begins where it ends, and the last ends where the
line does: so no frame can be repeated, left out or exchanged unseen. The checksum has 64 bits and covers the
header, with the checksum field zeroed, and everything after it. It is xxh3; among ranks that share a secret,
HMAC-SHA256, cut off, under the key of their session. Damaged, foreign and misplaced frames are told apart:
the checksum is verified first, identity second, the span third. Magic, protocol and checksum have lain where
they lie since protocol 3, so that a frame of another release is told from a damaged one.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from awex_delta.errors import (
    CorruptFrameError,
    MissingFrameError,
    RepeatedFrameError,
    StaleFrameError,
    WireError,
)
from awex_delta.lines.changes import Changes
from awex_delta.wire.buckets import HEADER_BYTES, Bucket
from awex_delta.wire.codec import Codec
from awex_delta.wire.guard import Guard, guard_bytes, guard_limit, guard_of, read_guard
from awex_delta.wire.pieces import blocks
from awex_delta.wire.spans import MAX_SPAN, Read, Span

MAGIC = b"AWEXDLTA"
PROTOCOL_VERSION = 4
WHOLE = 0
"""The codec number of a frame that holds all values of its span."""

_HEADER = struct.Struct("<8sHHHxx16sqqQIIQQQQQQQ")
_CHECKSUM_OFFSET = _HEADER.size - 8
_DTYPES = {torch.bfloat16: 1, torch.float32: 2, torch.float16: 3, torch.int64: 4, torch.int32: 5}
_IDENTITY_NAMES = ("run_id", "base_version", "target_version", "pair", "sender", "receiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameIdentity:
    """What a frame belongs to. Sender and receiver build it alone; a frame must carry the same.

    run_id: 32 hexadecimal digits, the trainer's life.
    base_version, target_version: the version that the frame applies to and the one that it makes.
    pair: digest of the pair's line, as both sides computed it at connect.
    sender, receiver: transfer ranks.
    dtype: wire dtype.
    key: of the session, for the checksum; empty if its ranks share no secret.
    """

    run_id: str
    base_version: int
    target_version: int
    pair: int
    sender: int
    receiver: int
    dtype: torch.dtype
    key: bytes = field(default=b"", repr=False)

    def fields(self) -> tuple[object, ...]:
        """The identity as the header stores it."""
        versions = self.base_version, self.target_version
        return (bytes.fromhex(self.run_id), *versions, self.pair, self.sender, self.receiver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """A frame taken apart: either the changes in its span, or all values of it.

    span: what the frame covers.
    changes: with positions in the pair's line; None in a frame that holds all values.
    whole: all values of the span, in order; None in a frame that holds changes.
    guard: the guard of the changes, if the frame has one.
    """

    span: Span
    changes: Changes | None = None
    whole: torch.Tensor | None = None
    guard: Guard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What a header says of what follows. guarded: 0 without a guard, else 1 + the changes it leaves out."""

    span: Span
    count: int
    body_bytes: int
    guarded: int
    digest: int

    def fields(self) -> tuple[int, ...]:
        where = self.span.begin, self.span.end
        return (*where, self.count, self.body_bytes, self.guarded, self.digest)


def pack_frame(
    identity: FrameIdentity,
    codec: Codec,
    bucket: Bucket,
    changes: Changes,
    read: Read | None = None,
    *,
    compiled: bool = False,
) -> torch.Tensor:
    """Build one frame.

    Args:
        identity: what the frame belongs to.
        codec: packs the changes.
        bucket: what the frame is made of.
        changes: those of the whole pair, which the bucket was cut from.
        read: the values after the step; for whole buckets, and for codecs that need it.
        compiled: how a guard is computed, see `awex_delta.wire.digest`.

    Returns:
        uint8 [n] on the CPU.

    Raises:
        WireError: changes lie outside of the span or have no values, or `read` is missing.
    """
    dtype, span, here = identity.dtype, bucket.span, changes.part(bucket.first, bucket.last)
    if bucket.whole:
        body_bytes = span.numel * dtype.itemsize
        frame = torch.empty(HEADER_BYTES + body_bytes, dtype=torch.uint8, device="cpu")
        _fill(frame[HEADER_BYTES:].view(dtype), span, read)
        content = _Content(span=span, count=span.numel, body_bytes=body_bytes, guarded=0, digest=0)
        return _headed(frame, identity, WHOLE, content)
    if here.num_changed and not span.begin <= int(here.pos[0]) <= int(here.pos[-1]) < span.end:
        raise WireError(f"changes lie outside of the span from {span.begin} to {span.end}")
    guard = guard_of(here, compiled=compiled) if bucket.guarded else None
    end = torch.empty(0, dtype=torch.uint8, device="cpu") if guard is None else guard_bytes(guard)
    most = codec.limit(here.num_changed, span.numel, dtype)
    frame = torch.empty(HEADER_BYTES + most + end.numel(), dtype=torch.uint8, device="cpu")
    body = codec.encode(here, span, dtype, out=frame[HEADER_BYTES : HEADER_BYTES + most], read=read)
    frame = frame[: HEADER_BYTES + body.numel() + end.numel()]
    frame[HEADER_BYTES + body.numel() :] = end
    content = _Content(
        span=span,
        count=here.num_changed,
        body_bytes=body.numel(),
        guarded=0 if guard is None else 1 + guard.unstated.numel(),
        digest=0 if guard is None else guard.digest,
    )
    return _headed(frame, identity, codec.number, content)


def _fill(body: torch.Tensor, span: Span, read: Read | None) -> None:
    """Write all values of a span, a block at a time."""
    if read is None:
        raise WireError("values of a whole span are to be sent, and nothing reads them")
    for start, values in blocks(read, span):
        body[start - span.begin : start - span.begin + values.numel()] = values


def _headed(
    frame: torch.Tensor, identity: FrameIdentity, codec_number: int, content: _Content
) -> torch.Tensor:
    """The frame, with the header before all that follows it."""
    numbers = PROTOCOL_VERSION, codec_number, _DTYPES[identity.dtype]
    header = bytearray(_HEADER.pack(MAGIC, *numbers, *identity.fields(), *content.fields(), 0))
    checksum = _checksum(identity.key, bytes(header), frame[HEADER_BYTES:])
    struct.pack_into("<Q", header, _CHECKSUM_OFFSET, checksum)
    frame[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
    return frame


def unpack_frame(
    frame: torch.Tensor,
    identity: FrameIdentity,
    codecs: Sequence[Codec],
    *,
    begin: int,
    numel: int,
    read: Read | None = None,
) -> Unpacked:
    """Check one frame and take it apart. Nothing is written anywhere.

    Args:
        frame: uint8 [n] on the CPU, as received.
        identity: what the receiver expects.
        codecs: those that the frame may be packed by; its header says which one it is.
        begin: where the frame before this one ended, 0 for the first.
        numel: elements of the pair's line.
        read: the values of the base, for codecs that need them.

    Returns:
        What the frame holds; values may alias `frame`. Changes that have codes have no values yet: see
        `codec.settle`.

    Raises:
        CorruptFrameError: the frame is damaged.
        StaleFrameError: the frame is whole, but of another release, run, version or pair.
        RepeatedFrameError, MissingFrameError: it is not the next one.
    """
    codec_number, content = _checked(frame, identity, codecs)
    _check_span(content.span, begin, numel)
    payload, span, count = frame[HEADER_BYTES:], content.span, content.count
    length = content.body_bytes + (guard_limit(content.guarded - 1) if content.guarded else 0)
    if payload.numel() != length:
        raise CorruptFrameError(f"frame carries {payload.numel()} bytes, its header speaks of {length}")
    body, end = payload[: content.body_bytes], payload[content.body_bytes :]
    if codec_number == WHOLE:
        if (count, body.numel(), end.numel()) != (span.numel, span.numel * identity.dtype.itemsize, 0):
            raise CorruptFrameError(f"{length} bytes cannot be all {span.numel} values of a span")
        return Unpacked(span=span, whole=body.view(identity.dtype))
    if span.numel > MAX_SPAN:
        raise CorruptFrameError(f"changes in a span of {span.numel} elements: the most are {MAX_SPAN}")
    codec = next(codec for codec in codecs if codec.number == codec_number)
    changes = codec.decode(body, count, span, identity.dtype, read=read)
    guard = read_guard(content.digest, end, count) if content.guarded else None
    return Unpacked(span=span, changes=changes, guard=guard)


def check_complete(end: int, numel: int) -> None:
    """Refuse to go on if the last frame of a pair ends before its line does.

    Raises:
        MissingFrameError: elements are missing.
    """
    if end != numel:
        raise MissingFrameError(f"frames end at element {end} of {numel}: the last ones did not come")


def _checked(frame: torch.Tensor, identity: FrameIdentity, codecs: Sequence[Codec]) -> tuple[int, _Content]:
    """The number of the codec and what the header says of the rest; checksum and identity are right."""
    if frame.numel() < HEADER_BYTES:
        raise CorruptFrameError(
            f"frame of {frame.numel()} bytes is shorter than its header of {HEADER_BYTES}"
        )
    header = bytearray(frame[:HEADER_BYTES].numpy().tobytes())
    magic, protocol, codec_number, dtype_number, *fields, checksum = _HEADER.unpack(header)
    if magic != MAGIC:
        raise CorruptFrameError(f"frame begins with {magic!r}, not {MAGIC!r}")
    struct.pack_into("<Q", header, _CHECKSUM_OFFSET, 0)
    if _checksum(identity.key, bytes(header), frame[HEADER_BYTES:]) != checksum:
        raise CorruptFrameError(
            "frame checksum differs: bytes were damaged on the way"
            + (", or are of somebody without the key of this session" if identity.key else "")
        )
    if protocol != PROTOCOL_VERSION:
        raise StaleFrameError(
            f"frame of protocol {protocol}, and this side speaks {PROTOCOL_VERSION}: both sides need the "
            "same release of awex_delta"
        )
    known = [WHOLE, *(codec.number for codec in codecs)]
    got, expected = (dtype_number, *fields[:6]), (_DTYPES[identity.dtype], *identity.fields())
    pairs = list(zip(("dtype", *_IDENTITY_NAMES), got, expected, strict=True))
    wrong = [f"{n}={g!r} (expected {e!r})" for n, g, e in pairs if g != e]
    if codec_number not in known:
        wrong.append(f"codec={codec_number} (expected one of {known})")
    if wrong:
        raise StaleFrameError(f"frame belongs elsewhere: {', '.join(wrong)}")
    begin, end, count, body_bytes, guarded, digest = fields[6:]
    span = Span(begin, end)
    return codec_number, _Content(
        span=span, count=count, body_bytes=body_bytes, guarded=guarded, digest=digest
    )


def _check_span(span: Span, begin: int, numel: int) -> None:
    if span.begin < begin:
        raise RepeatedFrameError(
            f"a frame begins at element {span.begin}, but all up to {begin} came: it was sent twice"
        )
    if span.begin > begin:
        raise MissingFrameError(
            f"a frame begins at element {span.begin}, but the last one ended at {begin}: one is missing or "
            "late"
        )
    if not span.begin < span.end <= numel:
        raise CorruptFrameError(f"a frame covers elements {span.begin} to {span.end} of {numel}")


def _checksum(key: bytes, header: bytes, payload: torch.Tensor) -> int:
    digest = hmac.new(key, header, "sha256") if key else xxhash.xxh3_64(header)
    digest.update(payload.numpy().data)
    return int.from_bytes(digest.digest()[:8], "big")
