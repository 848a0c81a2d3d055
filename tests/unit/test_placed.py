"""Trainers that say which parts of HF tensors they hold: copies of them are numbered, or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from awex_delta.errors import ConnectError, LayoutError
from awex_delta.plan.describe import TrainerColumns, TrainerSpec
from awex_delta.plan.shards import TrainingSide
from awex_delta.plan.world import make_world
from tests.unit.worlds import Model, trainers

WHOLE = (5, 4)
Part = tuple[tuple[int, int], tuple[int, int]]


def side(*parts: Part | None) -> TrainingSide:
    """One rank for each part, its offset and shape; None for a rank that holds none."""
    return TrainingSide([spec(rank, part) for rank, part in enumerate(parts)], ["w"])


def spec(rank: int, part: Part | None) -> TrainerSpec:
    held = [] if part is None else [part]
    layout = TrainerColumns(
        keys=tuple("0/w" for _ in held),
        numels=np.array([shape[0] * shape[1] for _, shape in held], np.int64),
        params=np.zeros(len(held), np.int64),
        names=tuple("w" for _ in held),
        shapes=tuple(shape for _, shape in held),
        dtypes=tuple("bfloat16" for _ in held),
        sparse=np.ones(len(held), bool),
        runs=np.zeros((4, 0), np.int64),
    )
    return TrainerSpec(
        rank=rank,
        run_id="run",
        agreed={},
        context=False,
        architecture="AnyForCausalLM",
        rank_info={},
        vocab_size=5,
        tied_embeddings=False,
        owners=tuple((rank,) for _ in held),
        owned=np.zeros((2, len(held)), np.int64),
        layout=layout,
        offsets=tuple(offset for offset, _ in held),
        wholes=tuple(WHOLE for _ in held),
    )


TOP, BOTTOM = ((0, 0), (3, 4)), ((3, 0), (2, 4))


def test_the_holders_of_each_part_make_copies() -> None:
    found = side(TOP, BOTTOM, None, BOTTOM, TOP)
    assert found.shapes == {"w": WHOLE}
    held = [shards.get("w") for shards in found.shards()]
    assert [one and (one.replica, one.num_replicas, one.offset) for one in held] == [
        (0, 2, (0, 0)),
        (0, 2, (3, 0)),
        None,
        (1, 2, (3, 0)),
        (1, 2, (0, 0)),
    ]


def test_a_grid_of_rows_and_columns_is_a_copy() -> None:
    cells = [((0, 0), (3, 1)), ((0, 1), (3, 3)), ((3, 0), (2, 1)), ((3, 1), (2, 3))]
    assert {shards["w"].num_replicas for shards in side(*cells).shards()} == {1}


@pytest.mark.parametrize(
    "parts",
    [
        [TOP],
        [TOP, ((2, 0), (3, 4))],
        [((1, 0), (2, 4)), BOTTOM],
        [TOP, ((3, 0), (2, 3))],
        [((0, 0), (3, 1)), ((0, 1), (3, 3)), ((3, 0), (2, 1))],
    ],
)
def test_parts_that_leave_holes_or_overlap_are_refused(parts: list[Part]) -> None:
    with pytest.raises(
        LayoutError, match="w: the parts that trainers hold of it leave out elements, or overlap"
    ):
        side(*parts)


def test_one_part_with_more_copies_than_another_is_refused() -> None:
    with pytest.raises(LayoutError, match="w: trainers hold 1 copies of one part of it, 2 of another"):
        side(TOP, BOTTOM, TOP)


def test_trainers_that_are_attached_in_two_ways_are_refused() -> None:
    by_rules = trainers(Model(layers=1), dp=2)[1].spec
    says = replace(spec(0, TOP), agreed=by_rules.agreed, architecture=by_rules.architecture)
    with pytest.raises(
        ConnectError, match="trainer rank 0 says which parts of HF tensors it holds, rank 1 does not"
    ):
        make_world([says, by_rules], 0)
