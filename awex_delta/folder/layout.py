"""The folder's side of the plan: one imaginary engine rank that holds every HF tensor whole.

With it, AWEX's planner says what each trainer rank holds of which tensor, tensor parallelism, expert
parallelism and vocabulary padding included, and the plan widened to the owners says what each stores of
a delta.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_delta.errors import ConnectError
from awex_delta.lines.geometry import Box
from awex_delta.plan.checks import TIED_HEAD
from awex_delta.plan.describe import WIRE_DTYPES, EngineSpec, TensorSpec, World
from awex_delta.plan.pairs import Plan, training_shapes

FOLDER_SEAT = 0
"""The folder's seat in the plan; trainer rank r sits at r + 1."""

EMBEDDING = "model.embed_tokens.weight"


def with_folder(world: World) -> World:
    """Add the imaginary engine to a world of trainers.

    Raises:
        ConnectError: two trainers disagree about a tensor's dtype, or it cannot be stored.

    Collective: no; every rank concludes the same.
    """
    tied = world.trainers[0].tied_embeddings
    dtypes: dict[str, str] = {}
    for trainer in world.trainers:
        for output in (output for param in trainer.params for output in param.outputs):
            if (
                dtypes.setdefault(output.name, output.dtype) != output.dtype
                or output.dtype not in WIRE_DTYPES
            ):
                raise ConnectError(f"{output.name}: {output.dtype} cannot be stored, or not on every rank")
    tensors = [
        TensorSpec(
            name=name,
            dtype=dtypes[name],
            shape=shape,
            global_shape=shape,
            global_offset=(0,) * len(shape),
            tied_to=None,
        )
        for name, shape in sorted(training_shapes(world.trainers).items())
        if not (tied and name == TIED_HEAD)
    ]
    folder = EngineSpec(rank=0, engine="folder", agreed=world.trainers[0].agreed, tensors=tuple(tensors))
    return World(engines=(folder,), trainers=world.trainers)


def tied_names(world: World) -> dict[str, str]:
    """HF names that are not stored, and under which name their values are."""
    return {TIED_HEAD: EMBEDDING} if world.trainers[0].tied_embeddings else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one trainer rank holds of a tensor: the box `source` of its part is the box `target` of it."""

    rank: int
    source: Box
    target: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """One HF tensor of a full version: who writes it, and whose pieces it is made of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    writer: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def assign_writers(world: World, plan: Plan) -> tuple[WholeTensor, ...]:
    """Share the tensors of a full version evenly among the trainer ranks that hold them.

    Where one rank holds a tensor whole, so do its replicas, and the least loaded of them writes it. A
    tensor that is cut over ranks is written by the least loaded of those that hold a piece.

    Args:
        world: from `with_folder`.
        plan: of that world.

    Returns:
        By name. The same on every rank. Collective: no.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for op in plan.operations:
        source = Box(start=tuple(op.send_offset), shape=tuple(op.overlap_shape))
        target = Box(start=tuple(op.recv_offset), shape=tuple(op.overlap_shape))
        pieces[op.send_shard_meta.name].append(Piece(rank=op.send_rank - 1, source=source, target=target))
    held = _held_shapes(world)
    tensors = sorted(world.engines[0].tensors, key=lambda t: (-math.prod(t.shape), t.name))
    load = dict.fromkeys(range(len(world.trainers)), 0)
    found: list[WholeTensor] = []
    for tensor in tensors:
        parts = pieces[tensor.name]
        # Of a tensor without elements nobody has a piece; it belongs into a checkpoint all the same.
        ranks = [piece.rank for piece in parts] or [rank for rank in load if tensor.name in held[rank]]
        if len(parts) == 1:
            shape = held[ranks[0]][tensor.name]
            ranks = [rank for rank in load if held[rank].get(tensor.name) == shape]
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        if len(parts) == 1:
            parts = [Piece(rank=writer, source=parts[0].source, target=parts[0].target)]
        whole = WholeTensor(
            name=tensor.name,
            dtype=WIRE_DTYPES[tensor.dtype],
            shape=tensor.shape,
            writer=writer,
            pieces=tuple(sorted(parts, key=lambda piece: piece.target.start)),
        )
        load[writer] += whole.num_bytes
        found.append(whole)
    return tuple(sorted(found, key=lambda whole: whole.name))


def _held_shapes(world: World) -> Sequence[Mapping[str, tuple[int, ...]]]:
    return [
        {output.name: output.shape for param in trainer.params for output in param.outputs}
        for trainer in world.trainers
    ]
