"""The folder's side of the plan: one imaginary engine rank that holds every HF tensor whole.

Its line is the canonical one of a folder: all HF tensors in the order of their names. With it, AWEX's
planner says what each trainer rank holds of which tensor, tensor parallelism, expert parallelism and
vocabulary padding included, and each trainer rank has lines of its own that lead there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_delta.errors import ConnectError
from awex_delta.folder.manifest import HfSpace
from awex_delta.plan.checks import EMBEDDINGS, TIED_HEAD, VOCAB_TENSORS
from awex_delta.plan.describe import WIRE_DTYPES, EngineColumns, EngineSpec
from awex_delta.plan.rank import Plan, plan_rank
from awex_delta.plan.shards import TrainingSide, source_of
from awex_delta.plan.world import World

FOLDER_SEAT = 0
"""The folder's seat in the plan; trainer rank r sits at r + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one trainer rank holds of a tensor: the begin of its part, which lies at `start` of the whole."""

    rank: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    @property
    def source(self) -> tuple[slice, ...]:
        """The piece in the rank's part of the tensor."""
        return tuple(map(slice, self.shape))

    @property
    def target(self) -> tuple[slice, ...]:
        """The piece in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPlan:
    """What one trainer rank knows of the folder after connecting.

    plan: its own lines, which lead to the folder.
    space: the folder's line.
    wholes: the tensors of a full version, by name.
    tied: HF names that are not stored, and under which name their values are.
    """

    plan: Plan
    space: HfSpace
    wholes: tuple[WholeTensor, ...]
    tied: Mapping[str, str]


def plan_folder(trainers: World, rank: int) -> FolderPlan:
    """Plan what one trainer rank writes. Rank 0 also checks that all lines together make the folder's.

    Raises:
        ConnectError: trainers disagree about a dtype, or it cannot be stored.
        LayoutError: tensors do not fit together, or lines leave an element out, or hold it twice.
        OwnershipError: optimizer shards do not tile a parameter exactly once.
    """
    tied = trainers.trainers[0].tied_embeddings
    dtypes = _dtypes(trainers)
    side = TrainingSide(trainers.trainers, dtypes.keys() - ({TIED_HEAD} if tied else set()))
    vocab = trainers.trainers[0].vocab_size
    shapes = {
        name: (vocab, *shape[1:]) if name in VOCAB_TENSORS and shape[0] >= vocab else shape
        for name, shape in sorted(side.shapes.items())
    }
    columns = {"names": [*shapes], "dtypes": [dtypes[name] for name in shapes], "shapes": [*shapes.values()]}
    space = HfSpace.model_validate(columns)
    world = _with_folder(trainers, space)
    if rank == 0:
        plan_rank(world, FOLDER_SEAT)
    return FolderPlan(
        plan=plan_rank(world, FOLDER_SEAT + 1 + rank),
        space=space,
        wholes=_assign_writers(trainers, side, space),
        tied={TIED_HEAD: next(name for name in EMBEDDINGS if name in shapes)} if tied else {},
    )


def _dtypes(world: World) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    for trainer in world.trainers:
        for name, dtype in zip(trainer.layout.names, trainer.layout.dtypes, strict=True):
            if dtypes.setdefault(name, dtype) != dtype or dtype not in WIRE_DTYPES:
                raise ConnectError(f"{name}: {dtype} cannot be stored, or not on every rank")
    return dtypes


def _with_folder(world: World, space: HfSpace) -> World:
    """Add the imaginary engine to a world of trainers."""
    layout = EngineColumns(
        names=space.names,
        dtypes=space.dtypes,
        shapes=space.shapes,
        global_shapes=space.shapes,
        global_offsets=tuple((0,) * len(shape) for shape in space.shapes),
        tied_to=("",) * len(space.names),
    )
    agreed = world.trainers[0].agreed
    folder = EngineSpec(rank=FOLDER_SEAT, engine="folder", agreed=agreed, context=False, layout=layout)
    return World(engines=(folder,), trainers=world.trainers)


def _assign_writers(world: World, side: TrainingSide, space: HfSpace) -> tuple[WholeTensor, ...]:
    """Share the tensors of a full version evenly among the trainer ranks that hold them.

    A tensor is taken from its source, as deltas are. One that is cut over ranks is written by the least
    loaded of those that hold a piece. All ranks find the same.
    """
    held = [dict(zip(t.layout.names, t.layout.shapes, strict=True)) for t in world.trainers]
    pieces = _pieces(side, held, dict(zip(space.names, space.shapes, strict=True)))
    tensors = list(zip(space.names, space.dtypes, space.shapes, strict=True))
    load = dict.fromkeys(range(len(world.trainers)), 0)
    found: list[WholeTensor] = []
    for name, dtype, shape in sorted(tensors, key=lambda one: (-math.prod(one[2]), one[0])):
        parts = pieces[name]
        # Of a tensor without elements nobody has a piece; it belongs into a checkpoint all the same.
        ranks = [piece.rank for piece in parts] or [rank for rank in load if name in held[rank]]
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        made = WholeTensor(
            name=name,
            dtype=WIRE_DTYPES[dtype],
            shape=shape,
            writer=writer,
            pieces=tuple(sorted(parts, key=lambda piece: piece.start)),
        )
        load[writer] += made.num_bytes
        found.append(made)
    return tuple(sorted(found, key=lambda whole: whole.name))


def _pieces(
    side: TrainingSide, held: Sequence[Mapping[str, tuple[int, ...]]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Piece]]:
    """The parts that the ranks of its source hold of each tensor, without padding."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for rank, shards in enumerate(side.shards()):
        for name, shard in shards.items():
            ends = (a + n for a, n in zip(shard.offset, held[rank][name], strict=True))
            extent = tuple(min(e, n) - a for e, n, a in zip(ends, shapes[name], shard.offset, strict=True))
            if shard.replica == source_of(name, shard.num_replicas) and all(size > 0 for size in extent):
                pieces[name].append(Piece(rank=rank, start=shard.offset, shape=extent))
    return pieces
