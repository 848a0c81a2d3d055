"""Changes found inside the optimizer's step: exact for any optimizer, and full when something went unseen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from awex_delta.detection import capture
from awex_delta.detection.accumulate import AccumulatedBaseline
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import stepped_by
from tests.unit.test_baselines import SHAPES, Truth

CAPTURE = DeltaSettings(method="capture")
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-5, amsgrad=True),
    "adam-l2": partial(torch.optim.Adam, lr=1e-5, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-5, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-5),
}


def make(
    optimizer: str = "sgd",
    *,
    masters: bool = True,
    dp_rank: int = 0,
    dp_size: int = 1,
    lr: float | None = None,
) -> TorchAdamWTrainer:
    shares = {"dp_rank": dp_rank, "dp_size": dp_size}
    made = stepped_by(OPTIMIZERS[optimizer], SHAPES, CAPTURE, seed=7, masters=masters, **shares)
    for group in made.optimizer.param_groups:
        group["lr"] = lr or group["lr"]
    return made


def unseen(trainer: TorchAdamWTrainer) -> str:
    """Where the trainer says that something went unseen."""
    found = trainer.detect()
    assert found.reason is Reason.UNSEEN_CHANGE, found
    assert not found.num_changed
    return found.detail


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("dp_rank", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_and_any_number_of_steps(optimizer: str, dp_rank: int, num_steps: int) -> None:
    trainer = make(optimizer, dp_rank=dp_rank, dp_size=2)
    assert trainer.detect().reason is Reason.FIRST_SYNC
    for _ in range(3):
        trainer.committed()
        truth = Truth(trainer)
        for _ in range(num_steps):
            trainer.train_step()
        changed, listed, unstated = truth.judge(trainer.detect())
        assert changed == listed > 10
        assert unstated <= listed * 0.05 + 3


def test_weights_that_are_stepped_themselves_are_compared_with_a_copy_of_the_moment() -> None:
    trainer = make("adamw", masters=False, lr=1e-3)
    trainer.committed()
    truth = Truth(trainer)
    trainer.train_step()
    trainer.train_step()
    changed, listed, _ = truth.judge(trainer.detect())
    assert changed == listed > 1000
    follower = trainer._baselines._follower
    assert isinstance(follower, capture.StepCapture)
    assert not follower._held, "the copy outlives the step"


def test_elements_whose_steps_cancel_are_left_out_and_a_plane_is_kept_only_when_smaller() -> None:
    trainer = make("sgd", lr=1e-3)
    trainer.committed()
    kept = trainer._baseline
    assert isinstance(kept, AccumulatedBaseline)
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    gradients["a"][3, 5:9] = 1.0
    trainer.train_step(gradients)
    assert trainer.detect().num_changed == 4
    assert kept.num_bytes == 4 * 9
    for group in trainer.optimizer.param_groups:
        group["momentum"] = 0.0
    trainer.train_step({name: -gradient for name, gradient in gradients.items()})
    assert trainer.detect().num_changed == 0
    truth = Truth(trainer)
    trainer.committed()
    for _ in range(2):
        trainer.train_step()
    changed, listed, unstated = truth.judge(trainer.detect())
    assert changed <= listed <= changed + unstated  # steps too long to state may cancel without being seen to
    assert kept.num_bytes == sum(weight.numel() for weight in truth.old.values())


def by_hand(trainer: TorchAdamWTrainer) -> None:
    trainer.tensor("0/a")[1, 2] += 0.5


def swapped(trainer: TorchAdamWTrainer) -> None:
    weight = trainer.tensor("0/a")
    weight[[0, 1]] = weight[[1, 0]].clone()


def replayed(trainer: TorchAdamWTrainer) -> None:
    """As a CUDA graph would: masters and weights move, and no hook is called."""
    for key, master in trainer._stepped.live().items():
        master.data.mul_(1.5)
        trainer.tensor(key).copy_(master.data)


def two_signs(trainer: TorchAdamWTrainer) -> None:
    """The highest bits of two words."""
    trainer.tensor("0/a")[1, [3, 7]] *= -1


def whole_column(trainer: TorchAdamWTrainer) -> None:
    """In every row the same of the four values of a word: only some of its upper bits."""
    trainer.tensor("0/a")[:, 7] *= 2


UNSEEN = [by_hand, swapped, replayed, two_signs, whole_column]


@pytest.mark.parametrize("write", UNSEEN)
@pytest.mark.parametrize("then_steps", [0, 1])
def test_what_no_step_wrote_makes_the_next_update_full_and_the_one_after_exact(
    write: Callable[[TorchAdamWTrainer], None], then_steps: int
) -> None:
    trainer = make()
    trainer.committed()
    trainer.train_step()
    write(trainer)
    for _ in range(then_steps):
        trainer.train_step()
    assert "0/a" in unseen(trainer)
    trainer.train_step()
    unseen(trainer)
    trainer.committed()
    truth = Truth(trainer)
    trainer.train_step()
    changed, listed, _ = truth.judge(trainer.detect())
    assert changed == listed > 0


def test_columns_that_are_written_are_noticed_wherever_they_are_in_a_word() -> None:
    trainer = make()
    weight = trainer.tensor("0/a")
    for trial in range(192):
        trainer.detect()  # it hears of the values that were put back
        trainer.committed()
        before = weight.clone()
        rows = slice(trial % 5, trial % 5 + 10)
        weight[rows, trial % 96] *= -1 if trial % 2 else 2
        assert not torch.equal(weight, before)
        unseen(trainer)
        weight.copy_(before)


def test_weights_that_change_while_an_update_is_under_way_are_noticed_at_its_commit() -> None:
    trainer = make()
    trainer.committed()
    trainer.train_step()
    assert trainer.detect().reason is Reason.NONE
    by_hand(trainer)
    trainer.committed()
    unseen(trainer)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("asked", [True, False])
def test_another_target_that_asks_meanwhile_does_not_take_the_doubt_away(asked: bool, is_full: bool) -> None:
    trainer = make()
    other = trainer.fork()
    other.committed()
    if not is_full:
        trainer.committed()
        trainer.train_step()
    if asked:  # an anchor is not
        trainer.detect()
    by_hand(trainer)
    unseen(other)
    trainer.committed()
    unseen(trainer)
    trainer.committed()
    truth = Truth(trainer)
    trainer.train_step()
    truth.judge(trainer.detect())


def test_a_step_while_an_update_is_under_way_is_noticed_and_one_after_a_failed_update_is_exact() -> None:
    trainer = make()
    trainer.committed()
    truth = Truth(trainer)
    for _ in range(2):
        trainer.train_step()
        truth.judge(trainer.detect())
    trainer.train_step()
    trainer.committed()
    assert trainer.detect().reason is Reason.STEP_GAP


def test_masters_that_are_replaced_and_states_that_are_reset_are_exact_all_the_same() -> None:
    trainer = make("adamw")
    trainer.committed()
    trainer.train_step()
    trainer.committed()
    truth = Truth(trainer)
    for master in trainer._stepped.live().values():
        master.data.add_(1e-3)  # as `reload_model_params` from another checkpoint would
    trainer.optimizer.state.clear()
    trainer.train_step()
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    trainer.train_step()
    changed, listed, _ = truth.judge(trainer.detect())
    assert changed == listed > 1000


def test_targets_go_each_at_their_own_pace() -> None:
    trainer = make()
    slow = trainer.fork()
    trainer.committed()
    slow.committed()
    truth = Truth(trainer)
    for _ in range(3):
        step = Truth(trainer)
        trainer.train_step()
        step.judge(trainer.detect())
        trainer.committed()
    changed, listed, _ = truth.judge(slow.detect())
    assert changed == listed > 0
    slow.detach()
    trainer.train_step()
    assert slow.detect().reason is Reason.NO_STEP_RECORD
    trainer.detach()
    assert not trainer.optimizer._optimizer_step_post_hooks
    assert not trainer.optimizer._optimizer_step_pre_hooks


def test_an_error_inside_a_hook_lets_training_go_on_and_the_update_be_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make()
    trainer.committed()

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(capture, "moves", fail)
        trainer.train_step()
    found = trainer.detect()
    assert (found.reason, found.detail) == (Reason.DETECTION_FAILED, "MemoryError: no room")
    trainer.committed()
    trainer.train_step()
    assert trainer.detect().reason is Reason.NONE


def test_masters_that_are_away_while_others_step_end_no_process() -> None:
    trainer = make("adamw")
    trainer.committed()
    first, *others = trainer._stepped.live().values()
    storage, held = first.untyped_storage(), first.detach().clone()
    storage.resize_(0)
    for other in others:
        other.grad = torch.ones_like(other)
    trainer.optimizer.step()
    found = trainer.detect()
    assert found.reason is Reason.DETECTION_FAILED
    assert f"{next(iter(trainer._stepped.live()))}: main: its storage was freed" in found.detail
    storage.resize_(held.nbytes)
    first.detach().copy_(held)
    trainer.committed()
    trainer.train_step()
    assert trainer.detect().num_changed > 0


def test_a_step_that_is_recorded_as_a_graph_reads_nothing_and_its_replay_is_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make("adamw")
    trainer.committed()
    with monkeypatch.context() as patched:  # stands for a CUDA graph, which hooks must not break
        patched.setattr(capture, "is_capturing", lambda: True)
        patched.setattr(capture, "bf16_slices", lambda _: pytest.fail("nothing may be read"))
        trainer.train_step()
    unseen(trainer)


def test_pieces_of_any_size_and_alignment_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_EAGER_PIECE", 60)
    for dp_rank in range(3):
        trainer = make("adamw", dp_rank=dp_rank, dp_size=3)
        trainer.committed()
        truth = Truth(trainer)
        trainer.train_step()
        changed, listed, _ = truth.judge(trainer.detect())
        assert changed == listed > 0
        trainer.committed()
        by_hand(trainer)
        if dp_rank == 0:
            unseen(trainer)
