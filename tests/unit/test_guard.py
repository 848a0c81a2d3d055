"""Guards: digests of the old bits that a frame's changes replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.wire.frame import unpack_frame
from awex_delta.wire.guard import Guard, guard_bytes, guard_of, num_unstated, read_guard
from awex_delta.wire.registry import CODECS
from tests.unit.line_updates import BF16, IDENTITY, Update, buckets_of, frames_of, update

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The finalizer of splitmix64, on Python's own integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def by_hand(pos: Sequence[int], old: torch.Tensor, stated: Sequence[bool]) -> int:
    """The digest of the docstring, one element at a time."""
    hashed = [
        splitmix64((0x9E3779B97F4A7C15 * place + bits) & MASK)
        for place, bits, counts in zip(pos, old.view(torch.int16).tolist(), stated, strict=True)
        if counts
    ]
    return sum(hashed) & MASK


def example(seed: int = 0, numel: int = 4300) -> Update:
    """Changes of every seventh element or so, some far and some not stated."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(numel, generator=generator).bfloat16()
    pos = (torch.rand(numel, generator=generator) < 0.15).nonzero().view(-1)
    steps = torch.randint(1, 5, (numel,), generator=generator).short()
    new = (old.view(torch.int16) + steps).view(BF16)
    new[::50] = 100.0  # too far for a code
    return update(old, new, pos, unstated=slice(3, None, 41))


def stated(changes: Changes) -> list[bool]:
    assert changes.code is not None
    return (changes.code != UNSTATED).tolist()


@pytest.mark.parametrize("piece", [1 << 15, 100])
def test_a_guard_is_the_sum_of_hashes_of_the_old_bits_that_are_known(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awex_delta.wire.guard._PIECE", piece)
    given = example()
    known = stated(given.changes)
    far = replace(given.changes, pos=given.changes.pos + 2**40)
    for changes in (given.changes, far):
        guard = guard_of(changes)
        assert guard.digest == by_hand(changes.pos.tolist(), given.old[given.changes.pos], known)
        assert guard.unstated.tolist() == [place for place, counts in enumerate(known) if not counts]
    assert known.count(False) > 3


@pytest.mark.parametrize("encoding", ["indices", "gaps"])
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_a_receiver_finds_what_drifted_in_every_frame(encoding: str, bucket_bytes: int) -> None:
    codec, given, begin = CODECS[encoding], example(seed=1), 0
    drifted = given.old.clone()
    buckets = buckets_of(codec, given, bucket_bytes, whole_prefix=30)
    assert [bucket.guarded for bucket in buckets] == [False] + [True] * (len(buckets) - 1)
    for bucket, frame in zip(buckets, frames_of(codec, given, bucket_bytes, whole_prefix=30), strict=True):
        assert frame.numel() <= bucket_bytes
        found = unpack_frame(frame, IDENTITY, [codec], begin=begin, numel=given.numel)
        begin = found.span.end
        assert (found.guard is not None) is bucket.guarded
        if found.guard is None:
            continue
        assert found.changes is not None
        pos, known = found.changes.pos, stated(given.changes.part(bucket.first, bucket.last))
        assert found.guard.holds(pos, given.old.__getitem__)
        unknown = [place for place, counts in zip(pos.tolist(), known, strict=True) if not counts]
        drifted.view(torch.int16)[unknown] ^= 1  # what no digest covers
        assert found.guard.holds(pos, drifted.__getitem__)
        last = int(pos[max(place for place, counts in enumerate(known) if counts)])
        drifted.view(torch.int16)[last] ^= 1  # one bit of the last element that counts
        assert not found.guard.holds(pos, drifted.__getitem__)
    assert (len(buckets) > 2) is (bucket_bytes == 1024)


def test_a_place_that_makes_no_sense_is_refused() -> None:
    for unstated in ([3, 3], [4, 2], [1, 10]):
        section = guard_bytes(Guard(digest=5, unstated=torch.tensor(unstated)))
        assert section.numel() == 8
        with pytest.raises(CorruptFrameError, match="out of order, or beyond"):
            read_guard(5, section, 10)
    guard = read_guard(5, section, 11)
    assert (guard.digest, guard.unstated.tolist()) == (5, [1, 10])


def test_frames_have_a_guard_where_values_are_sent_whole_and_nearly_every_old_one_can_be_known() -> None:
    changes = example().changes
    left_out = stated(changes).count(False)
    counts = {name: num_unstated(codec, changes) for name, codec in CODECS.items()}
    assert {name: count for name, count in counts.items() if count is not None} == {
        "indices": left_out,
        "gaps": left_out,
    }
    codec = CODECS["indices"]
    assert num_unstated(codec, Changes.none()) is None
    assert num_unstated(codec, replace(changes, code=None)) is None
    for dtype in (torch.float16, torch.float32):  # a converter cast them: steps are of bf16
        assert changes.value is not None
        assert num_unstated(codec, replace(changes, value=changes.value.to(dtype))) is None
    for known, count in ((150, 10), (149, None)):
        code = torch.tensor([1] * known + [UNSTATED] * 10, dtype=torch.int8)
        few = Changes(pos=torch.arange(len(code)), code=code, value=torch.zeros(len(code), dtype=BF16))
        assert num_unstated(codec, few) == count
