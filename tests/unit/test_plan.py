"""Lines of pairs, and AWEX's plan rank by rank, where every element has a number of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from awex.transfer.transfer_plan import TransferPlanBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_delta.errors import ConnectError, LayoutError, OwnershipError
from awex_delta.lines.boxes import BoxMap
from awex_delta.plan.describe import EngineColumns, TrainerColumns
from awex_delta.plan.rank import plan_rank
from awex_delta.plan.shards import TrainingSide, _inference_meta, copies_of
from awex_delta.plan.world import World, make_world
from tests.unit.worlds import EMBED, HEAD, NORM, Model, Rank, engines, numbered, trainers, world_of

MODEL = Model()

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
    """AWEX's plan of the whole world, by pair, from the one copy of each tensor that its name chooses."""
    names = {engine.layout.names[place] for engine in world.engines for place in engine.layout.stored()}
    side, copies = TrainingSide(world.trainers, names), copies_of(world.engines, names)
    metas = [_inference_meta(world.engines, copies[name], name, len(world.engines)) for name in sorted(names)]
    sources = [
        replace(meta, replicas=[meta.replicas[zlib.crc32(meta.name.encode()) % len(meta.replicas)]])
        for meta in side.metas
    ]
    builder = TransferPlanBuilder(len(world.engines), len(world.trainers), 1)
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for op in builder.build_weights_mapping_operations(metas, sources):
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


@pytest.mark.parametrize("head", ["own", "alias", "none"])
@pytest.mark.parametrize("pp", [1, 2])
def test_stages_and_tied_heads(pp: int, head: str) -> None:
    model = Model(tied=True)
    trainer_ranks = trainers(model, tp=2, dp=2, pp=pp, whole=[NORM0], uneven=True)
    engine_ranks = engines(model, tp=2, head=head)
    world = world_of(engine_ranks, trainer_ranks)
    check_lines(world, engine_ranks, trainer_ranks)
    check_dense(world)
    names = {name for rank in trainer_ranks for name in rank.spec.layout.names}
    assert names == set(model.shapes())
    carried = {
        op.send_shard_meta.name
        for seat in range(2)
        for ops in plan_rank(world, seat).dense.operations.values()
        for op in ops
    }
    assert carried == names - ({HEAD} if head != "own" else set())


def test_a_full_sync_sends_every_element_once() -> None:
    engine_ranks, trainer_ranks = engines(MODEL, tp=2), trainers(MODEL, tp=2, dp=2)
    world = world_of(engine_ranks, trainer_ranks)
    held = [2 * rank.numbers["line"].size for rank in engine_ranks]
    assert [plan_rank(world, seat).dense_bytes for seat in range(2)] == held
    assert sum(plan_rank(world, seat).dense_bytes for seat in range(2, 6)) == sum(held)


def test_the_digest_of_a_line_depends_on_its_layout_alone() -> None:
    trainer_ranks = trainers(MODEL, dp=2)

    def digests(engine_ranks: list[Rank]) -> list[list[int]]:
        world = world_of(engine_ranks, trainer_ranks)
        plans = [plan_rank(world, seat) for seat in range(len(engine_ranks))]
        return [[pair.digest for pair in plan.pairs.values()] for plan in plans]

    one, other = digests([*engines(MODEL), *engines(MODEL, first=1)])
    assert one == other, "replicas have equal lines"
    (first, second), (third, fourth) = digests(engines(MODEL, tp=2))
    assert len({*one, first, second, third, fourth}) == 6


