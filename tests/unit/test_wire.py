"""Frames: lossless for every bit pattern, and refused before use when anything is wrong."""

from __future__ import annotations

import hmac
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_delta.errors import (
    ConfigError,
    CorruptFrameError,
    MissingFrameError,
    RepeatedFrameError,
    StaleFrameError,
    WireError,
)
from awex_delta.lines.changes import Changes
from awex_delta.wire.buckets import HEADER_BYTES, Bucket
from awex_delta.wire.codec import Codec
from awex_delta.wire.frame import Unpacked, pack_frame, unpack_frame
from awex_delta.wire.registry import CODECS, codec_named
from awex_delta.wire.spans import MAX_SPAN, Span
from tests.unit.line_updates import IDENTITY, Update, bits, frames_of, patterns, reader, update, written

CODEC = CODECS["indices"]


def example() -> Update:
    """A hundred changes among four thousand elements."""
    old = torch.randn(4000, generator=torch.Generator().manual_seed(5)).bfloat16()
    pos = torch.arange(7, 4000, 40)
    return update(old, (old.float() * 1.001).bfloat16(), pos, unstated=slice(0, 4))


EXAMPLE = example()


def frame_of(codec: Codec = CODEC, *, whole: bool = False, guarded: bool = False) -> torch.Tensor:
    """The example in one frame."""
    there = EXAMPLE
    bucket = replace(there.bucket, whole=whole, guarded=guarded)
    return pack_frame(IDENTITY, codec, bucket, there.changes, reader(there.after))


def unpacked(frame: torch.Tensor, codec: Codec = CODEC, *, begin: int = 0, numel: int = 4000) -> Unpacked:
    read = reader(EXAMPLE.old)
    return unpack_frame(frame, IDENTITY, [codec], begin=begin, numel=numel, read=read)


def sealed(frame: torch.Tensor) -> torch.Tensor:
    """The frame with the checksum that its other bytes ask for."""
    frame[HEADER_BYTES - 8 : HEADER_BYTES] = 0
    checksum = xxhash.xxh3_64(frame.numpy().tobytes()).intdigest()
    frame[HEADER_BYTES - 8 : HEADER_BYTES] = torch.from_numpy(
        np.frombuffer(struct.pack("<Q", checksum), np.uint8).copy()
    )
    return frame


KEYED = replace(IDENTITY, key=b"k" * 32)


def test_with_a_key_the_checksum_is_an_hmac_of_the_frame() -> None:
    frame = pack_frame(KEYED, CODEC, EXAMPLE.bucket, EXAMPLE.changes)
    blank = frame.clone()
    blank[HEADER_BYTES - 8 : HEADER_BYTES] = 0
    mac = hmac.digest(KEYED.key, blank.numpy().tobytes(), "sha256")
    found = struct.unpack_from("<Q", frame.numpy().tobytes(), HEADER_BYTES - 8)[0]
    assert found == int.from_bytes(mac[:8], "big")
    taken = unpack_frame(frame, KEYED, [CODEC], begin=0, numel=4000)
    assert taken.changes is not None
    assert torch.equal(taken.changes.pos, EXAMPLE.changes.pos)
    assert frame.numel() == frame_of().numel()
    assert KEYED.key.decode() not in repr(KEYED)


@pytest.mark.parametrize("key", [b"", b"k" * 31 + b"l", b"k" * 31])
def test_a_frame_under_another_key_or_none_is_refused(key: bytes) -> None:
    """Whole, of the right run, version and pair: somebody else has made it."""
    frame = pack_frame(replace(KEYED, key=key), CODEC, EXAMPLE.bucket, EXAMPLE.changes)
    with pytest.raises(CorruptFrameError, match=r"checksum differs.* without the key of this session"):
        unpack_frame(frame, KEYED, [CODEC], begin=0, numel=4000)
    ours = pack_frame(KEYED, CODEC, EXAMPLE.bucket, EXAMPLE.changes)
    with pytest.raises(CorruptFrameError, match="checksum differs"):
        unpack_frame(ours, replace(KEYED, key=key), [CODEC], begin=0, numel=4000)


