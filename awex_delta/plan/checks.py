"""What must hold before the first byte moves. Each check names both sides of what does not fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from awex.transfer.transfer_plan import CommunicationOperation

from awex_delta.errors import LayoutError, OwnershipError
from awex_delta.plan.describe import EngineSpec, OutputSpec, TensorSpec, TrainerSpec, World

VOCAB_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
TIED_HEAD = "lm_head.weight"


def check_ownership(trainers: Sequence[TrainerSpec]) -> None:
    """Every element of every optimizer-owned parameter is owned exactly once in its group.

    Raises:
        OwnershipError: names the parameter, the ranks and the element where a hole or overlap begins.
    """
    by_rank = {trainer.rank: {param.key: param for param in trainer.params} for trainer in trainers}
    for trainer in trainers:
        for param in trainer.params:
            if param.owners and trainer.rank not in param.owners:
                raise OwnershipError(
                    f"{param.key}: trainer rank {trainer.rank} is not among its own owners {param.owners}"
                )
            if not param.owners or trainer.rank != min(param.owners):
                continue
            ranges = []
            for owner in param.owners:
                other = by_rank.get(owner, {}).get(param.key)
                if other is None or other.owners != param.owners or other.numel != param.numel:
                    raise OwnershipError(
                        f"{param.key}: trainer rank {trainer.rank} shares it with ranks {param.owners}, "
                        f"but rank {owner} does not hold the same parameter with the same owners"
                    )
                if other.owned_stop > other.owned_start:
                    ranges.append((other.owned_start, other.owned_stop, owner))
            _check_tiling(param.key, param.numel, sorted(ranges))


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
    tied = set(VOCAB_TENSORS) if world.trainers[0].tied_embeddings else set()
    for engine, ranks in _instances(world.engines).items():
        held = {t.name: t for rank in ranks for t in rank.tensors}
        missing = sorted(offered.keys() - held.keys())
        if world.trainers[0].tied_embeddings:
            missing = [name for name in missing if name != TIED_HEAD]
        extra = sorted(name for name in held.keys() - offered.keys() if held[name].tied_to is None)
        if missing or extra:
            raise LayoutError(
                f"engine {engine!r} and the trainer name different tensors: only the trainer has "
                f"{_some(missing)}; only the engine has {_some(extra)}"
            )
        for name, tensor in sorted(held.items()):
            if tensor.tied_to is None:
                _check_dtype(engine, tensor, offered[name])
            elif name in offered and {name, tensor.tied_to} != tied:
                raise LayoutError(
                    f"{name}: engine {engine!r} ties it to {tensor.tied_to}, but the trainer trains the two "
                    "apart: serve the model with untied weights (tie_word_embeddings)"
                )
        _check_parts(engine, ranks)


def check_coverage(world: World, operations: Sequence[CommunicationOperation]) -> None:
    """Every element of every engine shard is written by exactly one operation of the plan.

    Raises:
        LayoutError: names the tensor, the engine rank and how many elements are covered.
    """
    covered: dict[tuple[int, str], int] = defaultdict(int)
    for op in operations:
        covered[op.recv_rank, op.recv_shard_meta.name] += math.prod(op.overlap_shape)
    for engine in world.engines:
        for tensor in engine.tensors:
            want = math.prod(tensor.shape)
            got = covered[engine.rank, tensor.name]
            if tensor.tied_to is None and got != want:
                raise LayoutError(
                    f"{tensor.name}: engine {engine.engine!r} (rank {engine.rank}) holds {want} elements "
                    f"(global shape {list(tensor.global_shape)}), the trainer's shards reach {got} of them"
                )


def _offered(trainers: Sequence[TrainerSpec]) -> dict[str, OutputSpec]:
    offered: dict[str, OutputSpec] = {}
    for trainer in trainers:
        names: set[str] = set()
        for param in trainer.params:
            for output in param.outputs:
                if output.name in names:
                    raise LayoutError(
                        f"{output.name}: trainer rank {trainer.rank} converts two parameters to it"
                    )
                names.add(output.name)
                known = offered.setdefault(output.name, output)
                if known.dtype != output.dtype:
                    raise LayoutError(
                        f"{output.name}: trainer ranks hold it as {known.dtype} and {output.dtype}"
                    )
    return offered


def _instances(engines: Sequence[EngineSpec]) -> dict[str, list[EngineSpec]]:
    instances: dict[str, list[EngineSpec]] = defaultdict(list)
    for engine in engines:
        instances[engine.engine].append(engine)
    return instances


def _check_dtype(engine: str, tensor: TensorSpec, output: OutputSpec) -> None:
    if not tensor.global_shape or not output.shape:
        raise LayoutError(f"{tensor.name} is a scalar (engine {engine!r}): AWEX plans no tensor without rows")
    if tensor.dtype != output.dtype:
        raise LayoutError(
            f"{tensor.name}: the trainer sends {output.dtype}, engine {engine!r} serves {tensor.dtype}; "
            "load the engine with the trainer's dtype"
        )


def _check_parts(engine: str, ranks: Sequence[EngineSpec]) -> None:
    """The parts that an engine's ranks hold of a tensor agree on its shape and cover it."""
    parts: dict[str, dict[tuple[int, ...], TensorSpec]] = defaultdict(dict)
    for rank in ranks:
        for tensor in rank.tensors:
            known = next(iter(parts[tensor.name].values()), tensor)
            if known.global_shape != tensor.global_shape or known.dtype != tensor.dtype:
                raise LayoutError(
                    f"{tensor.name}: ranks of engine {engine!r} disagree about its shape or dtype"
                )
            ends = [o + n for o, n in zip(tensor.global_offset, tensor.shape, strict=False)]
            if len({len(tensor.shape), len(tensor.global_shape), len(tensor.global_offset)}) != 1 or any(
                end > size for end, size in zip(ends, tensor.global_shape, strict=True)
            ):
                raise LayoutError(
                    f"{tensor.name}: a part of shape {list(tensor.shape)} at {list(tensor.global_offset)} "
                    f"lies outside {list(tensor.global_shape)} (engine {engine!r}, rank {rank.rank})"
                )
            parts[tensor.name][tensor.global_offset] = tensor
    for name, places in parts.items():
        held = sum(math.prod(tensor.shape) for tensor in places.values())
        whole = math.prod(next(iter(places.values())).global_shape)
        if held != whole:
            raise LayoutError(f"{name}: the ranks of engine {engine!r} hold {held} of its {whole} elements")


def check_global_shapes(world: World, shapes: dict[str, tuple[int, ...]]) -> None:
    """The trainer's global shapes equal the engines', but for the padding of the vocabulary.

    Args:
        world: the specs of all ranks.
        shapes: the trainer's global shape of each tensor, as AWEX resolved it.

    Raises:
        LayoutError: names the tensor and both shapes.
    """
    vocab = world.trainers[0].vocab_size
    for engine in world.engines:
        for tensor in engine.tensors:
            ours = shapes.get(tensor.name, tensor.global_shape)
            if tensor.name in VOCAB_TENSORS and ours[0] >= vocab:
                ours = (vocab, *ours[1:])
            if tensor.tied_to is None and ours != tensor.global_shape:
                raise LayoutError(
                    f"{tensor.name}: the trainer holds shape {list(ours)}, engine {engine.engine!r} "
                    f"{list(tensor.global_shape)}"
                )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"[{shown}{', ...' if len(names) > 6 else ''}]" + (f" ({len(names)})" if len(names) > 6 else "")
