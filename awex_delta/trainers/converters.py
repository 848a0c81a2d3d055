"""AWEX's converters of Megatron parameters, brought to the names and shapes of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from awex.models.registry import ModelRegistry, get_train_weights_converter
from awex.sharding.rank_info import RankInfo

# AWEX does not register them, and its default converter names tensors as Ling's checkpoints do.
_NAMED_AS_QWEN3 = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
_FUSED = "Qwen3_5"  # AWEX fuses the tensors of these architectures as SGLang stores them


def converter_of(
    hf_config: Any,
    rank_info: Mapping[str, int | str | bool],
    tf_config: Any,
    *,
    layer_ids: Mapping[tuple[int, int], Mapping[int, int]],
    router_dtype: str,
) -> Any:
    """AWEX's converter of a model: `convert_param(name, tensor, vp_stage=stage)`.

    Args:
        hf_config: the HF configuration of the model; `architectures[0]` chooses the converter.
        rank_info: fields of AWEX's RankInfo for this trainer rank.
        tf_config: Megatron's configuration of the model.
        layer_ids: (pipeline rank, chunk) -> local layer number -> global layer number.
        router_dtype: dtype of the router weight in the engines.
    """
    architecture = hf_config.architectures[0]
    converter = get_train_weights_converter(
        "mcore",
        converted_as(architecture),
        hf_config,
        RankInfo(**rank_info),
        {
            "infer_engine_config": {"tp_size": 1, "ep_size": 1},
            "infer_atten_tp_size": 1,
            "hf_config": hf_config,
            "device_backend": "cuda",
            "router_dtype": router_dtype,
            "train_pp_stage_layer_id_map": layer_ids,
        },
        tf_config=tf_config,
    )
    return Unfused(converter, hf_config, rank_info) if architecture.startswith(_FUSED) else converter


def converted_as(architecture: str) -> str:
    """The architecture whose converter of AWEX makes the HF tensors of a model.

    It is another one where AWEX registers none, and the checkpoints have the names and shapes of Qwen3's.
    """
    registered = architecture in ModelRegistry.get_registered_models()
    return "Qwen3ForCausalLM" if architecture in _NAMED_AS_QWEN3 and not registered else architecture


class Unfused:
    """AWEX's converter for Qwen3.5, whose fused tensors are taken apart again, as checkpoints have them."""

    def __init__(self, converter: Any, hf_config: Any, rank_info: Mapping[str, int | str | bool]) -> None:
        """Take the converter over: it gives fused tensors whole, of which this rank's part is cut here."""
        converter._take_train_tp_shard = lambda whole: whole  # noqa: SLF001 - it cuts across the parts
        self._converter = converter
        self._rank, self._size = int(rank_info["attn_tp_rank"]), int(rank_info["attn_tp_size"])
        text = hf_config.get_text_config()
        self._model = "model." if text is hf_config else "model.language_model."
        key, value = (
            heads * dim
            for heads, dim in (
                (text.linear_num_key_heads, text.linear_key_head_dim),
                (text.linear_num_value_heads, text.linear_value_head_dim),
            )
        )
        query, heads = 2 * text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
        self._parts = {
            "self_attn.qkv_proj": {"q_proj": query, "k_proj": heads, "v_proj": heads},
            "linear_attn.in_proj_qkvz": {"in_proj_qkv": 2 * key + value, "in_proj_z": value},
            "linear_attn.in_proj_ba": dict.fromkeys(("in_proj_b", "in_proj_a"), text.linear_num_value_heads),
            "linear_attn.conv1d": {"conv1d": 2 * key + value},
        }
        """By module that AWEX names, the modules of a checkpoint and their rows, in their order."""

    def convert_param(
        self, name: str, tensor: torch.Tensor, vp_stage: int | None = None
    ) -> Sequence[tuple[str, torch.Tensor]]:
        """HF names and tensors of a parameter.

        Collective: over the tensor-parallel ranks, for attention, if there are several.
        """
        converted = self._converter.convert_param(name, tensor, vp_stage=vp_stage)
        return [one for fused in converted for one in self._take_apart(*fused)]

    def _take_apart(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name.startswith("model.") and not name.startswith("model.visual."):
            name = self._model + name.removeprefix("model.")
        path, _, kind = name.rpartition(".")
        layer, _, module = path.rpartition(".")
        block = f"{layer.rpartition('.')[2]}.{module}"
        if block not in self._parts:
            yield name, tensor
            return
        parts = self._parts[block]
        for part, rows in zip(parts, torch.split(tensor, [*parts.values()]), strict=True):
            yield f"{layer}.{part}.{kind}", rows.chunk(self._size)[self._rank]
