"""The trainer of the vLLM tests: Megatron ranks in processes of their own, and their HF checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save, save_file

from awex_delta.demo.members import tiny_spec
from awex_delta.demo.oracle import trainer_hf_state
from awex_delta.demo.scenario import DemoPlan, Layout, ModelName
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.stats import UpdateStats
from awex_delta.testing.procs import run_ranks
from awex_delta.testing.tiny_models import hf_config
from tests.procs.vllm_members import SETTINGS, train

NUM_VERSIONS = 6


def plan_of(model: ModelName) -> DemoPlan:
    """Under tensor parallelism Megatron trains experts on GPUs only, so the MoE model spreads them."""
    train_layout = Layout(tp=2) if model == "qwen3" else Layout(ep=2)
    return DemoPlan(
        model=model,
        train=train_layout,
        infer=Layout(),
        steps=NUM_VERSIONS,
        anchor_interval=SETTINGS.anchor_interval,
        lr=2e-5,
        seed=3,
        layers=2,
        hidden=128,
        fault="none",
        timeout_seconds=60,
    )


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
            self._found.append(run_ranks(train, self.plan.num_trainer_ranks, *args, timeout_seconds=500))
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
