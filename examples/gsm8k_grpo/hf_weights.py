"""HF weights of a Qwen3 or Qwen3-MoE model, cut for one rank of a Megatron model.

Knows the names of Megatron's local layers (CPU) and of Transformer Engine's (GPU).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from safetensors import safe_open

from awex_delta import ConfigError

Weights = Callable[[str], torch.Tensor]
"""An HF name to its whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which part of a split tensor this rank holds."""

    rank: int
    size: int

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Its rows."""
        return whole.chunk(self.size, dim=0)[self.rank]

    def columns(self, whole: torch.Tensor) -> torch.Tensor:
        """Its columns."""
        return whole.chunk(self.size, dim=1)[self.rank]


def checkpoint_weights(path: str) -> Weights:
    """Read tensors of a safetensors checkpoint one by one, from a folder or from the hub.

    Args:
        path: folder or hub name.

    Raises:
        ConfigError: there are no safetensors.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        outside = sorted(name for name in set(files.values()) if name == ".." or Path(name).name != name)
        if outside:
            raise ConfigError(
                f"model.path = {path!r}: its index names {outside[0]!r}, outside of the folder. Remedy: name "
                "an HF checkpoint that you trust"
            )
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", "pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise ConfigError(f"model.path = {path!r} holds no safetensors. Remedy: name an HF checkpoint")

    def read(name: str) -> torch.Tensor:
        with safe_open(folder / files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    return read


def load_into(model: Any, hf: Any, weights: Weights) -> None:
    """Give every parameter of this rank's `GPTModel` its part of the HF weights.

    Args:
        model: of the same sizes, on any layout but with context parallelism.
        hf: the HF configuration.
        weights: the whole tensors.

    Raises:
        ConfigError: a parameter is not known here.
    """
    for name, param in model.named_parameters():
        with torch.no_grad():
            param.copy_(_part(name, model, hf, weights))


def _part(name: str, model: Any, hf: Any, weights: Weights) -> torch.Tensor:
    cut = Cut(rank=mpu.get_tensor_model_parallel_rank(), size=mpu.get_tensor_model_parallel_world_size())
    if name == "embedding.word_embeddings.weight":
        return cut.rows(_padded(weights("model.embed_tokens.weight"), model.vocab_size))
    if name == "output_layer.weight":
        return cut.rows(_padded(weights("lm_head.weight"), model.vocab_size))
    if name == "decoder.final_layernorm.weight":
        return weights("model.norm.weight")
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise ConfigError(f"{name} has no known place in an HF checkpoint")
    number = model.decoder.layers[int(match[1])].layer_number - 1
    return _of_layer(match[2], f"model.layers.{number}.", hf, weights, cut)


def _of_layer(inner: str, prefix: str, hf: Any, weights: Weights, cut: Cut) -> torch.Tensor:
    norms = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if inner in norms:
        return weights(prefix + norms[inner])
    if inner == "self_attention.linear_qkv.weight":
        return cut.rows(_by_group(prefix, hf, weights)).flatten(0, 1)
    if inner == "self_attention.linear_proj.weight":
        return cut.columns(weights(prefix + "self_attn.o_proj.weight"))
    local = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", inner)
    grouped = re.fullmatch(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", inner)
    if local or grouped:
        expert, kind = (local[1], local[2]) if local else (grouped[2], grouped[1])  # type: ignore[index]
        first = (
            mpu.get_expert_model_parallel_rank()
            * hf.num_experts
            // mpu.get_expert_model_parallel_world_size()
        )
        expert_cut = Cut(
            rank=mpu.get_expert_tensor_parallel_rank(), size=mpu.get_expert_tensor_parallel_world_size()
        )
        return _feed_forward(kind, f"{prefix}mlp.experts.{first + int(expert)}.", weights, expert_cut)
    dense = re.fullmatch(r"mlp\.(linear_fc[12])\.weight", inner)
    if dense is None:
        raise ConfigError(f"{prefix}…{inner} has no known place in an HF checkpoint")
    return _feed_forward(dense[1], f"{prefix}mlp.", weights, cut)


def _feed_forward(kind: str, prefix: str, weights: Weights, cut: Cut) -> torch.Tensor:
    """Each rank holds its part of the gate above its part of the up projection."""
    if kind == "linear_fc2":
        return cut.columns(weights(prefix + "down_proj.weight"))
    return torch.cat(
        [cut.rows(weights(prefix + "gate_proj.weight")), cut.rows(weights(prefix + "up_proj.weight"))]
    )


def _by_group(prefix: str, hf: Any, weights: Weights) -> torch.Tensor:
    """[key-value heads, rows of a group, hidden]: the queries of a group, then its key, then its value."""
    groups = hf.num_key_value_heads
    q, k, v = (weights(f"{prefix}self_attn.{kind}_proj.weight") for kind in "qkv")
    return torch.cat([whole.reshape(groups, -1, whole.shape[1]) for whole in (q, k, v)], dim=1)


def _padded(whole: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(whole, (0, 0, 0, rows - whole.shape[0]))
