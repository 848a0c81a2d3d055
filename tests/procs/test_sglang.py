"""SGLang's own model classes, updated by a real Megatron training through SGLang's own weight updater.

The judge is a second instance that went through SGLang's own `load_weights` of the trainer's HF checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from awex_delta.engines.sglang_loader import Instruction, attached, message
from awex_delta.rendezvous import Rendezvous, host_store
from awex_delta.sender import Sender
from awex_delta.testing import sglang_cpu
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer
from awex_delta.types import DeltaSettings, UpdateStats

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sglang_cpu.sglang_found(), reason="SGLang is not installed: make install-sglang"),
]

SETTINGS = DeltaSettings(anchor_interval=3, timeout_seconds=60, connect_timeout_seconds=60)
NUM_VERSIONS = 6
KINDS = ["full", "delta", "delta", "delta", "full", "delta"]
QWEN3 = TinySpec(vocab_size=130)
MOE = TinySpec(model="qwen3-moe", vocab_size=130)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trainer of one tensor-parallel rank and an engine of `tp` ranks."""

    spec: TinySpec
    num_trainers: int
    tp: int
    ep: int = 1


def work(me: Rank, case: Case) -> Any:
    store = None
    if me.rank == case.tp:
        store = host_store()
        (me.folder / "port.tmp").write_text(str(store.port))
        (me.folder / "port.tmp").rename(me.folder / "port")
    while not (me.folder / "port").exists():
        time.sleep(0.05)
    port = int((me.folder / "port").read_text())
    outcome = serve(me, case, port) if me.rank < case.tp else train(me, case, port)
    del store
    return outcome


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
        checkpoint = {
            name: tensor.detach().clone()
            for info in view.weights()
            for name, tensor in view.convert(info.key, view.tensor(info.key))
        }
        save_file(checkpoint, me.folder / f"checkpoint-{version}-{rank}.safetensors")
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
        asked = instruction(port, num_engine_ranks=case.tp, num_trainer_ranks=case.num_trainers)
        answer = scheduler.update_weights_from_tensor(
            message(replace(asked, action="update", version=version)), case.tp
        )
        assert (answer.success, answer.message) == (True, "Success")
        outcome = held(model).outcome
        assert isinstance(outcome, UpdateStats), outcome
        assert outcome.version == held(model).receiver.version == version
        assert held(model).receiver.ready
        kinds.append(outcome.verdict.kind.value)
        assert before != bits(model)
        fresh = sglang_cpu.build(config, fp32_router=case.spec.fp32_router)
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


def instruction(port: int, **fields: Any) -> Instruction:
    facts = {"num_engine_ranks": 1, "num_trainer_ranks": 1, **fields}
    return Instruction(
        action="connect",
        engine="sglang",
        first_engine_rank=0,
        host="127.0.0.1",
        port=port,
        settings=SETTINGS,
        **facts,
    )


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
