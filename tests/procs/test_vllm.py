"""A real vLLM follows a real Megatron training: tokens, log-probabilities and bits, version by version."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from awex_delta.cli.demo_members import tiny_spec
from awex_delta.cli.demo_oracle import trainer_hf_state
from awex_delta.cli.demo_plan import DemoPlan, Layout, ModelName
from awex_delta.engines.vllm_driver import init_info
from awex_delta.rendezvous import Rendezvous, host_store
from awex_delta.testing.procs import run_ranks
from awex_delta.testing.tiny_models import hf_config
from awex_delta.types import UpdateStats
from tests.procs.vllm_members import (
    SETTINGS,
    Answers,
    VllmMember,
    VllmOptions,
    addresses_of,
    fail_next_apply,
    state_of,
    train,
)

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

pytestmark = pytest.mark.timeout(600)

NUM_VERSIONS = 6
ABORTED = 4


def plan_of(model: ModelName) -> DemoPlan:
    """Under tensor parallelism Megatron trains experts on GPUs only, so the MoE model spreads them."""
    train_layout = Layout(tp=2) if model == "qwen3" else Layout(ep=2)
    return DemoPlan(
        model=model,
        train=train_layout,
        infer=Layout(),
        steps=NUM_VERSIONS,
        anchor_interval=SETTINGS.anchor_interval,
        lr=3e-4,
        seed=3,
        layers=2,
        hidden=128,
        fault="none",
        timeout_seconds=60,
    )


@pytest.fixture
def vllm_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core runs in the member itself; cores are left to the system, which has few."""
    for name, value in {
        "VLLM_PLUGINS": "awex_delta",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def member(vllm_environment: None) -> Iterator[Callable[[VllmOptions], VllmMember]]:
    members: list[VllmMember] = []

    def start(options: VllmOptions) -> VllmMember:
        members.append(VllmMember(options))
        return members[-1]

    yield start
    for one in members:
        one.close()


class Training:
    """Trainer ranks in processes of their own, from the start of a test to `outcome`."""

    def __init__(self, plan: DemoPlan, folder: Path, num_engine_ranks: int, aborted: int = 0) -> None:
        self.plan = plan
        self.folder = folder
        self._store = host_store()
        self.rendezvous = Rendezvous(
            num_engine_ranks=num_engine_ranks,
            num_trainer_ranks=plan.num_trainer_ranks,
            port=self._store.port,
        )
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(aborted,), daemon=True)
        self._thread.start()

    def _run(self, aborted: int) -> None:
        try:
            args = (self.plan, self.rendezvous, self.folder, SETTINGS, aborted)
            self._found.append(
                run_ranks(train, self.plan.num_trainer_ranks, *args, timeout_seconds=500)
            )
        except AssertionError as error:
            self._found.append(error)

    def outcome(self) -> list[list[UpdateStats | str]]:
        self._thread.join(120)
        (found,) = self._found
        if isinstance(found, AssertionError):
            raise found
        whole: list[list[UpdateStats | str]] = found
        return whole

    def checkpoint(self, version: int) -> Path:
        """The HF checkpoint of a version, made by the demo's judge and not by AWEX's converter."""
        ranks = range(self.plan.num_trainer_ranks)
        dumps = [save(load_file(self.folder / f"{version}-{rank}.safetensors")) for rank in ranks]
        path = self.folder / f"hf-{version}"
        config_only(self.plan, path)
        state = {name: tensor.contiguous() for name, tensor in trainer_hf_state(self.plan, dumps).items()}
        save_file(state, path / "model.safetensors", {"format": "pt"})
        return path


def config_only(plan: DemoPlan, path: Path) -> Path:
    hf_config(tiny_spec(plan)).save_pretrained(path)
    return path


def differing(truth: dict[str, torch.Tensor], workers: list[Any]) -> list[str]:
    """Names of the tensors of which a worker holds other bits, or that the workers do not hold whole."""
    found: list[str] = []
    for name, whole in truth.items():
        bits = whole.view(torch.int16).numpy()
        held = np.zeros(bits.shape, dtype=bool)
        equal = True
        for offset, part in (parts[name] for parts in workers if name in parts):
            at = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
            held[at] = True
            equal = equal and np.array_equal(bits[at], part)
        if not (equal and held.all()):
            found.append(name)
    return found


def close_to(found: Answers, expected: Answers) -> bool:
    return all(
        tokens == other and np.allclose(logprobs, others, atol=0.05)
        for (tokens, logprobs), (other, others) in zip(found, expected, strict=True)
    )


STEPS = ["pause", "start", "update", "finish", "reset_prefix_cache", "resume"]


@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_vllm_generates_as_one_loaded_from_the_checkpoint(
    model: ModelName, tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of(model)
    training = Training(plan, tmp_path, num_engine_ranks=1)
    engine, fresh = member(VllmOptions()), member(VllmOptions())
    engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
    engine.ask("connect", init_info(training.rendezvous, SETTINGS))
    addresses = engine.ask("rpc", addresses_of)
    seen: list[Answers] = []
    for version in range(1, NUM_VERSIONS + 1):
        assert engine.ask("update", version) == STEPS
        assert engine.ask("version") == str(version)
        seen.append(engine.ask("generate"))
        checkpoint = training.checkpoint(version)
        assert differing(load_file(checkpoint / "model.safetensors"), engine.ask("rpc", state_of)) == []
        fresh.ask("load", checkpoint)
        assert seen[-1] == fresh.ask("generate"), version
    assert engine.ask("rpc", addresses_of) == addresses
    assert len({json.dumps(answers) for answers in seen}) == NUM_VERSIONS
    for stats in training.outcome():
        kinds = [one.verdict.kind.value for one in stats if isinstance(one, UpdateStats)]
        assert kinds == ["full", "delta", "delta", "delta", "full", "delta"]



@pytest.mark.parametrize(("model", "ep"), [("qwen3", False), ("qwen3-moe", False), ("qwen3-moe", True)])
def test_vllm_ranks_hold_their_parts(
    model: ModelName, ep: bool, tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of(model)
    training = Training(plan, tmp_path, num_engine_ranks=2)
    engine = member(VllmOptions(tp=2, ep=ep))
    engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
    engine.ask("connect", init_info(training.rendezvous, SETTINGS))
    for version in range(1, NUM_VERSIONS + 1):
        engine.ask("update", version)
        checkpoint = training.checkpoint(version)
        assert differing(load_file(checkpoint / "model.safetensors"), engine.ask("rpc", state_of)) == []
    followed = engine.ask("generate")
    engine.ask("load", checkpoint)
    assert followed == engine.ask("generate")
    training.outcome()
