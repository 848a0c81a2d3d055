"""The plan: AWEX's operations widened to the owners, against hand-made worlds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from awex_delta.errors import ConnectError, LayoutError, OwnershipError
from awex_delta.plan.describe import parse_world
from awex_delta.plan.pairs import Plan, build_plan

EMBED, Q_PROJ, O_PROJ, NORM = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.norm.weight",
)
GLOBAL = {EMBED: (16, 6), Q_PROJ: (8, 6), O_PROJ: (6, 8), NORM: (6,)}
DIM = {EMBED: 0, Q_PROJ: 0, O_PROJ: 1}


def rank_info(rank: int, tp: int, dp: int) -> dict[str, int | str | bool]:
    sizes = {"tp_size": tp, "pp_size": 1, "dp_size": dp, "ep_size": 1, "ep_tp_size": tp, "attn_tp_size": tp}
    ranks = {"tp_rank": rank % tp, "attn_tp_rank": rank % tp, "ep_tp_rank": rank % tp, "dp_rank": rank // tp}
    rest = {"pp_rank": 0, "ep_rank": 0, "attn_dp_rank": rank // tp, "local_rank": rank, "engine_rank": 0}
    return {**sizes, **ranks, **rest, "world_size": tp * dp, "global_rank": rank, "is_infer": False}


def cut(name: str, rank: int, size: int, dim: dict[str, int]) -> tuple[list[int], list[int]]:
    shape, offset = list(GLOBAL[name]), [0] * len(GLOBAL[name])
    if name in dim:
        shape[dim[name]] //= size
        offset[dim[name]] = rank % size * shape[dim[name]]
    return shape, offset


def trainer(rank: int, *, tp: int, dp: int) -> dict[str, Any]:
    params = []
    owners = [other for other in range(tp * dp) if other % tp == rank % tp]
    for name in GLOBAL:
        shape, _ = cut(name, rank, tp, DIM)
        numel, place = math.prod(shape), owners.index(rank)
        params.append(
            {
                "key": f"0/{name}",
                "numel": numel,
                "owners": owners,
                "owned_start": numel * place // dp,
                "owned_stop": numel * (place + 1) // dp,
                "outputs": [{"name": name, "shape": shape, "dtype": "bfloat16", "sparse": True}],
            }
        )
    return {
        "role": "trainer",
        "rank": rank,
        "run_id": "a" * 32,
        "agreed": {"protocol": 1},
        "architecture": "Qwen3ForCausalLM",
        "rank_info": rank_info(rank, tp, dp),
        "vocab_size": 16,
        "tied_embeddings": False,
        "params": params,
    }


def engine(rank: int, *, name: str = "e", tp: int = 1, place: int = 0) -> dict[str, Any]:
    tensors = []
    for tensor, whole in GLOBAL.items():
        shape, offset = cut(tensor, place, tp, DIM)
        tensors.append(
            {
                "name": tensor,
                "dtype": "bfloat16",
                "shape": shape,
                "global_shape": list(whole),
                "global_offset": offset,
                "tied_to": None,
            }
        )
    return {"role": "engine", "rank": rank, "engine": name, "agreed": {"protocol": 1}, "tensors": tensors}


def plan_of(engines: Sequence[dict[str, Any]], trainers: Sequence[dict[str, Any]]) -> Plan:
    return build_plan(parse_world([*engines, *trainers], len(engines)))


def ids(name: str) -> torch.Tensor:
    return torch.arange(math.prod(GLOBAL[name])).view(GLOBAL[name])


@pytest.mark.parametrize(
    ("tp", "dp", "infer"), [(2, 2, 2), (1, 2, 2), (2, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 4)]
)
def test_regions_carry_every_element_from_every_owner_to_every_engine(tp: int, dp: int, infer: int) -> None:
    engines = [engine(rank, tp=infer, place=rank) for rank in range(infer)]
    plan = plan_of(engines, [trainer(rank, tp=tp, dp=dp) for rank in range(tp * dp)])
    for name in GLOBAL:
        for receiver in range(infer):
            shape, offset = cut(name, receiver, infer, DIM)
            target = torch.zeros(shape, dtype=torch.int64) - 1
            times = torch.zeros(shape, dtype=torch.int64)
            for (sender, to, _), regions in plan.regions.items():
                for region in regions:
                    if to != receiver or region.name != name:
                        continue
                    have, start = cut(name, sender - infer, tp, DIM)
                    part = ids(name)[tuple(slice(a, a + n) for a, n in zip(start, have, strict=True))]
                    assert region.source_shape == tuple(have)
                    target[region.target.slices] = part[region.source.slices]
                    times[region.target.slices] += 1
            want = ids(name)[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
            assert torch.equal(target, want)
            assert torch.equal(times, torch.full(shape, dp)), "each owner of the sending shard, once"


def test_a_full_sync_sends_every_element_once() -> None:
    engines = [engine(rank, tp=2, place=rank) for rank in range(2)]
    plan = plan_of(engines, [trainer(rank, tp=2, dp=2) for rank in range(4)])
    elements = sum(math.prod(shape) for shape in GLOBAL.values()) + GLOBAL[NORM][0]
    assert plan.full_bytes == 2 * elements
    sent = [plan.dense_plan(seat, sending=True) for seat in range(2, 6)]
    got = [plan.dense_plan(seat, sending=False) for seat in range(2)]
    count = sum(math.prod(op.overlap_shape) for p in sent for ops in p.operations.values() for op in ops)
    assert count == elements
    assert count == sum(
        math.prod(op.overlap_shape) for p in got for ops in p.operations.values() for op in ops
    )


def test_the_digest_depends_on_the_plan_alone() -> None:
    trainers = [trainer(rank, tp=1, dp=2) for rank in range(2)]
    one = plan_of([engine(0, tp=2, place=0), engine(1, tp=2, place=1)], trainers)
    same = plan_of([engine(0, tp=2, place=0), engine(1, tp=2, place=1)], trainers)
    other = plan_of([engine(0, name="a"), engine(1, name="b")], trainers)
    assert one.digest == same.digest != other.digest


def test_replicated_kv_heads_all_receive() -> None:
    engines = [engine(rank, tp=2, place=rank // 2) for rank in range(4)]  # two ranks hold each half
    plan = plan_of(engines, [trainer(0, tp=1, dp=1)])
    for receiver in range(4):
        (region,) = [r for r in plan.between(4, receiver, torch.bfloat16) if r.name == Q_PROJ]
        assert region.source.start == ((receiver // 2) * 4, 0)


def test_dtypes_are_sorted_whatever_the_order_of_the_tensors() -> None:
    def world(order: list[str]) -> Plan:
        one, two = engine(0), trainer(0, tp=1, dp=1)
        for tensor in one["tensors"]:
            if tensor["name"] == NORM:
                tensor["dtype"] = "float32"
        for param in two["params"]:
            if param["key"].endswith(NORM):
                param["outputs"][0].update(dtype="float32", sparse=False)
                param.update(owners=[], owned_start=0, owned_stop=0)
        one["tensors"].sort(key=lambda t: order.index(t["name"]))
        return plan_of([one], [two])

    forward, backward = world(list(GLOBAL)), world(list(GLOBAL)[::-1])
    assert forward.dtypes == backward.dtypes == (torch.bfloat16, torch.float32)
    assert forward.digest == backward.digest


def test_a_hole_an_overlap_and_a_stranger_are_named() -> None:
    def broken(change: dict[str, Any], rank: int = 1) -> str:
        trainers = [trainer(r, tp=1, dp=2) for r in range(2)]
        trainers[rank]["params"][1].update(change)
        with pytest.raises(OwnershipError) as caught:
            plan_of([engine(0)], trainers)
        return str(caught.value)

    assert "nobody owns elements [24, 25) of 48" in broken({"owned_start": 25})
    assert "two ranks own elements [23, 24) of 48" in broken({"owned_start": 23})
    assert "nobody owns elements [47, 48) of 48" in broken({"owned_stop": 47})
    assert "nobody owns elements [0, 1) of 48" in broken({"owned_start": 1}, rank=0)
    assert "nobody owns elements [24, 48) of 48" in broken({"owned_start": 0, "owned_stop": 0})
    assert "not among its own owners" in broken({"owners": [1]}, rank=0)
    assert "does not hold the same parameter" in broken({"owners": [0, 1, 7]}, rank=0)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (
            0,
            {"name": "model.norm2.weight"},
            "only the trainer has [model.embed_tokens.weight]; only the engine has [model.norm2.weight]",
        ),
        (
            0,
            {"global_shape": [20, 6], "shape": [20, 6]},
            "the trainer holds shape [16, 6], engine 'e' [20, 6]",
        ),
        (1, {"dtype": "float32"}, "the trainer sends bfloat16, engine 'e' serves float32"),
        (1, {"dtype": "float8_e4m3fn"}, "as float8_e4m3fn: quantised"),
        (1, {"dtype": "int8"}, "as int8: quantised"),
        (1, {"shape": [4, 6]}, "hold 24 of its 48 elements"),
        (1, {"global_offset": [1, 0]}, "lies outside [8, 6]"),
        (1, {"global_offset": [0]}, "lies outside [8, 6]"),
        (3, {"shape": [], "global_shape": [], "global_offset": []}, "model.norm.weight is a scalar"),
    ],
)
def test_what_does_not_fit_names_both_sides(place: int, change: dict[str, Any], message: str) -> None:
    one = engine(0)
    one["tensors"][place].update(change)
    with pytest.raises(LayoutError) as caught:
        plan_of([one], [trainer(0, tp=1, dp=1)])
    assert message in str(caught.value)


HEAD = "lm_head.weight"


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_only_the_engine_ties_is_refused_because_it_would_never_be_sent(tied: bool) -> None:
    one, other = trainer(0, tp=1, dp=1), engine(0)
    embedding, head = one["params"][0], {"key": f"0/{HEAD}"}
    output = {**embedding["outputs"][0], "name": HEAD}
    one["params"].append({**embedding, **head, "outputs": [output]})
    one["tied_embeddings"] = tied
    other["tensors"].append({**other["tensors"][0], "name": HEAD, "tied_to": EMBED})
    if tied:  # a pipeline's last stage holds a copy of its own
        assert HEAD not in {op.send_shard_meta.name for op in plan_of([other], [one]).operations}
        return
    with pytest.raises(LayoutError, match=f"{HEAD}: engine 'e' ties it to {EMBED}"):
        plan_of([other], [one])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"role": "engine"}, trainer(0, tp=1, dp=1)], "seat 0 sent a malformed description"),
        ([trainer(0, tp=1, dp=1), engine(0)], "each other's seats"),
        ([engine(0), engine(1)], "each other's seats"),
        ([engine(1), trainer(0, tp=1, dp=1)], r"engine ranks are \[1\], expected 0..0"),
        (
            [engine(0), {**trainer(0, tp=1, dp=1), "agreed": {"protocol": 2}}],
            "protocol: trainer rank 0 has 2",
        ),
        ([engine(0), {**trainer(0, tp=1, dp=1), "surprise": 1}], "malformed"),
        ([engine(0), "text"], "malformed"),
    ],
)
def test_malformed_or_disagreeing_ranks_are_refused(values: list[Any], message: str) -> None:
    with pytest.raises(ConnectError, match=message):
        parse_world(values, 1)
