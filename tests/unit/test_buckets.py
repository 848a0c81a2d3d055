"""Long lines are cut: no frame is larger than the limit, and together they say what one frame would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_delta.errors import (
    CorruptFrameError,
    MissingFrameError,
    RepeatedFrameError,
    StaleFrameError,
    WireError,
)
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.wire.buckets import MIN_BUCKET_BYTES, Bucket, cut, frame_bytes
from awex_delta.wire.codec import Codec
from awex_delta.wire.frame import pack_frame
from awex_delta.wire.pieces import SCRATCH_BYTES
from awex_delta.wire.registry import CODECS
from awex_delta.wire.spans import Span
from tests.unit.line_updates import (
    BF16,
    BUCKET,
    IDENTITY,
    Update,
    buckets_of,
    frames_of,
    patterns,
    reader,
    update,
    written,
)


def example(prefix: int = 0, numel: int = 25_000) -> Update:
    """Every tenth element changed, and all that always travel whole."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(numel, generator=generator).bfloat16()
    pos = (torch.rand(numel, generator=generator) < 0.1).nonzero().view(-1)
    found = update(old, (old.float() * 1.01).bfloat16(), pos[pos >= prefix], unstated=slice(0, None, 19))
    found.after[:prefix] *= 2
    return found


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("bucket_bytes", [MIN_BUCKET_BYTES, 1500, 4096, BUCKET])
@pytest.mark.parametrize("prefix", [0, 1, 5000, 25_000])
def test_buckets_say_what_one_frame_says_and_none_is_too_large(
    codec: Codec, bucket_bytes: int, prefix: int
) -> None:
    there = example(prefix)
    frames = frames_of(codec, there, bucket_bytes, whole_prefix=prefix)
    assert all(frame.numel() <= bucket_bytes for frame in frames)
    if bucket_bytes == BUCKET:
        assert len(frames) == (prefix > 0) + (prefix < there.numel)
    assert patterns(written(codec, frames, there.old)) == patterns(there.after)


@settings(max_examples=40)
@given(
    name=st.sampled_from(list(CODECS)),
    numel=st.integers(1, 6000),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    bucket_bytes=st.integers(MIN_BUCKET_BYTES, 6000),
    prefix=st.integers(0, 6000),
)
def test_any_cut_is_lossless(name: str, numel: int, share: float, bucket_bytes: int, prefix: int) -> None:
    old, new = (torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16).view(BF16) for _ in range(2))
    prefix = min(prefix, numel)
    pos = (torch.rand(numel) < share).nonzero().view(-1)
    there = update(old, new, pos)  # lists changes of the prefix, too, which are not used
    there.after[:prefix] = new[:prefix]
    frames = frames_of(CODECS[name], there, bucket_bytes, whole_prefix=prefix)
    assert all(frame.numel() <= bucket_bytes for frame in frames)
    assert patterns(written(CODECS[name], frames, old)) == patterns(there.after)


@pytest.mark.parametrize("whole", [False, True])
def test_a_frame_that_just_fits_is_not_cut_and_one_byte_less_cuts_it(whole: bool) -> None:
    weights = torch.randn(4000).bfloat16()
    there, prefix = update(weights, -weights, torch.arange(0, 4000, 4)), 4000 if whole else 0
    (frame,) = frames_of(CODECS["indices"], there, whole_prefix=prefix, guards=False)
    least = next(size for size in range(frame.numel(), BUCKET) if frame_bytes(size) == frame.numel())
    for size, count in ((least, 1), (least - 1, 2)):
        assert len(frames_of(CODECS["indices"], there, size, whole_prefix=prefix, guards=False)) == count


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("stretch", [1, 3, 300, 70_000])
def test_no_body_is_larger_than_its_limit(codec: Codec, stretch: int) -> None:
    """Gaps around every escape, steps of every size, none stated: what takes the most bytes."""
    for count in (1, 2, 17, 300 if codec.needs_context and stretch > 300 else 5000):
        pos, span = torch.arange(count) * stretch + stretch - 1, Span(0, count * stretch)
        value = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16).view(BF16)
        weights = torch.zeros(span.numel, dtype=BF16)
        for code in (torch.full((count,), UNSTATED), torch.arange(count) % 255 - 127):
            changes = Changes(pos=pos, value=value, code=code.to(torch.int8))
            body = codec.encode(changes, span, BF16, read=reader(weights))
            assert body.numel() <= codec.limit(count, span.numel, BF16)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_the_smallest_bucket_holds_a_change(codec: Codec) -> None:
    old = torch.zeros(2**23, dtype=BF16)
    there = update(old, torch.ones(1).bfloat16().expand(2**23), torch.tensor([1, 2**22, 2**23 - 1]))
    frames = frames_of(codec, there, MIN_BUCKET_BYTES)
    assert all(frame.numel() <= frame_bytes(MIN_BUCKET_BYTES) for frame in frames)
    assert written(codec, frames, old).nonzero().view(-1).tolist() == [1, 2**22, 2**23 - 1]