def test_lines_of_several_dtypes_whatever_the_order_of_the_engine() -> None:
    def world(reverse: bool) -> tuple[list[Rank], list[Rank]]:
        (engine,), trainer_ranks = engines(MODEL), trainers(MODEL, dp=2, whole=[NORM, GATE0])
        for rank in (engine, *trainer_ranks):
            names = rank.spec.layout.names
            dtypes = ["float32" if name in (NORM, GATE0) else "bfloat16" for name in names]
            rank.spec = replace(rank.spec, layout=replace(rank.spec.layout, dtypes=tuple(dtypes)))
        if reverse:
            columns = ("names", "dtypes", "shapes", "global_shapes", "global_offsets", "tied_to")
            turned = {name: getattr(engine.spec.layout, name)[::-1] for name in columns}
            engine.spec = replace(engine.spec, layout=EngineColumns(**turned))
            values = numbered(MODEL)
            line = np.concatenate([values[name].reshape(-1) for name in engine.spec.layout.names])
            engine.numbers["line"] = line
        return [engine], trainer_ranks

    for reverse in (False, True):
        engine_ranks, trainer_ranks = world(reverse)
        whole = world_of(engine_ranks, trainer_ranks)
        check_lines(whole, engine_ranks, trainer_ranks)
        pairs = plan_rank(whole, 0).pairs
        sources = {(1 + zlib.crc32(name.encode()) % 2, torch.float32) for name in (NORM, GATE0)}
        assert set(pairs) == {(1, torch.bfloat16), (2, torch.bfloat16)} | sources
        lines = [pairs[source] for source in sources]
        assert sum(line.whole for line in lines) == sum(line.numel for line in lines) == 6 + 4 * 6


def edited(rank: Rank, name: str, **change: Any) -> Rank:
    """An engine rank that says something else of one tensor."""
    layout: EngineColumns = rank.spec.layout
    place = layout.places[name]
    return Rank(spec=replace(rank.spec, layout=changed(layout, place, change)), numbers=rank.numbers)


def changed(layout: Any, place: int, change: dict[str, Any]) -> Any:
    """A layout with other entries at one place of its columns."""
    columns = {key: list(getattr(layout, key)) for key in change}
    for key, value in change.items():
        columns[key][place] = value
    return replace(layout, **{key: tuple(column) for key, column in columns.items()})


def owning(rank: Rank, key: str, owned: tuple[int, int] | None = None, owners: Any = None) -> Rank:
    """A trainer rank that says something else of whom a parameter belongs to."""
    place = rank.spec.layout.keys.index(f"0/{key}")
    ranges, groups = rank.spec.owned.copy(), list(rank.spec.owners)
    if owned is not None:
        ranges[:, place] = owned
    if owners is not None:
        groups[place] = owners
    return Rank(spec=replace(rank.spec, owned=ranges, owners=tuple(groups)), numbers=rank.numbers)


def outputs(rank: Rank, name: str, **change: Any) -> Rank:
    """A trainer rank that says something else of one HF tensor."""
    layout: TrainerColumns = rank.spec.layout
    place = layout.names.index(name)
    return Rank(spec=replace(rank.spec, layout=changed(layout, place, change)), numbers=rank.numbers)


def refusal(engine_ranks: list[Rank], trainer_ranks: list[Rank], kind: type[ConnectError]) -> str:
    """What the first rank says that cannot plan; trainers are asked first."""
    num_engines, num_trainers = len(engine_ranks), len(trainer_ranks)

    def plan_all() -> None:
        world = world_of(engine_ranks, trainer_ranks)
        for seat in (*range(num_engines, num_engines + num_trainers), *range(num_engines)):
            plan_rank(world, seat)

    with pytest.raises(kind) as caught:
        plan_all()
    assert type(caught.value) is kind
    return str(caught.value)


# Of 11 x 6 elements and one row of padding, the first of two owners has [0, 36) and the second [36, 72).
@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (
            1,
            {"owned": (37, 72)},
            "nobody owns elements [36, 37) of 72 (beside the shards of trainer ranks [0, 1])",
        ),
        (
            1,
            {"owned": (35, 72)},
            "two ranks own elements [35, 36) of 72 (beside the shards of trainer ranks [0, 1])",
        ),
        (
            1,
            {"owned": (36, 71)},
            "nobody owns elements [71, 72) of 72 (beside the shards of trainer ranks [1])",
        ),
        (1, {"owned": (36, 73)}, "two ranks own elements [72, 73) of 72"),
        (0, {"owned": (1, 36)}, "nobody owns elements [0, 1) of 72 (beside the shards of trainer ranks [0])"),
        (0, {"owned": (-1, 36)}, "two ranks own elements [-1, 0) of 72"),
        (1, {"owned": (0, 0)}, "nobody owns elements [36, 72) of 72"),
        (0, {"owners": (1,)}, "trainer rank 0 is not among its own owners (1,)"),
        (0, {"owners": (0, 1, 7)}, "rank 1 does not hold the same parameter with the same owners"),
        (0, {"owners": (0, 7)}, "rank 7 does not hold the same parameter"),
        (0, {"owners": (0, 0)}, "two ranks own elements"),
    ],
)
def test_a_hole_an_overlap_and_a_stranger_are_named(rank: int, change: dict[str, Any], message: str) -> None:
    trainer_ranks = trainers(MODEL, dp=2)
    trainer_ranks[rank] = owning(trainer_ranks[rank], EMBED, **change)
    said = refusal(engines(MODEL), trainer_ranks, OwnershipError)
    assert said.startswith(f"0/{EMBED}: ")
    assert message in said


