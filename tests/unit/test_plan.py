"""Lines of pairs, and AWEX's plan rank by rank, where every element has a number of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from awex.transfer.transfer_plan import TransferPlanBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_delta.lines.boxes import BoxMap
from awex_delta.plan.rank import plan_rank
from awex_delta.plan.shards import TrainingSide, _inference_meta, copies_of
from awex_delta.plan.world import World
from tests.unit.worlds import EMBED, HEAD, Model, Rank, engines, trainers, world_of

NORM0, GATE0 = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.gate.weight"


def check_lines(world: World, engine_ranks: list[Rank], trainer_ranks: list[Rank]) -> None:
    """Both ends compute the same lines, and over all of them each element arrives once, where it belongs."""
    plans = [plan_rank(world, seat) for seat in range(len(world.engines) + len(world.trainers))]
    for seat, rank in enumerate(engine_ranks):
        line = rank.numbers["line"]
        arrived = np.full(line.size, -(10**9))
        for (sender, dtype), pair in plans[seat].pairs.items():
            other = plans[sender].pairs[seat, dtype]
            assert (other.digest, other.numel, other.whole) == (pair.digest, pair.numel, pair.whole)
            sent = trainer_ranks[sender - len(engine_ranks)].numbers["line"]
            positions = torch.arange(sent.size)
            where, pick = BoxMap(other.sent).map(positions)
            assert where.tolist() == list(range(pair.numel))
            there, back = BoxMap(pair.stored).map(torch.arange(pair.numel))
            assert (arrived[there.numpy()] == -(10**9)).all(), "an element arrives twice"
            arrived[there.numpy()] = sent[pick.numpy()][back.numpy()]
        assert arrived.tolist() == line.tolist()
    for seat, plan in enumerate(plans[len(engine_ranks) :], start=len(engine_ranks)):
        assert all((seat, dtype) in plans[peer].pairs for peer, dtype in plan.pairs)


def whole_plan(world: World) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """AWEX's plan of the whole world, by pair."""
    names = {engine.layout.names[place] for engine in world.engines for place in engine.layout.stored()}
    side, copies = TrainingSide(world.trainers, names), copies_of(world.engines, names)
    metas = [_inference_meta(world.engines, copies[name], name, len(world.engines)) for name in sorted(names)]
    builder = TransferPlanBuilder(len(world.engines), len(world.trainers), 1)
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for op in builder.build_weights_mapping_operations(metas, side.metas):
        found.setdefault((op.send_rank, op.recv_rank), []).append(as_tuple(op))
    return {pair: sorted(ops) for pair, ops in found.items()}


def as_tuple(op: Any) -> tuple[Any, ...]:
    return op.send_shard_meta.name, op.send_offset, op.recv_offset, op.overlap_shape


def check_dense(world: World) -> None:
    expected = whole_plan(world)
    for seat in range(len(world.engines) + len(world.trainers)):
        plan = plan_rank(world, seat).dense
        mine = {
            (seat, peer) if seat >= len(world.engines) else (peer, seat): sorted(map(as_tuple, ops))
            for peer, ops in plan.operations.items()
        }
        assert mine == {pair: ops for pair, ops in expected.items() if seat in pair}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Rank], list[Rank]]:
    model = Model(
        layers=draw(st.integers(1, 2)),
        hidden=draw(st.sampled_from([4, 6])),
        kv_heads=draw(st.sampled_from([2, 4])),
        head_dim=draw(st.integers(1, 3)),
        experts=draw(st.sampled_from([2, 4])),
        vocab=draw(st.integers(5, 8)),
        rows=8,
        tied=draw(st.booleans()),
    )
    heads = st.sampled_from(["own", "alias", "none"] if model.tied else ["own"])
    tp = draw(st.sampled_from([1, 2]))
    dp = draw(st.sampled_from([1, 2, 3]))
    ep = draw(st.sampled_from([size for size in (1, 2) if (tp * dp) % size == 0]))
    whole = draw(st.sets(st.sampled_from([NORM0, GATE0, EMBED, HEAD]), max_size=2))
    trainer_ranks = trainers(
        model,
        tp=tp,
        dp=dp,
        ep=ep,
        pp=draw(st.sampled_from([1, 2])),
        whole=sorted(whole),
        uneven=draw(st.booleans()),
    )
    first = engines(
        model,
        instances=draw(st.integers(1, 2)),
        tp=draw(st.sampled_from([1, 2, 4])),
        head=draw(heads),
    )
    tp2 = draw(st.sampled_from([1, 2]))
    more = engines(
        model, instances=draw(st.integers(0, 1)), tp=tp2, ep=tp2, first=len(first), head=draw(heads)
    )
    return [*first, *more], trainer_ranks


@settings(max_examples=40)
@given(layouts())
def test_lines_tile_every_engine_and_full_syncs_are_awexs(layout: tuple[list[Rank], list[Rank]]) -> None:
    engine_ranks, trainer_ranks = layout
    world = world_of(engine_ranks, trainer_ranks)
    check_lines(world, engine_ranks, trainer_ranks)
    check_dense(world)
