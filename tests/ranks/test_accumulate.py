"""Several optimizer steps between two updates: whole updates over thread ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import Pairing
from tests.ranks.conftest import BIAS, EMBED, ROUTER, train, truth, wrong

Make = Callable[..., Pairing]

MINIBATCHES = 4


def train_epoch(pairing: Pairing) -> None:
    for _ in range(MINIBATCHES):
        train(pairing)


@pytest.mark.parametrize(("encoding", "lr"), [("indices", 1e-5), ("ulp", 1e-5), ("ulp_zstd", 1e-3)])
def test_four_minibatches_a_version_stay_bit_identical(make: Make, encoding: str, lr: float) -> None:
    pairing = make(
        accumulate=True,
        encoding=encoding,
        lr=lr,
        anchor_interval=3,
        buffers={BIAS: (4,)},
        fp32={ROUTER: (4, 8)},
    )
    kinds = ""
    for version in range(6):
        before = {name: tensor.clone() for name, tensor in truth(pairing).items()}
        train_epoch(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}, {}, {}]
        kinds += "F" if stats[0].verdict.kind is Kind.FULL else "D"
        if stats[0].verdict.kind is Kind.DELTA:
            changed = sum(
                int((before[name] != new).sum())
                for name, new in truth(pairing).items()
                if new.element_size() == 2
            )
            assert changed <= stats[-1].total_changed <= changed * 1.02 + 4
    assert kinds == "FDDDFD"


def test_without_the_setting_the_same_training_is_full(make: Make) -> None:
    pairing = make()
    for version in range(2):
        train_epoch(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}, {}, {}]
    assert stats[0].verdict.reason is Reason.STEP_GAP


@pytest.mark.parametrize("steps_before_retry", [0, 3])
def test_an_aborted_update_loses_no_step(make: Make, steps_before_retry: int) -> None:
    pairing = make(accumulate=True, encoding="ulp")
    for version in range(2):
        train_epoch(pairing)
        pairing.commit(version)
    train_epoch(pairing)
    pairing.faults[4].fail("encode")
    assert all(isinstance(outcome, Exception) for outcome in pairing.update(2))
    for _ in range(steps_before_retry):
        train(pairing)
    assert pairing.commit(2)[0].verdict.reason is Reason.PREVIOUS_ABORTED
    assert wrong(pairing) == [{}, {}, {}]
    train_epoch(pairing)
    assert pairing.commit(3)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]


def test_a_doubt_of_an_early_minibatch_on_one_rank_makes_all_full(make: Make) -> None:
    pairing = make(accumulate=True)
    for version in range(2):
        train_epoch(pairing)
        pairing.commit(version)
    train(pairing)
    trainer = pairing.trainers[1]
    assert isinstance(trainer, TorchAdamWTrainer)
    trainer.tensor(f"0/{EMBED}")[15, 7] += 1.0  # which the next step undoes
    train_epoch(pairing)
    stats = pairing.commit(2)
    assert {s.verdict.reason for s in stats} == {Reason.MASTER_MISMATCH}
    assert stats[0].verdict.ranks == (4,)
    assert wrong(pairing) == [{}, {}, {}]
    train(pairing)
    assert pairing.commit(3)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]


@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_that_a_full_sync_took_in_mid_air_are_no_base(make: Make, accumulate: bool) -> None:
    pairing = make(accumulate=accumulate)
    train(pairing)
    pairing.commit(0)
    train(pairing)
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{EMBED}").mul_(2.0)
    assert pairing.commit(1)[0].verdict.reason is Reason.MASTER_MISMATCH
    train(pairing)  # writes the masters back, so that nearly all weights move
    assert pairing.commit(2)[0].verdict.reason is Reason.MASTER_MISMATCH
    assert wrong(pairing) == [{}, {}, {}]
    train(pairing)
    assert pairing.commit(3)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_model_that_was_loaded_without_its_masters_is_no_base(make: Make, accumulate: bool) -> None:
    pairing = make(accumulate=accumulate)
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{EMBED}").add_(0.5)
    pairing.commit(0)
    for version in (1, 2):
        train(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}, {}, {}]
    assert stats[0].verdict.kind is Kind.DELTA