def test_most_of_a_large_bucket_is_for_the_frame() -> None:
    assert frame_bytes(MIN_BUCKET_BYTES) == MIN_BUCKET_BYTES * 7 // 8
    assert frame_bytes(1 << 26) == (1 << 26) - SCRATCH_BYTES // 2 == 60 << 20


def test_a_limit_that_holds_no_element_is_refused() -> None:
    with pytest.raises(WireError, match="cannot hold one changed element"):
        buckets_of(CODECS["indices"], example(), 140)
    with pytest.raises(WireError, match="cannot hold one changed element"):
        buckets_of(CODECS["indices"], example(25_000), 130, whole_prefix=25_000)


def test_no_span_is_longer_than_its_positions_can_count() -> None:
    """A line of 15 thousand million elements, of which three changed."""
    pos = torch.tensor([5, 2**32 + 5, 3 * 2**32 + 9])
    changes = Changes(pos=pos, value=torch.ones(3).bfloat16())
    buckets = cut(changes, CODECS["gaps"], BF16, 7 * 2**31, BUCKET)
    edges = [0, 2**32, 2**33, 3 * 2**32, 7 * 2**31]
    assert [bucket.span.begin for bucket in buckets] == edges[:-1]
    assert [bucket.span.end for bucket in buckets] == edges[1:]
    assert [(bucket.first, bucket.last) for bucket in buckets] == [(0, 1), (1, 2), (2, 2), (2, 3)]


def test_nothing_changed_and_nothing_there() -> None:
    one, none = (cut(Changes.none(), CODECS["ulp"], BF16, numel, BUCKET) for numel in (9, 0))
    assert one == (Bucket(span=Span(0, 9), first=0, last=0),)
    assert none == ()


@pytest.mark.parametrize(
    ("name", "unstated", "last_sparse"),
    [("indices", False, 333), ("gaps", False, 666), ("ulp", False, 1000), ("ulp", True, 444)],
)
def test_a_span_goes_whole_exactly_where_that_is_smaller(name: str, unstated: bool, last_sparse: int) -> None:
    for count, whole in ((last_sparse, False), (last_sparse + 1, True)):
        if count <= 1000:
            code = torch.full((count,), UNSTATED if unstated else 1, dtype=torch.int8)
            changes = Changes(pos=torch.arange(count), value=code.bfloat16(), code=code)
            (bucket,) = cut(changes, CODECS[name], BF16, 1000, BUCKET, unstated=0)
            assert bucket.whole is whole
            assert bucket.guarded is not whole
            assert bucket.num_sent == (1000 if whole else count)


def test_a_dense_part_of_a_line_goes_whole_and_the_rest_does_not() -> None:
    old = torch.randn(60_000).bfloat16()
    pos = torch.cat([torch.arange(0, 30_000), torch.arange(30_000, 60_000, 100)])
    there = update(old, -old, pos)
    buckets = buckets_of(CODECS["indices"], there, 4096)  # each holds 577 changes
    assert [bucket.whole for bucket in buckets] == [True] * 52 + [False]
    frames = frames_of(CODECS["indices"], there, 4096)
    assert all(frame.numel() <= 4096 for frame in frames)
    assert patterns(written(CODECS["indices"], frames, old)) == patterns(there.after)


# --- order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_each_fault_of_a_frame_has_its_own_error(codec: Codec) -> None:
    there = example(prefix=2000)
    frames = frames_of(codec, there, 4096, whole_prefix=2000)
    first, second, third, *_ = frames
    with pytest.raises(RepeatedFrameError, match="it was sent twice"):
        written(codec, [first, first], there.old)
    with pytest.raises(MissingFrameError, match="one is missing or late"):
        written(codec, [first, third, second], there.old)
    with pytest.raises(MissingFrameError, match="begins at element"):
        written(codec, frames[1:], there.old)
    with pytest.raises(MissingFrameError, match="the last ones did not come"):
        written(codec, frames[:-1], there.old)
    with pytest.raises(CorruptFrameError):
        written(codec, [first, second[:-8].clone()], there.old)
    flipped = second.clone()
    flipped[-1] ^= 1
    with pytest.raises(CorruptFrameError, match="checksum"):
        written(codec, [first, flipped], there.old)
    bucket = buckets_of(codec, there, 4096, whole_prefix=2000)[1]
    foreign = pack_frame(replace(IDENTITY, base_version=3), codec, bucket, there.changes, reader(there.after))
    with pytest.raises(StaleFrameError, match=r"base_version=3 \(expected 41\)"):
        written(codec, [first, foreign], there.old)
