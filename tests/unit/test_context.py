"""`ulp_context`: its walk against a slow oracle, lossless for all weights, refused where it is nonsense."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awex_delta.errors import ConfigError, CorruptFrameError, WireError
from awex_delta.lines.bits import UNSTATED
from awex_delta.wire import context as module
from awex_delta.wire.classes import Classes, load_loops
from awex_delta.wire.registry import CODECS, codec_named, codecs_for
from awex_delta.wire.spans import Span
from tests.unit.line_updates import BF16, Update, adamw_step, bits, patterns, reader, update

CODEC = CODECS["ulp_context"]


def body_of(there: Update) -> torch.Tensor:
    return CODEC.encode(there.changes, there.span, BF16, read=reader(there.after))


def some_unstated(there: Update, every: int) -> Update:
    """The update; of its changes, one in so many states no step."""
    assert there.changes.code is not None
    code = there.changes.code.clone()
    code[::every] = UNSTATED
    return replace(there, changes=replace(there.changes, code=code))


def oracle(old: torch.Tensor, index: torch.Tensor) -> tuple[list[int], list[int]]:
    """By exponent, then position: changed positions, and unchanged elements of the exponent before each."""
    exponent = (old.view(torch.int16).to(torch.int64) >> 7) & 255
    changed = torch.zeros(old.numel(), dtype=torch.bool)
    changed[index] = True
    places, gaps = [], []
    for kind in sorted(set(exponent.tolist())):
        mine = (exponent == kind).nonzero().view(-1)
        ranks = changed[mine].nonzero().view(-1)
        places += mine[ranks].tolist()
        gaps += (torch.diff(ranks, prepend=torch.tensor([-1])) - 1).tolist()
    return places, gaps


@pytest.mark.parametrize("block", [1 << 22, 1000, 7])
@pytest.mark.parametrize("every", [10**6, 3])
def test_the_walk_counts_what_a_slow_oracle_counts(
    block: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What states no step is to the walk as if it were not there."""
    monkeypatch.setattr("awex_delta.wire.context.BLOCK", block)
    monkeypatch.setattr("awex_delta.wire.pieces.BLOCK", block)
    there = some_unstated(adamw_step(1e-5, 20_000), every)
    changes = there.changes
    assert changes.code is not None
    kept = torch.ones(there.numel, dtype=torch.bool)
    kept[changes.pos[changes.code == UNSTATED]] = False
    new_place = kept.cumsum(0) - 1
    stated = changes.pos[changes.code != UNSTATED]
    places, gaps = oracle(there.old[kept], new_place[stated])
    found = module._walked(changes, there.span, reader(there.after))
    steps = dict(
        zip(new_place[stated].tolist(), changes.code[changes.code != UNSTATED].tolist(), strict=True)
    )
    assert len(gaps) > 100
    assert found.gaps.tolist() == gaps
    assert found.steps.tolist() == [steps[place] for place in places]


def test_a_walk_finds_no_more_changes_than_there_are_slots() -> None:
    """Over any number of blocks: if a receiver's base is another one, anything may be found."""
    loops, weights = load_loops(), np.full(40, 0x3F80, np.uint16)
    cursors, left = np.zeros((256, 7), np.int64), np.full(256, loops.NEVER)
    cursors[127, loops.LAST], left[127] = 2, 0
    memory, new = np.full(12, -7, np.int64), np.full(12, 7, np.uint16)
    memory[2] = 1000  # what states no step lies elsewhere
    at, empty = np.array([0, 2]), np.empty(0, np.uint8)
    streams = np.zeros(2, np.uint8), empty, np.full(1, 0x21, np.uint8), empty, np.empty(0, np.uint32)
    for base in range(0, 40, 8):
        block = weights[base : base + 8]
        loops.find_changes(block, base, at, left, cursors, *streams, memory[:3], new[:3])
        assert at.tolist() == [2, 2]
    assert memory.tolist() == [0, 1, 1000] + [-7] * 9
    assert new.tolist() == [0x3F7F, 0x3F81] + [7] * 10


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """Any patterns; few exponents make long runs of one."""
    high = 0x3FF if draw(st.booleans()) else 0xFFFF
    old = draw(st.lists(st.integers(0, high), min_size=1, max_size=120))
    step = draw(st.integers(-3, 3) | st.integers(-200, 200))
    pos = torch.tensor(sorted(draw(st.sets(st.integers(0, len(old) - 1)))), dtype=torch.int64)
    unstated = slice(draw(st.integers(0, 3)), draw(st.integers(0, 9)))
    return update(bits(old), bits([(p + step) & 0xFFFF for p in old]), pos, unstated=unstated)


@pytest.mark.parametrize(("block", "group", "piece"), [(1 << 22, 4096, 1 << 16), (5, 3, 2)])
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(there=updates(), begin=st.sampled_from([0, 3, 2**33]))
def test_any_weights_come_back(
    block: int, group: int, piece: int, monkeypatch: pytest.MonkeyPatch, there: Update, begin: int
) -> None:
    monkeypatch.setattr("awex_delta.wire.context.BLOCK", block)
    monkeypatch.setattr("awex_delta.wire.pieces.BLOCK", block)
    monkeypatch.setattr("awex_delta.wire.classes.GROUP", group)
    monkeypatch.setattr("awex_delta.wire.pieces.PIECE", piece)
    span, changes = Span(begin, begin + there.numel), replace(there.changes, pos=there.changes.pos + begin)
    body = CODEC.encode(changes, span, BF16, read=reader(there.after, begin))
    got = CODEC.decode(body, changes.num_changed, span, BF16, read=reader(there.old, begin))
    assert got.pos.tolist() == changes.pos.tolist()
    assert got.code is None
    assert patterns(got.value) == patterns(changes.value)


