"""Reads fused engine storage without `engines.fused`'s views, to judge them.

The adapter publishes narrow views with global offsets. Here whole tensors are glued with cat instead, so
that an error in the views does not cancel out when the two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from awex_delta.engines.fused import ModelShape

Storage = Mapping[str, torch.Tensor]


def hf_copies(shape: ModelShape, ranks: Sequence[Storage], ep_size: int = 1) -> dict[str, list[torch.Tensor]]:
    """Every whole copy of every HF tensor held by one tensor-parallel group: as many as it has replicas.

    ranks are the fused storage of each rank, in order, as `FusedEngine.params` names it.
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
