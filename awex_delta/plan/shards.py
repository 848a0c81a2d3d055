"""Both sides as AWEX sees them: its resolver and its planner, asked for what one rank needs.

AWEX's planner numbers copies of a tensor on either side (its *replicas*). It is given one training copy of
each tensor, the *source*, which then serves all inference copies, so that engines hold the same bits even if
copies of the trainer differ. A full sync is its own plan for one rank; a delta follows the same rule
(`plan.pairs`).
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from awex.meta.meta_resolver import ParamMetaResolver
from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
from awex.models import get_sharding_strategy
from awex.sharding.param_sharding import ShardingType
from awex.sharding.rank_info import RankInfo
from awex.transfer.transfer_plan import CommunicationOperation, TransferPlan, TransferPlanBuilder

from awex_delta.errors import LayoutError
from awex_delta.plan.describe import WIRE_DTYPES, EngineSpec, TrainerSpec
from awex_delta.plan.world import World


class Shard(NamedTuple):
    """One trainer rank's part of an HF tensor: its copy, how many copies there are, and where it begins."""

    replica: int
    num_replicas: int
    offset: tuple[int, ...]


def source_of(name: str, num_replicas: int) -> int:
    """Which training copy of an HF tensor serves all engines: by its name, so that copies share the load."""
    return zlib.crc32(name.encode()) % num_replicas


def copies_of_rank(shards: Sequence[Mapping[str, Shard]], rank: int) -> dict[str, tuple[int, ...]]:
    """Trainer ranks that hold the same part of an HF tensor as `rank`, which is among them, ascending.

    Args:
        shards: what each trainer rank holds, at least of the tensors of `rank`.

    Returns:
        By HF name, of tensors of which there is more than one copy.
    """
    found = {}
    for name, mine in shards[rank].items():
        same = (
            other for other, held in enumerate(shards) if name in held and held[name].offset == mine.offset
        )
        ranks = tuple(same)
        if len(ranks) > 1:
            found[name] = ranks
    return found