def test_every_byte_counts_under_a_key() -> None:
    frame = pack_frame(KEYED, CODEC, EXAMPLE.bucket, EXAMPLE.changes)
    for place in range(frame.numel()):
        bad = frame.clone()
        bad[place] ^= 0x10
        with pytest.raises(CorruptFrameError):
            unpack_frame(bad, KEYED, [CODEC], begin=0, numel=4000)


@settings(max_examples=40)
@given(
    old=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300),
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
    prefix=st.integers(0, 300),
)
def test_any_line_comes_back_bit_for_bit(old: list[int], seed: int, share: float, prefix: int) -> None:
    source = torch.Generator().manual_seed(seed)
    new = torch.randint(0, 2**16, (len(old),), generator=source)
    pos = (torch.rand(len(old), generator=source) < share).nonzero().view(-1)
    prefix = min(prefix, len(old))
    there = update(bits(old), bits(new.tolist()), pos[pos >= prefix])
    if prefix:
        there.after[:prefix] = bits(new[:prefix].tolist())
    got = written(CODEC, frames_of(CODEC, there, whole_prefix=prefix), there.old)
    assert patterns(got) == patterns(there.after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_other_wire_dtypes(dtype: torch.dtype) -> None:
    value, identity = torch.randint(-99, 99, (9,)).to(dtype), replace(IDENTITY, dtype=dtype)
    pos = torch.tensor([1, 2, 4, 8])
    for whole in (False, True):
        bucket = Bucket(span=Span(0, 9), first=0, last=4, whole=whole)
        frame = pack_frame(identity, CODEC, bucket, Changes(pos=pos, value=value[pos]), reader(value))
        found = unpack_frame(frame, identity, [CODEC], begin=0, numel=9)
        got = found.whole if found.changes is None else found.changes.value
        assert got is not None
        assert torch.equal(got, value if whole else value[pos])


def test_six_bytes_a_change_or_two_an_element_and_a_header() -> None:
    assert frame_of().numel() == 120 + 100 * 6
    assert frame_of(guarded=True).numel() == 120 + 100 * 6 + 4 * 4
    assert frame_of(whole=True).numel() == 120 + 4000 * 2


def test_what_a_frame_cannot_be_made_of_is_refused() -> None:
    there = EXAMPLE
    bucket = Bucket(span=Span(0, 3900), first=0, last=100)
    with pytest.raises(WireError, match="changes lie outside of the span from 0 to 3900"):
        pack_frame(IDENTITY, CODEC, bucket, there.changes)
    with pytest.raises(WireError, match="nothing reads them"):
        pack_frame(IDENTITY, CODEC, replace(bucket, whole=True), there.changes)
    with pytest.raises(WireError, match="ulp_context needs the weights of the span"):
        pack_frame(IDENTITY, CODECS["ulp_context"], there.bucket, there.changes)
    with pytest.raises(WireError, match="without their values"):
        pack_frame(IDENTITY, CODEC, there.bucket, replace(there.changes, value=None))


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_every_flipped_byte_cut_and_tail_of_a_frame_is_found(codec: Codec, guarded: bool) -> None:
    frame = frame_of(codec, guarded=guarded)
    damaged = [frame[:length].clone() for length in range(frame.numel())]
    for place in range(frame.numel()):
        damaged.append(frame.clone())
        damaged[-1][place] ^= 1 << place % 8
    damaged.append(torch.cat([frame, frame.new_zeros(8)]))
    for bad in damaged:
        with pytest.raises(CorruptFrameError):
            unpacked(bad, codec)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_frames_of_a_peer_that_packs_nonsense_are_refused_or_stay_in_their_line(
    codec: Codec, whole: bool
) -> None:
    """Damage under a right checksum, mostly of the header: never another error, never out of range."""
    frame, source = frame_of(codec, whole=whole, guarded=not whole), random.Random(0)  # noqa: S311
    refused = 0
    for _ in range(800):
        bad = frame.clone()
        for _ in range(source.choice((1, 1, 2, 8))):
            place = (
                source.randrange(64, HEADER_BYTES) if source.random() < 0.7 else source.randrange(len(bad))
            )
            bad[place] = source.choice((0, 1, 255, source.randrange(256)))
        try:
            found = unpacked(sealed(bad[: source.choice((len(bad), len(bad), 300))].clone()), codec)
        except WireError:
            refused += 1
            continue
        assert found.span.begin == 0
        assert 0 < found.span.end <= 4000
        if found.changes is None:
            assert found.whole is not None
            assert found.whole.numel() == found.span.numel
        elif found.changes.num_changed:
            assert 0 <= int(found.changes.pos[0]) <= int(found.changes.pos[-1]) < found.span.end
            assert bool((found.changes.pos.diff() > 0).all())
    assert 300 < refused < 800


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run_id": "f" * 32}, "run_id"),
        ({"base_version": 40}, r"base_version=40 \(expected 41\)"),
        ({"target_version": 43}, "target_version"),
        ({"pair": 1}, "pair"),
        ({"sender": 2}, "sender"),
        ({"receiver": 0}, "receiver"),
        ({"dtype": torch.float16}, "dtype"),
    ],
)
def test_a_foreign_frame_is_stale_and_says_why(change: dict[str, object], named: str) -> None:
    there = EXAMPLE
    identity = replace(IDENTITY, **change)  # type: ignore[arg-type]
    foreign = pack_frame(identity, CODEC, there.bucket, there.changes)
    with pytest.raises(StaleFrameError, match=named):
        unpacked(foreign)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_a_frame_of_another_encoding_is_stale_and_a_choice_is_read(codec: Codec) -> None:
    frame = frame_of(codec)
    for other in CODECS.values():
        if other is not codec:
            with pytest.raises(StaleFrameError, match=f"codec={codec.number} "):
                unpacked(frame, other)
    read = reader(EXAMPLE.old)
    found = unpack_frame(frame, IDENTITY, list(CODECS.values()), begin=0, numel=4000, read=read)
    assert found.changes is not None
    assert found.changes.num_changed == 100


