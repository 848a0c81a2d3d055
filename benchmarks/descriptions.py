"""Descriptions of the ranks of a Qwen3-MoE model, from its sizes alone: no weights, and no ranks that run.

Trainers are Megatron's, with expert parallelism over all of them and everything else whole on each. An engine
is SGLang's: tensor parallel, its experts cut over all its ranks, or whole experts divided among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from awex_delta.plan.describe import EngineColumns, EngineSpec, Spec, TrainerColumns, TrainerSpec

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Part = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name of an HF tensor, shape of a part of it, its whole shape, and where the part begins."""

Runs = list[tuple[int, int, int]]
"""Position in the parameter, position in the HF tensor, elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a mixture of experts."""

    layers: int
    experts: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and the ranks that hold it.

    trainers: ranks of the trainer, as many as expert-parallel ranks.
    instances, engine_tp: engines, and ranks of each.
    expert_parallel: an engine's ranks divide the experts, and do not cut each of them.
    """

    sizes: Sizes
    trainers: int
    instances: int
    engine_tp: int
    expert_parallel: bool = False

    @property
    def num_engines(self) -> int:
        """Engine ranks."""
        return self.instances * self.engine_tp

    def describe(self) -> list[Spec]:
        """What every rank says of itself, by transfer rank. Replicas share their layout."""
        layouts = [self._engine_layout(rank) for rank in range(self.engine_tp)]
        engines = [
            EngineSpec(
                rank=seat,
                engine=f"engine{seat // self.engine_tp}",
                agreed={},
                context=True,
                layout=layouts[seat % self.engine_tp],
            )
            for seat in range(self.num_engines)
        ]
        return [*engines, *(self._trainer(rank) for rank in range(self.trainers))]

    def _engine_layout(self, rank: int) -> EngineColumns:
        parts = list(self._engine_parts(rank))
        return EngineColumns(
            names=tuple(part[0] for part in parts),
            dtypes=("bfloat16",) * len(parts),
            shapes=tuple(part[1] for part in parts),
            global_shapes=tuple(part[2] for part in parts),
            global_offsets=tuple(part[3] for part in parts),
            tied_to=("",) * len(parts),
        )

    def _engine_parts(self, rank: int) -> Iterator[Part]:
        """In the order of storages: all gates and ups of a layer, then all downs."""
        sizes, tp = self.sizes, self.engine_tp
        yield _cut(EMBEDDING, (sizes.vocab, sizes.hidden), 0, rank, tp)
        local = sizes.experts // tp if self.expert_parallel else sizes.experts
        first, cuts = (rank * local, 1) if self.expert_parallel else (0, tp)
        for layer in range(sizes.layers):
            prefix = f"model.layers.{layer}"
            for name, shape, dim in _dense(sizes, prefix):
                yield _whole(name, shape) if dim is None else _cut(name, shape, dim, rank, tp)
            experts = [f"{prefix}.mlp.experts.{number}" for number in range(first, first + local)]
            for expert in experts:
                for one in ("gate", "up"):
                    up = f"{expert}.{one}_proj.weight", (sizes.inter, sizes.hidden)
                    yield _cut(*up, 0, rank % cuts, cuts)
            for expert in experts:
                yield _cut(f"{expert}.down_proj.weight", (sizes.hidden, sizes.inter), 1, rank % cuts, cuts)
        yield _whole(NORM, (sizes.hidden,))
        yield _cut(HEAD, (sizes.vocab, sizes.hidden), 0, rank, tp)

    def _trainer(self, rank: int) -> TrainerSpec:
        everyone = tuple(range(self.trainers))
        keys, numels, owners, owned = list[str](), list[int](), list[tuple[int, ...]](), list[list[int]]()
        outputs: list[tuple[int, str, tuple[int, ...]]] = []
        runs: list[tuple[int, int, int, int]] = []
        for key, converted, is_expert in self._params(rank):
            numel = sum(math.prod(shape) for _, shape, _ in converted)
            # The optimizer's shards of a parameter: one for each rank that holds it.
            group = (rank,) if is_expert else everyone
            place = group.index(rank)
            edges = [numel * edge // len(group) for edge in (place, place + 1)]
            for name, shape, moves in converted:
                runs += [(len(outputs), *move) for move in moves]
                outputs.append((len(keys), name, shape))
            keys.append(f"0/{key}")
            numels.append(numel)
            owners.append(group)
            owned.append(edges)
        layout = TrainerColumns(
            keys=tuple(keys),
            numels=np.array(numels, np.int64),
            params=np.array([param for param, _, _ in outputs], np.int64),
            names=tuple(name for _, name, _ in outputs),
            shapes=tuple(shape for _, _, shape in outputs),
            dtypes=("bfloat16",) * len(outputs),
            sparse=np.ones(len(outputs), bool),
            runs=np.array(runs, np.int64).T.copy(),
        )
        return TrainerSpec(
            rank=rank,
            run_id="0" * 32,
            agreed={},
            context=True,
            architecture="Qwen3MoeForCausalLM",
            rank_info=rank_info(rank, self.trainers),
            vocab_size=self.sizes.vocab,
            tied_embeddings=False,
            owners=tuple(owners),
            owned=np.array(owned, np.int64).T.copy(),
            layout=layout,
        )

    def _params(self, rank: int) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...], Runs]], bool]]:
        """Megatron's parameters, the HF tensors that each converts to, and whether it is an expert's."""
        sizes = self.sizes
        table = (sizes.vocab, sizes.hidden)
        yield "embedding.word_embeddings.weight", [_moved(EMBEDDING, table)], False
        local = sizes.experts // self.trainers
        for layer in range(sizes.layers):
            ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
            dense = {name.removeprefix(f"{theirs}."): shape for name, shape, _ in _dense(sizes, theirs)}
            fused = []
            for letter, runs in zip("qkv", _qkv_runs(sizes), strict=True):
                name = f"self_attn.{letter}_proj.weight"
                fused.append((f"{theirs}.{name}", dense.pop(name), runs))
            yield f"{ours}.self_attention.linear_qkv.weight", fused, False
            for name, shape in dense.items():
                yield f"{ours}.{name}", [_moved(f"{theirs}.{name}", shape)], False
            up, down = (sizes.inter, sizes.hidden), (sizes.hidden, sizes.inter)
            for number in range(local):
                expert = f"{theirs}.mlp.experts.{rank * local + number}"
                both = [
                    _moved(f"{expert}.{one}_proj.weight", up, place * math.prod(up))
                    for place, one in enumerate(("gate", "up"))
                ]
                yield f"{ours}.mlp.experts.linear_fc1.weight{number}", both, True
            for number in range(local):
                expert = f"{theirs}.mlp.experts.{rank * local + number}"
                yield (
                    f"{ours}.mlp.experts.linear_fc2.weight{number}",
                    [_moved(f"{expert}.down_proj.weight", down)],
                    True,
                )
        yield "decoder.final_layernorm.weight", [_moved(NORM, (sizes.hidden,))], False
        yield "output_layer.weight", [_moved(HEAD, table)], False


def rank_info(rank: int, world: int) -> dict[str, int | str | bool]:
    """The fields of AWEX's RankInfo: expert parallelism over all ranks."""
    sizes = dict.fromkeys(("tp_size", "pp_size", "ep_tp_size", "attn_tp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "ep_tp_rank", "attn_tp_rank", "engine_rank"), 0)
    own = dict.fromkeys(("dp_rank", "attn_dp_rank", "ep_rank", "local_rank", "global_rank"), rank)
    return {
        **sizes,
        **ranks,
        **own,
        "dp_size": world,
        "ep_size": world,
        "world_size": world,
        "is_infer": False,
    }


def _dense(sizes: Sizes, prefix: str) -> Sequence[tuple[str, tuple[int, ...], int | None]]:
    """HF tensors of a layer beside its experts, and along which dimension an engine cuts each."""
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return [
        (f"{prefix}.input_layernorm.weight", (sizes.hidden,), None),
        (f"{prefix}.self_attn.q_proj.weight", (q, sizes.hidden), 0),
        (f"{prefix}.self_attn.k_proj.weight", (kv, sizes.hidden), 0),
        (f"{prefix}.self_attn.v_proj.weight", (kv, sizes.hidden), 0),
        (f"{prefix}.self_attn.o_proj.weight", (sizes.hidden, q), 1),
        (f"{prefix}.self_attn.q_norm.weight", (sizes.head_dim,), None),
        (f"{prefix}.self_attn.k_norm.weight", (sizes.head_dim,), None),
        (f"{prefix}.post_attention_layernorm.weight", (sizes.hidden,), None),
        (f"{prefix}.mlp.gate.weight", (sizes.experts, sizes.hidden), None),
    ]


@lru_cache(maxsize=1)
def _qkv_runs(sizes: Sizes) -> tuple[Runs, Runs, Runs]:
    """Megatron's order: for each key-value head its query heads, then the key, then the value."""
    head = sizes.head_dim * sizes.hidden
    queries = sizes.heads // sizes.kv_heads * head
    group, heads = queries + 2 * head, range(sizes.kv_heads)
    return (
        [(number * group, number * queries, queries) for number in heads],
        [(number * group + queries, number * head, head) for number in heads],
        [(number * group + queries + head, number * head, head) for number in heads],
    )


def _moved(name: str, shape: tuple[int, ...], source: int = 0) -> tuple[str, tuple[int, ...], Runs]:
    return name, shape, [(source, 0, math.prod(shape))]


def _whole(name: str, shape: tuple[int, ...]) -> Part:
    return name, shape, shape, (0,) * len(shape)


def _cut(name: str, whole: tuple[int, ...], dim: int, rank: int, size: int) -> Part:
    shape, offset = list(whole), [0] * len(whole)
    shape[dim] = whole[dim] // size
    offset[dim] = rank * shape[dim]
    return name, tuple(shape), whole, tuple(offset)
