"""The transfer plan: AWEX's plan for full syncs, and the same plan widened to the owners for deltas.

AWEX's planner names one sending rank for each overlap of a training shard and an inference shard. A
full sync uses that as it is. A delta replaces the sender of a sparse tensor by every member of its
optimizer group: they hold the same shard, and each sends what it owns of the overlap.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from awex.meta.meta_resolver import ParamMetaResolver
from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
from awex.models import get_sharding_strategy
from awex.sharding.param_sharding import ShardingType
from awex.sharding.rank_info import RankInfo
from awex.transfer.transfer_plan import CommunicationOperation, TransferPlan, TransferPlanBuilder

from awex_delta.lines.geometry import Box
from awex_delta.plan.checks import (
    VOCAB_TENSORS,
    check_coverage,
    check_global_shapes,
    check_layouts,
    check_ownership,
)
from awex_delta.plan.describe import WIRE_DTYPES, EngineSpec, TensorSpec, TrainerSpec, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The part of one HF tensor that one sender gives one receiver in a delta.

    sender, receiver: transfer ranks.
    source, target: where the region lies in the sender's and in the receiver's part of the tensor.
    source_shape: shape of the sender's part.
    sparse: changed elements only; otherwise the whole region in every delta.
    owned: half-open ranges of flat positions in the region whose optimizer state the sender holds, as far
        as connecting found out: ascending and disjoint.
    """

    name: str
    dtype: torch.dtype
    sender: int
    receiver: int
    source: Box
    target: Box
    source_shape: tuple[int, ...]
    sparse: bool
    owned: tuple[tuple[int, int], ...] = ()

    @property
    def numel(self) -> int:
        """Elements in the region."""
        return self.source.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank knows after connecting. The same on every rank.

    regions: by (sender, receiver, dtype), in the order in which frames list them.
    dtypes: the wire dtypes of all regions, sorted by name: one round each.
    operations: AWEX's own plan, for full syncs.
    full_bytes: payload of a full sync over all ranks.
    digest: 64 bits over all of it, compared across ranks before the first use.
    """

    regions: dict[tuple[int, int, torch.dtype], tuple[Region, ...]]
    dtypes: tuple[torch.dtype, ...]
    operations: tuple[CommunicationOperation, ...]
    full_bytes: int
    digest: int

    def between(self, sender: int, receiver: int, dtype: torch.dtype) -> tuple[Region, ...]:
        """The regions of one frame; empty when the pair has none of this dtype."""
        return self.regions.get((sender, receiver, dtype), ())

    def dense_plan(self, seat: int, *, sending: bool) -> TransferPlan:
        """AWEX's plan as one rank sees it: its operations by peer, in the order both peers use."""
        by_peer: dict[int, list[CommunicationOperation]] = defaultdict(list)
        for op in self.operations:
            if (op.send_rank if sending else op.recv_rank) == seat:
                by_peer[op.recv_rank if sending else op.send_rank].append(op)
        return TransferPlan(inter_operations=dict(sorted(by_peer.items())))


def dense_volume(plan: TransferPlan) -> tuple[int, int]:
    """Bytes and elements that one rank sends or receives in a full sync. Collective: no."""
    operations = [op for ops in plan.operations.values() for op in ops]
    numels = [math.prod(op.overlap_shape) for op in operations]
    widths = [op.send_shard_meta.dtype.itemsize for op in operations]
    return sum(n * w for n, w in zip(numels, widths, strict=True)), sum(numels)


def build_plan(world: World) -> Plan:
    """Plan every transfer between the ranks of `world`, through AWEX's planner.

    Raises:
        LayoutError: a tensor is missing on one side, differs in shape or dtype, or is not covered.
        OwnershipError: optimizer shards do not tile a parameter exactly once.

    Collective: no; every rank computes the same plan from the same specs.
    """
    check_ownership(world.trainers)
    check_layouts(world)
    names = _wanted_names(world)
    training = [meta for meta in _TrainingMeta(world.trainers).get_parameters_meta() if meta.name in names]
    check_global_shapes(world, {meta.name: tuple(meta.global_shape) for meta in training})
    inference = _inference_meta(world)
    builder = TransferPlanBuilder(len(world.engines), len(world.trainers), 1)
    operations = builder.build_weights_mapping_operations(inference, training)
    operations.sort(key=lambda op: (op.send_shard_meta.name, op.send_rank, op.recv_rank, op.send_offset))
    check_coverage(world, operations)
    regions = _widen(world, operations)
    return Plan(
        regions=regions,
        dtypes=tuple(sorted({key[2] for key in regions}, key=str)),
        operations=tuple(operations),
        full_bytes=sum(math.prod(op.overlap_shape) * op.send_shard_meta.dtype.itemsize for op in operations),
        digest=_digest(operations, regions),
    )


def training_shapes(trainers: Sequence[TrainerSpec]) -> dict[str, tuple[int, ...]]:
    """The whole shape of every HF tensor that trainers hold, by name, without vocabulary padding."""
    vocab = trainers[0].vocab_size
    shapes = {meta.name: tuple(meta.global_shape) for meta in _TrainingMeta(trainers).get_parameters_meta()}
    return {
        name: (vocab, *shape[1:]) if name in VOCAB_TENSORS and shape[0] >= vocab else shape
        for name, shape in shapes.items()
    }


