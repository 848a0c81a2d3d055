"""What must hold before the first byte moves. Each check names both sides of what does not fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from awex.transfer.transfer_plan import TransferPlan

from awex_delta.errors import LayoutError, OwnershipError
from awex_delta.plan.columns import Ints
from awex_delta.plan.describe import EngineColumns, EngineSpec, TrainerColumns, TrainerSpec
from awex_delta.plan.pairs import Pair, engine_line
from awex_delta.plan.world import World

EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
TIED_HEAD = "lm_head.weight"
VOCAB_TENSORS = (*EMBEDDINGS, TIED_HEAD)


def check_ownership(trainers: Sequence[TrainerSpec], rank: int) -> None:
    """Every element of every parameter that this rank owns with others is owned exactly once.

    Args:
        trainers: all of them, by rank.
        rank: the rank whose parameters are checked. The first of the ranks that share a parameter checks it.

    Raises:
        OwnershipError: names the parameter, the ranks and the element where a hole or overlap begins.
    """
    me = trainers[rank]
    places = {
        other: {key: place for place, key in enumerate(trainers[other].layout.keys)}
        for other in {owner for owners in me.owners for owner in owners if 0 <= owner < len(trainers)}
    }
    for place, (key, owners) in enumerate(zip(me.layout.keys, me.owners, strict=True)):
        if owners and rank not in owners:
            raise OwnershipError(f"{key}: trainer rank {rank} is not among its own owners {owners}")
        if not owners or rank != min(owners):
            continue
        numel, ranges = int(me.layout.numels[place]), []
        for owner in owners:
            there = places.get(owner, {}).get(key)
            other = trainers[owner] if there is not None else None
            if (
                other is None
                or there is None
                or other.owners[there] != owners
                or int(other.layout.numels[there]) != numel
            ):
                raise OwnershipError(
                    f"{key}: trainer rank {rank} shares it with ranks {owners}, "
                    f"but rank {owner} does not hold the same parameter with the same owners"
                )
            start, stop = other.owned[:, there].tolist()
            if stop > start:
                ranges.append((start, stop, owner))
        _check_tiling(key, numel, sorted(ranges))


def _check_tiling(key: str, numel: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    edges = [(0, 0, -1), *ranges, (numel, numel, -1)]
    for (_, stop, left), (start, _, right) in pairwise(edges):
        if start != stop:
            kind = "nobody owns" if start > stop else "two ranks own"
            ranks = sorted({rank for rank in (left, right) if rank >= 0})
            raise OwnershipError(
                f"{key}: {kind} elements [{min(start, stop)}, {max(start, stop)}) of {numel} "
                f"(beside the shards of trainer ranks {ranks}): optimizer shards must tile it exactly once"
            )


def check_layouts(world: World) -> None:
    """Trainer and every engine hold the same tensors, with equal shapes and dtypes.

    A tied lm_head may be absent from an engine, and the trainer may hold more vocabulary rows than the
    engine (padding), which are never sent. What an engine ties is never sent either, so the trainer has
    to tie it as well.

    Raises:
        LayoutError: names the tensor on both sides.
    """
    offered = _offered(world.trainers)
    head_may_miss = world.trainers[0].tied_embeddings
    tied = set(VOCAB_TENSORS) if head_may_miss else set()
    checked: set[tuple[int, ...]] = set()
    for engine, ranks in _instances(world.engines).items():
        layouts = tuple(id(spec.layout) for spec in ranks)
        if layouts in checked:  # a replica of another engine
            continue
        checked.add(layouts)
        held: dict[str, tuple[str, str]] = {}
        for spec in ranks:
            one = spec.layout
            held |= dict(zip(one.names, zip(one.dtypes, one.tied_to, strict=True), strict=True))
        missing = sorted(offered.keys() - held.keys())
        if head_may_miss:
            missing = [name for name in missing if name != TIED_HEAD]
        extra = sorted(name for name in held.keys() - offered.keys() if not held[name][1])
        if missing or extra:
            raise LayoutError(
                f"engine {engine!r} and the trainer name different tensors: "
                f"{_only(missing, extra)}{_about_a_head(missing, extra)}"
            )
        for name, (dtype, alias) in sorted(held.items()):
            if alias and name in offered and not {name, alias} <= tied:
                raise LayoutError(
                    f"{name}: engine {engine!r} ties it to {alias}, but the trainer trains the two "
                    "apart: serve the model with untied weights (tie_word_embeddings)"
                )
            if not alias and dtype != offered[name][0]:
                raise LayoutError(
                    f"{name}: the trainer sends {offered[name][0]}, engine {engine!r} serves {dtype}; "
                    "load the engine with the trainer's dtype"
                )
        _check_parts(engine, ranks, offered)


def check_dense_coverage(engine: EngineSpec, plan: TransferPlan) -> None:
    """A full sync writes every element of an engine rank exactly once.

    Args:
        engine: the rank.
        plan: AWEX's plan as this rank sees it.

    Raises:
        LayoutError: names the tensor, the engine rank and how many elements are covered.
    """
    covered: dict[str, int] = defaultdict(int)
    for op in (op for ops in plan.operations.values() for op in ops):
        covered[op.recv_shard_meta.name] += math.prod(op.overlap_shape)
    line = engine_line(engine.layout)
    counts = np.array([covered[name] for name in line.names], np.int64)
    _check_counts(engine, counts, "the trainer's shards reach")


def check_coverage(engine: EngineSpec, pairs: Iterable[Pair]) -> None:
    """The lines of all pairs together hold every element of an engine rank exactly once.

    Raises:
        LayoutError: names the tensor, the engine rank and how many elements are covered.
    """
    starts = engine_line(engine.layout).starts.numpy()
    counts = np.zeros(starts.size - 1, np.int64)
    for pair in pairs:
        tensor = np.searchsorted(starts, pair.stored.target.numpy(), side="right") - 1
        np.add.at(counts, tensor, pair.stored.numels.numpy())
    _check_counts(engine, counts, "the trainer's owners send")


def _check_counts(engine: EngineSpec, counts: Ints, what: str) -> None:
    line = engine_line(engine.layout)
    sizes = line.starts.diff().numpy()
    for place in np.flatnonzero(counts != sizes)[:1].tolist():
        name = line.names[place]
        shape = engine.layout.global_shapes[engine.layout.places[name]]
        raise LayoutError(
            f"{name}: engine {engine.engine!r} (rank {engine.rank}) holds {sizes[place]} elements "
            f"(global shape {list(shape)}), {what} {counts[place]} of them"
        )


Offered = dict[str, tuple[str, tuple[int, ...]]]
"""By HF name: the dtype that trainers send, and the shape of the part that one of them holds."""


def _offered(trainers: Sequence[TrainerSpec]) -> Offered:
    offered: Offered = {}
    seen: set[int] = set()
    for trainer in trainers:
        if id(trainer.layout) not in seen:
            seen.add(id(trainer.layout))
            _offer(offered, trainer.layout, trainer.rank)
    return offered


def _offer(offered: Offered, layout: TrainerColumns, rank: int) -> None:
    names: set[str] = set()
    for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
        if name in names:
            raise LayoutError(f"{name}: trainer rank {rank} converts two parameters to it")
        names.add(name)
        known = offered.setdefault(name, (dtype, shape))
        if known[0] != dtype:
            raise LayoutError(f"{name}: trainer ranks hold it as {known[0]} and {dtype}")


def _instances(engines: Sequence[EngineSpec]) -> dict[str, list[EngineSpec]]:
    instances: dict[str, list[EngineSpec]] = defaultdict(list)
    for engine in engines:
        instances[engine.engine].append(engine)
    return instances


def _check_parts(engine: str, ranks: Sequence[EngineSpec], offered: Offered) -> None:
    """The parts that an engine's ranks hold of a tensor agree on its shape and cover it."""
    whole: dict[str, tuple[tuple[int, ...], str]] = {}
    parts: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for spec in ranks:
        layout = spec.layout
        for name, place in layout.places.items():
            if not layout.tied_to[place]:
                _check_rows(name, engine, layout, place, offered[name][1])
            shape = layout.global_shapes[place]
            if whole.setdefault(name, (shape, layout.dtypes[place])) != (shape, layout.dtypes[place]):
                raise LayoutError(f"{name}: ranks of engine {engine!r} disagree about its shape or dtype")
            _check_place(name, engine, spec.rank, layout, place)
            numel, found = math.prod(layout.shapes[place]), parts[name]
            if numel:  # an empty part begins where the next one does
                found[layout.global_offsets[place]] = numel
    for name, places in parts.items():
        held, size = sum(places.values()), math.prod(whole[name][0])
        if held != size:
            raise LayoutError(f"{name}: the ranks of engine {engine!r} hold {held} of its {size} elements")


