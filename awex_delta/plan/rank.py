"""What one rank sends and receives: its own pairs, and its own part of AWEX's plan for full syncs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from awex.transfer.transfer_plan import TransferPlan

from awex_delta.garbage import uncollected
from awex_delta.plan.checks import (
    check_coverage,
    check_dense_coverage,
    check_global_shapes,
    check_layouts,
    check_ownership,
)
from awex_delta.plan.pairs import Pair, engine_starts, pairs_between, sender_side
from awex_delta.plan.shards import TrainingSide, copies_of, copies_of_rank, dense_plan, dense_volume
from awex_delta.plan.world import World

PairKey = tuple[int, torch.dtype]
"""Names one of a rank's pairs, and its line: the rank at the other end, and the wire dtype."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What one rank knows after connecting.

    pairs: this rank's pairs.
    dense: AWEX's own plan of a full sync, as this rank sees it.
    dense_bytes: what this rank sends or receives in a full sync.
    copies: of a trainer rank, see `shards.copies_of_rank`.
    """

    pairs: Mapping[PairKey, Pair]
    dense: TransferPlan
    dense_bytes: int
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@uncollected()
def plan_rank(world: World, seat: int) -> Plan:
    """Plan the transfers of one rank, from the descriptions of all.

    Args:
        world: all descriptions.
        seat: transfer rank.

    Raises:
        LayoutError: a tensor is missing on one side, differs in shape or dtype, or is not covered.
        OwnershipError: optimizer shards do not tile a parameter exactly once.
    """
    check_layouts(world)
    num_engines = len(world.engines)
    stored = {e.layout.names[place] for e in world.engines for place in e.layout.stored()}
    if seat < num_engines:
        engine = world.engines[seat].layout
        names = {engine.names[place] for place in engine.stored()}
    else:
        check_ownership(world.trainers, seat - num_engines)
        names = set(world.trainers[seat - num_engines].layout.names) & stored
    side, copies = TrainingSide(world.trainers, names), copies_of(world.engines, names)
    check_global_shapes(world, side.shapes)
    dense, shards = dense_plan(world, side, copies, seat), side.shards()
    trainers = [world.trainers[seat - num_engines]] if seat >= num_engines else world.trainers
    engines = [world.engines[seat]] if seat < num_engines else world.engines
    sides = [sender_side(trainer) for trainer in trainers]
    layouts = {id(engine.layout): engine.layout for engine in engines}  # replicas share one
    starts = {key: engine_starts(layout) for key, layout in layouts.items()}
    found = [
        pair
        for side in sides
        for engine in engines
        for pair in pairs_between(side, shards, engine, starts[id(engine.layout)], copies, num_engines)
    ]
    if seat < num_engines:
        check_dense_coverage(world.engines[seat], dense)
        check_coverage(world.engines[seat], found)
    peers = {(p.sender if seat < num_engines else p.receiver, p.dtype): p for p in found}
    alike = copies_of_rank(shards, seat - num_engines) if seat >= num_engines else {}
    return Plan(pairs=peers, dense=dense, dense_bytes=dense_volume(dense)[0], copies=alike)
