"""Model-parallel Megatron trainings that publish through a folder: every bit, over a kill and a restart."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from awex_delta.attach import attach_megatron_disk, attach_transformers_disk
from awex_delta.demo.members import megatron_state, tiny_spec
from awex_delta.demo.oracle import EMBEDDING, LM_HEAD, State, same_bits, trainer_hf_state
from awex_delta.demo.scenario import DemoPlan, Layout, ModelName
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig, resolve
from awex_delta.testing.procs import Rank, RanksFailed, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer, hf_config

pytestmark = pytest.mark.timeout(300)

NUM_RANKS = 4
DOOMED = 5
SAVED = 3
LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training. late_gather: ranks hold old weights of each other until the next forward.

    victim: the rank that dies as the step `fatal` of publishing DOOMED begins.
    """

    model: ModelName
    layout: Layout
    backend: str
    late_gather: bool
    victim: int
    fatal: str

    @property
    def plan(self) -> DemoPlan:
        """As the demo's judge wants it."""
        return DemoPlan(
            model=self.model,
            train=self.layout,
            infer=Layout(),
            steps=LAST,
            anchor_interval=0,
            lr=3e-6,
            seed=5,
            layers=2,
            hidden=64,
            fault="none",
            timeout_seconds=60,
        )

    @property
    def spec(self) -> TinySpec:
        return replace(tiny_spec(self.plan), overlap_param_gather=self.late_gather)

    def settings(self, url: Path) -> DeltaSettings:
        train = {
            "backend": self.backend,
            "enable_delta_weight_update": True,
            "weight_update_transport": "disk",
            "weight_update_disk_url": str(url),
            "weight_update_anchor_interval": 0,
            "weight_update_verify": "full",
        }
        return resolve(TrainEngineConfig.load(train), RolloutConfig.load({"backend": "vllm:d1"})).settings


CASES = {
    "a tied head over stages": Case(
        model="qwen3",
        layout=Layout(tp=2, pp=2),
        backend="megatron:p2t2",
        late_gather=False,
        victim=3,
        fatal="rename weight_v000005/delta",
    ),
    "experts owned in parts": Case(
        model="qwen3-moe",
        layout=Layout(ep=2, dp=2),
        backend="megatron:(attn:d4|ffn:d2e2)",
        late_gather=True,
        victim=0,
        fatal="write weight_v000005/model.safetensors.index.json",
    ),
}


def live(me: Rank, case: Case, port: int, folder: Path, first: int) -> list[str]:
    """Versions from `first` on, the steps before it from a checkpoint; without one, the life that ends badly.

    Training goes on while the version before is written. The kinds of the versions.
    """
    me.init_gloo(rank=me.rank, world_size=NUM_RANKS)
    tiny = build_trainer(case.spec)
    settings = case.settings(folder / "run")
    meeting = Rendezvous(num_engine_ranks=0, num_trainer_ranks=NUM_RANKS, port=port)
    writer = attach_megatron_disk(
        tiny.chunks, tiny.optimizer, tiny.hf_config, rendezvous=meeting, settings=settings
    )
    if first > 1:
        load_training(tiny, folder / f"checkpoint-{me.rank}", first - 1)
    kinds = []
    for version in range(first, LAST + 1):
        tiny.train_step()
        doomed = first == 1 and version == DOOMED
        path = folder / f"{first}-{version}-{me.rank}.safetensors"
        if doomed:
            writer.wait()
            dump(tiny, path)  # afterwards this rank may be gone
            doom(writer._publisher, case.fatal if me.rank == case.victim else "")
        kinds.append(writer.update_weights(version).verdict.kind.value)
        if not doomed:
            dump(tiny, path)
        if first == 1 and version == SAVED:
            save_training(tiny, folder / f"checkpoint-{me.rank}")
    writer.close()
    return kinds


def dump(tiny: TinyTrainer, path: Path) -> None:
    """Save the rank's weights for the judge, gathered first where that is late."""
    for chunk in tiny.chunks if tiny.spec.overlap_param_gather else ():
        chunk.start_param_sync(force_sync=True)
    save_file(megatron_state(tiny), path)