def test_nothing_is_read_if_no_change_states_a_step() -> None:
    there = some_unstated(adamw_step(1e-5, 5000), 1)

    def refuse(start: int, stop: int) -> torch.Tensor:
        raise AssertionError(f"elements {start} to {stop} were read")

    body = CODEC.encode(there.changes, there.span, BF16, read=refuse)
    got = CODEC.decode(body, there.changes.num_changed, there.span, BF16, read=refuse)
    assert torch.equal(got.pos, there.changes.pos)
    assert patterns(got.value) == patterns(there.changes.value)


@pytest.mark.parametrize("longest", [0, 254, 2**31, 2**32 - 1])
@pytest.mark.parametrize("shift", [0, 1, 7, 8, 13])
def test_gaps_of_any_length(longest: int, shift: int) -> None:
    """Two exponents: what `split_gaps` writes, `next_gap` reads, whichever comes first among the weights."""
    gaps = np.array([0, 1, longest, 254 << shift, (255 << shift) - 1, 255 << shift], np.uint32)
    loops, classes = (
        load_loops(),
        Classes(kinds=np.array([7, 9]), counts=np.array([2, 4]), shifts=np.array([shift, shift])),
    )
    escaped = sum(loops.count_escapes(gaps[slots], shift) for slots in classes.slots())
    assert escaped == sum(gap >> shift >= 255 for gap in gaps.tolist())
    high, low, wide = (
        np.zeros(6, np.uint8),
        np.zeros(classes.low_bytes, np.uint8),
        np.zeros(escaped, np.uint32),
    )
    at = np.zeros(2, np.int64)
    for slots in classes.slots():
        loops.split_gaps(gaps[slots], shift, at, high[slots], low, wide)
    cursors, totals = classes.cursors(), np.zeros(2, np.int64)
    loops.find_escapes(high, np.zeros(3, np.uint8), cursors, totals)
    assert totals.tolist() == [0, escaped]
    found: dict[int, list[int]] = {7: [], 9: []}
    for kind in (9, 7, 9, 9, 7, 9, 9, 7, 250):
        gap = loops.next_gap(kind, cursors, high, low, wide)
        cursors[kind, loops.SLOT] += 1
        assert (gap == loops.NEVER) == (kind == 250 or len(found[kind]) == classes.counts[kind // 9])
        if gap != loops.NEVER:
            found[kind].append(gap)
    assert found == {7: gaps[:2].tolist(), 9: gaps[2:].tolist()}


@pytest.mark.parametrize(("lr", "limit"), [(1e-6, 0.88), (3e-6, 0.78)])
def test_bytes_a_change(lr: float, limit: float) -> None:
    there = adamw_step(lr, 3_000_000)
    assert body_of(there).numel() <= limit * there.changes.num_changed


# --- refusals -----------------------------------------------------------------------------------------------


def test_another_base_is_found_or_gives_other_positions_never_an_error_of_python() -> None:
    there = adamw_step(1e-5, 5000)
    body, count = body_of(there), there.changes.num_changed
    with pytest.raises(CorruptFrameError, match=f"changes lie among the weights, the frame lists {count}"):
        CODEC.decode(body, count, there.span, BF16, read=reader(torch.ones(5000, dtype=BF16)))
    with pytest.raises(WireError, match="needs the weights of the span"):
        CODEC.decode(body, count, there.span, BF16)


def test_bodies_that_make_no_sense_are_refused_or_stay_in_their_span() -> None:
    """What no checksum guards: a peer that packs nonsense. Never another error, never out of range."""
    there = some_unstated(adamw_step(1e-5, 3000), 9)
    body, span = body_of(there), Span(0, there.numel)
    source = random.Random(0)  # noqa: S311 - test data
    damaged = [body[:length].clone() for length in range(0, body.numel(), 5)]
    for _ in range(1500):
        damaged.append(body.clone())
        for _ in range(source.choice((1, 1, 2, 8))):
            damaged[-1][source.randrange(body.numel())] = source.randrange(256)
    refused = 0
    for bad in damaged:
        try:
            got = CODEC.decode(bad, there.changes.num_changed, span, BF16, read=reader(there.old))
        except CorruptFrameError:
            refused += 1
            continue
        assert int(got.pos[0]) >= 0
        assert int(got.pos[-1]) < there.numel
        assert bool((got.pos.diff() > 0).all())
    assert refused > 100


def test_without_numba_it_is_refused_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ulp_context" in [codec.name for codec in codecs_for("auto", context=True)]
    monkeypatch.setattr("awex_delta.wire.registry.numba_is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"'ulp_context' needs numba.*pip install 'awex-delta\[context\]'"):
        codec_named("ulp_context")
    assert "ulp_context" not in [codec.name for codec in codecs_for("auto")]
