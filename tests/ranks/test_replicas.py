"""Trainer ranks whose copies of a weight drifted: engines all hold the same bits, and the weight is named."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from awex_delta.errors import VerificationError
from awex_delta.lines.storages import bits
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import TrainerLayout, WeightInfo
from tests.pairing import EngineSeat, Pairing
from tests.ranks.conftest import BIAS, DOWN, EMBED, NORM, Q_PROJ, SETTINGS, SHAPES, train, wrong
from tests.ranks.disk import Engine, Trainers

Make = Callable[..., Pairing]


class Replica(TorchAdamWTrainer):
    """One of several ranks that each step every parameter whole, as with a replicated optimizer."""

    rank = 0

    def layout(self) -> TrainerLayout:
        layout = super().layout()
        place = {"dp_rank": self.rank, "dp_size": 2, "attn_dp_rank": self.rank, "world_size": 2}
        return replace(layout, rank_info={**layout.rank_info, **place, "global_rank": self.rank})

    def weights(self) -> Sequence[WeightInfo]:
        return [replace(info, owners=(self.rank,) if info.sparse else ()) for info in super().weights()]


@pytest.fixture
def replicas() -> Iterator[Callable[..., Pairing]]:
    built: list[Pairing] = []

    def build(**settings: Any) -> Pairing:
        shapes = {**SHAPES, BIAS: (4,)}
        trainers = [Replica.create(SHAPES, lr=1e-5, buffers={BIAS: (4,)}) for _ in range(2)]
        for rank, trainer in enumerate(trainers):
            vars(trainer)["rank"] = rank
        dtypes = {BIAS: torch.float32}
        seats = [EngineSeat(engine=name, view=DictEngine(shapes, dtypes=dtypes)) for name in "abc"]
        built.append(Pairing(trainers, seats, replace(SETTINGS, verify="full", **settings)))
        return built[-1]

    yield build
    for pairing in built:
        pairing.close()


def held(engine: DictEngine) -> Mapping[str, list[int]]:
    return {
        name: tensor.view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32).tolist()
        for name, tensor in engine.tensors_by_name.items()
    }


def nudge(trainer: Any, name: str) -> None:
    """One unit in the last place of one element, in the weight and in its master."""
    key = f"0/{name}"
    weight = trainer._weights[key].view(-1)
    raw = weight.view(torch.int16 if weight.dtype is torch.bfloat16 else torch.int32)
    raw[-1] += 1
    if key in trainer._stepped.live():
        with torch.no_grad():
            trainer._stepped.live()[key].view(-1)[-1] = weight[-1].float()


@pytest.mark.parametrize("names", [(NORM,), (BIAS,), (NORM, EMBED, BIAS, DOWN)])
def test_one_source_feeds_all_engines(
    replicas: Callable[..., Pairing], names: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    pairing = replicas(anchor_interval=3)
    for name in names:
        nudge(pairing.trainers[1], name)
    kinds = []
    for version in range(6):
        train(pairing)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            stats = pairing.commit(version)
        kinds.append(stats[0].verdict.kind)
        first, *others = [held(engine) for engine in pairing.engines]
        assert all(other == first for other in others)
        warnings = [
            record.getMessage() for record in caplog.records if "different bits" in record.getMessage()
        ]
        if stats[0].verdict.kind is Kind.DELTA:
            assert warnings == []
            continue
        (warning,) = warnings
        assert f"{len(names)} tensors" in warning
        assert all(f"{name} (trainer ranks 0, 1)" in warning for name in names)
    assert kinds == [Kind.FULL, Kind.DELTA, Kind.DELTA, Kind.DELTA, Kind.FULL, Kind.DELTA]


def test_equal_copies_are_not_named(
    replicas: Callable[..., Pairing], caplog: pytest.LogCaptureFixture
) -> None:
    pairing = replicas(anchor_interval=1)
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            train(pairing)
            pairing.commit(version)
    assert not [record for record in caplog.records if "different bits" in record.getMessage()]
    assert not any("copies" in phase for end in pairing.ends for phase in end.comm.trace)


def test_owners_in_parts_that_drifted_are_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    pairing = make(buffers={BIAS: (4,)})
    nudge(pairing.trainers[1], BIAS)
    train(pairing)
    with caplog.at_level(logging.WARNING):
        pairing.commit(0)
    assert f"{BIAS} (trainer ranks 0, 1)" in caplog.text
    first, second, whole = [held(engine)[BIAS] for engine in pairing.engines]
    assert first == second == whole


def test_a_source_that_differs_from_its_owners_is_no_version(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    pairing = make()
    train(pairing)
    source = pairing.trainers[zlib.crc32(EMBED.encode()) % 2]
    assert isinstance(source, TorchAdamWTrainer)
    # Each rank owns a half; the source alone holds another value in the half of the other one.
    other = -1 if source._dp_rank == 0 else 0
    weight = source._weights[f"0/{EMBED}"].view(-1)
    weight.view(torch.int16)[other] += 1
    with caplog.at_level(logging.WARNING):
        outcomes = pairing.update(0)
    assert all(isinstance(outcome, VerificationError) and EMBED in str(outcome) for outcome in outcomes)
    assert f"{EMBED} (trainer ranks 0, 1)" in caplog.text
    train(pairing)  # gathers the parameters, as a distributed optimizer does
    caplog.clear()
    pairing.commit(0)
    assert wrong(pairing) == [{}, {}, {}]
    assert "different bits" not in caplog.text


def test_a_folder_is_written_from_one_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    views = [Replica.create(SHAPES, lr=1e-5, buffers={BIAS: (4,)}) for _ in range(2)]
    for rank, view in enumerate(views):
        vars(view)["rank"] = rank
    drifted = (NORM, EMBED, DOWN, Q_PROJ, BIAS)
    for name in drifted:
        nudge(views[1], name)
    trainers = Trainers(str(tmp_path), views=views, verify="full", anchor_interval=2)
    engine = Engine(trainers)
    with caplog.at_level(logging.WARNING):
        for version in range(4):
            trainers.write(version)
            engine.read()
            for name in (*SHAPES, BIAS):
                source = views[zlib.crc32(name.encode()) % 2]._weights[f"0/{name}"]
                assert bits(engine.views[0].tensors_by_name[name]).equal(bits(source)), (version, name)
    trainers.close()
    engine.close()
    assert trainers.kinds == "FDDF"
    warnings = [record.getMessage() for record in caplog.records if "different bits" in record.getMessage()]
    assert len(warnings) == 2
    assert all(f"{name} (trainer ranks 0, 1)" in warning for warning in warnings for name in drifted)