def doom(publisher: Any, fatal: str) -> None:
    """Die as the step begins; the others give up on this rank before long."""
    if not fatal:  # who dies waits for the others first, however late they are
        publisher._ranks._timeout_seconds = 2.0

    def step(name: str) -> None:
        if fatal and name.startswith(fatal):
            os.kill(os.getpid(), signal.SIGKILL)

    publisher._step = step


def save_training(tiny: TinyTrainer, path: Path) -> None:
    """The weights of a rank, and of what it owns the masters and torch's optimizer state."""
    models = [chunk.module.state_dict() for chunk in tiny.chunks]
    inner = [one.optimizer for one in tiny.optimizer.chained_optimizers]
    states = [one.state_dict() for one in inner]
    torch.save({"models": models, "masters": [masters(one) for one in inner], "states": states}, path)


def masters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param.data for group in inner.param_groups for param in group["params"]]


def load_training(tiny: TinyTrainer, path: Path, num_steps: int) -> None:
    saved = torch.load(path, weights_only=False)
    for chunk, state in zip(tiny.chunks, saved["models"], strict=True):
        chunk.module.load_state_dict(state)
    for number, one in enumerate(tiny.optimizer.chained_optimizers):
        one.optimizer.load_state_dict(saved["states"][number])
        for live_master, master in zip(masters(one.optimizer), saved["masters"][number], strict=True):
            live_master.copy_(master)
    tiny.num_steps = num_steps


def truth(case: Case, folder: Path, first: int, version: int) -> State:
    """The trainer's whole HF weights, put together by the demo's judge and not by AWEX's converter."""
    paths = [folder / f"{first}-{version}-{rank}.safetensors" for rank in range(NUM_RANKS)]
    return trainer_hf_state(case.plan, [path.read_bytes() for path in paths])


def wrong(model: Any, expected: State, folder: Path) -> list[str]:
    """Names of the tensors whose bits differ, as transformers writes the model out."""
    model.save_pretrained(folder / "engine")
    held = load_file(folder / "engine" / "model.safetensors")
    if model.config.tie_word_embeddings:  # listed once
        held[LM_HEAD] = held[EMBEDDING]
    assert held.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not same_bits(held[name], tensor)]


@pytest.mark.parametrize("name", CASES)
def test_a_reader_holds_every_version_bit_for_bit(name: str, tmp_path: Path) -> None:
    case, store = CASES[name], host_store()
    create: Any = AutoModelForCausalLM
    with pytest.raises(RanksFailed) as failure:
        run_ranks(live, NUM_RANKS, case, store.port, tmp_path, 1)
    assert f"rank {case.victim}: the process died" in str(failure.value)
    assert f"UpdateAborted: version {DOOMED} was not written" in str(failure.value)

    model = create.from_config(hf_config(case.spec), dtype=torch.bfloat16)
    reader = attach_transformers_disk(model, settings=case.settings(tmp_path / "run"))
    first_life = [truth(case, tmp_path, 1, version) for version in range(1, LAST + 1)]
    for version in range(1, DOOMED):
        stats = reader.update_weights(version)
        assert stats.verdict.kind.value == ("delta" if version > 1 else "full")
        assert wrong(model, first_life[version - 1], tmp_path) == [], version
        assert stats.total_owned == 0 or 0 < stats.total_changed < 0.5 * stats.total_owned
    assert reader.update_weights().version == DOOMED - 1

    kinds = run_ranks(live, NUM_RANKS, case, store.port, tmp_path, SAVED + 1)
    assert kinds == [["full", "delta"]] * NUM_RANKS
    assert reader.update_weights().version == LAST
    assert wrong(model, truth(case, tmp_path, SAVED + 1, LAST), tmp_path) == []
    # The restarted training takes the steps again that the killed one took.
    assert wrong(model, first_life[LAST - 1], tmp_path) == []
    # A full version is a checkpoint for anybody.
    anchor = tmp_path / "run" / f"weight_v{SAVED + 1:06d}"
    loaded = create.from_pretrained(anchor, dtype=torch.bfloat16)
    assert wrong(loaded, first_life[SAVED], tmp_path) == []
    assert not list((tmp_path / "run").glob("weight_v*/*.tmp"))  # not of a sign of life, cut short
    assert not list(anchor.glob("delta*"))
    reader.close()
