"""The demo's judge: whole HF weights from both sides, by paths that share nothing with the product.

Megatron's own tensors are gathered and renamed here, without AWEX's converter and without the transfer
plan. Engines are read from their raw storage. Then bits are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load

from awex_delta.demo.scenario import EXPERTS, HEADS, KV_HEADS, VOCAB_SIZE, DemoPlan
from awex_delta.engines.fused import ModelShape
from awex_delta.testing.fused_oracle import hf_copies

State = Mapping[str, torch.Tensor]

_WHOLE = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_VOCABULARY = {"embedding.word_embeddings.weight": EMBEDDING, "output_layer.weight": LM_HEAD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The elements of one tensor in which an engine differs from the trainer, bit by bit.

    count: differing elements; all of them when the tensor is missing on one side, or has another
        shape or dtype there.
    first: position of the first one; None in those cases.
    """

    engine: str
    name: str
    count: int
    first: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.engine}: {self.name} is missing on one side, or has another shape or dtype there"
        return f"{self.engine}: {self.name} differs in {self.count} elements, the first at {list(self.first)}"


def model_shape(plan: DemoPlan) -> ModelShape:
    """The sizes of the demo's model, spelled out here rather than read from a configuration."""
    moe = plan.model == "qwen3-moe"
    return ModelShape(
        num_layers=plan.layers,
        hidden_size=plan.hidden,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=plan.head_dim,
        intermediate_size=plan.ffn,
        vocab_size=VOCAB_SIZE,
        tied_embeddings=plan.tied,
        moe_layers=frozenset(range(plan.layers)) if moe else frozenset(),
        num_experts=EXPERTS if moe else 0,
        moe_intermediate_size=plan.ffn if moe else 0,
    )


def trainer_hf_state(plan: DemoPlan, dumps: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """The whole HF model that the trainer holds.

    dumps are, by trainer rank, its Megatron weights with global layer and expert numbers, as safetensors;
    tensor-parallel neighbours have adjacent ranks. Raises ValueError if ranks that should hold equal
    replicas do not, or a name is not known.
    """
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for rank, dump in enumerate(dumps):
        for name, tensor in load(dump).items():
            kept = shards.setdefault(name, {}).setdefault(rank % plan.train.tp, tensor)
            if not same_bits(kept, tensor):
                raise ValueError(f"trainer rank {rank} holds other bits of {name} than its replica")
    state: dict[str, torch.Tensor] = {}
    for name, by_tp_rank in shards.items():
        state.update(_to_hf(plan, name, [by_tp_rank[tp_rank] for tp_rank in sorted(by_tp_rank)]))
    if plan.tied:  # with several pipeline stages the last one has a copy of its own
        state.setdefault(LM_HEAD, state[EMBEDDING].clone())
    return state


def _to_hf(plan: DemoPlan, name: str, shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    if name in _VOCABULARY:
        return {_VOCABULARY[name]: torch.cat(shards)[:VOCAB_SIZE].clone()}
    prefix, local = "", name
    if name.startswith("decoder.layers."):
        layer, local = name.removeprefix("decoder.layers.").split(".", 1)
        prefix = f"model.layers.{layer}."
    if local in _WHOLE:
        if not all(same_bits(shards[0], shard) for shard in shards):
            raise ValueError(f"tensor-parallel ranks hold different bits of {name}")
        return {prefix + _WHOLE[local]: shards[0]}
    if local == "self_attention.linear_qkv.weight":
        return _split_qkv(plan, f"{prefix}self_attn", torch.cat(shards))
    if local == "self_attention.linear_proj.weight":
        return {f"{prefix}self_attn.o_proj.weight": torch.cat(shards, dim=1)}
    if local.startswith("mlp."):
        mlp, kind = local.rsplit(".", 2)[0].replace("local_experts.", ""), local.split(".")[-2]
        if kind == "linear_fc1":
            gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
            return {
                f"{prefix}{mlp}.gate_proj.weight": torch.cat(gates),
                f"{prefix}{mlp}.up_proj.weight": torch.cat(ups),
            }
        if kind == "linear_fc2":
            return {f"{prefix}{mlp}.down_proj.weight": torch.cat(shards, dim=1)}
    raise ValueError(f"no rule for Megatron's {name}")


def _split_qkv(plan: DemoPlan, prefix: str, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """Megatron keeps, for each key-value head, its query heads, then the key, then the value."""
    groups = fused.view(KV_HEADS, HEADS // KV_HEADS + 2, plan.head_dim, plan.hidden)
    return {
        f"{prefix}.q_proj.weight": groups[:, :-2].reshape(-1, plan.hidden),
        f"{prefix}.k_proj.weight": groups[:, -2].reshape(-1, plan.hidden),
        f"{prefix}.v_proj.weight": groups[:, -1].reshape(-1, plan.hidden),
    }


def engine_differences(plan: DemoPlan, truth: State, dumps: Sequence[bytes]) -> list[Difference]:
    """Compare every copy that any engine holds with the trainer's weights; empty when all bits are equal.

    dumps are by engine rank: the transformers engine's checkpoint, then raw fused storages.
    """
    held = {name: [tensor] for name, tensor in load(dumps[0]).items()}
    if plan.tied:  # a checkpoint lists tied weights once
        held.setdefault(LM_HEAD, held[EMBEDDING])
    found = _compare("transformers engine", truth, held)
    storages = [load(dump) for dump in dumps[1:]]
    fused = hf_copies(model_shape(plan), storages, plan.infer.ep)
    return found + _compare("sharded engine", truth, fused)


def _compare(engine: str, truth: State, held: Mapping[str, Sequence[torch.Tensor]]) -> list[Difference]:
    found: list[Difference] = []
    for name in sorted(truth.keys() | held.keys()):
        expected, copies = truth.get(name), held.get(name, ())
        if expected is None or not copies:
            known = copies[0] if expected is None else expected
            found.append(Difference(engine=engine, name=name, count=known.numel(), first=None))
            continue
        for copy in copies:
            difference = _difference(engine, name, expected, copy)
            if difference is not None:
                found.append(difference)
    return found


def _difference(engine: str, name: str, expected: torch.Tensor, held: torch.Tensor) -> Difference | None:
    if expected.shape != held.shape or expected.dtype != held.dtype:
        return Difference(engine=engine, name=name, count=expected.numel(), first=None)
    positions = (_bits(expected) != _bits(held)).nonzero()
    if not len(positions):
        return None
    return Difference(engine=engine, name=name, count=len(positions), first=tuple(positions[0].tolist()))


def distinct(plan: DemoPlan, state: State) -> State:
    """A state without the lm_head that is tied to the embedding: every weight once."""
    return {name: tensor for name, tensor in state.items() if not (plan.tied and name == LM_HEAD)}


def count_changed(old: State, new: State) -> int:
    """Elements of `new` whose bits differ from those in `old`, which has its names."""
    return sum(int((_bits(old[name]) != _bits(tensor)).sum()) for name, tensor in new.items())


def count_elements(state: State) -> int:
    """Elements in a state."""
    return sum(tensor.numel() for tensor in state.values())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True when shape, dtype and all bits are equal."""
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
