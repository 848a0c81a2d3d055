"""Guards: digests of the old bits that a frame's changes replace."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.wire.buckets import cut
from awex_delta.wire.codec import RegionChange
from awex_delta.wire.frame import _HEADER, FrameIdentity, pack_frame, unpack_bucket
from awex_delta.wire.guard import Guard, guard_bytes, guard_of, old_digest, read_guard, unstated_counts
from awex_delta.wire.registry import CODECS

MASK = (1 << 64) - 1
_GUARDED = 11  # the place of a field in the header
IDENTITY = FrameIdentity(
    run_id="1" * 32, base_version=4, target_version=5, plan=7, sender=1, receiver=0, dtype=torch.bfloat16
)


def splitmix64(state: int) -> int:
    """The finalizer of splitmix64, on Python's own integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def by_hand(index: Sequence[int], old: torch.Tensor, stated: Sequence[bool]) -> int:
    """The digest of the docstring, one element at a time."""
    bits = old.view(torch.int16).tolist()
    hashed = [
        splitmix64((0x9E3779B97F4A7C15 * i + b) & MASK)
        for i, b, s in zip(index, bits, stated, strict=True)
        if s
    ]
    return sum(hashed) & MASK


def regions(
    seed: int = 0, sizes: Sequence[int] = (1400, 30, 1, 2900)
) -> tuple[list[RegionChange], list[torch.Tensor]]:
    """Changes of every seventh element or so, some far and some not stated; and the weights before."""
    generator = torch.Generator().manual_seed(seed)
    changes, before = [], []
    for size in sizes:
        old = torch.randn(size, generator=generator).bfloat16()
        index = (torch.rand(size, generator=generator) < 0.15).nonzero().view(-1)
        new = (old.view(torch.int16) + torch.randint(1, 5, (size,), generator=generator).short()).view(
            torch.bfloat16
        )
        new[::50] = 100.0  # too far for a code
        code = step_code(old[index], new[index])
        code[3::41] = UNSTATED  # changed by who knows how much
        changes.append(RegionChange(numel=size, index=index, value=new[index], code=code))
        before.append(old)
    return changes, before


def test_a_guard_is_the_sum_of_hashes_of_the_old_bits_that_are_known() -> None:
    changes, before = regions()
    guard = guard_of(changes)
    unstated, place = [], 0
    for change, old, total in zip(changes, before, guard.digests.tolist(), strict=True):
        assert change.index is not None
        assert change.code is not None
        stated = (change.code != UNSTATED).tolist()
        assert total & MASK == by_hand(change.index.tolist(), old[change.index], stated)
        unstated += [place + n for n, one in enumerate(stated) if not one]
        place += len(stated)
    assert len(unstated) > 3
    assert guard.unstated.tolist() == unstated


@pytest.mark.parametrize("encoding", ["indices", "gaps"])
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_a_receiver_finds_what_drifted_in_every_frame(encoding: str, bucket_bytes: int) -> None:
    codec = CODECS[encoding]
    changes, before = regions(seed=1)
    whole = RegionChange(numel=9, value=torch.ones(9).bfloat16())
    changes.insert(2, whole)
    before.insert(2, torch.zeros(9).bfloat16())
    numels = [change.numel for change in changes]
    drifted = [old.clone() for old in before]
    buckets = cut(changes, codec, torch.bfloat16, bucket_bytes, unstated=unstated_counts(codec, changes))
    seen = begin = 0
    for bucket in buckets:
        here = bucket.changes(changes)
        frame = pack_frame(IDENTITY, codec, here, bucket.span, guard_of(here))
        assert frame.numel() <= bucket_bytes
        found = unpack_bucket(frame, IDENTITY, [codec], numels, begin=begin)
        begin = found.end
        assert found.guard is not None
        first = 0
        for window, change, total in zip(
            found.windows, found.changes, found.guard.digests.tolist(), strict=True
        ):
            if change.index is None:
                assert total == 0
                continue
            stated = found.guard.stated(first, first + change.index.numel())
            first += change.index.numel()
            for held, right in ((before, True), (drifted, False)):
                old = held[window.region][change.index + window.start]
                if not right and stated.any():  # one bit of the last element that counts
                    old.view(torch.int16)[int(stated.nonzero()[-1])] ^= 1
                live = int(old_digest(change.index, old.__getitem__, stated.__getitem__))
                assert (live == total) is (right or not bool(stated.any()))
                seen += bool(stated.any())
    assert seen >= 6
    assert (len(buckets) > 1) is (bucket_bytes == 1024)


