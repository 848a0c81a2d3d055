"""Long frames are cut: no bucket is larger than the limit, and together they say what one frame would."""

from __future__ import annotations

from collections.abc import Sequence
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
from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.lines.storages import read_range, write_range
from awex_delta.wire.buckets import MIN_BUCKET_BYTES, cut, frame_bytes
from awex_delta.wire.codec import Codec, Context, RegionChange, settle
from awex_delta.wire.frame import FrameIdentity, check_complete, pack_frame, unpack_bucket
from awex_delta.wire.pieces import SCRATCH_BYTES
from awex_delta.wire.registry import CODECS
from awex_delta.wire.spans import windows_of

BF16 = torch.bfloat16
IDENTITY = FrameIdentity(
    run_id="0123456789abcdef" * 2, base_version=4, target_version=5, plan=7, sender=3, receiver=1, dtype=BF16
)


def context(weights: torch.Tensor) -> Context:
    return Context(owned=((0, weights.numel()),), read=lambda start, stop: weights[start:stop])


def change(old: torch.Tensor, new: torch.Tensor, index: torch.Tensor) -> RegionChange:
    after = old.clone()
    after[index] = new[index]
    code = step_code(old[index], new[index])
    code[::7] = UNSTATED
    return RegionChange(numel=old.numel(), index=index, value=new[index], code=code, context=context(after))


def frames_of(codec: Codec, regions: Sequence[RegionChange], bucket_bytes: int) -> list[torch.Tensor]:
    buckets = cut(regions, codec, BF16, bucket_bytes)
    return [pack_frame(IDENTITY, codec, bucket.changes(regions), bucket.span) for bucket in buckets]


