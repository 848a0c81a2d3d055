"""Trainings under FSDP2, each rank a process: engines hold what FSDP would gather, yet none gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from awex_delta.engines.transformers import TransformersEngine
from awex_delta.engines.view import EngineView
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.procs import Rank, run_ranks
from tests.procs.fsdp_training import FsdpSpec, State, hf_config, start

pytestmark = pytest.mark.timeout(240)

NUM_VERSIONS = 8
SETTINGS = DeltaSettings(anchor_interval=3, verify="full", allow_any_world_size=True)
NUM_ENGINES = 3
"""A transformers model, and an engine that cuts tensors over two ranks."""


class CountGathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on the process groups that torch knows, which are those of the training."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.ScriptObject)]
            self.num_calls += any(map(_is_registered, groups))
        self.num_calls += func.namespace == "_c10d_functional"
        return func(*args, **(kwargs or {}))


def _is_registered(group: Any) -> bool:
    try:
        return dist.ProcessGroup.unbox(group) in dist.distributed_c10d._world.pg_map
    except RuntimeError:  # another kind of object
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One version, as a trainer rank saw it. truth: of trainer rank 0 alone."""

    truth: State
    stats: UpdateStats
    num_gathers: int


def follow(me: Rank, spec: FsdpSpec, settings: DeltaSettings, port: int) -> list[Any]:
    """Engine ranks: their weights after each version. Trainer ranks: what was sent."""
    meeting = Rendezvous(num_engine_ranks=NUM_ENGINES, num_trainer_ranks=spec.num_ranks, port=port)
    if me.rank < NUM_ENGINES:
        return serve(me, spec, settings, meeting)
    training = start(me, spec, NUM_ENGINES)
    view = training.attach(settings)
    sender = Sender(view, meeting, me.rank - NUM_ENGINES, settings)
    sent = list[Sent]()
    for version in range(NUM_VERSIONS):
        training.train_step()
        with CountGathers() as count:
            stats = sender.update_weights(version)
        whole = training.truth()
        sent.append(
            Sent(truth=whole if me.rank == NUM_ENGINES else {}, stats=stats, num_gathers=count.num_calls)
        )
    sender.close()
    return sent


def serve(me: Rank, spec: FsdpSpec, settings: DeltaSettings, meeting: Rendezvous) -> list[State]:
    create: Any = AutoModelForCausalLM
    model = create.from_config(hf_config(spec), dtype=torch.bfloat16)
    view: EngineView = TransformersEngine(model)
    live: Mapping[str, torch.Tensor] = model.state_dict()
    if me.rank:
        whole = {one.name: one.global_shape for one in view.tensors() if not one.tied_to}
        engine = DictEngine(whole, cut=cuts(whole), rank=me.rank - 1, num_ranks=2)
        view, live = engine, engine.tensors_by_name
    receiver = Receiver(view, meeting, me.rank, "cut" if me.rank else "whole", settings)
    held = []
    for version in range(NUM_VERSIONS):
        receiver.update_weights(version)
        held.append({name: tensor.clone() for name, tensor in live.items()})
    receiver.close()
    return held