def test_a_place_that_makes_no_sense_is_refused() -> None:
    for unstated in ([3, 3], [4, 2], [1, 10]):
        guard = Guard(digests=torch.tensor([5]), unstated=torch.tensor(unstated))
        section = guard_bytes(guard)
        assert section.numel() == 16
        with pytest.raises(CorruptFrameError, match="out of order, or beyond"):
            read_guard(section, 1, 2, 10)
    guard = read_guard(section, 1, 2, 11)
    assert (guard.digests.tolist(), guard.unstated.tolist()) == ([5], [1, 10])


def test_every_flipped_byte_and_cut_of_a_guarded_frame_is_found() -> None:
    codec = CODECS["indices"]
    changes, _ = regions(sizes=(60,))
    frame = pack_frame(IDENTITY, codec, changes, guard=guard_of(changes))
    for place in range(frame.numel()):
        bad = frame.clone()
        bad[place] ^= 4
        with pytest.raises(CorruptFrameError):
            unpack_bucket(bad, IDENTITY, [codec], [60], begin=0)
        with pytest.raises(CorruptFrameError):
            unpack_bucket(frame[:place].clone(), IDENTITY, [codec], [60], begin=0)


def test_frames_have_a_guard_where_values_are_sent_whole_and_every_old_one_can_be_known() -> None:
    changes, _ = regions()
    counts = {name: unstated_counts(codec, changes) for name, codec in CODECS.items()}
    left_out = [change.code.tolist().count(-128) for change in changes if change.code is not None]
    assert sum(left_out) > 0
    assert {name: of for name, of in counts.items() if of} == {"indices": left_out, "gaps": left_out}
    assert unstated_counts(CODECS["indices"], [*changes, replace(changes[0], code=None)]) is None
    code = torch.full_like(changes[0].value, UNSTATED, dtype=torch.int8)
    assert unstated_counts(CODECS["indices"], [*changes, replace(changes[0], code=code)]) is None
    for dtype in (torch.float16, torch.float32):  # a converter cast them: steps are of bf16
        cast = replace(changes[0], value=changes[0].value.to(dtype))
        assert unstated_counts(CODECS["indices"], [cast]) is None


def test_a_region_in_which_nothing_changed_leaves_the_guard_of_the_others() -> None:
    codec = CODECS["indices"]
    changes, _ = regions(seed=2)
    nothing = RegionChange(numel=8, value=torch.empty(0).bfloat16(), index=torch.empty(0).long())
    assert unstated_counts(codec, [nothing]) is None
    there = [nothing, changes[0], nothing, *changes[1:]]
    first, *others = unstated_counts(codec, changes) or []
    assert unstated_counts(codec, there) == [0, first, 0, *others]
    frame = pack_frame(IDENTITY, codec, there, guard=guard_of(there))
    found = unpack_bucket(frame, IDENTITY, [codec], [change.numel for change in there], begin=0).guard
    assert found is not None
    alone = guard_of(changes)
    assert torch.equal(found.unstated, alone.unstated)
    totals = alone.digests.tolist()
    assert found.digests.tolist() == [0, totals[0], 0, *totals[1:]]


@pytest.mark.parametrize("numels", [[], [0, 0], [60]])
@pytest.mark.parametrize("extra", [0, 1, 8, 12])
@pytest.mark.parametrize("num_unstated", [0, 1, 3, 2**32 - 2])
def test_a_guard_that_does_not_fit_its_frame_is_refused(
    numels: list[int], extra: int, num_unstated: int
) -> None:
    """A header that is right in itself, about a guard that is longer or shorter than what is there."""
    codec = CODECS["indices"]
    changes = [
        RegionChange(numel=numel, value=torch.empty(0).bfloat16(), index=torch.empty(0).long())
        for numel in numels
    ]
    frame = torch.cat([pack_frame(IDENTITY, codec, changes), torch.zeros(extra, dtype=torch.uint8)])
    header = frame[: _HEADER.size].numpy()
    fields = [*_HEADER.unpack(header.tobytes())[:-1], 0]
    fields[_GUARDED] = 1 + num_unstated
    header[:] = np.frombuffer(_HEADER.pack(*fields), np.uint8)
    checksum = xxhash.xxh3_64(frame.numpy().tobytes()).intdigest()
    header[-8:] = np.frombuffer(struct.pack("<Q", checksum), np.uint8)
    if num_unstated == 0 and extra == (8 if numels == [60] else 0):  # a digest for the window
        found = unpack_bucket(frame, IDENTITY, [codec], numels, begin=0).guard
        assert found is not None
        assert found.unstated.numel() == 0
        return
    with pytest.raises(CorruptFrameError):
        unpack_bucket(frame, IDENTITY, [codec], numels, begin=0)
