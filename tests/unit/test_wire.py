"""Frames: lossless for every bit pattern, and refused before use when anything is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.errors import ConfigError, CorruptFrameError, StaleFrameError
from awex_delta.wire.codec import RegionChange
from awex_delta.wire.frame import FrameIdentity, pack_frame, unpack_frame
from awex_delta.wire.indices import check_positions
from awex_delta.wire.registry import codec_named

CODEC = codec_named("indices")
IDENTITY = FrameIdentity(
    run_id="0123456789abcdef" * 2,
    base_version=41,
    target_version=42,
    plan=2**64 - 3,
    sender=3,
    receiver=1,
    dtype=torch.bfloat16,
)


def sparse(numel: int, index: list[int], bits: list[int]) -> RegionChange:
    value = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return RegionChange(numel=numel, index=torch.tensor(index, dtype=torch.int64), value=value)


def example() -> list[RegionChange]:
    whole = torch.tensor([1, 2, 3], dtype=torch.int16).view(torch.bfloat16)
    return [sparse(10, [0, 9], [0x7FC1, 0x8000]), RegionChange(numel=3, value=whole), sparse(5, [], [])]


NUMELS = [10, 3, 5]


@st.composite
def region_lists(draw: st.DrawFn) -> list[RegionChange]:
    regions = []
    for numel in draw(st.lists(st.integers(1, 300), max_size=6)):
        if draw(st.booleans()):
            index = sorted(draw(st.sets(st.integers(0, numel - 1))))
            bits = draw(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=len(index), max_size=len(index)))
            regions.append(sparse(numel, index, bits))
        else:
            bits = draw(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=numel, max_size=numel))
            regions.append(
                RegionChange(numel=numel, value=torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16))
            )
    return regions


@given(region_lists())
def test_any_regions_come_back_bit_for_bit(regions: list[RegionChange]) -> None:
    numels = [region.numel for region in regions]
    frame = pack_frame(IDENTITY, CODEC, regions)
    for want, got in zip(regions, unpack_frame(frame, IDENTITY, [CODEC], numels), strict=True):
        assert got.value.view(torch.int16).tolist() == want.value.view(torch.int16).tolist()
        assert (got.index is None) == (want.index is None)
        if want.index is not None and got.index is not None:
            assert got.index.tolist() == want.index.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_wire_dtypes(dtype: torch.dtype) -> None:
    value = torch.randn(4).to(dtype)
    regions = [RegionChange(numel=9, index=torch.tensor([1, 2, 4, 8]), value=value)]
    identity = replace(IDENTITY, dtype=dtype)
    (got,) = unpack_frame(pack_frame(identity, CODEC, regions), identity, [CODEC], [9])
    assert torch.equal(got.value, value)


def test_six_bytes_a_change_and_little_more() -> None:
    index = torch.arange(0, 40_000, 4)
    frame = pack_frame(IDENTITY, CODEC, [RegionChange(numel=40_000, index=index, value=index.bfloat16())])
    assert 60_000 <= frame.numel() <= 60_000 + 128


def test_every_flipped_bit_is_found() -> None:
    frame = pack_frame(IDENTITY, CODEC, example())
    for position in range(frame.numel()):
        for bit in (1, 128):
            damaged = frame.clone()
            damaged[position] ^= bit
            with pytest.raises(CorruptFrameError):
                unpack_frame(damaged, IDENTITY, [CODEC], NUMELS)


def test_every_cut_and_every_tail_is_found() -> None:
    frame = pack_frame(IDENTITY, CODEC, example())
    for length in range(frame.numel()):
        with pytest.raises(CorruptFrameError):
            unpack_frame(frame[:length].clone(), IDENTITY, [CODEC], NUMELS)
    with pytest.raises(CorruptFrameError):
        unpack_frame(torch.cat([frame, frame.new_zeros(8)]), IDENTITY, [CODEC], NUMELS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run_id": "f" * 32}, "run_id"),
        ({"base_version": 40}, "base_version"),
        ({"target_version": 43}, "target_version"),
        ({"plan": 1}, "plan"),
        ({"sender": 2}, "sender"),
        ({"receiver": 0}, "receiver"),
        ({"dtype": torch.float16}, "dtype"),
    ],
)
def test_a_foreign_frame_is_stale_and_says_why(change: dict[str, object], named: str) -> None:
    foreign = pack_frame(replace(IDENTITY, **change), CODEC, example())  # type: ignore[arg-type]
    with pytest.raises(StaleFrameError, match=named):
        unpack_frame(foreign, IDENTITY, [CODEC], NUMELS)


def test_another_number_of_regions_is_stale() -> None:
    with pytest.raises(StaleFrameError, match="regions=3"):
        unpack_frame(pack_frame(IDENTITY, CODEC, example()), IDENTITY, [CODEC], [10, 3])


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ([0, 10], "10 in region 0"),
        ([-1, 2], "-1 in region 0"),
        ([4, 4], "4 in region 0"),
        ([5, 3], "3 in region 0"),
    ],
)
def test_positions_out_of_place_are_refused_even_under_a_right_checksum(index: list[int], what: str) -> None:
    frame = pack_frame(IDENTITY, CODEC, [sparse(10, index, [1, 2])])
    with pytest.raises(CorruptFrameError, match=what):
        unpack_frame(frame, IDENTITY, [CODEC], [10])


def test_order_starts_anew_in_each_region() -> None:
    check_positions(torch.tensor([3, 9, 0, 2]), [2, 2], [10, 3])
    with pytest.raises(CorruptFrameError, match="3 in region 1"):
        check_positions(torch.tensor([3, 9, 0, 3]), [2, 2], [10, 3])


def test_an_unknown_encoding_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown: choose one of auto, gaps, indices"):
        codec_named("zip")