def test_a_frame_of_another_release_says_what_to_do() -> None:
    """Protocol 3 had a table of regions behind the header, which ended with the checksum as it does now."""
    frame = torch.zeros(120 + 8, dtype=torch.uint8)
    frame[:8] = frame_of()[:8]
    frame[8:10] = torch.tensor([3, 0])
    with pytest.raises(
        StaleFrameError, match=r"protocol 3, .* 4: both sides need the same release of awex_delta"
    ):
        unpacked(sealed(frame))


def test_a_frame_that_is_not_the_next_one_says_so() -> None:
    frame = frame_of()
    with pytest.raises(RepeatedFrameError, match="it was sent twice"):
        unpacked(frame, begin=1)
    there = EXAMPLE
    late = Bucket(span=Span(5, 4000), first=0, last=100)
    with pytest.raises(MissingFrameError, match="begins at element 5"):
        unpacked(pack_frame(IDENTITY, CODEC, late, there.changes))
    with pytest.raises(CorruptFrameError, match="covers elements 0 to 4000 of 3999"):
        unpacked(frame, numel=3999)


def test_a_span_whose_positions_need_more_than_32_bits_is_refused() -> None:
    bucket = Bucket(span=Span(0, MAX_SPAN + 1), first=0, last=0)
    frame = pack_frame(IDENTITY, CODEC, bucket, Changes.none())
    with pytest.raises(CorruptFrameError, match="the most are 4294967296"):
        unpacked(frame, numel=MAX_SPAN + 1)


def test_an_unknown_encoding_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown: choose one of auto, gaps, indices"):
        codec_named("zip")
