"""Deltas for optimizers whose step cannot be inverted: whole updates over thread ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import Pairing, stepped_by
from tests.ranks.conftest import DOWN, NORM, SETTINGS, SHAPES, engine_seats, train, truth, wrong

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Make = Callable[..., Pairing]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=3e-6, momentum=0.9),
    "adam-l2": partial(torch.optim.Adam, lr=1e-6, weight_decay=0.1),
    "adamw-amsgrad": partial(torch.optim.AdamW, lr=1e-6, amsgrad=True),
}


def trainer(rank: int, size: int, make_optimizer: MakeOptimizer, method: str) -> TorchAdamWTrainer:
    settings = replace(SETTINGS, method=method)
    return stepped_by(make_optimizer, SHAPES, settings, dp_rank=rank, dp_size=size)


@pytest.fixture
def make_pairing() -> Iterator[Make]:
    built: list[Pairing] = []

    def build(optimizer: str = "sgd", *, method: str = "snapshot", encoding: str = "ulp") -> Pairing:
        trainers = [trainer(rank, 2, OPTIMIZERS[optimizer], method) for rank in range(2)]
        settings = replace(SETTINGS, anchor_interval=4, method=method, encoding=encoding)
        built.append(Pairing(trainers, engine_seats(), settings))
        return built[-1]

    yield build
    for pairing in built:
        pairing.close()


def num_changed(before: dict[str, torch.Tensor], pairing: Pairing) -> int:
    return sum(
        int((before[name].view(torch.int16) != new.view(torch.int16)).sum())
        for name, new in truth(pairing).items()
    )


@pytest.mark.parametrize("method", ["capture", "snapshot"])
@pytest.mark.parametrize(
    ("optimizer", "encoding"), [("sgd", "indices"), ("adam-l2", "ulp"), ("adamw-amsgrad", "ulp_zstd")]
)
def test_any_optimizer_and_any_number_of_steps(
    make_pairing: Make, optimizer: str, encoding: str, method: str
) -> None:
    pairing = make_pairing(optimizer, method=method, encoding=encoding)
    kinds = ""
    for version in range(7):
        before = {name: tensor.clone() for name, tensor in truth(pairing).items()}
        for _ in range(version % 4):
            train(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}, {}, {}]
        kinds += stats[0].verdict.kind.value[0]
        if stats[0].verdict.kind is Kind.DELTA:
            assert stats[-1].total_changed == num_changed(before, pairing)
            assert (stats[-1].total_changed > 0) == (version % 4 > 0)
    assert kinds == "fddddfd"


def test_by_inversion_the_same_training_is_full(make_pairing: Make) -> None:
    pairing = make_pairing("adam-l2", method="adamw")
    for version in range(2):
        train(pairing)
        stats = pairing.commit(version)
    assert stats[0].verdict.reason is Reason.NOT_ADAMW


def test_weights_that_something_else_replaced_are_a_delta(make_pairing: Make) -> None:
    pairing = make_pairing()
    pairing.commit(0)
    for one in pairing.trainers:
        one.tensor(f"0/{DOWN}")[2, 3:9] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 7.0, -3e38])
        one.tensor(f"0/{NORM}")[3] *= -1
    stats = pairing.commit(1)
    assert (stats[0].verdict.kind, stats[-1].total_changed) == (Kind.DELTA, 7)
    assert wrong(pairing) == [{}, {}, {}]


def test_to_a_capture_they_are_one_full_sync(make_pairing: Make) -> None:
    pairing = make_pairing(method="capture")
    pairing.commit(0)
    for one in pairing.trainers:
        one.tensor(f"0/{DOWN}")[2, 3] = 7.0
    stats = pairing.commit(1)
    assert stats[0].verdict.reason is Reason.UNSEEN_CHANGE
    assert "one of 3 beside it" in stats[0].verdict.detail  # four small parameters are one piece
    assert wrong(pairing) == [{}, {}, {}]
    train(pairing)
    assert pairing.commit(2)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]


@pytest.mark.parametrize("method", ["capture", "snapshot"])
def test_an_aborted_update_leaves_the_base_as_it_was(make_pairing: Make, method: str) -> None:
    pairing = make_pairing(method=method)
    pairing.commit(0)
    held = {name: tensor.clone() for name, tensor in truth(pairing).items()}
    train(pairing)
    pairing.faults[1].fail("stage")
    assert all(isinstance(outcome, Exception) for outcome in pairing.update(1))
    train(pairing)
    found = sum(one.detect().num_changed for one in pairing.trainers)
    assert found == num_changed(held, pairing) > 0
    assert pairing.commit(1)[0].verdict.reason is Reason.PREVIOUS_ABORTED
    train(pairing)
    assert pairing.commit(2)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]
