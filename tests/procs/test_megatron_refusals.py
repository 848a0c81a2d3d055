"""Megatron models that cannot be sent are refused as they are attached, by the name of what is in the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import FullyShardedDataParallel, TorchFullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

from awex_delta.conversion.alone import check_conversion
from awex_delta.errors import UnsupportedError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing import tiny_models
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer
from tests.procs.test_awex_converters import HIDDEN, Shards
from tests.procs.test_megatron_trainer import attach

SPEC = TinySpec(layers=1, hidden=32)


class Quantised(torch.Tensor):
    """As Transformer Engine's quantised tensors and DTensors: a class of its own that says bf16."""


class WithPrediction(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """With one layer that predicts the token after the next."""

    def __init__(self, *, config: Any, transformer_layer_spec: Any, **rest: Any) -> None:
        config.mtp_num_layers = 1
        mtp = get_gpt_mtp_block_spec(config, transformer_layer_spec, use_transformer_engine=False)
        super().__init__(
            config=config, transformer_layer_spec=transformer_layer_spec, mtp_block_spec=mtp, **rest
        )


def norm(tiny: TinyTrainer) -> Any:
    return tiny.chunks[0].module.decoder.final_layernorm


def wrapped_in(kind: Any) -> Callable[[TinyTrainer], None]:
    """Neither class is built here: Megatron-FSDP wants a device, and what is refused is the class."""

    def wrap(tiny: TinyTrainer) -> None:
        wrapper = kind.__new__(kind)
        torch.nn.Module.__init__(wrapper)
        wrapper.module = tiny.chunks[0].module
        tiny.chunks = [wrapper]

    return wrap


def quantise(tiny: TinyTrainer) -> None:
    held = norm(tiny).weight.detach()
    norm(tiny).weight = torch.nn.Parameter(held.as_subclass(Quantised))


def cut(tiny: TinyTrainer) -> None:
    """As Megatron marks its parts; its own need Transformer Engine."""
    norm(tiny).weight.is_gtp_weight_remat = True


CASES: Mapping[str, Callable[[TinyTrainer], None]] = {
    "the model is wrapped in megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel, "
    "which cuts its weights between ranks": wrapped_in(FullyShardedDataParallel),
    "torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel, which": wrapped_in(
        TorchFullyShardedDataParallel
    ),
    "decoder.final_layernorm.weight is a Quantised of torch.bfloat16": quantise,
    "decoder.final_layernorm.weight is cut by generalized tensor parallelism": cut,
}


def check_refusals(me: Rank) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    for enabled in (True, False):
        for message, harm in CASES.items():
            tiny = build_trainer(SPEC)
            harm(tiny)
            assert_refused(tiny, message, DeltaSettings(enabled=enabled))
        with patch.object(tiny_models, "GPTModel", WithPrediction):
            tiny = build_trainer(SPEC)
        message = "AWEX cannot convert mtp.layers.0.enorm.weight"
        assert_refused(tiny, message, DeltaSettings(enabled=enabled))


def assert_refused(tiny: TinyTrainer, message: str, settings: DeltaSettings) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        attach(tiny, settings)
    hooks = [vars(part.optimizer)["_optimizer_step_post_hooks"] for part in tiny.optimizer.chained_optimizers]
    assert hooks == [{}] * len(hooks), "refused before a hook is set"


def test_what_a_rank_holds_in_part_or_awex_does_not_know() -> None:
    run_ranks(check_refusals, 1)


def check_dropped(me: Rank) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    mpu.initialize_model_parallel()
    view = Shards("Qwen3_5ForCausalLM", {"mtp.layers.0.enorm.weight": (HIDDEN,)})
    with pytest.raises(
        UnsupportedError, match=r"drops mtp\.layers\.0\.enorm\.weight, which is trained.*freeze"
    ):
        check_conversion(view.weights(), view.convert)


def test_a_layer_that_is_trained_and_dropped_by_its_converter() -> None:
    run_ranks(check_dropped, 1)