def cuts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Columns of some tensors, rows of others, as engines cut them; norms are whole on each rank."""
    return {
        name: 1 if "o_proj" in name or "down_proj" in name else 0
        for name, shape in shapes.items()
        if len(shape) == 2 and shape[0] % 2 == 0
    }


def wrong(truth: State, held: Mapping[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, tensor in held.items()
        if tensor.dtype is not truth[name].dtype or not bits(tensor).equal(bits(truth[name]))
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def by_expert(truth: State) -> State:
    """The names of checkpoints, for what transformers keeps of all experts together."""
    found = dict(truth)
    for name, tensor in truth.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj" and tensor.dim() == 3:
            for number, expert in enumerate(tensor):
                half = expert.shape[0] // 2
                found[f"{prefix}.{number}.gate_proj.weight"] = expert[:half]
                found[f"{prefix}.{number}.up_proj.weight"] = expert[half:]
        elif kind == "down_proj" and tensor.dim() == 3:
            found |= {f"{prefix}.{n}.down_proj.weight": expert for n, expert in enumerate(tensor)}
    return found


def halved(whole: State, rank: int) -> State:
    dims = cuts({name: tuple(tensor.shape) for name, tensor in whole.items()})
    return {n: t.chunk(2, dims[n])[rank] if n in dims else t for n, t in whole.items()}


def check_versions(spec: FsdpSpec, settings: DeltaSettings) -> list[list[Sent]]:
    store = host_store()
    ranks = run_ranks(follow, NUM_ENGINES + spec.num_ranks, spec, settings, store.port, timeout_seconds=200)
    engines, trainers = ranks[:NUM_ENGINES], ranks[NUM_ENGINES:]
    before: State = {}
    for version, sent in enumerate(trainers[0]):
        truth = dict(sent.truth)
        if spec.tied:
            truth["lm_head.weight"] = truth["model.embed_tokens.weight"]
        assert wrong(truth, engines[0][version]) == [], version
        whole = by_expert(truth)
        for rank in range(2):
            assert wrong(halved(whole, rank), engines[1 + rank][version]) == [], (version, rank)
        assert sent.stats.verified == "full"
        assert not any(one[version].num_gathers for one in trainers), "each rank sends its own part"
        if before:
            assert any(not bits(before[n]).equal(bits(truth[n])) for n in truth), (
                "each step changes something"
            )
        before = truth
    return trainers


def kinds(sent: Sequence[Sent]) -> list[Kind]:
    return [one.stats.verdict.kind for one in sent]


F, D = Kind.FULL, Kind.DELTA
HSDP = FsdpSpec(mesh=(2, 2), tied=True, wrapped="none")
MANY = FsdpSpec(mesh=(4,), vocab_size=3, wrapped="pair", reshard=False, layers=1)


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        pytest.param(FsdpSpec(layers=1), "adamw", id="uneven rows on two ranks"),
        pytest.param(replace(HSDP, layers=1), "capture", id="two replicas of two shards, tied"),
        pytest.param(MANY, "adamw", id="four ranks and three rows", marks=pytest.mark.all),
        pytest.param(HSDP, "adamw", id="replicas, inverted", marks=pytest.mark.all),
        pytest.param(
            FsdpSpec(frozen="model.embed", layers=1), "snapshot", id="frozen embedding", marks=pytest.mark.all
        ),
        pytest.param(FsdpSpec(mesh=(4,), experts=6, layers=1), "adamw", id="experts", marks=pytest.mark.all),
        pytest.param(
            FsdpSpec(mesh=(2, 2), tensor=True), "adamw", id="tensor parallelism", marks=pytest.mark.all
        ),
        pytest.param(FsdpSpec(columns=True), "adamw", id="columns", marks=pytest.mark.all),
        pytest.param(FsdpSpec(kind="momentum"), "capture", id="momentum", marks=pytest.mark.all),
        pytest.param(FsdpSpec(kind="fused"), "adamw", id="fused", marks=pytest.mark.all),
    ],
)
def test_engines_hold_every_version_bit_for_bit(spec: FsdpSpec, method: Any) -> None:
    trainers = check_versions(spec, replace(SETTINGS, method=method))
    for sent in trainers:
        assert kinds(sent) == [F, D, D, D, F, D, D, D]
        assert sent[4].stats.verdict.reason is Reason.ANCHOR_DUE
    stats = [sent[1].stats for sent in trainers]
    frozen = bool(spec.frozen)
    assert all(0 < one.total_wire_bytes < one.full_bytes / (1 if frozen else 2) for one in stats)


@pytest.mark.all
def test_bf16_parameters_without_masters() -> None:
    captured = check_versions(FsdpSpec(kind="bf16"), replace(SETTINGS, method="capture", anchor_interval=0))
    assert D in kinds(captured[0])
    inverted = check_versions(FsdpSpec(kind="bf16"), SETTINGS)
    assert {one.stats.verdict.reason for one in inverted[0][1:4]} == {Reason.NO_FP32_MASTER}
