"""SGLang's own model classes and a whole vLLM follow a training under FSDP2.

The judge is what FSDP gathers: SGLang and vLLM load it as a checkpoint, and both sides are compared.
"""

from __future__ import annotations

import json
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from awex_delta.demo.members import tiny_spec
from awex_delta.engines.vllm.driver import init_info
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec
from awex_delta.testing.tiny_models import hf_config as config_of
from tests import sglang_cpu
from tests.procs.fsdp_training import FsdpSpec, FsdpTraining, State
from tests.procs.test_fsdp import by_expert
from tests.procs.test_sglang import KINDS, MOE, NUM_VERSIONS, QWEN3, Case, meeting, serve
from tests.procs.test_sglang import SETTINGS as SGLANG_SETTINGS
from tests.procs.test_vllm import STEPS, differing
from tests.procs.vllm_members import SETTINGS as VLLM_SETTINGS
from tests.procs.vllm_members import Members, VllmOptions, state_of
from tests.procs.vllm_training import config_only, plan_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.all]

SHARDED = FsdpSpec(mesh=(2,))


def publish(
    rank: int, spec: TinySpec, meeting: Rendezvous, settings: DeltaSettings, folder: Path, first: int
) -> list[str]:
    """Train, write what FSDP gathers as a checkpoint, and update; the kinds of the updates."""
    training = FsdpTraining(SHARDED, rank, config_of(spec))
    sender = Sender(training.attach(settings), meeting, rank, settings)
    sender.connect()
    kinds = []
    for version in range(first, first + NUM_VERSIONS):
        training.train_step()
        state = checkpoint(training, tied=spec.tied)
        if rank == 0:
            save_file(state, folder / f"checkpoint-{version}-0.safetensors", {"format": "pt"})
        kinds.append(sender.update_weights(version).verdict.kind.value)
    sender.close()
    return kinds


def checkpoint(training: FsdpTraining, *, tied: bool) -> State:
    found = {n: t.contiguous() for n, t in by_expert(training.truth()).items() if t.dim() < 3}
    return found | ({"lm_head.weight": found["model.embed_tokens.weight"].clone()} if tied else {})


def sglang(me: Rank, case: Case) -> list[str]:
    with meeting(me, case.tp) as port:
        if me.rank < case.tp:
            return serve(me, case, port)
        rank = me.rank - case.tp
        me.init_gloo(rank=rank, world_size=case.num_trainers, name="trainer")
        place = Rendezvous(num_engine_ranks=case.tp, num_trainer_ranks=case.num_trainers, port=port)
        return publish(rank, case.spec, place, SGLANG_SETTINGS, me.folder, 0)


@pytest.mark.skipif(not sglang_cpu.sglang_found(), reason="SGLang is not installed: make sglang")
@pytest.mark.parametrize(
    "case", [Case(spec=QWEN3, num_trainers=2, tp=2), Case(spec=MOE, num_trainers=2, tp=2, ep=2)]
)
def test_sglang_holds_what_it_loads_from_the_checkpoint(case: Case) -> None:
    outcomes = run_ranks(sglang, case.tp + case.num_trainers, case, timeout_seconds=400)
    assert outcomes == [KINDS] * (case.tp + case.num_trainers)


def trainer(me: Rank, spec: TinySpec, meeting: Rendezvous, folder: Path) -> list[str]:
    me.init_gloo(rank=me.rank, world_size=me.world_size, timeout_seconds=240)
    return publish(me.rank, spec, meeting, VLLM_SETTINGS, folder, 1)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
def test_vllm_holds_what_fsdp_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_PLUGINS": "awex_delta",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    plan, store, outcome = plan_of("qwen3"), host_store(), list[Any]()
    place = Rendezvous(num_engine_ranks=1, num_trainer_ranks=2, port=store.port)

    def train() -> None:
        outcome.extend(run_ranks(trainer, 2, tiny_spec(plan), place, tmp_path, timeout_seconds=500))

    members = Members()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        engine = members.take(VllmOptions())
        engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
        engine.ask("connect", init_info(place, VLLM_SETTINGS))
        seen = set()
        for version in range(1, NUM_VERSIONS + 1):
            assert engine.ask("update", version) == STEPS
            truth = load_file(tmp_path / f"checkpoint-{version}-0.safetensors")
            assert differing(truth, engine.ask("rpc", state_of)) == [], version
            seen.add(json.dumps(engine.ask("generate")))
        assert len(seen) > 1
        thread.join(120)
        assert outcome == [KINDS] * 2
    finally:
        members.give_back()
        members.close()
