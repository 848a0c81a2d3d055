"""NaN and infinity in weights that are published: counted on all ranks, told of once, refused on request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from awex_delta.errors import UpdateAborted
from awex_delta.folder.writer import DiskWriter
from awex_delta.lines.finite import not_finite
from awex_delta.observe.runlog.reader import read_run
from awex_delta.observe.runlog.writer import RunLog
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import Pairing
from tests.ranks.conftest import DOWN, EMBED, ROUTER, SHAPES, train, wrong

Make = Callable[..., Pairing]


def poison(pairing: Pairing, name: str, *places: tuple[int, ...]) -> None:
    """Write NaN and infinity, by turns, into a weight of every trainer rank, all of which hold it whole."""
    for trainer in pairing.trainers:
        for number, place in enumerate(places):
            trainer.tensor(f"0/{name}")[place] = float("-inf") if number % 2 else float("nan")


def test_they_are_sent_counted_and_told_of_once(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pairing = make(method="snapshot")
    train(pairing)
    assert {stats.total_not_finite for stats in pairing.commit(0)} == {0}
    with caplog.at_level(logging.WARNING):
        poison(pairing, DOWN, (0, 0), (7, 23), (3, 1))  # in the halves of both owners
        delta = pairing.commit(1)
        assert {stats.verdict.kind for stats in delta} == {Kind.DELTA}
        assert {stats.total_not_finite for stats in delta} == {3}
        assert wrong(pairing) == [{}, {}, {}]
        full = pairing.commit(5)  # which sends everything
        assert {stats.verdict.kind for stats in full} == {Kind.FULL}
        assert {stats.total_not_finite for stats in full} == {3}
    said = [record.message for record in caplog.records if "NaN" in record.message]
    assert len(said) == 1
    assert "version 1: 3 of the values" in said[0]
    log = RunLog(tmp_path / "RUN.jsonl")
    log.append(delta[-1])
    assert read_run(tmp_path / "RUN.jsonl").updates[0].total_not_finite == 3


def test_what_travels_whole_is_looked_at_in_a_delta(make: Make) -> None:
    pairing = make(method="snapshot", fp32={ROUTER: (4, 8)})
    train(pairing)
    pairing.commit(0)
    poison(pairing, ROUTER, (1, 1), (2, 2))
    stats = pairing.commit(1)
    assert {one.verdict.kind for one in stats} == {Kind.DELTA}
    assert {one.total_not_finite for one in stats} == {2}  # one of the copies is sent


@pytest.mark.parametrize("version", [1, 3], ids=["delta", "full"])
def test_they_are_refused_before_an_engine_is_written(make: Make, version: int) -> None:
    pairing = make(method="snapshot", not_finite="refuse")
    train(pairing)
    pairing.commit(0)
    before = [{t.name: t.view.clone() for t in engine.tensors()} for engine in pairing.engines]
    good = [trainer.tensor(f"0/{EMBED}").clone() for trainer in pairing.trainers]
    poison(pairing, EMBED, (0, 0))
    for outcome in pairing.update(version):
        assert isinstance(outcome, UpdateAborted)
        assert "weight_update_not_finite = 'refuse': 1 of the values" in str(outcome)
        assert EMBED in str(outcome)
        assert "Remedy: go back to a checkpoint" in str(outcome)
    assert [receiver.ready for receiver in pairing.receivers] == [True] * 3
    for held, engine in zip(before, pairing.engines, strict=True):
        assert all(torch.equal(held[t.name], t.view) for t in engine.tensors())
    for trainer, weight in zip(pairing.trainers, good, strict=True):
        trainer.tensor(f"0/{EMBED}").copy_(weight)
    assert {stats.total_not_finite for stats in pairing.commit(version + 1)} == {0}
    assert wrong(pairing) == [{}, {}, {}]


def test_a_folder_counts_and_refuses_them_too(tmp_path: Path) -> None:
    def write(folder: str, choice: str) -> list[UpdateStats]:
        settings = DeltaSettings(
            transport="disk", disk_url=str(tmp_path / folder), method="snapshot", not_finite=choice
        )
        trainer = TorchAdamWTrainer.create(SHAPES, settings=settings)
        writer = DiskWriter(trainer, Rendezvous.alone(), 0, settings)
        try:
            first = writer.update_weights(0)
            trainer.tensor(f"0/{DOWN}")[2, 2] = float("inf")
            return [first, writer.update_weights(1), writer.update_weights(5)]
        finally:
            writer.close()

    assert [stats.total_not_finite for stats in write("warn", "warn")] == [0, 1, 1]
    with pytest.raises(UpdateAborted, match=r"1 of the values to be sent are NaN or infinite, in 0/model"):
        write("refuse", "refuse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elements_are_counted_as_torch_counts_them(dtype: torch.dtype) -> None:
    largest = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    mixed = torch.arange(12, dtype=dtype).view(3, 4).t()  # which is not contiguous
    mixed[0, 0], mixed[3, 2], mixed[1, 1] = float("inf"), float("-inf"), float("nan")
    tensors = {"largest": largest, "mixed": mixed, "whole": torch.arange(3), "none": torch.empty(0)}
    assert not_finite(tensors) == {"mixed": 3}
