"""SGLang's own model classes, updated by a real Megatron training through SGLang's own weight updater.

The judge is a second instance that went through SGLang's own `load_weights` of the trainer's HF checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from awex_delta.engines.sglang.loader import attached, load, message
from awex_delta.errors import LayoutError, UpdateAborted
from awex_delta.protocol.rendezvous import Joining, Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer
from tests import sglang_cpu

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sglang_cpu.sglang_found(), reason="SGLang is not installed: make sglang"),
]

# To import SGLang takes long, most of all in several processes of a busy machine, while the trainers wait.
SETTINGS = DeltaSettings(anchor_interval=3, timeout_seconds=120, connect_timeout_seconds=240)
NUM_VERSIONS = 6
KINDS = ["full", "delta", "delta", "delta", "full", "delta"]
QWEN3 = TinySpec(vocab_size=130, lr=3e-6)
MOE = TinySpec(model="qwen3-moe", vocab_size=130, lr=3e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trainer of one tensor-parallel rank and an engine of `tp` ranks."""

    spec: TinySpec
    num_trainers: int
    tp: int
    ep: int = 1


@contextmanager
def meeting(me: Rank, host: int) -> Iterator[int]:
    """The port of a store that the rank `host` opens."""
    store = host_store() if me.rank == host else None
    if store is not None:
        (me.folder / "port.tmp").write_text(str(store.port))
        (me.folder / "port.tmp").rename(me.folder / "port")
    while not (me.folder / "port").exists():
        time.sleep(0.05)
    yield int((me.folder / "port").read_text())
    del store


def work(me: Rank, case: Case) -> list[str]:
    with meeting(me, case.tp) as port:
        return serve(me, case, port) if me.rank < case.tp else train(me, case, port)


def train(me: Rank, case: Case, port: int) -> list[str]:
    """Six steps, each followed by an HF checkpoint and an update. The kinds of the updates."""
    rank = me.rank - case.tp
    me.init_gloo(rank=rank, world_size=case.num_trainers)
    tiny = build_trainer(case.spec)
    view = MegatronTrainer.attach(
        tiny.chunks,
        tiny.optimizer,
        tiny.hf_config,
        settings=SETTINGS,
        router_dtype="fp32" if case.spec.fp32_router else "bf16",
    )
    rendezvous = Rendezvous(num_engine_ranks=case.tp, num_trainer_ranks=case.num_trainers, port=port)
    sender = Sender(view, rendezvous, rank, SETTINGS)
    sender.connect()
    kinds = []
    for version in range(NUM_VERSIONS):
        tiny.train_step()
        write_checkpoint(me, view, version)
        kinds.append(sender.update_weights(version).verdict.kind.value)
    return kinds


def serve(me: Rank, case: Case, port: int) -> list[str]:
    config = hf_config(case.spec)
    sglang_cpu.start(me, config, tp=case.tp, ep=case.ep, rank=me.rank)
    model = sglang_cpu.build(config, fp32_router=case.spec.fp32_router)
    scheduler = sglang_cpu.Scheduler(model, lambda: held(model).view.version, me.rank)
    places = {name: param.data_ptr() for name, param in model.named_parameters()}
    kinds = []
    for version in range(NUM_VERSIONS):
        before = bits(model)
        pairing = joining(port, num_engine_ranks=case.tp, num_trainer_ranks=case.num_trainers)
        answer = scheduler.update_weights_from_tensor(message("update", pairing, version=version), case.tp)
        assert (answer.success, answer.message) == (True, "Success")
        outcome = held(model).outcome
        assert isinstance(outcome, UpdateStats), outcome
        assert outcome.version == held(model).receiver.version == version
        assert held(model).receiver.ready
        kinds.append(outcome.verdict.kind.value)
        assert before != bits(model)
        fresh: Any = sglang_cpu.build(config, fp32_router=case.spec.fp32_router)
        fresh.load_weights(list(read_checkpoint(me, version).items()))
        assert sglang_cpu.differing(model, fresh) == [], version
    assert places == {name: param.data_ptr() for name, param in model.named_parameters()}
    # Once an update, and only after its commit.
    assert scheduler.flushes == list(range(NUM_VERSIONS))
    return kinds


def held(model: nn.Module) -> Any:
    found = attached(model)
    assert found is not None
    return found


def bits(model: nn.Module) -> dict[str, int]:
    return {
        name: int(param.data.contiguous().view(torch.uint8).long().sum())
        for name, param in model.named_parameters()
    }


def joining(port: int, num_engine_ranks: int = 1, num_trainer_ranks: int = 1) -> Joining:
    meeting = Rendezvous(port=port, num_engine_ranks=num_engine_ranks, num_trainer_ranks=num_trainer_ranks)
    return Joining(rendezvous=meeting, settings=SETTINGS, engine="sglang")


def write_checkpoint(me: Rank, view: MegatronTrainer, version: int) -> None:
    """What this trainer rank holds of the HF model; its tensors are whole, as tensor parallelism is 1."""
    checkpoint = {
        name: tensor.detach().clone()
        for info in view.weights()
        for name, tensor in view.convert(info.key, view.tensor(info.key))
    }
    save_file(checkpoint, me.folder / f"checkpoint-{version}-{me.rank}.safetensors")


