"""A live SGLang model, one tensor-parallel rank of it, as an `EngineView`.

SGLang fuses and cuts weights in a few kinds of layer. Each kind has one rule here, which names the parts
of its storage as HF checkpoints do; the sizes and the rank come from the layer itself, so attention data
parallelism and replicated key-value heads need no rule of their own. What no rule knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from awex_delta.engines.view import EngineTensor, LiveParts, part
from awex_delta.errors import LayoutError

Rule = Callable[[str, str, Any, torch.Tensor], Iterator[EngineTensor]]
"""Parts of a parameter, from its module's name, its own name, the module, and the live tensor."""

# What a fused projection is in an HF checkpoint, in the order of its rows.
_FUSED_NAMES: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
# Methods of SGLang that compute with the weights as they were loaded.
_PLAIN_METHODS = (
    "PackWeightMethod",  # packs on Intel AMX only, which the layer then says
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "UnquantizedLinearMethod",
)


class SGLangEngine:
    """One rank of an SGLang model, updated in place.

    `model` is what SGLang's model runner holds, such as its `Qwen3MoeForCausalLM`, weights loaded. Nothing is
    checked here: `tensors` does, within `connect`, where a refusal reaches every rank at once.

    Attributes:
        version: the committed version; None before the first.
        device: where the weights live.
    """

    def __init__(self, model: nn.Module) -> None:
        self.version: int | None = None
        self.device = next(model.parameters()).device
        self._parts = LiveParts(
            lambda: model.named_parameters(remove_duplicate=False),
            lambda: _parts(model),
            captured="start SGLang anew, or with --disable-cuda-graph" if _captures(self.device) else "",
        )

    def tensors(self) -> Sequence[EngineTensor]:
        """HF-named views of the model's parameters, wherever they lie now. Padding is in none of them.

        Raises LayoutError if a weight is quantized, repacked or a copy, no rule knows a layer, or a weight
        moved that captured graphs read.
        """
        return self._parts()

    def synchronize(self) -> None:
        """Block until writes to the weights are done on the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def committed(self, version: int) -> None:
        """Publish a version. SGLang's scheduler drops its cache itself, once the loader returns."""
        self.version = version


def rank_in_engine() -> int:
    """Rank of this worker in its SGLang instance, over its tensor and pipeline ranks."""
    from sglang.srt.distributed.parallel_state import get_world_group

    rank: int = get_world_group().rank_in_group
    return rank


def _captures(device: torch.device) -> bool:
    """Whether SGLang replays CUDA graphs, as far as it says."""
    if device.type == "cpu":
        return False
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    return not cuda_graph_fully_disabled()


def _parts(model: nn.Module) -> Iterator[EngineTensor]:
    first_name: dict[tuple[int, torch.Size], str] = {}
    rules = _rules()
    # A tied lm_head may be the embedding module itself, which must then be met under both names.
    for path, module in model.named_modules(remove_duplicate=False):
        for own_name, tensor in module.named_parameters(recurse=False):
            _refuse_unwritable(path, module)
            rule = next((rule for kind, rule in rules if isinstance(module, kind)), None)
            if rule is None:
                raise LayoutError(f"{path}.{own_name}: no rule knows how {type(module).__name__} stores it")
            parts = list(rule(path, own_name, module, tensor.detach()))
            for entry in parts:
                owner = first_name.setdefault((entry.view.data_ptr(), entry.view.shape), entry.name)
                tied_to = None if owner == entry.name else owner
                yield part(entry.name, entry.view, entry.global_shape, entry.global_offset, tied_to)


def _rules() -> list[tuple[type, Rule]]:
    """By kind of layer, special kinds before the general ones."""
    from sglang.srt.layers import layernorm, linear, vocab_parallel_embedding
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return [
        (linear.QKVParallelLinear, _qkv),
        (linear.MergedColumnParallelLinear, _merged_columns),
        (linear.ColumnParallelLinear, _columns),
        (linear.RowParallelLinear, _rows),
        (linear.ReplicatedLinear, _whole),
        (vocab_parallel_embedding.VocabParallelEmbedding, _vocabulary),
        (FusedMoE, _experts),
        (nn.Linear, _whole),
        (layernorm.RMSNorm, _whole),
        (layernorm.LayerNorm, _whole),
    ]


def _refuse_unwritable(path: str, module: nn.Module) -> None:
    """Refuse storage that does not hold the weights as a checkpoint does."""
    facts = {**vars(module), **dict(module.named_children())}
    method = facts.get("quant_method")
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        raise LayoutError(
            f"{path} is served by {type(method).__name__}: quantized or repacked weights cannot be updated "
            "in place. Serve an unquantized model."
        )
    if facts.get("use_intel_amx_backend"):
        raise LayoutError(f"{path} was packed for Intel AMX after loading. Serve it without that backend.")


def _rank_and_size(group: Any) -> tuple[int, int]:
    from sglang.srt.distributed.utils import get_group_rank_size

    rank, size = get_group_rank_size(group)
    return rank, size


