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
from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.wire import context as module
from awex_delta.wire.classes import Classes, load_loops
from awex_delta.wire.codec import Context, RegionChange, settle
from awex_delta.wire.registry import CODECS, codec_named, codecs_for

BF16 = torch.bfloat16
CODEC = CODECS["ulp_context"]
Ranges = tuple[tuple[int, int], ...]


def context(weights: torch.Tensor, owned: Ranges | None = None) -> Context:
    whole = ((0, weights.numel()),)
    return Context(owned=whole if owned is None else owned, read=lambda start, stop: weights[start:stop])


def change(
    old: torch.Tensor, new: torch.Tensor, index: torch.Tensor, owned: Ranges | None = None
) -> RegionChange:
    after = old.clone()
    after[index] = new[index]
    code = step_code(old[index], new[index])
    return RegionChange(
        numel=old.numel(), index=index, value=new[index], code=code, context=context(after, owned)
    )


def adamw_step(lr: float, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights before and after the third step."""
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 0.02
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.01)
    for step in range(3):
        old = weight.bfloat16()
        weight.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return old, weight.bfloat16()


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
def test_the_walk_counts_what_a_slow_oracle_counts(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awex_delta.wire.weights.BLOCK", block)
    old, new = adamw_step(1e-5, 20_000)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    index = index[step_code(old[index], new[index]) != UNSTATED]
    region = change(old, new, index)
    assert region.code is not None
    found = module._walk_sender([region])
    places, gaps = oracle(old, index)
    steps = dict(zip(index.tolist(), region.code.tolist(), strict=True))
    assert found.gaps.tolist() == gaps
    assert found.steps.tolist() == [steps[place] for place in places]


def test_a_walk_finds_no_more_changes_than_there_are_slots() -> None:
    """Over any number of blocks: where a receiver's base is another one, anything may be found."""
    loops, bits = load_loops(), np.full(40, 0x3F80, np.uint16)
    cursors, left = np.zeros((256, 7), np.int64), np.full(256, loops.NEVER)
    cursors[127, loops.LAST], left[127] = 2, 0
    memory, new = np.full(12, -7, np.int64), np.full(12, 7, np.uint16)
    memory[2] = 1000  # what states no step lies elsewhere
    at, segments, empty = np.array([0, 0, 2]), np.array([[0, 40]], np.int64), np.empty(0, np.uint8)
    streams = np.zeros(2, np.uint8), empty, np.full(1, 0x21, np.uint8), empty, np.empty(0, np.int64)
    for base in range(0, 40, 8):
        block = bits[base : base + 8]
        loops.find_changes(block, base, segments, at, 0, left, cursors, *streams, memory[:3], new[:3])
        assert at[1:].tolist() == [2, 2]
    assert memory.tolist() == [0, 1, 1000] + [-7] * 9
    assert new.tolist() == [0x3F7F, 0x3F81] + [7] * 10


def test_counts_run_on_through_regions() -> None:
    """One region, or the same weights as three: the same gaps."""
    old, new = adamw_step(1e-5, 9000)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    index = index[step_code(old[index], new[index]) != UNSTATED]
    parts = []
    for start in (0, 3000, 6000):
        here = index[(index >= start) & (index < start + 3000)] - start
        parts.append(change(old[start : start + 3000], new[start : start + 3000], here))
    whole = module._walk_sender([change(old, new, index)])
    assert module._walk_sender(parts).gaps.tolist() == whole.gaps.tolist()


@st.composite
def regions(draw: st.DrawFn) -> tuple[list[RegionChange], list[torch.Tensor], list[Context | None]]:
    """Any patterns, any owned ranges; what is not owned may not change with a step."""
    changes, olds, contexts = list[RegionChange](), list[torch.Tensor](), list[Context | None]()
    for numel in draw(st.lists(st.integers(1, 60), max_size=4)):
        few = draw(st.booleans())  # few exponents make long runs of one
        patterns = st.integers(0, 0x3FF) if few else st.integers(0, 0xFFFF)
        old = torch.tensor(draw(st.lists(patterns, min_size=numel, max_size=numel)), dtype=torch.int32)
        step = draw(st.integers(-3, 3) | st.integers(-200, 200))
        before, after = old.to(torch.int16).view(BF16), (old + step).to(torch.int16).view(BF16)
        edges = sorted(draw(st.sets(st.integers(0, numel), max_size=6)))
        owned = tuple(zip(edges[::2], edges[1::2], strict=False))
        inside = [place for a, b in owned for place in range(a, b)]
        index = torch.tensor(
            sorted(draw(st.sets(st.sampled_from(inside)))) if inside else [], dtype=torch.int64
        )
        region = change(before, after, index, owned)
        assert region.code is not None
        region.code[region.code == 0] = UNSTATED
        region.code[: draw(st.integers(0, 3))] = UNSTATED
        changes.append(region)
        olds.append(before)
        contexts.append(context(before, owned))
    return changes, olds, contexts


@pytest.mark.parametrize(("block", "group", "piece"), [(1 << 22, 4096, 1 << 16), (5, 3, 2)])
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(update=regions())
def test_any_weights_come_back(
    block: int,
    group: int,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
    update: tuple[list[RegionChange], list[torch.Tensor], list[Context | None]],
) -> None:
    monkeypatch.setattr("awex_delta.wire.weights.BLOCK", block)
    monkeypatch.setattr("awex_delta.wire.classes.GROUP", group)
    monkeypatch.setattr("awex_delta.wire.pieces.PIECE", piece)
    changes, olds, contexts = update
    counts, numels = [c.value.numel() for c in changes], [c.numel for c in changes]
    found = CODEC.decode(CODEC.encode(changes, BF16), counts, numels, BF16, contexts)
    for want, got, old in zip(changes, found, olds, strict=True):
        assert want.index is not None
        assert got.index is not None
        assert got.index.tolist() == want.index.tolist()
        value = settle(got, old[got.index]).value
        assert value.view(torch.int16).tolist() == want.value.view(torch.int16).tolist()


def test_positions_beyond_int32_in_a_region_of_which_little_is_owned() -> None:
    start, weights = 2**33, torch.randn(1000).bfloat16()
    new = (weights.float() * 1.004).bfloat16()
    index = (weights.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)[::3]
    after = weights.clone()
    after[index] = new[index]

    def far(live: torch.Tensor) -> Context:
        return Context(
            owned=((start, start + 1000),), read=lambda begin, end: live[begin - start : end - start]
        )

    region = RegionChange(
        numel=2**34,
        index=index + start,
        value=new[index],
        code=step_code(weights[index], new[index]),
        context=far(after),
    )
    body = CODEC.encode([region], BF16)
    (got,) = CODEC.decode(body, [len(index)], [2**34], BF16, [far(weights)])
    assert got.index is not None
    assert got.index.tolist() == (index + start).tolist()
    assert body.numel() <= CODEC.limit(len(index), 2**34, BF16)


@pytest.mark.parametrize("top", [0, 254, 255, 2**31, 2**40])
@pytest.mark.parametrize("shift", [0, 1, 7, 8, 13])
def test_gaps_of_any_length(top: int, shift: int) -> None:
    """Two exponents: what `split_gaps` writes, `next_gap` reads, whichever comes first among the weights."""
    gaps = np.array([0, 1, (top << shift) | 1, 254 << shift, (255 << shift) - 1, 255 << shift], np.int64)
    loops, classes = (
        load_loops(),
        Classes(kinds=np.array([7, 9]), counts=np.array([2, 4]), shifts=np.array([shift, shift])),
    )
    escaped = sum(loops.count_escapes(gaps[slots], shift) for slots in classes.slots())
    assert escaped == sum(gap >> shift >= 255 for gap in gaps.tolist())
    high, low, wide = (
        np.zeros(6, np.uint8),
        np.zeros(classes.low_bytes, np.uint8),
        np.zeros(escaped, np.int64),
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


def test_gaps_are_wide_only_where_a_frame_covers_2_to_the_32_elements() -> None:
    far = change(torch.ones(3).bfloat16(), torch.zeros(3).bfloat16(), torch.tensor([2]))
    for numel, width in ((2**32 - 1, 4), (2**32, 8)):
        assert module._walk_sender([replace(far, numel=numel)]).gaps.itemsize == width


@pytest.mark.parametrize(("lr", "limit"), [(1e-6, 0.88), (3e-6, 0.78)])
def test_bytes_a_change(lr: float, limit: float) -> None:
    old, new = adamw_step(lr, 3_000_000)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    body = CODEC.encode([change(old, new, index)], BF16)
    assert body.numel() <= limit * index.numel()


# --- refusals -----------------------------------------------------------------------------------------------


def test_a_change_outside_what_the_sender_owns_is_refused() -> None:
    old = torch.ones(10, dtype=BF16)
    region = change(old, (old.float() * 1.01).bfloat16(), torch.tensor([2, 7]), owned=((0, 5),))
    with pytest.raises(WireError, match="that its sender does not own"):
        CODEC.encode([region], BF16)


def test_another_base_is_found_or_gives_other_positions_never_an_error_of_python() -> None:
    old, new = adamw_step(1e-5, 5000)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    body = CODEC.encode([change(old, new, index)], BF16)
    with pytest.raises(CorruptFrameError, match="changes lie in a region of"):
        CODEC.decode(body, [len(index)], [5000], BF16, [context(torch.ones(5000, dtype=BF16))])
    with pytest.raises(CorruptFrameError, match="changes lie in a region of"):
        CODEC.decode(body, [len(index)], [5000], BF16)


def test_bodies_that_make_no_sense_are_refused_or_stay_in_their_region() -> None:
    """What no checksum guards: a peer that packs nonsense. Never another error, never out of range."""
    old, new = adamw_step(1e-5, 3000)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    region = change(old, new, index)
    assert region.code is not None
    region.code[::9] = UNSTATED
    body = CODEC.encode([region], BF16)
    source = random.Random(0)  # noqa: S311 - test data
    damaged = [body[:length].clone() for length in range(0, body.numel(), 5)]
    for _ in range(1500):
        damaged.append(body.clone())
        for _ in range(source.choice((1, 1, 2, 8))):
            damaged[-1][source.randrange(body.numel())] = source.randrange(256)
    refused = 0
    for bad in damaged:
        try:
            (got,) = CODEC.decode(bad, [len(index)], [3000], BF16, [context(old)])
        except CorruptFrameError:
            refused += 1
            continue
        assert got.index is not None
        assert int(got.index[0]) >= 0
        assert int(got.index[-1]) < 3000
        assert bool((got.index.diff() > 0).all())
    assert refused > 100


def test_without_numba_it_is_refused_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awex_delta.wire.registry.numba_is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"'ulp_context' needs numba.*pip install 'awex-delta\[context\]'"):
        codec_named("ulp_context")
    assert "ulp_context" not in [codec.name for codec in codecs_for("auto")]
