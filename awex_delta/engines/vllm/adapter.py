"""A live vLLM model on one worker, as an `EngineView`: HF names over vLLM's own fused, split storage.

vLLM fuses what HF checkpoints keep apart, and gives each tensor-parallel rank a part:

    qkv_proj        query rows, then key rows, then value rows; key-value heads are repeated where
                    there are fewer than ranks
    gate_up_proj    gate rows, then up rows
    w13_weight      [local experts, 2 inter, hidden], gate rows, then up rows
    w2_weight       [local experts, hidden, inter]
    embed_tokens    a slice of the padded vocabulary, as is lm_head

Every HF tensor becomes a view of that storage. `vllm_proof.prove` then shows that vLLM's own loader
puts it in the same place, and that the layers compute with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from awex_delta.engines.view import EngineTensor, LiveParts, part
from awex_delta.engines.vllm.proof import prove
from awex_delta.errors import LayoutError
from awex_delta.lines.storages import bits, unreadable

_EXPERTS = ".routed_experts"
# The parts of a fused projection, by the name that vLLM gives it.
_MERGED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}

# Scales of a quantized key-value cache; they belong to the cache, not to the checkpoint.
_CACHE_SCALES = ("._q_scale", "._k_scale", "._v_scale", "._prob_scale")

_SAMPLE = 256


class VllmEngine:
    """One worker's share of a vLLM model, updated in place.

    Args:
        model: what the worker's model runner serves: the whole causal language model. LayoutError if a weight
            is quantized, was repacked after loading, lies elsewhere than vLLM's loader writes it, or belongs
            to a layer that is not known here. The weights are as before.
        captured: vLLM replays captured graphs, which read the addresses that weights had as they were
            captured. A weight that moves is an error then.

    Attributes:
        version: the committed version; None before the first.
    """

    def __init__(self, model: nn.Module, *, captured: bool = False) -> None:
        self.version: int | None = None
        self._model = model
        self._parts = LiveParts(
            lambda: model.named_parameters(remove_duplicate=False),
            lambda: _proved_parts(model),
            captured="start vLLM anew, or with enforce_eager=True" if captured else "",
        )
        self._device = self._parts()[0].view.device
        self._sample: list[torch.Tensor] = []

    def tensors(self) -> Sequence[EngineTensor]:
        """HF-named views of the parameters, wherever they lie now. Padding is in none of them.

        Views of what moved are proved as those before them were. Raises LayoutError as the constructor, and
        if captured graphs would still read what was there before.
        """
        return self._parts()

    def synchronize(self) -> None:
        """Block until writes to the weights are done on the device, and note a few elements of each."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._sample = self._take_sample()

    def committed(self, version: int) -> None:
        """Note the version. The process that schedules requests drops the prefix cache (`vllm_driver`)."""
        self.version = version

    def still_committed(self) -> bool:
        """False when weights were lost or replaced since the last commit, as by sleeping or reloading.

        vLLM tells nobody of it, so a few elements of every weight are compared with what they were.
        """
        sample = self._take_sample()
        return len(sample) == len(self._sample) and all(map(torch.equal, self._sample, sample))

    def _take_sample(self) -> list[torch.Tensor]:
        """Up to `_SAMPLE` elements of each weight, spread over it, as integers."""
        sample = []
        for weight in self._model.parameters():
            nothing = torch.empty(0, dtype=torch.int16, device="cpu")
            cells = nothing if unreadable(weight) else bits(weight).reshape(-1)
            sample.append(cells[:: max(1, -(-cells.numel() // _SAMPLE))].clone())
        return sample


def _proved_parts(model: nn.Module) -> Sequence[EngineTensor]:
    parts = tuple(_parts(model))
    _refuse_unnamed(model, parts)
    prove(model, parts)
    return parts


def _parts(model: nn.Module) -> Iterator[EngineTensor]:
    first_name: dict[int, str] = {}
    for name, module in model.named_modules():
        rule = next((rule for kind, rule in _RULES if isinstance(module, kind)), None)
        if rule is None:
            continue
        _require_plain(name, module)
        for entry in rule(name, module):
            # The embedding comes before lm_head in the module tree, so the head is the one named as tied.
            owner = first_name.setdefault(entry.view.data_ptr(), entry.name)
            if owner == entry.name:
                yield entry
            else:
                yield part(entry.name, entry.view, entry.global_shape, entry.global_offset, owner)


def _require_plain(name: str, module: nn.Module) -> None:
    """Refuse what was quantized, or packed away after loading."""
    for kind, weight in module.named_parameters(recurse=False):
        if weight.numel() == 0:
            raise LayoutError(
                f"{name}.{kind} is empty: vLLM packed the weight away after loading, for a faster kernel. "
                f"Start vLLM with weight_transfer_config backend 'awex_delta', so that it stays live."
            )
    if isinstance(module, RMSNorm):
        return
    method = type(module.quant_method).__name__
    if method not in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"):
        raise LayoutError(f"{name} is served by {method}: only unquantized weights can be updated in place")


def _refuse_unnamed(model: nn.Module, parts: Sequence[EngineTensor]) -> None:
    named = {entry.view.untyped_storage().data_ptr() for entry in parts}
    # A rank may hold nothing but padding of the vocabulary.
    vocabulary = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    named |= {module.weight.untyped_storage().data_ptr() for module in vocabulary}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or name.endswith(_CACHE_SCALES):
            continue
        if tensor.untyped_storage().data_ptr() not in named:
            raise LayoutError(f"{name} has shape {tuple(tensor.shape)}: no rule names its HF tensors")


def _norm(name: str, module: Any) -> Iterator[EngineTensor]:
    yield part(f"{name}.weight", module.weight)


def _replicated(name: str, module: Any) -> Iterator[EngineTensor]:
    _refuse_bias(name, module)
    yield part(f"{name}.weight", module.weight)


def _columns(name: str, module: Any) -> Iterator[EngineTensor]:
    """A projection split along its output."""
    yield _rows_of(f"{name}.weight", module, 0, module.weight.shape[0], module.tp_rank, module.tp_size)


def _row_parallel(name: str, module: Any) -> Iterator[EngineTensor]:
    """A projection split along its input."""
    _refuse_bias(name, module)
    out, size = module.weight.shape
    yield part(f"{name}.weight", module.weight, (out, size * module.tp_size), (0, size * module.tp_rank))


def _merged(name: str, module: Any) -> Iterator[EngineTensor]:
    prefix, _, kind = name.rpartition(".")
    names = _MERGED.get(kind, ())
    if len(names) != len(module.output_sizes):
        raise LayoutError(f"{name} fuses {len(module.output_sizes)} projections whose HF names are not known")
    start = 0
    for single, size in zip(names, module.output_sizes, strict=True):
        rows = size // module.tp_size
        yield _rows_of(f"{prefix}.{single}.weight", module, start, rows, module.tp_rank, module.tp_size)
        start += rows


def _qkv(name: str, module: Any) -> Iterator[EngineTensor]:
    prefix = name.rpartition(".")[0]
    heads, kv_heads, size = module.num_heads, module.num_kv_heads, module.head_size
    if module.v_head_size != size:
        raise LayoutError(f"{name}: value heads of another size than key heads are not known here")
    q, kv = heads * size, kv_heads * size
    kv_rank, kv_ranks = (
        module.tp_rank // module.num_kv_head_replicas,
        module.tp_size // module.num_kv_head_replicas,
    )
    yield _rows_of(f"{prefix}.q_proj.weight", module, 0, q, module.tp_rank, module.tp_size)
    yield _rows_of(f"{prefix}.k_proj.weight", module, q, kv, kv_rank, kv_ranks)
    yield _rows_of(f"{prefix}.v_proj.weight", module, q + kv, kv, kv_rank, kv_ranks)


def _rows_of(name: str, module: Any, start: int, rows: int, rank: int, size: int) -> EngineTensor:
    """`rows` rows of the fused weight, which are part `rank` of `size` of an HF tensor."""
    _refuse_bias(name, module)
    view = module.weight.narrow(0, start, rows)
    return part(name, view, (rows * size, view.shape[1]), (rows * rank, 0))


def _refuse_bias(name: str, module: Any) -> None:
    if module.bias is not None:
        raise LayoutError(f"{name}: projections with a bias are not known here")


def _vocabulary(name: str, module: Any) -> Iterator[EngineTensor]:
    """The rows of real tokens; nothing on a rank that holds only padding."""
    shard, width = module.shard_indices, module.weight.shape[1]
    if module.num_embeddings != module.org_vocab_size:
        raise LayoutError(f"{name} has rows beyond the vocabulary, as LoRA adds them")
    start, rows = shard.org_vocab_start_index, shard.num_org_elements
    if rows:
        view = module.weight.narrow(0, 0, rows)
        yield part(f"{name}.weight", view, (module.org_vocab_size, width), (start, 0))


def _experts(name: str, module: Any) -> Iterator[EngineTensor]:
    config, experts = module.moe_config, module.expert_map_manager
    prefix = name.removesuffix(_EXPERTS)
    if config.num_experts != config.num_logical_experts:
        raise LayoutError(f"{name}: redundant experts are not known here: switch expert balancing off")
    if not config.is_act_and_mul or config.has_bias:
        raise LayoutError(f"{name}: only gated experts without a bias are known here")
    inter, padded = config.intermediate_size_per_partition_unpadded, module.w2_weight.shape[2]
    hidden, rank, size = config.hidden_dim_unpadded, experts.tp_rank, experts.tp_size
    up_and_gate, across = (inter * size, hidden), (hidden, inter * size)
    for expert in experts.get_local_expert_ids():
        slot = int(experts.map_global_to_local(expert))
        w13, w2 = module.w13_weight[slot].narrow(1, 0, hidden), module.w2_weight[slot].narrow(0, 0, hidden)
        one = f"{prefix}.{expert}"
        yield part(f"{one}.gate_proj.weight", w13.narrow(0, 0, inter), up_and_gate, (rank * inter, 0))
        yield part(f"{one}.up_proj.weight", w13.narrow(0, padded, inter), up_and_gate, (rank * inter, 0))
        yield part(f"{one}.down_proj.weight", w2.narrow(1, 0, inter), across, (0, rank * inter))


# The first kind that fits counts: QKV and merged projections are column-parallel, too.
_RULES: tuple[tuple[type, Callable[[str, Any], Iterator[EngineTensor]]], ...] = (
    (QKVParallelLinear, _qkv),
    (MergedColumnParallelLinear, _merged),
    (ColumnParallelLinear, _columns),
    (RowParallelLinear, _row_parallel),
    (ReplicatedLinear, _replicated),
    (VocabParallelEmbedding, _vocabulary),
    (RoutedExperts, _experts),
    (RMSNorm, _norm),
)
