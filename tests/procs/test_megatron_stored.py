"""Megatron's precision-aware optimizer over a model of Transformer Engine's FusedAdam, judged by a copy.

Transformer Engine needs a GPU. Megatron's own code runs: which tensors are stepped, who keeps masters, how
gradients are handed over.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, optimizer_config

from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing import tiny_models
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer
from tests.procs.test_megatron_state import Engine
from tests.procs.test_megatron_trainer import attach
from tests.te_adam import E4M3, FusedAdam

pytestmark = pytest.mark.timeout(240)

TE = "transformer_engine.pytorch.optimizers"
SPEC = TinySpec(model="qwen3-moe", layers=1, lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Options of Megatron's optimizer, and what updates say."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    reasons: tuple[Reason, ...] = (Reason.NONE,)
    method: str = "adamw"
    options: tuple[tuple[str, Any], ...] = ()


def build(way: Way) -> TinyTrainer:
    package, module = ModuleType("transformer_engine"), ModuleType(TE)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    modules = {"transformer_engine": package, "transformer_engine.pytorch": package, TE: module}
    config = partial(
        OptimizerConfig,
        use_precision_aware_optimizer=True,
        exp_avg_dtype=torch.uint8 if way.exp_avg is E4M3 else way.exp_avg,
        exp_avg_sq_dtype=torch.uint8 if way.exp_avg_sq is E4M3 else way.exp_avg_sq,
        **dict(way.options),
    )
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, modules))
        stack.enter_context(patch.object(tiny_models, "OptimizerConfig", config))
        for place in (megatron_optimizer, optimizer_config):
            stack.enter_context(patch.object(place, "is_te_min_version", lambda *_: True))
        for place in (megatron_optimizer, distrib_optimizer):
            stack.enter_context(patch.object(place, "Adam", FusedAdam))
        stack.enter_context(patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False))
        return build_trainer(SPEC)


@patch.object(FusedAdam, "__module__", f"{TE}.fused_adam")
def check(me: Rank, ways: list[Way]) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    for way in ways:
        tiny = build(way)
        engine = Engine(attach(tiny, DeltaSettings(method=way.method)))
        for version in range(3):
            tiny.train_step()
            reason = engine.update()
            assert reason in way.reasons, (way, version, reason.name)
        engine.view.detach()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NONE = Reason.NONE
SPLIT = (("store_param_remainders", True),)
WHOLE = (("store_param_remainders", False),)
# With fp8 weights but delayed scaling, Megatron keeps the masters itself.
MEGATRON = (("fp8_recipe", "blockwise"), *WHOLE)
HALF = (("main_params_dtype", FP16), *WHOLE)


def test_the_precision_aware_optimizer_is_inverted_or_refused_by_name() -> None:
    run_ranks(
        check,
        2,
        [
            Way(exp_avg=BF16, exp_avg_sq=BF16, options=SPLIT),
            Way(exp_avg=FP32, exp_avg_sq=FP32, options=WHOLE),
            Way(exp_avg=FP16, exp_avg_sq=FP16, options=MEGATRON),
            # Most rows of an embedding have no gradient in a step of so few tokens.
            Way(exp_avg=E4M3, exp_avg_sq=E4M3, reasons=(NONE, Reason.MOMENTS_COARSE), options=SPLIT),
            Way(exp_avg=BF16, exp_avg_sq=BF16, reasons=(Reason.NO_FP32_MASTER,), options=HALF),
            Way(exp_avg=BF16, exp_avg_sq=E4M3, method="capture", options=HALF),
        ],
    )