def written(codec: Codec, frames: Sequence[torch.Tensor], olds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights after all frames, written window by window."""
    numels, end = [old.numel() for old in olds], 0
    new = [old.clone() for old in olds]
    for frame in frames:
        found = unpack_bucket(
            frame, IDENTITY, [codec], numels, begin=end, contexts=[context(old) for old in olds]
        )
        for window, got in zip(found.windows, found.changes, strict=True):
            target = new[window.region][window.start : window.stop]
            if got.index is None:
                target.copy_(got.value)
            else:
                base = olds[window.region][window.start : window.stop]
                target[got.index] = settle(got, base[got.index]).value
        end = found.end
    check_complete(end, numels)
    return new


def example(share: float = 0.1) -> tuple[list[RegionChange], list[torch.Tensor], list[torch.Tensor]]:
    """Regions of several sizes, one of them sent whole: changes, old and new weights."""
    generator = torch.Generator().manual_seed(0)
    olds = [torch.randn(n, generator=generator).bfloat16() for n in (1, 5000, 3, 700, 20_000)]
    news, regions = [], []
    for place, old in enumerate(olds):
        index = (torch.rand(old.numel(), generator=generator) < share).nonzero().view(-1)
        new = old.clone()
        new[index] = (old[index].float() * 1.01).bfloat16()
        regions.append(RegionChange(numel=700, value=new) if place == 3 else change(old, new, index))
        news.append(new)
    return regions, olds, news


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("bucket_bytes", [MIN_BUCKET_BYTES, 1500, 4096, 1 << 26])
def test_buckets_say_what_one_frame_says_and_none_is_too_large(codec: Codec, bucket_bytes: int) -> None:
    regions, olds, news = example()
    frames = frames_of(codec, regions, bucket_bytes)
    assert all(frame.numel() <= bucket_bytes for frame in frames)
    assert (len(frames) == 1) is (bucket_bytes == 1 << 26)
    for got, want in zip(written(codec, frames, olds), news, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("whole", [False, True])
def test_a_frame_that_just_fits_is_not_cut_and_one_byte_more_is(whole: bool) -> None:
    weights = torch.randn(4000).bfloat16()
    index = torch.arange(4000)
    region = RegionChange(numel=4000, value=weights, index=None if whole else index)
    (frame,) = frames_of(CODECS["indices"], [region], 1 << 26)
    least = next(size for size in range(frame.numel(), 1 << 26) if frame_bytes(size) == frame.numel())
    assert len(frames_of(CODECS["indices"], [region], least)) == 1
    assert len(frames_of(CODECS["indices"], [region], least - 1)) == 2


@settings(max_examples=40)
@given(
    name=st.sampled_from(list(CODECS)),
    numels=st.lists(st.integers(1, 3000), max_size=5),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    bucket_bytes=st.integers(MIN_BUCKET_BYTES, 6000),
)
def test_any_cut_is_lossless(name: str, numels: list[int], share: float, bucket_bytes: int) -> None:
    olds = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16).view(BF16) for n in numels]
    news = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16).view(BF16) for n in numels]
    regions = []
    for old, new in zip(olds, news, strict=True):
        index = (torch.rand(old.numel()) < share).nonzero().view(-1)
        regions.append(change(old, new, index))
    frames = frames_of(CODECS[name], regions, bucket_bytes)
    assert all(frame.numel() <= bucket_bytes for frame in frames)
    for got, old, new, region in zip(written(CODECS[name], frames, olds), olds, news, regions, strict=True):
        want = old.clone()
        assert region.index is not None
        want[region.index] = new[region.index]
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("stretch", [1, 3, 300, 70_000])
def test_no_body_is_larger_than_its_limit(codec: Codec, stretch: int) -> None:
    """Gaps around every escape, steps of every size, none stated: what takes the most bytes."""
    for count in (1, 2, 17, 5000):
        index = torch.arange(count) * stretch + stretch - 1
        value = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16).view(BF16)
        for code in (torch.full((count,), UNSTATED), torch.arange(count) % 255 - 127):
            region = RegionChange(numel=count * stretch, index=index, value=value, code=code.to(torch.int8))
            body = codec.encode([region], BF16)
            assert body.numel() <= codec.limit(count, region.numel, BF16)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_the_smallest_bucket_holds_a_change(codec: Codec) -> None:
    old = torch.randn(2**24).bfloat16()
    index = torch.tensor([1, 2**23, 2**24 - 1])
    frames = frames_of(codec, [change(old, -old, index)], MIN_BUCKET_BYTES)
    (got,) = written(codec, frames, [old])
    assert (got.view(torch.int16) != old.view(torch.int16)).nonzero().view(-1).tolist() == index.tolist()
    assert all(frame.numel() <= frame_bytes(MIN_BUCKET_BYTES) for frame in frames)


def test_most_of_a_large_bucket_is_for_the_frame() -> None:
    assert frame_bytes(MIN_BUCKET_BYTES) == MIN_BUCKET_BYTES * 7 // 8
    assert frame_bytes(1 << 26) == (1 << 26) - SCRATCH_BYTES // 2 == 60 << 20


def test_a_limit_that_holds_no_element_is_refused() -> None:
    regions, _, _ = example()
    with pytest.raises(WireError, match="a frame of 130 bytes cannot hold one changed element"):
        cut(regions, CODECS["indices"], BF16, 130)


def test_windows_of_spans() -> None:
    found = [(w.region, w.start, w.stop) for w in windows_of([3, 0, 4, 5], 2, 8)]
    assert found == [(0, 2, 3), (2, 0, 4), (3, 0, 1)]
    assert windows_of([3, 0, 4], 7, 7) == ()


# --- order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_each_fault_of_a_frame_has_its_own_error(codec: Codec) -> None:
    regions, olds, _ = example()
    frames = frames_of(codec, regions, 4096)
    first, second, third, *_ = frames
    with pytest.raises(RepeatedFrameError, match="it was sent twice"):
        written(codec, [first, first], olds)
    with pytest.raises(MissingFrameError, match="one is missing or late"):
        written(codec, [first, third, second], olds)
    with pytest.raises(MissingFrameError, match="begins at element"):
        written(codec, frames[1:], olds)
    with pytest.raises(MissingFrameError, match="the last ones did not come"):
        written(codec, frames[:-1], olds)
    with pytest.raises(CorruptFrameError):
        written(codec, [first, second[:-8].clone()], olds)
    flipped = second.clone()
    flipped[-1] ^= 1
    with pytest.raises(CorruptFrameError, match="checksum"):
        written(codec, [first, flipped], olds)
    foreign = replace(IDENTITY, base_version=3)
    bucket = cut(regions, codec, BF16, 4096)[1]
    with pytest.raises(StaleFrameError, match=r"base_version=3 \(expected 4\)"):
        written(codec, [first, pack_frame(foreign, codec, bucket.changes(regions), bucket.span)], olds)


# --- live weights -------------------------------------------------------------------------------------------


def test_a_range_of_strided_weights_copies_about_its_own_size() -> None:
    """Experts that lie transposed: a row of the first dimension has a million elements."""
    live = torch.zeros(3, 1000, 1000).transpose(1, 2)
    for start in (0, 999_500, 1_500_300):
        found = read_range(live, start, start + 1000)
        assert found.untyped_storage().nbytes() in (1000 * 4, live.untyped_storage().nbytes())


@pytest.mark.parametrize("view", ["whole", "columns", "transposed", "deep", "scalar"])
def test_ranges_of_live_weights_count_row_by_row(view: str) -> None:
    storage = torch.arange(6 * 10 * 4).view(6, 10, 4).float()
    live = {
        "whole": storage,
        "columns": storage[:, 2:7],
        "transposed": storage.transpose(0, 1),
        "deep": storage[1:5, 3:9, 1:3],
        "scalar": storage[2, 3, 1],
    }[view]
    flat = live.reshape(-1).clone()
    for start in range(0, flat.numel(), 3):
        for stop in (start + 1, (start + flat.numel() + 1) // 2, flat.numel()):
            if start < stop:
                assert torch.equal(read_range(live, start, stop), flat[start:stop])
                flat[start:stop] *= -1
                write_range(live, start, flat[start:stop].clone())
                assert torch.equal(live.reshape(-1), flat)
