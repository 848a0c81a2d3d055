"""Megatron's gated delta net on a CPU: what Transformer Engine and FLA would bring, in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from awex_delta.testing import tiny_models

LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


class ZeroCentered(torch.nn.Module):
    """The norm of Transformer Engine with `layernorm_zero_centered_gamma`, as Qwen3.5 has it."""

    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)


def hybrid_block(*args: Any, **kwargs: Any) -> Any:
    """The first layer has linear attention, the others have attention with an output gate."""
    block = get_gpt_decoder_block_spec(*args, **kwargs)
    block.layer_norm = ZeroCentered
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentered
        parts.self_attention.submodules.q_layernorm = ZeroCentered
        parts.self_attention.submodules.k_layernorm = ZeroCentered
    block.layer_specs[0].submodules.self_attention = ModuleSpec(
        module=gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=ZeroCentered, out_proj=RowParallelLinear
        ),
    )
    return block


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


@contextmanager
def qwen3_5() -> Iterator[None]:
    """Inside, tiny models are built and trained with the layers of Qwen3.5."""
    config = partial(TransformerConfig, attention_output_gate=True, deterministic_mode=True, **LINEAR)
    with (
        patch.object(gated_delta_net, "HAVE_FLA", new=True),
        patch.object(gated_delta_net, "l2norm", l2norm, create=True),  # FLA brings it
        patch.object(tiny_models, "TransformerConfig", config),
        patch.object(tiny_models, "get_gpt_decoder_block_spec", hybrid_block),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