class TrainingSide(ParamMetaResolver):  # type: ignore[misc]
    """AWEX's description of the training side, for some HF tensors."""

    def __init__(self, trainers: Sequence[TrainerSpec], names: Collection[str]) -> None:
        """Resolve who holds which part.

        Args:
            trainers: all of them, by rank. Either all of them say which parts they hold, or none does, and
                AWEX resolves it.
            names: HF tensors to describe.

        Raises:
            LayoutError: ranks that say so hold more copies of one part of a tensor than of another.
        """
        self._trainers = trainers
        self._names = frozenset(names)
        if any(trainer.wholes for trainer in trainers):
            self.metas: list[ParameterMeta] = self._placed()
            return
        info = RankInfo(**trainers[0].rank_info)
        self._strategy = get_sharding_strategy(trainers[0].architecture)(
            engine_name="mcore",
            enable_dp_attention=False,
            enable_dp_lm_head=False,
            moe_dense_tp_size=info.tp_size,
            tp_size=info.tp_size,
            ep_size=info.ep_size,
            ep_tp_size=info.ep_tp_size,
            rank_info=info,
        )
        self.metas = list(self._build_params_meta())

    def get_model_arch_name(self) -> str:
        """The architecture of the HF configuration."""
        return self._trainers[0].architecture

    def get_parameters_meta(self) -> list[ParameterMeta]:
        """What was resolved."""
        return self.metas

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each HF tensor, with vocabulary padding."""
        return {meta.name: tuple(meta.global_shape) for meta in self.metas}

    def shards(self) -> list[dict[str, Shard]]:
        """What each trainer rank holds, by name."""
        found: list[dict[str, Shard]] = [{} for _ in self._trainers]
        for meta in self.metas:
            for number, replica in enumerate(meta.replicas):
                for one in replica.shards:
                    offset = tuple(one.global_offset)
                    found[one.global_rank][meta.name] = Shard(number, len(meta.replicas), offset)
        return found

    def _placed(self) -> list[ParameterMeta]:
        """From what ranks say of themselves: the k-th holders of all parts of a tensor make copy k."""
        held: dict[str, dict[tuple[int, ...], list[ParameterShardMeta]]] = defaultdict(dict)
        wholes: dict[str, tuple[int, ...]] = {}
        for trainer in self._trainers:
            layout = trainer.layout
            columns = zip(
                layout.names, layout.shapes, layout.dtypes, trainer.offsets, trainer.wholes, strict=True
            )
            for name, shape, dtype, offset, whole in columns:
                if name in self._names:
                    one = _shard(name, trainer.rank, len(self._trainers), shape, dtype, offset)
                    held[name].setdefault(offset, []).append(one)
                    wholes[name] = whole
        return [_copied(name, list(parts.values()), wholes[name]) for name, parts in held.items()]

    def _get_params_raw_meta(self) -> list[dict[str, object]]:
        return [
            {
                "rank_info": RankInfo(**{**trainer.rank_info, "global_rank": trainer.rank}),
                "params_meta": [
                    {
                        "name": name,
                        "numel": math.prod(shape),
                        "shape": shape,
                        "dtype": WIRE_DTYPES[dtype],
                    }
                    for name, shape, dtype in zip(
                        trainer.layout.names, trainer.layout.shapes, trainer.layout.dtypes, strict=True
                    )
                    if name in self._names
                ],
            }
            for trainer in self._trainers
        ]

    def _get_sharding_info(
        self, name: str, rank_info: RankInfo, param_meta: dict[str, object]
    ) -> tuple[ShardingType, int, int]:
        kind, dim, count = self._strategy.get_sharding_strategy(
            name, rank_info=rank_info, param_meta=param_meta
        )
        return kind, dim, count


Copies = dict[str, dict[int, int]]
"""Engine ranks that store a tensor, by its HF name, and which copy of it each of them belongs to."""


def copies_of(engines: Sequence[EngineSpec], names: Collection[str]) -> Copies:
    """Number the copies of each tensor: in each engine the k-th holders of all its parts make one copy."""
    wanted = frozenset(names)
    holders: dict[str, dict[str, dict[tuple[int, ...], list[int]]]] = defaultdict(dict)
    for spec in engines:
        layout = spec.layout
        for place in layout.stored():
            name = layout.names[place]
            if name in wanted:
                parts = holders[name].setdefault(spec.engine, {})
                parts.setdefault(layout.global_offsets[place], []).append(spec.rank)
    found: Copies = {}
    for name, by_engine in holders.items():
        numbers, first = dict[int, int](), 0
        for _, parts in sorted(by_engine.items()):
            for ranks in parts.values():
                numbers |= {rank: first + copy for copy, rank in enumerate(ranks)}
            first += max(len(ranks) for ranks in parts.values())
        found[name] = numbers
    return found


def dense_plan(world: World, side: TrainingSide, copies: Copies, seat: int) -> TransferPlan:
    """AWEX's plan of a full sync from sources, as one rank sees it, by peer, in the order that both use.

    Args:
        world: all descriptions.
        side: the training side, at least for the tensors of this rank.
        copies: see `copies_of`; for the same tensors.
        seat: transfer rank.
    """
    num_engines = len(world.engines)
    inference = [_inference_meta(world.engines, copies[meta.name], meta.name, seat) for meta in side.metas]
    builder = TransferPlanBuilder(num_engines, len(world.trainers), 1)
    sources = [
        replace(meta, replicas=[meta.replicas[source_of(meta.name, len(meta.replicas))]])
        for meta in side.metas
    ]
    operations = builder.build_weights_mapping_operations(inference, sources, seat)
    operations.sort(key=lambda op: (op.send_shard_meta.name, op.send_rank, op.recv_rank, op.send_offset))
    by_peer: dict[int, list[CommunicationOperation]] = defaultdict(list)
    for op in operations:
        if seat in (op.send_rank, op.recv_rank):
            by_peer[op.recv_rank if seat >= num_engines else op.send_rank].append(op)
    return TransferPlan(inter_operations=dict(sorted(by_peer.items())))


Operations = list[tuple[int, CommunicationOperation]]
"""Operations of AWEX's plan, each with the rank at its other end."""


def dense_batches(plan: TransferPlan, most: int, most_bytes: int) -> Iterator[Operations]:
    """The operations of a full sync, some at a time.

    What two ranks exchange is cut at the same places at both ends, and batch k of each rank holds piece k of
    each of its exchanges. So ranks that end one batch before they begin the next never wait in a circle.

    Args:
        plan: of one rank.
        most: operations of one exchange in one batch.
        most_bytes: bytes of them; an operation that has more is alone.
    """
    peers = plan.operations
    for pieces in zip_longest(*(_cut(ops, most, most_bytes) for ops in peers.values()), fillvalue=()):
        rounds = (zip(peers, ops, strict=True) for ops in zip_longest(*pieces))  # peer by peer, as AWEX does
        yield [(peer, op) for one in rounds for peer, op in one if op is not None]