def test_an_owner_that_holds_another_size_is_named() -> None:
    trainer_ranks = trainers(MODEL, dp=2)
    layout = trainer_ranks[1].spec.layout
    numels = layout.numels.copy()
    numels[0] += 6
    trainer_ranks[1].spec = replace(trainer_ranks[1].spec, layout=replace(layout, numels=numels))
    said = refusal(engines(MODEL), trainer_ranks, OwnershipError)
    assert f"0/{EMBED}: trainer rank 0 shares it with ranks (0, 1), but rank 1 does not hold" in said


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            EMBED,
            {"names": "model.norm2.weight"},
            f"tensors: only the trainer has [{EMBED}]; only the engine has [model.norm2.weight]",
        ),
        (
            EMBED,
            {"global_shapes": (20, 6), "shapes": (20, 6)},
            "the trainer holds shape [11, 6], engine 'engine0' [20, 6]",
        ),
        (Q0, {"dtypes": "float32"}, "the trainer sends bfloat16, engine 'engine0' serves float32"),
        (
            Q0,
            {"dtypes": "float8_e4m3fn"},
            f"engine 'engine0' (rank 0) holds {Q0} as float8_e4m3fn: quantised",
        ),
        (Q0, {"dtypes": "int8"}, f"engine 'engine0' (rank 0) holds {Q0} as int8: quantised"),
        (Q0, {"shapes": (4, 6)}, "the ranks of engine 'engine0' hold 24 of its 72 elements"),
        (Q0, {"global_offsets": (1, 0)}, "lies outside [12, 6] (engine 'engine0', rank 0)"),
        (Q0, {"global_offsets": (0,)}, "lies outside [12, 6] (engine 'engine0', rank 0)"),
        (
            NORM,
            {"shapes": (), "global_shapes": (), "global_offsets": ()},
            f"{NORM} is a scalar (engine 'engine0')",
        ),
        (
            HEAD,
            {"tied_to": EMBED},
            f"engine 'engine0' ties it to {EMBED}, but the trainer trains the two apart",
        ),
    ],
)
def test_what_does_not_fit_names_both_sides(name: str, change: dict[str, Any], message: str) -> None:
    said = refusal([edited(engines(MODEL)[0], name, **change)], trainers(MODEL), LayoutError)
    assert message in said
    assert name in said


def test_an_alias_of_something_else_than_the_embedding_is_refused() -> None:
    model = Model(tied=True)
    engine_ranks = [edited(engines(model)[0], NORM, tied_to=EMBED)]
    assert f"{NORM}: engine 'engine0' ties it to {EMBED}" in refusal(
        engine_ranks, trainers(model), LayoutError
    )


def test_a_tensor_that_no_rank_of_an_engine_holds_is_named() -> None:
    trainer_ranks = trainers(MODEL)
    said = refusal(engines(MODEL, head="none"), trainer_ranks, LayoutError)
    assert f"only the trainer has [{HEAD}]: the engine ties it" in said


@pytest.mark.parametrize(
    "change", [{"dtypes": "float32"}, {"global_shapes": (13, 6)}, {"global_shapes": (12, 7)}]
)
def test_ranks_of_an_engine_that_disagree_are_refused(change: dict[str, Any]) -> None:
    first, second = engines(MODEL, tp=2)
    trainer_ranks = trainers(MODEL)
    said = refusal([first, edited(second, Q0, **change)], trainer_ranks, LayoutError)
    assert Q0 in said
    assert "engine 'engine0'" in said


