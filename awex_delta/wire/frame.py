"""Frames: everything one sender tells one receiver in one dtype round.

    header (104 bytes, little-endian)  magic, protocol, codec, dtype, identity, lengths, checksum
    region table                       uint32 a region: changed elements, or WHOLE
    codec body                         the sparse regions, as the codec packs them
    whole values                       the regions that are sent whole, one after the other

Every part begins at a multiple of 8 bytes. The checksum (xxh3, 64 bit) covers the header with the
checksum field zeroed and everything after it. A damaged frame and a foreign one are told apart: the
checksum is verified first, identity second.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from awex_delta.errors import CorruptFrameError, StaleFrameError, WireError
from awex_delta.wire.codec import Codec, RegionChange, as_bytes, pad_to_word, padding

MAGIC = b"AWEXDLTA"
PROTOCOL_VERSION = 1
WHOLE = 0xFFFF_FFFF

_HEADER = struct.Struct("<8sHHHxx16sqqQIIIIQQQQ")
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
        return (
            bytes.fromhex(self.run_id),
            self.base_version,
            self.target_version,
            self.plan,
            self.sender,
            self.receiver,
        )


def max_frame_bytes(numels: Sequence[int], dtype: torch.dtype) -> int:
    """The largest frame that these regions can need: a limit to check before memory is allocated."""
    return _HEADER.size + 256 + 4 * len(numels) + 8 * len(numels) + sum(numels) * (8 + dtype.itemsize)


def pack_frame(identity: FrameIdentity, codec: Codec, changes: Sequence[RegionChange]) -> torch.Tensor:
    """Build one frame.

    Args:
        identity: what the frame belongs to.
        codec: packs the sparse regions.
        changes: one entry a region, in the order of the plan.

    Returns:
        uint8 [n] on the CPU.

    Raises:
        WireError: more elements of a region changed than the region table can count.

    Collective: no.
    """
    sparse = [change for change in changes if change.index is not None]
    if any(change.value.numel() >= WHOLE for change in sparse):
        raise WireError(f"a region changed in {WHOLE} elements or more: its count does not fit the table")
    whole = [as_bytes(change.value.to(identity.dtype)) for change in changes if change.index is None]
    table = torch.tensor(
        [WHOLE if change.index is None else change.value.numel() for change in changes], dtype=torch.int64
    ).to(torch.uint32)
    body = codec.encode(sparse, identity.dtype)
    tail = torch.cat(whole) if whole else torch.empty(0, dtype=torch.uint8)
    payload = torch.cat([pad_to_word(as_bytes(table)), body, tail])
    header = bytearray(
        _HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            codec.number,
            _DTYPES[identity.dtype],
            *identity.fields(),
            len(changes),
            0,
            sum(change.value.numel() for change in changes),
            body.numel(),
            tail.numel(),
            0,
        )
    )
    struct.pack_into("<Q", header, _CHECKSUM_OFFSET, _checksum(bytes(header), payload))
    return torch.cat([torch.frombuffer(header, dtype=torch.uint8), payload])


def unpack_frame(
    frame: torch.Tensor, identity: FrameIdentity, codecs: Sequence[Codec], numels: Sequence[int]
) -> list[RegionChange]:
    """Check one frame and take it apart. Nothing is written anywhere.

    Args:
        frame: uint8 [n] on the CPU, as received.
        identity: what the receiver expects.
        codecs: those that the frame may be packed by; its header says which one it is.
        numels: elements of each region, in the order of the plan.

    Returns:
        One entry a region, in the order of the plan; tensors may alias `frame`. Changes that carry
        codes have no values yet: see `settle`.

    Raises:
        CorruptFrameError: the frame is damaged.
        StaleFrameError: the frame is whole, but not the expected one.

    Collective: no.
    """
    if frame.numel() < _HEADER.size:
        raise CorruptFrameError(
            f"frame of {frame.numel()} bytes is shorter than its header of {_HEADER.size}"
        )
    header = bytearray(frame[: _HEADER.size].numpy().tobytes())
    fields = _HEADER.unpack(header)
    magic, protocol, codec_number, dtype_number, *rest = fields
    found, (num_regions, _, num_elements, body_bytes, tail_bytes, checksum) = tuple(rest[:6]), rest[6:]
    if magic != MAGIC:
        raise CorruptFrameError(f"frame begins with {magic!r}, not {MAGIC!r}")
    struct.pack_into("<Q", header, _CHECKSUM_OFFSET, 0)
    payload = frame[_HEADER.size :]
    if _checksum(bytes(header), payload) != checksum:
        raise CorruptFrameError("frame checksum differs: bytes were damaged on the way")
    codec = next((codec for codec in codecs if codec.number == codec_number), codecs[0])
    expected = (PROTOCOL_VERSION, codec.number, _DTYPES[identity.dtype], len(numels), *identity.fields())
    got = (protocol, codec_number, dtype_number, num_regions, *found)
    if got != expected:
        wrong = [
            f"{n}={g!r} (expected {e!r})"
            for n, g, e in zip(_IDENTITY_NAMES, got, expected, strict=True)
            if g != e
        ]
        raise StaleFrameError(f"frame belongs elsewhere: {', '.join(wrong)}")
    return _regions(payload, codec, identity.dtype, numels, (body_bytes, tail_bytes, num_elements))


def _regions(
    payload: torch.Tensor,
    codec: Codec,
    dtype: torch.dtype,
    numels: Sequence[int],
    lengths: tuple[int, int, int],
) -> list[RegionChange]:
    body_bytes, tail_bytes, num_elements = lengths
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
    )
    changes = dict(zip(sparse, decoded, strict=True))
    tail = payload[body_start + body_bytes :].view(dtype)
    for place, value in zip(whole, torch.split(tail, [numels[place] for place in whole]), strict=True):
        changes[place] = RegionChange(numel=numels[place], value=value)
    ordered = [changes[place] for place in range(len(numels))]
    if sum(change.value.numel() for change in ordered) != num_elements:
        raise CorruptFrameError(
            f"frame holds another number of elements than its header says ({num_elements})"
        )
    return ordered


def _checksum(header: bytes, payload: torch.Tensor) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(payload.numpy().data)
    return digest.intdigest()