def read_checkpoint(me: Rank, version: int) -> dict[str, torch.Tensor]:
    files = sorted(me.folder.glob(f"checkpoint-{version}-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(spec=QWEN3, num_trainers=1, tp=1), id="qwen3-tp1"),
        pytest.param(
            Case(spec=replace(QWEN3, kv_heads=1, tied=True), num_trainers=2, tp=2),
            id="qwen3-tp2-one-kv-head-tied",
        ),
        pytest.param(Case(spec=MOE, num_trainers=1, tp=1), id="qwen3-moe-tp1"),
        pytest.param(Case(spec=replace(MOE, ep=2), num_trainers=2, tp=2), id="qwen3-moe-tp2"),
        pytest.param(
            Case(spec=replace(MOE, fp32_router=True), num_trainers=2, tp=2, ep=2),
            id="qwen3-moe-ep2-fp32-router",
        ),
    ],
)
def test_every_version_is_what_sglang_loads_from_the_checkpoint(case: Case) -> None:
    outcomes = run_ranks(work, case.tp + case.num_trainers, case, timeout_seconds=280)
    assert outcomes == [KINDS] * (case.tp + case.num_trainers)


def fail_and_recover(me: Rank) -> list[str]:
    """By request, what became of it: on the engine's side the outcome, on the trainer's what was raised."""
    case = Case(spec=QWEN3, num_trainers=1, tp=1)
    with meeting(me, 1) as port:
        return fail_on_engine(me, case, port) if me.rank == 0 else fail_on_trainer(me, case, port)


def fail_on_trainer(me: Rank, case: Case, port: int) -> list[str]:
    me.init_gloo(rank=0, world_size=1)
    tiny = build_trainer(case.spec)
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=SETTINGS)
    sender = Sender(view, Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port), 0, SETTINGS)
    seen = []
    for version in range(6):
        tiny.train_step()
        write_checkpoint(me, view, version)
        try:
            seen.append(str(sender.update_weights(version).verdict))
        except (UpdateAborted, LayoutError) as error:
            seen.append(str(error))
    return seen


def fail_on_engine(me: Rank, case: Case, port: int) -> list[str]:
    config = hf_config(case.spec)
    sglang_cpu.start(me, config)
    model: Any = sglang_cpu.build(config)
    pairing = joining(port)
    scheduler = sglang_cpu.Scheduler(model, lambda: held(model).view.version)

    def update(version: int) -> str:
        scheduler.update_weights_from_tensor(message("update", pairing, version=version))
        outcome = held(model).outcome
        if isinstance(outcome, UpdateStats):
            fresh: Any = sglang_cpu.build(config)
            fresh.load_weights(list(read_checkpoint(me, version).items()))
            assert sglang_cpu.differing(model, fresh) == [], version
            return str(outcome.verdict)
        return str(outcome)

    seen = [update(0)]
    # Weights that SGLang has moved are written where they are now.
    norm = model.model.norm.weight
    norm.data = torch.zeros_like(norm)
    seen.append(update(1))

    # A weight that SGLang has cast: every rank gives the update up, and nothing was written.
    norm.data = norm.data.float()
    before = bits(model)
    seen.append(update(2))
    assert bits(model) == before
    assert not held(model).receiver.ready

    # Connected anew, the views are of the storage that is there now.
    norm.data = norm.data.bfloat16()
    load(model, message("disconnect", pairing))
    assert attached(model) is None
    seen.append(update(3))

    # A failure after the first write: SGLang must not go on serving a mixture.
    view = held(model).view
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "synchronize", lambda: 1 / 0)
        with pytest.raises(UpdateAborted) as caught:
            update(4)
    seen.append(str(caught.value))
    assert held(model).receiver.dirty
    scheduler = sglang_cpu.Scheduler(model, lambda: view.version)
    seen.append(update(5))
    assert scheduler.flushes == [5]

    # Another pairing must not be taken for this one, nor a draft model for the target.
    another = replace(pairing.rendezvous, name="another")
    load(model, message("connect", pairing.model_copy(update={"rendezvous": another})))
    assert "disconnect before" in str(held(model).outcome)
    draft = sglang_cpu.build(config)
    load(draft, message("connect", pairing))
    assert attached(draft) is None
    return seen


def test_a_failure_is_known_on_both_sides_and_the_next_update_repairs_it() -> None:
    engine, trainer = run_ranks(fail_and_recover, 2, timeout_seconds=280)
    assert engine == trainer
    assert [text.startswith("full, ") for text in engine] == [True, True, False, True, False, True]
    assert Reason.ENGINE_MOVED.text in engine[1]
    assert "model.norm.weight" in engine[1]
    assert "model.norm.weight: the trainer sends bfloat16, engine 'sglang' serves float32" in engine[2]
    assert "ZeroDivisionError" in engine[4]
