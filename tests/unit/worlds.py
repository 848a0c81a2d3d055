"""Worlds of descriptions without weights: a small Qwen3-MoE under any parallelism, on both sides.

Every element of every HF tensor has a number of its own, so that what a line carries can be followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from awex_delta.plan.describe import EngineColumns, EngineSpec, TrainerColumns, TrainerSpec
from awex_delta.plan.world import World, make_world

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a small mixture of experts."""

    layers: int = 2
    hidden: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 3
    experts: int = 4
    inter: int = 4
    vocab: int = 11
    rows: int = 12  # of the trainer's embedding, padding included
    tied: bool = False  # the head is the embedding

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """HF name -> whole shape."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {EMBED: (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found |= {
                f"{prefix}.input_layernorm.weight": (self.hidden,),
                f"{prefix}.self_attn.q_proj.weight": (q, self.hidden),
                f"{prefix}.self_attn.k_proj.weight": (kv, self.hidden),
                f"{prefix}.self_attn.v_proj.weight": (kv, self.hidden),
                f"{prefix}.self_attn.o_proj.weight": (self.hidden, q),
                f"{prefix}.mlp.gate.weight": (self.experts, self.hidden),
            }
            for expert in range(self.experts):
                inner = f"{prefix}.mlp.experts.{expert}"
                found |= {
                    f"{inner}.gate_proj.weight": (self.inter, self.hidden),
                    f"{inner}.up_proj.weight": (self.inter, self.hidden),
                    f"{inner}.down_proj.weight": (self.hidden, self.inter),
                }
        return {**found, NORM: (self.hidden,), HEAD: (self.vocab, self.hidden)}


@dataclass(kw_only=True)
class Rank:
    """What one rank holds: numbers of elements by name, and how to describe it."""

    spec: Any
    numbers: dict[str, np.ndarray] = field(default_factory=dict)


def numbered(model: Model) -> dict[str, np.ndarray]:
    """Every element of every HF tensor by a number of its own, the trainer's padding as negative ones."""
    found, start = {}, 0
    for name, shape in model.shapes().items():
        size = math.prod(shape)
        found[name] = np.arange(start, start + size).reshape(shape)
        start += size
    if model.tied:
        found[HEAD] = found[EMBED]
    return found


