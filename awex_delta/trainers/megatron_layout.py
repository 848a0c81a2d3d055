"""What Megatron's objects say about names, ranks and optimizer shards. Reads them, changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import FullyShardedDataParallel, TorchFullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.transformer.module import MegatronModule

from awex_delta.errors import ConfigError, UnsupportedError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require

RankInfo = Mapping[str, int | str | bool]

# The local layer spec keeps this norm apart; AWEX knows it by its place in Transformer Engine's layer.
_LOCAL_SPEC_NAMES: Mapping[str, str] = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
}
_HF_CONFIG = ("architectures", "vocab_size", "tie_word_embeddings")
_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedPart:
    """The part of one parameter that this rank steps.

    optimizer: the inner `torch.optim.Optimizer`.
    start, stop: flat range in the parameter.
    stepped: the flat tensor that `optimizer` steps for that range; the fp32 master if there is one.
    has_master: False where `stepped` is the parameter itself; then `optimizer` keeps a master, or none.
    """

    optimizer: torch.optim.Optimizer
    start: int
    stop: int
    stepped: torch.Tensor
    has_master: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One parameter as one optimizer group sees it.

    owners: trainer ranks that step it in parts, this one included, ascending.
    part: what this rank steps; None when nothing.
    late: what the other owners step reaches this rank only during the next forward.
    group: of the owners; None where this rank steps all of it.
    """

    param: torch.nn.Parameter
    owners: tuple[int, ...]
    part: OwnedPart | None
    late: bool
    group: dist.ProcessGroup | None


def canonical_name(name: str) -> str:
    """A parameter's name without wrapper prefixes, as Transformer Engine's layers would name it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for local, canonical in _LOCAL_SPEC_NAMES.items():
        if name.endswith(local):
            return name.removesuffix(local) + canonical
    return name


def named_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name in the module and parameter of one model chunk; a shared parameter once."""
    for name, param in chunk.named_parameters():
        # Quantised tensors also say bf16. They have classes of their own, as have parts of a tensor.
        if type(param) is not torch.nn.Parameter or param.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedError(
                f"{canonical_name(name)} is a {type(param).__name__} of {param.dtype}; only plain bf16 and "
                f"fp32 weights can be sent"
            )
        if hasattr(param, "is_gtp_weight_remat") and param.is_gtp_weight_remat:
            raise UnsupportedError(
                f"{canonical_name(name)} is cut by generalized tensor parallelism, which AWEX does not know; "
                "leave gtp_weight_remat_size and expert_gtp_weight_remat_size at 1"
            )
        yield name, param


def router_biases(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the module and buffer of each `expert_bias`, the one kind of buffer that AWEX sends."""
    for name, buffer in chunk.named_buffers():
        if name.rpartition(".")[2] == "expert_bias":
            yield name, buffer


def check_model(chunks: Sequence[torch.nn.Module], *, tied: bool) -> None:
    """Refuse a model of whose weights a rank holds parts, or whose lm_head engines would not get.

    tied: engines take the embedding for lm_head.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, FullyShardedDataParallel | TorchFullyShardedDataParallel):
            raise UnsupportedError(
                f"the model is wrapped in {type(module).__module__}.{type(module).__name__}, which cuts its "
                "weights between ranks: wrap it in megatron.core.distributed.DistributedDataParallel"
            )
        if isinstance(module, GPTModel) and tied and not module.share_embeddings_and_output_weights:
            raise UnsupportedError(
                "hf_config.tie_word_embeddings is True, but the Megatron model was built without "
                "share_embeddings_and_output_weights: engines would never receive its lm_head"
            )


def check_training(chunks: Any, hf_config: Any, settings: Any) -> None:
    """Refuse what is no training of Megatron's, before anything of it is read. Raises ConfigError."""
    require(DeltaSettings, "what resolve(...).settings is", settings=settings)
    require((list, tuple), "what get_model returned, a list of model chunks", model_chunks=chunks)
    wrong = next((chunk for chunk in chunks if not isinstance(chunk, MegatronModule)), None)
    if not chunks or wrong is not None:
        raise ConfigError(
            f"model_chunks = [{'' if wrong is None else type(wrong).__name__}]: this is no model of "
            "Megatron's. Remedy: give what get_model returned; TorchAdamWTrainer takes a model of plain torch"
        )
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    both = (hf_config, text)
    lacking = [n for n in _HF_CONFIG if all(not hasattr(one, n) or getattr(one, n) is None for one in both)]
    if lacking:
        raise ConfigError(
            f"hf_config is a {type(hf_config).__name__} without {', '.join(lacking)}. Remedy: give the "
            "AutoConfig of the HF model that the engines serve"
        )
    if not mpu.model_parallel_is_initialized():
        raise ConfigError(
            "model_chunks: Megatron's process groups do not exist on this rank. Remedy: call "
            "torch.distributed.init_process_group and Megatron's initialize_model_parallel first"
        )


def global_layer_ids(chunks: Sequence[torch.nn.Module]) -> dict[tuple[int, int], dict[int, int]]:
    """(pipeline rank, chunk) -> local layer number -> global layer number, both from 0."""
    pp_rank = mpu.get_pipeline_model_parallel_rank()
    ids: dict[tuple[int, int], dict[int, int]] = {}
    for stage, chunk in enumerate(chunks):
        layers = ids.setdefault((pp_rank, stage), {})
        for name, module in chunk.named_modules():
            match = _LAYER.search(name)
            if match:
                layers[int(match.group(1))] = int(module.layer_number) - 1
    return ids


