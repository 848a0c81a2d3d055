"""Real Megatron trainings that no inversion covers: captured at each step, or found by a copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, layer_wise_optimizer, optimizer_config
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing import tiny_models
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer
from awex_delta.trainers.megatron import MegatronTrainer
from tests.procs.test_megatron_trainer import by_key

pytestmark = pytest.mark.timeout(120)

# Its own Muon came with 0.18, and steps with another package: `make megatron-matrix` installs it.
HAS_MUON = bool(importlib.util.find_spec("emerging_optimizers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Changed elements of one rank by parameter, really and as found."""

    truth: Mapping[str, list[int]]
    found: Mapping[str, list[int]]
    by_inversion: Reason
    after_a_reload: Reason


def l2_decay(spec: TinySpec) -> TinyTrainer:
    tiny = build_trainer(spec)
    for group in tiny.optimizer.param_groups:
        group["decoupled_weight_decay"] = False
    return tiny


def in_host_memory(spec: TinySpec) -> TinyTrainer:
    """HybridDeviceOptimizer: masters and moments are in host memory. What is bf16 plays the device."""
    on_device = property(lambda tensor: tensor.dtype == torch.bfloat16)
    with (
        with_config(
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            pin_cpu_grads=False,
            use_precision_aware_optimizer=True,
        ),
        patch.object(optimizer_config, "is_te_min_version", lambda *_: True),
        patch.object(torch.Tensor, "is_cuda", on_device),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
    ):
        return build_trainer(spec)


def muon(spec: TinySpec) -> TinyTrainer:
    """Megatron's own Muon, spread by layers over buffers that are cut for it; AdamW for what it leaves."""

    def with_layout(config: Any, ddp_config: Any, module: Any) -> DistributedDataParallel:
        layer_wise_optimizer.tag_params_for_buffer_routing([module])
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            [*module.parameters()], ddp_config.bucket_size, torch.distributed.get_world_size(), ddp_config
        )
        return DistributedDataParallel(config, ddp_config, module, full_param_layout=layout)

    with (
        with_config(optimizer="muon", use_layer_wise_distributed_optimizer=True),
        patch.object(tiny_models, "DistributedDataParallel", with_layout),
    ):
        return build_trainer(spec)


def with_config(**changes: Any) -> Any:
    return patch.object(
        tiny_models, "OptimizerConfig", lambda **given: OptimizerConfig(**{**given, **changes})
    )


def train_and_watch(me: Rank, spec: TinySpec, build: Callable[[TinySpec], TinyTrainer], method: str) -> Seen:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build(spec)
    settings = DeltaSettings(method=method)
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=settings)
    inverting = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=DeltaSettings())
    for one in (view, inverting):
        one.committed()
    sparse = [info for info in view.weights() if info.sparse]
    before = {info.key: view.tensor(info.key).clone() for info in sparse}
    tiny.train_step()
    inverted = inverting.detect()
    tiny.train_step()
    detection = view.detect()
    assert detection.reason is Reason.NONE, detection
    view.gather_params()
    truth = {}
    for info in sparse:
        differs = before[info.key].view(torch.int16) != view.tensor(info.key).view(torch.int16)
        truth[info.key] = differs.view(-1).nonzero().view(-1).tolist()
    view.committed()
    assert view.detect().num_changed == 0
    for info in sparse:
        view.tensor(info.key).mul_(2.0)  # as loading another checkpoint into the model would
    return Seen(
        truth=truth,
        found={key: index.tolist() for key, (index, _) in by_key(view, detection).items()},
        by_inversion=inverted.reason,
        after_a_reload=view.detect().reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training; inverted: what the method `adamw` says of it."""

    build: Callable[[TinySpec], TinyTrainer] = l2_decay
    spec: TinySpec
    inverted: Reason = Reason.NOT_ADAMW


CASES = {
    "ep2": Case(spec=TinySpec(model="qwen3-moe", ep=2)),
    "dp2-overlap": Case(spec=TinySpec(overlap_param_gather=True)),
    "in host memory": Case(build=in_host_memory, spec=TinySpec(), inverted=Reason.NOT_ADAMW),
    "muon": Case(build=muon, spec=TinySpec()),
    "muon-overlap": Case(build=muon, spec=TinySpec(overlap_param_gather=True)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["capture", "snapshot"])
def test_owners_together_find_exactly_what_two_steps_changed(name: str, method: str) -> None:
    case = CASES[name]
    if case.build is muon and not HAS_MUON:
        pytest.skip("emerging-optimizers, with which Megatron's Muon steps, is not installed")
    ranks = run_ranks(train_and_watch, 2, case.spec, case.build, method)
    for seen in ranks:
        assert seen.by_inversion is case.inverted
        assert seen.after_a_reload is (Reason.UNSEEN_CHANGE if method == "capture" else Reason.NONE)
    assert sum(map(len, ranks[0].truth.values())) > 1000
    for key in ranks[0].truth:
        found = [index for seen in ranks for index in seen.found.get(key, [])]
        # An expert has one owner, on the rank that holds it; everything else is shared by both ranks.
        local = [index for seen in ranks for index in seen.truth[key]]
        expected = sorted(local) if ".experts." in key else sorted(set(local))
        assert sorted(found) == expected, key
