"""Every layout of SGLang's layers: what is written through the views is what SGLang itself would load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2MoeConfig

from awex_delta.engines.sglang.adapter import SGLangEngine
from awex_delta.engines.view import EngineView
from awex_delta.errors import LayoutError
from awex_delta.testing.contract.engines import MOVES, UNUSABLE, EngineTrial
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, hf_config
from tests import sglang_cpu

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not sglang_cpu.sglang_found(), reason="SGLang is not installed: make sglang"),
]

QWEN3 = hf_config(TinySpec(vocab_size=130, kv_heads=1, tied=True))
UNTIED = hf_config(TinySpec(vocab_size=130))
QWEN3_MOE = hf_config(TinySpec(model="qwen3-moe", vocab_size=130))
# Biases in the attention, and an expert that every token shares.
SHARED_EXPERT = Qwen2MoeConfig(
    architectures=["Qwen2MoeForCausalLM"],
    vocab_size=130,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
    decoder_sparse_step=1,
)


def hf_weights(me: Rank, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """A checkpoint with the names and shapes that transformers gives it, and random values."""
    folder = me.folder / f"transformers-{me.rank}"
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator).bfloat16()
        for name, tensor in sorted(load_file(folder / "model.safetensors").items())
    }


def write_through(engine: SGLangEngine, weights: dict[str, torch.Tensor]) -> set[str]:
    """Copy each rank's part of a checkpoint into its view. Names of what was written."""
    for entry in engine.tensors():
        whole = weights[entry.tied_to or entry.name]
        assert tuple(whole.shape) == entry.global_shape, entry.name
        if entry.tied_to is None:
            cut = zip(entry.global_offset, entry.view.shape, strict=True)
            entry.view.copy_(whole[tuple(slice(start, start + size) for start, size in cut)])
    return {entry.name for entry in engine.tensors()}


def check_layout(me: Rank, config: PretrainedConfig, options: dict[str, Any]) -> set[str]:
    sglang_cpu.install()
    weights = hf_weights(me, config)
    sglang_cpu.start(me, config, rank=me.rank, **options)
    model = sglang_cpu.build(config)
    fresh: Any = sglang_cpu.build(config)
    engine = SGLangEngine(model)
    assert isinstance(engine, EngineView)
    written = write_through(engine, weights)
    fresh.load_weights(list(weights.items()))
    assert sglang_cpu.differing(model, fresh) == []
    assert written <= {*weights, "lm_head.weight"}
    return written


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(QWEN3, {"tp": 1}, id="qwen3-tied"),
        pytest.param(QWEN3, {"tp": 2}, id="qwen3-tp2-one-kv-head"),
        pytest.param(UNTIED, {"tp": 2, "dp_size": 2, "enable_dp_attention": True}, id="attention-dp2"),
        pytest.param(QWEN3_MOE, {"tp": 2}, id="qwen3-moe-tp2"),
        pytest.param(QWEN3_MOE, {"tp": 4, "ep": 2}, id="qwen3-moe-tp4-ep2"),
        pytest.param(SHARED_EXPERT, {"tp": 2}, id="shared-expert-and-biases-tp2"),
    ],
)
def test_views_are_what_sglang_loads(config: PretrainedConfig, options: dict[str, Any]) -> None:
    by_rank = run_ranks(check_layout, options["tp"], config, options, timeout_seconds=180)
    experts = {name for names in by_rank for name in names if ".mlp.experts." in name}
    num_experts = 0 if config is QWEN3 or config is UNTIED else 4
    assert len(experts) == 2 * 3 * num_experts, "every expert of every layer, by its global number"


class Packed(nn.Module):
    """Stands for any layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))


class Fp8LinearMethod:
    """Stands for a quantization."""


def refusal(model: nn.Module) -> str:
    with pytest.raises(LayoutError) as caught:
        SGLangEngine(model).tensors()
    return str(caught.value)


def check_refusals(me: Rank) -> None:
    sglang_cpu.start(me, QWEN3_MOE)
    model: Any = sglang_cpu.build(QWEN3_MOE)
    engine = SGLangEngine(model)
    names = [entry.name for entry in engine.tensors()]
    norm = model.model.norm.weight
    norm.data = torch.full_like(norm, 3)
    moved = {entry.name: entry.view for entry in engine.tensors()}
    assert list(moved) == names
    moved["model.norm.weight"].fill_(5)
    assert norm.unique().tolist() == [5], "what is written is what SGLang computes with now"

    layer = model.model.layers[1]
    qkv, experts = layer.self_attn.qkv_proj, layer.mlp.experts
    plain, qkv.quant_method = qkv.quant_method, Fp8LinearMethod()
    assert "layers.1.self_attn.qkv_proj is served by Fp8LinearMethod" in refusal(model)
    qkv.quant_method = plain
    qkv.use_intel_amx_backend = True
    assert "packed for Intel AMX" in refusal(model)
    qkv.use_intel_amx_backend = False
    experts.quant_method.w13_swiglu_interleaved = True
    assert "interleaved" in refusal(model)
    experts.quant_method.w13_swiglu_interleaved = False
    experts.w13_weight.data = experts.w13_weight.data.transpose(1, 2).contiguous()
    assert "w13_weight of shape" in refusal(model)
    experts.w13_weight.data = experts.w13_weight.data.transpose(1, 2)
    layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.to(torch.float8_e4m3fn)
    assert "served as torch.float8_e4m3fn" in refusal(model)
    layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.bfloat16()
    assert len(SGLangEngine(model).tensors()) == len(names)
    layer.mlp.extra = Packed()
    assert "layers.1.mlp.extra.weight: no rule knows how Packed stores it" in refusal(model)


def test_what_cannot_be_written_in_place_is_refused_by_name() -> None:
    run_ranks(check_refusals, 1, timeout_seconds=180)


def check_contract(me: Rank, config: PretrainedConfig) -> None:
    sglang_cpu.start(me, config)
    model, fresh = sglang_cpu.build(config), sglang_cpu.build(config)

    def held(one: torch.nn.Module) -> list[torch.Tensor]:
        return [param.detach() for param in one.parameters()]

    def loaded(weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        loader: Any = fresh
        tied = config.tie_word_embeddings
        loader.load_weights([(n, w) for n, w in weights.items() if not (tied and n == "lm_head.weight")])
        return held(fresh)

    with EngineTrial([SGLangEngine(model)], lambda: held(model), loaded) as trial:
        for move in ("data_swapped", "one_tensor", "parameters_replaced", "one_storage_for_all"):
            trial.check_move(partial(MOVES[move], model))
        for change in ("cast", "offloaded", "quantized"):
            trial.check_refusal(partial(UNUSABLE[change], model))


@pytest.mark.parametrize(
    "config",
    [pytest.param(QWEN3, id="qwen3"), pytest.param(QWEN3_MOE, id="qwen3-moe", marks=pytest.mark.all)],
)
def test_a_model_of_sglang_is_followed_wherever_it_moves(config: PretrainedConfig) -> None:
    """Against the parameters of a second instance, into which SGLang's own loader loads."""
    run_ranks(check_contract, 1, config, timeout_seconds=180)