def _check_rows(name: str, engine: str, layout: EngineColumns, place: int, offered: tuple[int, ...]) -> None:
    if not layout.global_shapes[place] or not offered:
        raise LayoutError(f"{name} is a scalar (engine {engine!r}): AWEX plans no tensor without rows")


def _check_place(name: str, engine: str, rank: int, layout: EngineColumns, place: int) -> None:
    shape, offset = layout.shapes[place], layout.global_offsets[place]
    whole = layout.global_shapes[place]
    fits = len(shape) == len(offset) == len(whole)
    if not fits or any(o + n > size for o, n, size in zip(offset, shape, whole, strict=True)):
        raise LayoutError(
            f"{name}: a part of shape {list(shape)} at {list(offset)} lies outside {list(whole)} "
            f"(engine {engine!r}, rank {rank})"
        )


def check_global_shapes(world: World, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The trainer's global shapes equal those of the engines, except for the padding of the vocabulary.

    Args:
        world: all descriptions.
        shapes: the trainer's global shape of some tensors, as AWEX resolved it.

    Raises:
        LayoutError: names the tensor and both shapes.
    """
    vocab, seen = world.trainers[0].vocab_size, set[int]()
    for engine in world.engines:
        layout = engine.layout
        if id(layout) in seen:
            continue
        seen.add(id(layout))
        for name, ours in shapes.items():
            place = layout.places.get(name)
            if place is None or layout.tied_to[place]:
                continue
            padded = name in VOCAB_TENSORS and ours[0] >= vocab
            unpadded = (vocab, *ours[1:]) if padded else ours
            if unpadded != layout.global_shapes[place]:
                raise LayoutError(
                    f"{name}: the trainer holds shape {list(unpadded)}, engine {engine.engine!r} "
                    f"{list(layout.global_shapes[place])}"
                )


def _only(missing: Sequence[str], extra: Sequence[str]) -> str:
    sides = (("the trainer", missing), ("the engine", extra))
    return "; ".join(f"only {side} has {_some(names)}" for side, names in sides if names)


def _about_a_head(missing: Sequence[str], extra: Sequence[str]) -> str:
    """What to do if lm_head is all that differs: one side was told that it is the embedding."""
    if {*missing, *extra} != {TIED_HEAD}:
        return ""
    tied, apart = ("the engine", "the trainer") if missing else ("the trainer", "the engine")
    return (
        f": {tied} ties it to the embedding, {apart} does not. Remedy: give both sides a model and a "
        "configuration of the same tie_word_embeddings"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"[{shown}{', ...' if len(names) > 6 else ''}]" + (f" ({len(names)})" if len(names) > 6 else "")
