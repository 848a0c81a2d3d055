"""Reads and loads fused engine storage without `engines.fused`'s views, to judge them.

The adapter publishes narrow views with global offsets. Here whole tensors are cut with chunk and glued
with cat instead, so that an error in the views does not cancel out when the two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from awex_delta.engines.fused import FusedEngine, ModelShape

Storage = Mapping[str, torch.Tensor]


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


def hf_copies(shape: ModelShape, ranks: Sequence[Storage], ep_size: int = 1) -> dict[str, list[torch.Tensor]]:
    """Every copy of every HF tensor held by one tensor-parallel group: one, or as many as it has replicas.

    Args:
        shape: the model's sizes.
        ranks: fused storage of each rank, in order, as `FusedEngine.params` names it.
        ep_size: groups of experts.

    Returns:
        HF name to its whole copies.
    """
    state: dict[str, list[torch.Tensor]] = {}
    for name in ranks[0]:
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        stored = [rank[name] for rank in ranks]
        if kind in ("embed_tokens", "lm_head"):
            state[name] = [torch.cat(stored)[: shape.vocab_size]]
        elif kind == "qkv_proj":
            state |= _split_qkv(prefix, stored, shape)
        elif kind == "gate_up_proj":
            gates, ups = zip(*(tensor.chunk(2) for tensor in stored), strict=True)
            state[f"{prefix}.gate_proj.weight"] = [torch.cat(gates)]
            state[f"{prefix}.up_proj.weight"] = [torch.cat(ups)]
        elif kind in ("o_proj", "down_proj"):
            state[name] = [torch.cat(stored, dim=1)]
        elif kind == "w13_weight":
            gates, ups = zip(*(tensor.chunk(2, dim=1) for tensor in stored), strict=True)
            state |= _experts(prefix, "gate_proj", gates, ep_size, dim=1)
            state |= _experts(prefix, "up_proj", ups, ep_size, dim=1)
        elif kind == "w2_weight":
            state |= _experts(prefix, "down_proj", stored, ep_size, dim=2)
        else:
            state[name] = [tensor.clone() for tensor in stored]
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _split_qkv(
    prefix: str, stored: Sequence[torch.Tensor], shape: ModelShape
) -> dict[str, list[torch.Tensor]]:
    """Count heads from the end: the last two blocks are the values and the keys."""
    heads = [tensor.view(-1, shape.head_dim, shape.hidden_size) for tensor in stored]
    kv = (heads[0].shape[0] - shape.num_heads // len(stored)) // 2
    replicas = len(stored) * kv // shape.num_kv_heads
    values = [tensor[-kv:] for tensor in heads]
    keys = [tensor[-2 * kv : -kv] for tensor in heads]
    queries = [tensor[: -2 * kv] for tensor in heads]
    return {
        f"{prefix}.q_proj.weight": [torch.cat(queries).flatten(0, 1)],
        f"{prefix}.k_proj.weight": [torch.cat(keys[i::replicas]).flatten(0, 1) for i in range(replicas)],
        f"{prefix}.v_proj.weight": [torch.cat(values[i::replicas]).flatten(0, 1) for i in range(replicas)],
    }


def _experts(
    prefix: str, kind: str, stored: Sequence[torch.Tensor], ep_size: int, dim: int
) -> dict[str, list[torch.Tensor]]:
    """Glue the parts of each expert along `dim`, then the groups of experts, then take experts apart."""
    per_group = len(stored) // ep_size
    groups = [torch.cat(list(stored[i : i + per_group]), dim) for i in range(0, len(stored), per_group)]
    experts = torch.cat(groups).unbind(0)
    return {f"{prefix}.{i}.{kind}.weight": [expert.clone()] for i, expert in enumerate(experts)}


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