def _wanted_names(world: World) -> set[str]:
    """Names that at least one engine stores for itself (a tied lm_head may be stored by none)."""
    return {t.name for engine in world.engines for t in engine.tensors if t.tied_to is None}


class _TrainingMeta(ParamMetaResolver):  # type: ignore[misc]
    """AWEX's description of the training side, from the specs that all ranks gathered."""

    def __init__(self, trainers: Sequence[TrainerSpec]) -> None:
        self._trainers = trainers
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

    def get_model_arch_name(self) -> str:
        return self._trainers[0].architecture

    def get_parameters_meta(self) -> list[ParameterMeta]:
        return list(self._build_params_meta())

    def _get_params_raw_meta(self) -> list[dict[str, object]]:
        return [
            {
                "rank_info": RankInfo(**{**trainer.rank_info, "global_rank": trainer.rank}),
                "params_meta": [
                    {
                        "name": output.name,
                        "numel": math.prod(output.shape),
                        "shape": output.shape,
                        "dtype": WIRE_DTYPES[output.dtype],
                    }
                    for param in trainer.params
                    for output in param.outputs
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


def _inference_meta(world: World) -> list[ParameterMeta]:
    """AWEX's description of the inference side. Copies of a part on several ranks become replicas."""
    holders: dict[str, dict[tuple[str, tuple[int, ...]], list[ParameterShardMeta]]] = defaultdict(
        lambda: defaultdict(list)
    )
    first: dict[str, TensorSpec] = {}
    for engine in world.engines:
        for tensor in engine.tensors:
            if tensor.tied_to is None:
                first.setdefault(tensor.name, tensor)
                place = (engine.engine, tensor.global_offset)
                holders[tensor.name][place].append(_shard(engine, tensor, len(world.engines)))
    return [
        ParameterMeta(
            name=name,
            global_numel=math.prod(first[name].global_shape),
            global_shape=first[name].global_shape,
            dtype=WIRE_DTYPES[first[name].dtype],
            shards=[shard for copies in parts.values() for shard in copies],
            replicas=_replicas(parts),
        )
        for name, parts in sorted(holders.items())
    ]


def _replicas(
    parts: dict[tuple[str, tuple[int, ...]], list[ParameterShardMeta]],
) -> list[ParameterReplicaMeta]:
    """One replica an engine and copy: the k-th holder of each part of that engine."""
    replicas: dict[tuple[str, int], list[ParameterShardMeta]] = defaultdict(list)
    for (engine, _), copies in sorted(parts.items(), key=lambda item: item[0]):
        for copy, shard in enumerate(copies):
            replicas[engine, copy].append(shard)
    return [ParameterReplicaMeta(shards=shards) for _, shards in sorted(replicas.items())]


def _shard(engine: EngineSpec, tensor: TensorSpec, world_size: int) -> ParameterShardMeta:
    return ParameterShardMeta(
        tp_rank=0,
        attn_tp_rank=0,
        pp_rank=0,
        ep_rank=0,
        ep_tp_rank=0,
        global_rank=engine.rank,
        world_size=world_size,
        engine_rank=0,
        name=tensor.name,
        shape=tensor.shape,
        numel=math.prod(tensor.shape),
        dtype=WIRE_DTYPES[tensor.dtype],
        global_offset=tensor.global_offset,
    )


def _widen(
    world: World, operations: Sequence[CommunicationOperation]
) -> dict[tuple[int, int, torch.dtype], tuple[Region, ...]]:
    """Give every overlap of a sparse tensor to all owners of the sender's shard."""
    num_engines = len(world.engines)
    outputs = [{o.name: o for param in t.params for o in param.outputs} for t in world.trainers]
    owners: list[dict[str, tuple[int, ...]]] = [
        {o.name: param.owners if o.sparse else () for param in trainer.params for o in param.outputs}
        for trainer in world.trainers
    ]
    found: dict[tuple[int, int, torch.dtype], list[Region]] = defaultdict(list)
    for op in operations:
        shard = op.send_shard_meta
        group = owners[op.send_rank - num_engines][shard.name]
        for sender in [num_engines + owner for owner in group] or [op.send_rank]:
            source = Box(start=tuple(op.send_offset), shape=tuple(op.overlap_shape))
            output = outputs[sender - num_engines].get(shard.name)
            region = Region(
                name=shard.name,
                dtype=shard.dtype,
                sender=sender,
                receiver=op.recv_rank,
                source=source,
                target=Box(start=tuple(op.recv_offset), shape=tuple(op.overlap_shape)),
                source_shape=tuple(shard.shape),
                sparse=bool(group),
                owned=source.ranges_inside(output.owned, tuple(shard.shape)) if output else (),
            )
            found[sender, op.recv_rank, shard.dtype].append(region)
    return {
        key: tuple(sorted(regions, key=lambda r: (r.name, r.source.start, r.target.start)))
        for key, regions in found.items()
    }


def _digest(
    operations: Sequence[CommunicationOperation],
    regions: dict[tuple[int, int, torch.dtype], tuple[Region, ...]],
) -> int:
    state = hashlib.sha256()
    for op in operations:
        state.update(
            repr(
                (op.send_rank, op.recv_rank, op.send_shard_meta.name, op.train_slices, op.inf_slices)
            ).encode()
        )
    for key in sorted(regions, key=str):
        state.update(repr((key, regions[key])).encode())
    return int.from_bytes(state.digest()[:8], "little")