def rank_info() -> RankInfo:
    """The fields of AWEX's RankInfo for this rank.

    AWEX's own `get_mcore_rank_info` divides by the number of GPUs, which fails where there is none.
    """
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    cp_size = mpu.get_context_parallel_world_size()
    global_rank = dist.get_rank()
    return {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "pp_rank": mpu.get_pipeline_model_parallel_rank(),
        "pp_size": mpu.get_pipeline_model_parallel_world_size(),
        "dp_size": dp_size,
        "dp_rank": dp_rank,
        "ep_rank": mpu.get_expert_model_parallel_rank(),
        "ep_size": mpu.get_expert_model_parallel_world_size(),
        "ep_tp_rank": mpu.get_expert_tensor_parallel_rank(),
        "ep_tp_size": mpu.get_expert_tensor_parallel_world_size(),
        "attn_tp_rank": tp_rank,
        "attn_tp_size": tp_size,
        "attn_dp_rank": dp_rank,
        "world_size": dist.get_world_size(),
        "global_rank": global_rank,
        "local_rank": global_rank % max(1, torch.cuda.device_count()),
        "engine_rank": 0,
        "is_infer": False,
        "cp_rank": mpu.get_context_parallel_rank(),
        "cp_size": cp_size,
        "cp_mode": "ring" if cp_size > 1 else "none",
    }


def optimizer_shards(optimizer: Any) -> list[Shard]:
    """Every parameter that Megatron's optimizer steps, on this rank or on another of its group.

    Args:
        optimizer: what `get_megatron_optimizer` returned.

    Raises:
        ConfigError: it is none of Megatron's optimizers.
        UnsupportedError: an optimizer class whose shards are not known, or an attribute that this
            release of megatron-core lacks.
    """
    try:
        return list(_all_shards(optimizer))
    except AttributeError as error:
        raise UnsupportedError(
            f"megatron-core {megatron.core.__version__}: {type(error.obj).__name__} has no attribute "
            f"{error.name}, which tells what each rank's optimizer owns; 0.16 to 0.19 have it"
        ) from error


def _all_shards(optimizer: Any) -> Iterator[Shard]:
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        yield from _layer_wise_shards(optimizer)
    elif isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _all_shards(part)
    elif not isinstance(optimizer, MegatronOptimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, none of Megatron's. Remedy: give what "
            "get_megatron_optimizer returned"
        )
    elif not optimizer.is_stub_optimizer:
        # A stub stands where all parameters of a rank are frozen: it steps nothing.
        yield from _shards_of(optimizer)


def _layer_wise_shards(optimizer: Any) -> Iterator[Shard]:
    """Each parameter is stepped whole by one rank of its group, which then sends it to the others."""
    mine = {shard.param: shard for part in optimizer.chained_optimizers for shard in _all_shards(part)}
    groups = optimizer.pg_collection
    for lists, group in (
        (optimizer.dp_cp_params_list, groups.dp_cp),
        (optimizer.expt_dp_params_list, groups.expt_dp),
    ):
        owners = tuple(sorted(dist.get_process_group_ranks(group))) if lists else ()
        late = optimizer.config.overlap_param_gather and len(owners) > 1
        for param in (param for params in lists or () for param in params):
            shard = mine.pop(param, None)
            part = None if shard is None else shard.part
            yield Shard(param=param, owners=owners, part=part, late=late, group=group)
    yield from mine.values()  # of groups of one rank


def _shards_of(part: MegatronOptimizer) -> Iterator[Shard]:
    if isinstance(part, DistributedOptimizer):
        yield from _distributed_shards(part)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        yield from _replicated_shards(part)
    elif isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield _whole(part.optimizer, param, None)
    else:
        raise UnsupportedError(
            f"{type(part).__name__} is not known: what it owns on each rank cannot be read; "
            f"use DistributedOptimizer or Float16OptimizerWithFloat16Params"
        )


def _distributed_shards(part: Any) -> Iterator[Shard]:
    spans = {
        param: maps["param"]
        for buffer_ranges in part.gbuf_ranges
        for buckets in buffer_ranges.values()
        for bucket in buckets
        for param, maps in bucket["param_map"].items()
    }
    owned: dict[torch.nn.Parameter, OwnedPart] = {}
    for param, stepped, main in _distributed_masters(part):
        span = spans[param]
        owned[param] = OwnedPart(
            optimizer=part.optimizer,
            start=span.start,
            stop=span.end,
            stepped=stepped,
            has_master=main is not None,
        )
    group = part.data_parallel_group
    owners = tuple(sorted(dist.get_process_group_ranks(group)))
    late = part.ddp_config.overlap_param_gather and len(owners) > 1
    for buffer in part.buffers:
        for param in buffer.params:
            yield Shard(param=param, owners=owners, part=owned.get(param), late=late, group=group)


def _distributed_masters(
    part: Any,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor | None]]:
    """Owned parameter, what the inner optimizer steps for it, and its fp32 master."""
    for params, shards, mains in zip(
        part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True
    ):
        for param, shard, main in zip(params, shards, mains, strict=True):
            # The precision-aware optimizer has no main here, and steps the shard itself.
            yield param, shard if main is None else main, main
    for params, shards in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
        for param, shard in zip(params, shards, strict=True):
            yield param, shard, None


def _replicated_shards(part: Any) -> Iterator[Shard]:
    for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        for param, main in zip(params, mains, strict=True):
            yield _whole(part.optimizer, param, main)
    for params in part.fp32_from_fp32_groups:
        for param in params:
            yield _whole(part.optimizer, param, None)


def _whole(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, main: torch.Tensor | None) -> Shard:
    # Every data-parallel rank steps all of it, so that any one of them can send it alone.
    part = OwnedPart(
        optimizer=optimizer,
        start=0,
        stop=param.numel(),
        stepped=param if main is None else main,
        has_master=main is not None,
    )
    return Shard(param=param, owners=(dist.get_rank(),), part=part, late=False, group=None)
