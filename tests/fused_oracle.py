"""Whole HF state dicts out of fused engine storage and into it, without `engines.fused`'s views."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from awex_delta.engines.fused import FusedEngine
from awex_delta.testing.fused_oracle import Storage, hf_copies


def full_hf_state(engines: Sequence[FusedEngine]) -> dict[str, torch.Tensor]:
    """The whole HF model that the ranks of one tensor-parallel group hold together.

    Args:
        engines: all ranks, in order.

    Returns:
        HF name to a new tensor.

    Raises:
        ValueError: ranks that hold replicas of one tensor hold different bits.
    """
    first = engines[0]
    copies = hf_copies(first.shape, [engine.params for engine in engines], first.rank.ep_size)
    for name, tensors in copies.items():
        for number, tensor in enumerate(tensors[1:], start=1):
            if not torch.equal(_bits(tensors[0]), _bits(tensor)):
                raise ValueError(f"{name}: replica {number} differs from replica 0")
    return {name: tensors[0] for name, tensors in copies.items()}


def load_hf_state(engine: FusedEngine, state: Storage) -> None:
    """Load a whole HF state dict into one rank, as SGLang's `load_weights` does: cut, then place.

    Args:
        engine: the rank; only its `params`, `shape` and `rank` are used.
        state: HF name to whole tensor; a tied lm_head may be listed.
    """
    for name, tensor in state.items():
        _load_one(engine, name, tensor)


def _load_one(engine: FusedEngine, name: str, tensor: torch.Tensor) -> None:
    params, rank, shape = engine.params, engine.rank, engine.shape
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    if ".mlp.experts." in name:
        _load_expert(engine, prefix, kind, tensor)
    elif kind in ("embed_tokens", "lm_head"):
        if name in params:
            per_rank = params[name].shape[0]
            rows = tensor[rank.tp_rank * per_rank : (rank.tp_rank + 1) * per_rank]
            params[name][: rows.shape[0]] = rows
    elif kind in ("q_proj", "k_proj", "v_proj"):
        target = params[f"{prefix}.qkv_proj.weight"]
        kv_shards = min(rank.tp_size, shape.num_kv_heads)
        queries = shape.num_heads * shape.head_dim // rank.tp_size
        if kind == "q_proj":
            target[:queries] = tensor.chunk(rank.tp_size)[rank.tp_rank]
        else:
            shard = tensor.chunk(kv_shards)[rank.tp_rank // (rank.tp_size // kv_shards)]
            target[queries:].chunk(2)[kind == "v_proj"][:] = shard
    elif kind in ("gate_proj", "up_proj"):
        halves = params[f"{prefix}.gate_up_proj.weight"].chunk(2)
        halves[kind == "up_proj"][:] = tensor.chunk(rank.tp_size)[rank.tp_rank]
    elif kind in ("o_proj", "down_proj"):
        params[name][:] = tensor.chunk(rank.tp_size, dim=1)[rank.tp_rank]
    else:
        params[name][:] = tensor


def _load_expert(engine: FusedEngine, prefix: str, kind: str, tensor: torch.Tensor) -> None:
    """Place one expert, if this rank holds it."""
    rank = engine.rank
    experts, expert_id = prefix.rsplit(".", 1)
    local = engine.shape.num_experts // rank.ep_size
    group, slot = divmod(int(expert_id), local)
    if group != rank.tp_rank // (rank.tp_size // rank.ep_size):
        return
    tp_rank, tp_size = rank.tp_rank % (rank.tp_size // rank.ep_size), rank.tp_size // rank.ep_size
    if kind == "down_proj":
        engine.params[f"{experts}.w2_weight"][slot] = tensor.chunk(tp_size, dim=1)[tp_rank]
    else:
        halves = engine.params[f"{experts}.w13_weight"][slot].chunk(2)
        halves[kind == "up_proj"][:] = tensor.chunk(tp_size)[tp_rank]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