def _whole(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    if own_name not in ("weight", "bias"):
        raise LayoutError(f"{path}.{own_name}: no rule knows this parameter of {type(module).__name__}")
    yield part(f"{path}.{own_name}", tensor)


def _columns(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    rank, size = _rank_and_size(module.tp_group)
    yield from _cut_rows(own_name, tensor, [(path, tensor.shape[0], rank, size)])


def _merged_columns(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    parent, _, kind = path.rpartition(".")
    if kind not in _FUSED_NAMES:
        raise LayoutError(f"{path}: no rule names the HF tensors that {type(module).__name__} fuses there")
    rank, size = _rank_and_size(module.tp_group)
    pairs = zip(_FUSED_NAMES[kind], module.output_sizes, strict=True)
    pieces = [(f"{parent}.{name}", rows // size, rank, size) for name, rows in pairs]
    yield from _cut_rows(own_name, tensor, pieces)


def _qkv(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    prefix = path.removesuffix("qkv_proj")
    if prefix == path:
        raise LayoutError(f"{path}: no rule names the HF tensors of a fused attention of this name")
    rank, size = _rank_and_size(module.tp_group)
    kv_rank, kv_size = _rank_and_size(module.kv_tp_group)
    # Neighbouring ranks hold the same key-value heads if there are fewer heads than ranks.
    kv_rank, kv_size = kv_rank // module.num_kv_head_replicas, kv_size // module.num_kv_head_replicas
    pieces = [
        (f"{prefix}q_proj", module.q_proj_shard_size, rank, size),
        (f"{prefix}k_proj", module.kv_proj_shard_size, kv_rank, kv_size),
        (f"{prefix}v_proj", module.v_proj_shard_size, kv_rank, kv_size),
    ]
    yield from _cut_rows(own_name, tensor, pieces)


def _cut_rows(
    own_name: str, tensor: torch.Tensor, pieces: Sequence[tuple[str, int, int, int]]
) -> Iterator[EngineTensor]:
    """Stacked pieces (HF name, rows, rank, ranks), each the `rank`-th of equal parts of its HF tensor."""
    num_rows = sum(rows for _, rows, _, _ in pieces)
    if own_name not in ("weight", "bias") or num_rows != tensor.shape[0]:
        names = ", ".join(name for name, _, _, _ in pieces)
        raise LayoutError(f"{own_name} of shape {tuple(tensor.shape)} is not {num_rows} rows of {names}")
    start = 0
    for name, rows, rank, size in pieces:
        rest = tuple(tensor.shape[1:])
        offset = (rank * rows, *(0 for _ in rest))
        yield part(f"{name}.{own_name}", tensor.narrow(0, start, rows), (size * rows, *rest), offset)
        start += rows


def _rows(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    if own_name != "weight":
        yield from _whole(path, own_name, module, tensor)
        return
    rank, size = _rank_and_size(module.tp_group)
    rows, columns = tensor.shape
    yield part(f"{path}.weight", tensor, (rows, size * columns), (0, rank * columns))


def _vocabulary(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    """The rows of real tokens; nothing on a rank that holds only padding."""
    if own_name != "weight" or module.num_embeddings != module.org_vocab_size:
        raise LayoutError(f"{path}.{own_name}: no rule knows a bias, or tokens added to the vocabulary")
    if tensor.shape[0] != module.num_embeddings_per_partition:
        raise LayoutError(f"{path}.weight has {tensor.shape[0]} rows, not one for each token")
    start, stop = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
    if stop > start:
        whole = (module.org_vocab_size, tensor.shape[1])
        yield part(f"{path}.weight", tensor.narrow(0, 0, stop - start), whole, (start, 0))


def _experts(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> Iterator[EngineTensor]:
    _refuse_foreign_experts(path, own_name, module, tensor)
    rank, size = module.moe_tp_rank, module.moe_tp_size
    for expert, weight in zip(_expert_ids(module), tensor.unbind(0), strict=True):
        name = f"{path}.{expert}"
        if own_name == "w13_weight":
            inter = weight.shape[0] // 2
            pieces = [(f"{name}.{kind}", inter, rank, size) for kind in ("gate_proj", "up_proj")]
            yield from _cut_rows("weight", weight, pieces)
        else:
            hidden, inter = weight.shape
            yield part(f"{name}.down_proj.weight", weight, (hidden, size * inter), (0, rank * inter))


def _refuse_foreign_experts(path: str, own_name: str, module: Any, tensor: torch.Tensor) -> None:
    """Refuse what is not [experts, 2 inter, hidden], gate above up, or [experts, hidden, inter]."""
    from sglang.srt.runtime_context import get_exec

    method = module.quant_method
    inter = module.intermediate_size_per_partition
    shapes = {
        "w13_weight": (module.num_local_experts, 2 * inter, module.hidden_size),
        "w2_weight": (module.num_local_experts, module.hidden_size, inter),
    }
    doubts = {
        f"{own_name} of shape {tuple(tensor.shape)} is none of {shapes}": (
            shapes.get(own_name) != tuple(tensor.shape)
        ),
        "shared experts are fused with them (start with --disable-shared-experts-fusion)": (
            module.num_fused_shared_experts
        ),
        "they move between ranks (start without --enable-eplb)": get_exec().moe.enable_eplb,
        "they are not gated": not module.moe_runner_config.is_gated,
        "the up projection stands first": (
            hasattr(method, "load_up_proj_weight_first") and method.load_up_proj_weight_first
        ),
        "gate and up rows are interleaved (set SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0)": (
            method.w13_swiglu_interleaved
        ),
        "Triton kernels hold them transposed": module.use_triton_kernels,
        "aiter shuffles them": _aiter_shuffles(),
    }
    for why, doubtful in doubts.items():
        if doubtful:
            raise LayoutError(f"the experts of {path} cannot be updated in place: {why}")


def _aiter_shuffles() -> bool:
    from sglang.srt.layers.quantization import unquant

    return bool(vars(unquant)["_use_aiter"])


def _expert_ids(module: Any) -> list[int]:
    """Global number of the expert in each local slot."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    first = module.moe_ep_rank * module.num_local_experts
    slots = range(first, first + module.num_local_experts)
    where = get_global_expert_location_metadata() if module.uses_expert_location else None
    if where is None:
        return list(slots)
    logical = where.physical_to_logical_map_cpu[module.layer_id]
    return [int(logical[slot]) for slot in slots]
