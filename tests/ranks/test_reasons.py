"""Every reason for a full sync, caused on one rank alone: all ranks go full, end exact, and go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from awex_delta.errors import UpdateAborted
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import EngineSeat, Pairing
from tests.ranks.conftest import EMBED, SETTINGS, SHAPES, train, wrong
from tests.te_adam import Float8Tensor

Make = Callable[..., Pairing]


def state(pairing: Pairing, rank: int) -> dict[str, torch.Tensor]:
    """The optimizer state of the first parameter of one trainer rank."""
    trainer = pairing.trainers[rank]
    assert isinstance(trainer, TorchAdamWTrainer)
    param = trainer.optimizer.param_groups[0]["params"][0]
    found = trainer.optimizer.state[param]
    assert isinstance(found, dict)
    return found


def masters(pairing: Pairing) -> list[torch.Tensor]:
    trainer = pairing.trainers[1]
    assert isinstance(trainer, TorchAdamWTrainer)
    return list(trainer._stepped.live().values())


def two_steps(pairing: Pairing) -> None:
    train(pairing)


def no_record(pairing: Pairing) -> None:
    trainer = pairing.trainers[1]
    assert isinstance(trainer, TorchAdamWTrainer)
    trainer.optimizer._optimizer_step_post_hooks.clear()  # as in a process whose hook is not installed


def master_written(pairing: Pairing) -> None:
    with torch.no_grad():
        masters(pairing)[0].mul_(1.0)


def all_replaced(pairing: Pairing) -> None:
    """Masters and weights alike on every rank, where torch does not count it."""
    for trainer in pairing.trainers:
        assert isinstance(trainer, TorchAdamWTrainer)
        for key, main in trainer._stepped.live().items():
            main.data.mul_(1.5)
            trainer.tensor(key).copy_(main.detach())


def moments_missing(pairing: Pairing) -> None:
    del state(pairing, 1)["exp_avg"]


def moments_infinite(pairing: Pairing) -> None:
    state(pairing, 1)["exp_avg"].view(-1)[-1] = float("inf")


def moments_fp16(pairing: Pairing) -> None:
    found = state(pairing, 1)
    found["exp_avg_sq"] = found["exp_avg_sq"].half()  # of which no scale tells what it stands for


def moments_coarse(pairing: Pairing) -> None:
    trainer = pairing.trainers[1]
    assert isinstance(trainer, TorchAdamWTrainer)
    for found in trainer.optimizer.state.values():
        zeros = torch.zeros_like(found["exp_avg"]).to(torch.float8_e4m3fn)
        found["exp_avg"] = Float8Tensor.make(zeros, torch.ones(1))


def step_is_zero(pairing: Pairing) -> None:
    state(pairing, 1)["step"].zero_()


def weights_replaced(pairing: Pairing) -> None:
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{EMBED}").mul_(2.0)


def detection_fails(pairing: Pairing) -> None:
    pairing.faults[4].fail("detect")


def engine_moves(pairing: Pairing) -> None:
    pairing.engines[1].tensors_by_name[EMBED] = pairing.engines[1].tensors_by_name[EMBED].clone()


def engine_restarts(pairing: Pairing) -> None:
    pairing.receivers[1].invalidate()


AFTER_TRAINING: list[tuple[Reason, Callable[[Pairing], None]]] = [
    (Reason.STEP_GAP, two_steps),
    (Reason.STATE_REPLACED, master_written),
    (Reason.STEP_DISPROVED, all_replaced),
    (Reason.MOMENTS_MISSING, moments_missing),
    (Reason.MOMENTS_INVALID, moments_infinite),
    (Reason.MOMENTS_INVALID, moments_fp16),
    (Reason.MOMENTS_COARSE, moments_coarse),
    (Reason.STEP_GAP, step_is_zero),
    (Reason.MASTER_MISMATCH, weights_replaced),
    (Reason.DETECTION_FAILED, detection_fails),
    (Reason.ENGINE_STALE, engine_restarts),
    (Reason.ENGINE_MOVED, engine_moves),
]


@pytest.mark.parametrize(("reason", "cause"), AFTER_TRAINING, ids=lambda x: getattr(x, "__name__", str(x)))
def test_one_rank_in_doubt_makes_all_ranks_full(
    make: Make, reason: Reason, cause: Callable[[Pairing], None]
) -> None:
    pairing = make()
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    cause(pairing)
    stats = pairing.commit(2)
    assert {s.verdict.reason for s in stats} == {reason}
    assert {s.verdict.kind for s in stats} == {Kind.FULL}
    assert reason.text in str(stats[0].verdict)
    assert wrong(pairing) == [{}, {}, {}]


def test_a_missing_step_record_is_never_guessed(make: Make) -> None:
    pairing = make()
    train(pairing)
    pairing.commit(0)
    no_record(pairing)
    train(pairing)
    stats = pairing.commit(1)
    assert {s.verdict.reason for s in stats} == {Reason.NO_STEP_RECORD}
    assert stats[0].verdict.ranks == (4,)
    assert wrong(pairing) == [{}, {}, {}]


def test_hyper_parameters_that_change_around_a_step(make: Make) -> None:
    pairing = make(lr=1e-3)
    train(pairing)
    pairing.commit(0)
    trainer = pairing.trainers[1]
    assert isinstance(trainer, TorchAdamWTrainer)
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=1e-3))
    trainer.optimizer.param_groups[0]["lr"] = 9.0  # what our hook reads; the step uses what the other sets
    train(pairing)
    stats = pairing.commit(1)
    assert {s.verdict.reason for s in stats} == {Reason.LOSSY_RECORD}
    assert wrong(pairing) == [{}, {}, {}]


def plain_trainer(kind: str, rank: int) -> TorchAdamWTrainer:
    """A trainer over one weight with an optimizer of the given kind."""
    weight = torch.full(SHAPES[EMBED], 0.5, dtype=torch.bfloat16)
    master = weight.float().requires_grad_()
    stepped = weight.requires_grad_() if kind == "no_master" else master
    optimizer = torch.optim.SGD([stepped], lr=0.1) if kind == "sgd" else torch.optim.AdamW([stepped], lr=0.1)
    return TorchAdamWTrainer(
        weights={EMBED: weight},
        masters={} if kind == "no_master" else {EMBED: master},
        optimizer=optimizer,
        settings=SETTINGS,
        dp_rank=rank,
        dp_size=2,
    )


@pytest.mark.parametrize(
    ("reason", "kind"), [(Reason.NOT_ADAMW, "sgd"), (Reason.NO_FP32_MASTER, "no_master")]
)
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_cannot_be_inverted_is_synchronized_in_full(
    make: Make, reason: Reason, kind: str
) -> None:
    only = {EMBED: SHAPES[EMBED]}
    pairing = make(shapes=only, engines=[EngineSeat(engine="e", view=DictEngine(only))])
    for rank in range(2):
        pairing.restart_trainer(rank, plain_trainer(kind, rank))
    for version in range(3):
        for trainer in pairing.trainers:
            assert isinstance(trainer, TorchAdamWTrainer)
            dtype = torch.bfloat16 if kind == "no_master" else torch.float32
            trainer.train_step({EMBED: torch.ones(SHAPES[EMBED], dtype=dtype)})
        stats = pairing.commit(version)
        expected = Reason.FIRST_SYNC if version == 0 else reason
        assert {s.verdict.reason for s in stats} == {expected}
        if reason is Reason.NOT_ADAMW and version:
            assert "the optimizer is SGD. Remedy: set weight_update_delta_method" in stats[0].verdict.detail
        assert wrong(pairing) == [{}]


def test_version_gaps_both_ways(make: Make) -> None:
    pairing, before = make(), -1
    for version, reason in (
        (5, Reason.FIRST_SYNC),
        (7, Reason.VERSION_GAP),
        (3, Reason.VERSION_GAP),
        (4, Reason.NONE),
    ):
        train(pairing)
        stats = pairing.commit(version)
        assert {s.verdict.reason for s in stats} == {reason}
        if reason is Reason.VERSION_GAP:
            assert stats[0].verdict.detail == f"{before} was committed, {version} was asked for"
        before = version
        assert wrong(pairing) == [{}, {}, {}]
        assert [r.version for r in pairing.receivers] == [version] * 3


def test_a_flag_that_is_off_means_full_syncs_at_any_world_size(make: Make) -> None:
    pairing = make(enabled=False, allow_any_world_size=False)
    for version in range(3):
        train(pairing)
        assert {s.verdict.reason for s in pairing.commit(version)} == {Reason.DELTA_DISABLED}
        assert wrong(pairing) == [{}, {}, {}]
    assert not any("sizes" in phase for phase in pairing.senders[0].comm.trace)


def test_repeated_fallbacks_are_said_aloud(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    pairing = make()
    for version in range(0, 12, 2):
        train(pairing)
        pairing.commit(version)
    assert [r.message for r in caplog.records if r.levelname == "WARNING" and "in a row" in r.message] != []


def test_hyper_parameters_that_cannot_be_inverted(make: Make) -> None:
    pairing = make(lr=0.5)
    train(pairing)
    pairing.commit(0)
    for trainer in pairing.trainers:
        assert isinstance(trainer, TorchAdamWTrainer)
        trainer.optimizer.param_groups[0]["weight_decay"] = 2.0  # lr * decay = 1: the old weight is gone
    train(pairing)
    assert {s.verdict.reason for s in pairing.commit(1)} == {Reason.HYPERPARAMETERS_INVALID}
    assert wrong(pairing) == [{}, {}, {}]


def test_every_reason_has_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    unused = [reason.name for reason in Reason if f"Reason.{reason.name}" not in text]
    assert unused == []


def step_of_first_rows(pairing: Pairing) -> None:
    grad = torch.zeros(SHAPES[EMBED])
    grad[:2] = 1.0
    for trainer in pairing.trainers:
        trainer.train_step({EMBED: grad})  # type: ignore[attr-defined]


def test_weights_that_are_edited_after_an_update_that_failed(make: Make) -> None:
    """It found them in order, which says nothing of what the full sync after it sends."""
    pairing = make()
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    step_of_first_rows(pairing)
    pairing.faults[0].fail("stage")
    assert all(isinstance(one, UpdateAborted) for one in pairing.update(2))
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{EMBED}").view(-1)[-1] += 1.0  # the next step rounds its master over it
    assert pairing.commit(2)[0].verdict.reason is Reason.PREVIOUS_ABORTED
    step_of_first_rows(pairing)
    assert pairing.commit(3)[0].verdict.reason is Reason.MASTER_MISMATCH
    assert wrong(pairing) == [{}, {}, {}]