def _cut(
    operations: Sequence[CommunicationOperation], most: int, most_bytes: int
) -> Iterator[list[CommunicationOperation]]:
    piece: list[CommunicationOperation] = []
    size = 0
    for op in operations:
        num_bytes = math.prod(op.overlap_shape) * op.send_shard_meta.dtype.itemsize
        if piece and (len(piece) == most or size + num_bytes > most_bytes):
            yield piece
            piece, size = [], 0
        piece.append(op)
        size += num_bytes
    if piece:
        yield piece


def sent_names(plan: TransferPlan) -> frozenset[str]:
    """The HF tensors that a rank sends in a full sync; of copies on several ranks one is sent."""
    return frozenset(op.send_shard_meta.name for ops in plan.operations.values() for op in ops)


def dense_volume(plan: TransferPlan) -> tuple[int, int]:
    """Bytes and elements that one rank sends or receives in a full sync."""
    operations = [op for ops in plan.operations.values() for op in ops]
    numels = [math.prod(op.overlap_shape) for op in operations]
    widths = [op.send_shard_meta.dtype.itemsize for op in operations]
    return sum(n * w for n, w in zip(numels, widths, strict=True)), sum(numels)


def _inference_meta(
    engines: Sequence[EngineSpec], numbers: Mapping[int, int], name: str, seat: int
) -> ParameterMeta:
    """AWEX's description of one tensor in the engines. An engine rank asks for its own copy alone."""
    replicas: list[list[ParameterShardMeta]] = [[] for _ in range(1 + max(numbers.values()))]
    asked = [seat] if seat in numbers and seat < len(engines) else list(numbers)
    for rank in asked:
        replicas[numbers[rank]].append(_engine_shard(engines[rank], name, len(engines)))
    one = next(shards[0] for shards in replicas if shards)
    # The planner takes no copy without a part, and leaves out the parts of other ranks.
    elsewhere = ParameterReplicaMeta(shards=[replace(one, global_rank=-1)])
    return ParameterMeta(
        name=name,
        global_numel=one.numel,
        global_shape=one.shape,
        dtype=one.dtype,
        shards=[shard for shards in replicas for shard in shards],
        replicas=[ParameterReplicaMeta(shards=shards) if shards else elsewhere for shards in replicas],
    )


def _copied(
    name: str, parts: Sequence[Sequence[ParameterShardMeta]], whole: tuple[int, ...]
) -> ParameterMeta:
    """AWEX's description of one tensor of the trainer, from the holders of each part of it."""
    counts = sorted({len(holders) for holders in parts})
    if len(counts) > 1:
        raise LayoutError(
            f"{name}: trainers hold {counts[0]} copies of one part of it, {counts[-1]} of another"
        )
    if not _tile([(one.global_offset, one.shape) for one, *_ in parts], whole):
        raise LayoutError(f"{name}: the parts that trainers hold of it leave out elements, or overlap")
    return ParameterMeta(
        name=name,
        global_numel=math.prod(whole),
        global_shape=whole,
        dtype=parts[0][0].dtype,
        shards=[shard for holders in parts for shard in holders],
        replicas=[ParameterReplicaMeta(shards=list(copy)) for copy in zip(*parts, strict=True)],
    )


def _tile(parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], whole: tuple[int, ...]) -> bool:
    """Whether parts, each an offset and a shape, are all cells of a grid over the whole tensor."""
    num_cells = 1
    for dim, size in enumerate(whole):
        extents = {(offset[dim], shape[dim]) for offset, shape in parts}
        ends = [0, *(start + extent for start, extent in sorted(extents))]
        if ends != [*(start for start, _ in sorted(extents)), size]:
            return False
        num_cells *= len(extents)
    return num_cells == len(parts)  # parts differ in where they begin


def _engine_shard(engine: EngineSpec, name: str, world_size: int) -> ParameterShardMeta:
    layout = engine.layout
    place = layout.places[name]
    shape, dtype, offset = layout.shapes[place], layout.dtypes[place], layout.global_offsets[place]
    return _shard(name, engine.rank, world_size, shape, dtype, offset)


def _shard(
    name: str, rank: int, world_size: int, shape: tuple[int, ...], dtype: str, offset: tuple[int, ...]
) -> ParameterShardMeta:
    """A part of a tensor at a known place, as AWEX describes it."""
    return ParameterShardMeta(
        tp_rank=0,
        attn_tp_rank=0,
        pp_rank=0,
        ep_rank=0,
        ep_tp_rank=0,
        global_rank=rank,
        world_size=world_size,
        engine_rank=0,
        name=name,
        shape=shape,
        numel=math.prod(shape),
        dtype=WIRE_DTYPES[dtype],
        global_offset=offset,
    )