def test_a_part_that_two_ranks_of_an_engine_hold_leaves_another_one_open() -> None:
    first, second = engines(MODEL, tp=2)
    again = edited(second, Q0, global_offsets=first.spec.layout.global_offsets[first.spec.layout.places[Q0]])
    said = refusal([first, again], trainers(MODEL), LayoutError)
    assert f"{Q0}: the ranks of engine 'engine0' hold 36 of its 72 elements" in said


def test_an_empty_part_hides_none_that_begins_at_the_same_place() -> None:
    first, second = engines(MODEL, tp=2)
    layout = second.spec.layout
    start = sum(np.prod(shape, dtype=int) for shape in layout.shapes[: layout.places[Q0]])
    rest = np.delete(second.numbers["line"], slice(start, start + 36))
    third = Rank(spec=replace(second.spec, rank=2), numbers={"line": rest})
    engine_ranks, trainer_ranks = [first, second, edited(third, Q0, shapes=(0, 6))], trainers(MODEL, dp=2)
    check_lines(world_of(engine_ranks, trainer_ranks), engine_ranks, trainer_ranks)


def test_trainers_that_hold_a_tensor_in_different_dtypes_are_refused() -> None:
    first, second = trainers(MODEL, dp=2)
    said = refusal(engines(MODEL), [first, outputs(second, Q0, dtypes="float32")], LayoutError)
    assert f"{Q0}: trainer ranks hold it as bfloat16 and float32" in said


def test_two_parameters_that_become_one_tensor_are_refused() -> None:
    said = refusal(engines(MODEL), [outputs(trainers(MODEL)[0], HEAD, names=EMBED)], LayoutError)
    assert f"{EMBED}: trainer rank 0 converts two parameters to it" in said


def test_a_part_that_no_run_reaches_is_found_by_the_engine() -> None:
    """A relocation that forgets elements: the dense plan is whole, and deltas would never send them."""
    trainer_ranks = trainers(MODEL, dp=2)
    for rank in trainer_ranks:
        layout = rank.spec.layout
        runs = layout.runs[:, ~((layout.runs[0] == layout.names.index(Q0)) & (layout.runs[2] == 0))]
        rank.spec = replace(rank.spec, layout=replace(layout, runs=runs))
    said = refusal(engines(MODEL), trainer_ranks, LayoutError)
    assert f"{Q0}: engine 'engine0' (rank 0) holds 72 elements (global shape [12, 6])" in said
    assert "the trainer's owners send 36 of them" in said


def test_a_tensor_that_a_stage_forgot_is_named_with_what_is_covered() -> None:
    first, second = trainers(MODEL, tp=2)
    short = outputs(second, Q0, names="model.other.weight")
    said = refusal(engines(MODEL), [first, short], LayoutError)
    assert "only the trainer has [model.other.weight]" in said


@pytest.mark.parametrize(
    ("specs", "num_engines", "message"),
    [
        (lambda e, t: [t, e], 1, "sit on each other's seats"),
        (lambda e, t: [e, e], 1, "sit on each other's seats"),
        (lambda e, t: [e, t], 2, "sit on each other's seats"),
        (lambda e, t: [replace(e, rank=1), t], 1, r"engine ranks are \[1\], expected 0..0, each once"),
        (lambda e, t: [e, replace(t, rank=1)], 1, r"trainer ranks are \[1\], expected 0..0, each once"),
        (lambda e, t: [e, t, t], 1, r"trainer ranks are \[0, 0\], expected 0..1, each once"),
        (
            lambda e, t: [e, replace(t, agreed={"protocol": 2})],
            1,
            "protocol: trainer rank 0 has 2, engine rank 0 has None",
        ),
        (
            lambda e, t: [replace(e, agreed={"verify": "off"}), t],
            1,
            "verify: trainer rank 0 has None, engine rank 0 has 'off'",
        ),
        (
            lambda e, t: [e, t, replace(t, rank=1, architecture="LlamaForCausalLM")],
            1,
            "trainer rank 1 trains LlamaForCausalLM, rank 0 Qwen3MoeForCausalLM",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(
    specs: Callable[[Any, Any], list[Any]], num_engines: int, message: str
) -> None:
    with pytest.raises(ConnectError, match=message):
        make_world(specs(engines(MODEL)[0].spec, trainers(MODEL)[0].spec), num_engines)