def part_of(whole: np.ndarray, dim: int | None, rank: int, size: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """An even part along a dimension, and its offset."""
    offset = [0] * whole.ndim
    if dim is None or size == 1:
        return whole, tuple(offset)
    step = whole.shape[dim] // size
    offset[dim] = rank * step
    return np.take(whole, range(rank * step, (rank + 1) * step), dim), tuple(offset)


def tp_dim(name: str) -> int | None:
    """Along which dimension tensor parallelism cuts a tensor outside of the experts."""
    if name in (EMBED, HEAD) or any(one in name for one in ("q_proj", "k_proj", "v_proj")):
        return 0
    return 1 if "o_proj" in name else None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Megatron's parallelism: each of `pp` stages has tp x dp ranks, which follow each other."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def stage(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.dp


def trainers(
    model: Model,
    *,
    tp: int = 1,
    dp: int = 1,
    ep: int = 1,
    pp: int = 1,
    whole: Sequence[str] = (),
    uneven: bool = False,
) -> list[Rank]:
    """Megatron-shaped ranks: dense tp x dp, experts ep x the rest. Attention and each fc1 are fused."""
    sizes, values = Sizes(tp=tp, dp=dp, ep=ep, pp=pp), numbered(model)
    return [
        _trainer(model, values, rank, sizes, frozenset(whole), uneven) for rank in range(sizes.stage * pp)
    ]


def _trainer(
    model: Model,
    values: dict[str, np.ndarray],
    rank: int,
    sizes: Sizes,
    whole: frozenset[str],
    uneven: bool,
) -> Rank:
    params: list[tuple[str, list[tuple[str, np.ndarray, np.ndarray]], tuple[int, ...]]] = []
    tp, ep, first = sizes.tp, sizes.ep, rank // sizes.stage * sizes.stage
    stage = range(first, first + sizes.stage)
    dense_owners = tuple(r for r in stage if r % tp == rank % tp)
    # Experts: expert-parallel ranks follow each other, and every ep-th rank holds the same experts. Without
    # expert parallelism they are cut as everything else.
    expert_owners = tuple(r for r in stage if r % ep == rank % ep) if ep > 1 else dense_owners
    for name, outputs, is_expert in _params(model, values, rank, sizes):
        owners = expert_owners if is_expert else dense_owners
        params.append((name, outputs, () if any(o[0] in whole for o in outputs) else owners))
    keys, numels, owned, runs, out = [], [], [], [], []
    for place, (key, outputs, owners) in enumerate(params):
        flat = _numel(outputs)
        keys.append(f"0/{key}")
        numels.append(flat)
        owned.append(_owned(flat, owners, rank, uneven))
        for name, value, where in outputs:
            sparse = bool(owners)
            if sparse:
                runs += [(len(out), *run) for run in _runs(where)]
            out.append((place, name, value.shape, sparse))
    columns = TrainerColumns(
        keys=tuple(keys),
        numels=np.array(numels, np.int64),
        params=np.array([o[0] for o in out], np.int64),
        names=tuple(o[1] for o in out),
        shapes=tuple(tuple(o[2]) for o in out),
        dtypes=("bfloat16",) * len(out),
        sparse=np.array([o[3] for o in out], bool),
        runs=np.array(runs, np.int64).reshape(-1, 4).T,
    )
    spec = TrainerSpec(
        rank=rank,
        run_id="a" * 32,
        agreed={},
        context=False,
        architecture="Qwen3MoeForCausalLM",
        rank_info=rank_info(rank, sizes),
        vocab_size=model.vocab,
        tied_embeddings=model.tied,
        owners=tuple(p[2] for p in params),
        owned=np.array(owned, np.int64).reshape(-1, 2).T,
        layout=columns,
    )
    # The sender's line: elements of the owned parameters in their order, then what travels whole.
    line = [_flat(outputs) for _, outputs, owners in params if owners]
    line += [o[1].reshape(-1) for _, outputs, owners in params if not owners for o in outputs]
    return Rank(spec=spec, numbers={"line": np.concatenate(line)})


def _numel(outputs: list[tuple[str, np.ndarray, np.ndarray]]) -> int:
    """Elements of a parameter; a tied embedding gives them to two tensors."""
    return 1 + max(int(where.max()) for _, _, where in outputs)


def _flat(outputs: list[tuple[str, np.ndarray, np.ndarray]]) -> np.ndarray:
    flat = np.empty(_numel(outputs), np.int64)
    for _, value, where in outputs:
        flat[where.reshape(-1)] = value.reshape(-1)
    return flat


def _params(
    model: Model, values: dict[str, np.ndarray], rank: int, sizes: Sizes
) -> Iterator[tuple[str, list[tuple[str, np.ndarray, np.ndarray]], bool]]:
    """Parameter, its HF tensors with the places of their elements in it, and whether it is an expert's."""
    tp, ep, pp, stage = sizes.tp, sizes.ep, sizes.pp, rank // sizes.stage

    def cut(name: str) -> np.ndarray:
        return part_of(values[name], tp_dim(name), rank % tp, tp)[0]

    def alone(name: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
        value = cut(name)
        return [(name, value, np.arange(value.size).reshape(value.shape))]

    def padded(name: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
        padding = -np.arange(1, 1 + (model.rows - model.vocab) * model.hidden).reshape(-1, model.hidden)
        value = part_of(np.concatenate([values[name], padding]), 0, rank % tp, tp)[0]
        return [(name, value, np.arange(value.size).reshape(value.shape))]

    if stage == 0:
        # One stage makes the tied head of the embedding; the last of several has a copy of its own.
        yield EMBED, padded(EMBED) + (padded(HEAD) if model.tied and pp == 1 else []), False
    for layer in (layer for layer in range(model.layers) if layer * pp // model.layers == stage):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", alone(f"{prefix}.input_layernorm.weight"), False
        yield (
            f"{prefix}.qkv",
            _qkv(model, [cut(f"{prefix}.self_attn.{x}_proj.weight") for x in "qkv"], prefix),
            False,
        )
        for name in ("self_attn.o_proj.weight", "mlp.gate.weight"):
            yield f"{prefix}.{name}", alone(f"{prefix}.{name}"), False
        local = model.experts // ep
        for expert in range(rank % ep * local, (rank % ep + 1) * local):
            inner = f"{prefix}.mlp.experts.{expert}"
            names = [f"{inner}.gate_proj.weight", f"{inner}.up_proj.weight"]
            size = tp if ep == 1 else 1
            gate, up = (part_of(values[name], 0, rank % tp, size)[0] for name in names)
            place = np.arange(gate.size + up.size).reshape(-1, model.hidden)
            fused = [(names[0], gate, place[: len(gate)]), (names[1], up, place[len(gate) :])]
            yield f"{inner}.fc1", fused, True
            down = part_of(values[f"{inner}.down_proj.weight"], 1, rank % tp, size)[0]
            yield (
                f"{inner}.fc2",
                [(f"{inner}.down_proj.weight", down, np.arange(down.size).reshape(down.shape))],
                True,
            )
    if stage == pp - 1:
        yield NORM, alone(NORM), False
        if not model.tied or pp > 1:
            yield HEAD, padded(HEAD), False


def _qkv(model: Model, parts: list[np.ndarray], prefix: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Megatron's order: for each key-value head its query heads, then the key, then the value."""
    groups = parts[1].shape[0] // model.head_dim
    per_group = [part.shape[0] // groups for part in parts]
    place = np.arange(sum(part.size for part in parts)).reshape(groups, sum(per_group), model.hidden)
    found, start = [], 0
    for letter, part, rows in zip("qkv", parts, per_group, strict=True):
        where = place[:, start : start + rows].reshape(part.shape)
        found.append((f"{prefix}.self_attn.{letter}_proj.weight", part, where))
        start += rows
    return found


def _runs(where: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs of source positions, destination row by row."""
    flat = where.reshape(-1)
    begins = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 2) != 1)
    ends = np.append(begins[1:], flat.size)
    return [(int(flat[b]), int(b), int(e - b)) for b, e in zip(begins, ends, strict=True)]


def _owned(numel: int, owners: tuple[int, ...], rank: int, uneven: bool) -> tuple[int, int]:
    if not owners:
        return 0, 0
    edges = [numel * place // len(owners) for place in range(len(owners) + 1)]
    if uneven:  # an optimizer's buckets do not end with parameters
        edges[1:-1] = [min(numel, edge + 3) for edge in edges[1:-1]]
    place = owners.index(rank)
    return (edges[place], edges[place + 1]) if edges[place + 1] > edges[place] else (0, 0)


def rank_info(rank: int, sizes: Sizes) -> dict[str, int | str | bool]:
    """The fields of AWEX's RankInfo."""
    tp, dp, ep, inner = sizes.tp, sizes.dp, sizes.ep, rank % sizes.stage
    counts = {"tp_size": tp, "pp_size": sizes.pp, "dp_size": dp, "ep_size": ep, "ep_tp_size": 1}
    ranks = {"tp_rank": inner % tp, "pp_rank": rank // sizes.stage, "dp_rank": inner // tp, "ep_tp_rank": 0}
    attention = {"attn_tp_size": tp, "attn_tp_rank": inner % tp, "attn_dp_rank": inner // tp}
    rest = {"ep_rank": inner % ep, "local_rank": rank, "engine_rank": 0, "is_infer": False}
    return {**counts, **ranks, **attention, **rest, "world_size": sizes.stage * sizes.pp, "global_rank": rank}


def engines(
    model: Model, *, instances: int = 1, tp: int = 1, ep: int = 1, first: int = 0, head: str = "own"
) -> list[Rank]:
    """SGLang-shaped ranks: tensor parallel, whole experts on expert-parallel ranks or each cut over all.

    head: "own", or "alias" of the embedding, or "none".
    """
    values = {name: value for name, value in numbered(model).items() if (name, head) != (HEAD, "none")}
    found = []
    for instance in range(instances):
        for rank in range(tp):
            found.append(
                _engine(model, values, f"engine{first + instance}", len(found) + first, rank, tp, ep, head)
            )
    return found


def _engine(
    model: Model,
    values: dict[str, np.ndarray],
    engine: str,
    seat: int,
    rank: int,
    tp: int,
    ep: int,
    head: str,
) -> Rank:
    parts: list[tuple[str, np.ndarray, tuple[int, ...]]] = []
    for name, whole in values.items():
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            group, size = rank // (tp // ep), tp // ep
            if expert // (model.experts // ep) == group:
                parts.append((name, *part_of(whole, 1 if "down" in name else 0, rank % size, size)))
        elif ("k_proj" in name or "v_proj" in name) and tp > model.kv_heads:
            parts.append((name, *part_of(whole, 0, rank * model.kv_heads // tp, model.kv_heads)))
        elif name in (EMBED, HEAD):
            rows = -(-model.vocab // tp)
            cut = whole[rank * rows : (rank + 1) * rows]
            if cut.size:
                parts.append((name, cut, (rank * rows, 0)))
        else:
            parts.append((name, *part_of(whole, tp_dim(name), rank, tp)))
    columns = EngineColumns(
        names=tuple(p[0] for p in parts),
        dtypes=("bfloat16",) * len(parts),
        shapes=tuple(tuple(p[1].shape) for p in parts),
        global_shapes=tuple(tuple(values[p[0]].shape) for p in parts),
        global_offsets=tuple(p[2] for p in parts),
        tied_to=tuple(EMBED if (p[0], head) == (HEAD, "alias") else "" for p in parts),
    )
    spec = EngineSpec(rank=seat, engine=engine, agreed={}, context=False, layout=columns)
    stored = [p[1].reshape(-1) for p, alias in zip(parts, columns.tied_to, strict=True) if not alias]
    return Rank(spec=spec, numbers={"line": np.concatenate(stored)})


def world_of(engine_ranks: Sequence[Rank], trainer_ranks: Sequence[Rank]) -> World:
    """All descriptions together."""
    specs = [rank.spec for rank in (*engine_ranks, *trainer_ranks)]
    return make_world(specs, len(engine_ranks))
