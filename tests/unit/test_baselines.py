"""Changes over any number of steps: judged against a copy of the weights of the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from awex_delta.detection import baselines, invert
from awex_delta.detection.slices import Detection
from awex_delta.lines.bits import UNSTATED, add_codes
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

ON = DeltaSettings(accumulate=True)
SHAPES = {"a": (64, 96), "b": (50,), "c": (3, 5, 7)}
Bits = Mapping[str, torch.Tensor]


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """Where a bf16 pattern stands among all: sign and magnitude counted out, as by hand."""
    magnitude = (bits & 0x7FFF).to(torch.int64)
    return torch.where(bits < 0, -magnitude - 1, magnitude)


class Truth:
    """The owned weights as they were when it was made, kept apart from everything that is tested."""

    def __init__(self, trainer: TorchAdamWTrainer) -> None:
        self._trainer = trainer
        self.old = self.bits()
        self.steps: list[Bits] = [self.old]

    def bits(self) -> dict[str, torch.Tensor]:
        return {
            info.key: self._trainer.tensor(info.key).detach().clone().view(torch.int16).view(-1)
            for info in self._trainer.weights()
            if info.sparse
        }

    def step_is_over(self) -> None:
        self.steps.append(self.bits())

    def owned(self, key: str) -> range:
        info = next(info for info in self._trainer.weights() if info.key == key)
        return range(info.owned_start, info.owned_stop)

    def judge(self, detection: Detection) -> tuple[int, int, int]:
        """No change is missed and no step is wrong. Returns how many changed, were listed, are unstated."""
        assert detection.reason is Reason.NONE, detection
        pos, code = detection.changes.pos, detection.changes.code
        assert code is not None
        assert bool((pos.diff() > 0).all())
        assert 0 not in code.tolist()
        old, new = (torch.cat(list(bits.values())) for bits in (self.old, self.bits()))
        owned = torch.cat([self.mask(key) for key in self.old])
        truth = (old != new) & owned
        listed = torch.zeros_like(truth)
        listed[pos] = True
        assert not bool((truth & ~listed).any())
        assert not bool((listed & ~owned).any())
        stated = code != UNSTATED
        moved = ordered(new[pos]) - ordered(old[pos])
        assert torch.equal(moved[stated], code[stated].long())
        return int(truth.sum()), pos.numel(), int((~stated).sum())

    def mask(self, key: str) -> torch.Tensor:
        mask = torch.zeros(self.old[key].numel(), dtype=torch.bool)
        owned = self.owned(key)
        mask[owned.start : owned.stop] = True
        return mask

    def came_back(self) -> int:
        """Elements that moved in between and have their old bits again."""
        count = 0
        for key, old in self.old.items():
            moved = torch.stack([step[key] != old for step in self.steps]).any(0)
            owned = self.owned(key)
            count += int((moved & (self.steps[-1][key] == old))[owned.start : owned.stop].sum())
        return count


@pytest.mark.parametrize(
    ("lr", "num_steps"), [(1e-5, 1), (1e-5, 4), (1e-4, 4), (1e-3, 4), (0.1, 4), (1e-5, 9)]
)
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_steps_add_up_to_what_a_copy_shows(lr: float, num_steps: int, dp_rank: int) -> None:
    trainer = TorchAdamWTrainer.create(
        SHAPES, lr=lr, weight_decay=0.1, dp_rank=dp_rank, dp_size=2, settings=ON, seed=num_steps
    )
    for _ in range(3):
        trainer.committed()
        truth = Truth(trainer)
        for _ in range(num_steps):
            trainer.train_step()
            truth.step_is_over()
        changed, listed, unstated = truth.judge(trainer.detect())
        assert changed > 10
        assert listed <= changed * 1.01 + 3
        if lr <= 1e-4:
            assert unstated <= listed * 0.05 + 3  # weights near zero move far
        if lr == 1e-5 and num_steps > 1:
            assert truth.came_back() > 0, "nothing tests that steps cancel"


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("then_steps", [0, 1])
@pytest.mark.parametrize("aborted", [False, True])
def test_weights_that_are_lent_for_one_update_make_the_next_one_full(
    aborted: bool, then_steps: int, accumulate: bool
) -> None:
    """Averages are swapped in, published and swapped out: engines hold what no step leads from."""
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=DeltaSettings(accumulate=accumulate))
    trainer.committed()
    trainer.train_step()
    if aborted:
        assert trainer.detect().reason is Reason.NONE
    policy = trainer.tensor("0/a").clone()
    trainer.tensor("0/a").mul_(2)
    assert trainer.detect().reason is Reason.MASTER_MISMATCH
    trainer.committed()
    trainer.tensor("0/a").copy_(policy)
    for _ in range(then_steps):
        trainer.train_step()
    assert trainer.detect().reason is Reason.MASTER_MISMATCH
    trainer.committed()
    truth = Truth(trainer)
    trainer.train_step()
    changed, _, _ = truth.judge(trainer.detect())
    assert changed > 10


def test_a_step_that_is_too_far_to_state_stays_unstated() -> None:
    trainer = TorchAdamWTrainer.create({"a": (2000,)}, lr=0.1, settings=ON)
    trainer.committed()
    truth = Truth(trainer)
    for _ in range(4):
        trainer.train_step()
    _, listed, unstated = truth.judge(trainer.detect())
    assert unstated > listed / 2
    codes = torch.tensor([UNSTATED, 126, -126, 100, 5, -3], dtype=torch.int8)
    other = torch.tensor([3, 1, -1, 26, -5, 2], dtype=torch.int8)
    assert add_codes(codes, other).tolist() == [UNSTATED, UNSTATED, UNSTATED, 126, 0, -1]
    assert add_codes(other, codes).tolist() == [UNSTATED, UNSTATED, UNSTATED, 126, 0, -1]


def odd_trainer(values: torch.Tensor, lr: float) -> TorchAdamWTrainer:
    weight = values.bfloat16()
    master = weight.float().requires_grad_()
    return TorchAdamWTrainer(
        weights={"odd": weight},
        masters={"odd": master},
        optimizer=torch.optim.AdamW([master], lr=lr, weight_decay=0.0),
        settings=ON,
    )


@pytest.mark.parametrize("lr", [1e-42, 1e-6, 1e-2, 1e36])
def test_signs_zeros_and_the_ends_of_the_range(lr: float) -> None:
    edges = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 9.2e-41, 1.2e-38, -1.2e-38, 1.0, -1.0, 3.3e38, -3.3e38, 8e37]
    )
    trainer = odd_trainer(edges.repeat(40), lr)
    trainer.committed()
    truth = Truth(trainer)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        trainer.train_step({"odd": torch.randn(480, generator=generator)})
        truth.step_is_over()
    detection = trainer.detect()
    if lr == 1e-42:
        assert detection.reason is Reason.HYPERPARAMETERS_INVALID
    else:
        truth.judge(detection)


def test_nan_and_infinity_in_one_step_are_a_doubt_until_the_commit() -> None:
    trainer = TorchAdamWTrainer.create({"a": (300,)}, settings=ON)
    trainer.committed()
    for poison in (0.0, float("nan"), 0.0):
        grad = torch.randn(300)
        grad[17] += poison
        trainer.train_step({"a": grad})
    assert trainer.detect().reason is Reason.MOMENTS_INVALID
    for state in trainer.optimizer.state.values():
        state["exp_avg"][17] = 0.0
    assert trainer.detect().reason is Reason.MOMENTS_INVALID, "one poisoned step spoils the sum"


def test_any_number_of_steps_is_covered_even_none() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=ON)
    trainer.train_step()
    assert trainer.detect().reason is Reason.FIRST_SYNC
    trainer.committed()
    truth = Truth(trainer)
    for _ in range(2):
        assert trainer.detect().num_changed == 0
        assert trainer.detect().num_owned == 64 * 96 + 50 + 105
    for _ in range(5):  # aborted updates: the planes stay, and asking twice changes nothing
        trainer.train_step()
        once = trainer.detect()
        truth.judge(once)
        again = trainer.detect()
        assert torch.equal(again.changes.pos, once.changes.pos)
        assert torch.equal(again.changes.code, once.changes.code)  # type: ignore[arg-type]
    trainer.committed()
    assert trainer.detect().num_changed == 0


def test_a_parameter_may_sit_out_some_steps() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-4, settings=ON)
    for _ in range(2):
        trainer.committed()
        truth = Truth(trainer)
        for names in (("a",), (), ("b", "c"), ("a", "c")):
            trainer.train_step({name: torch.randn(SHAPES[name]) for name in names})
        assert truth.judge(trainer.detect())[0] > 100


def test_hyper_parameters_that_change_between_steps_are_those_of_each_step() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=ON)
    trainer.committed()
    truth = Truth(trainer)
    for lr, decay, grads in ((1e-5, 0.0, None), (3e-4, 0.3, None), (0.5, 0.9, {}), (1e-4, 0.1, None)):
        for group in trainer.optimizer.param_groups:
            group.update(lr=lr, weight_decay=decay)
        trainer.train_step(grads)  # the third moves nothing, and is not mistaken for one that did
    truth.judge(trainer.detect())


def replace_weights(trainer: TorchAdamWTrainer) -> None:
    trainer.tensor("0/a")[3, 5] += 1


def load_optimizer(trainer: TorchAdamWTrainer) -> None:
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


def lose_moments(trainer: TorchAdamWTrainer) -> None:
    for state in trainer.optimizer.state.values():
        del state["exp_avg_sq"]


def replace_everything(trainer: TorchAdamWTrainer) -> None:
    for owned in trainer.owned_slices():
        assert owned.main is not None
        owned.main.add_(1.0)
        owned.weight.copy_(owned.main)
    trainer._baselines.weights_replaced()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (replace_weights, Reason.MASTER_MISMATCH),
        (load_optimizer, Reason.STEP_GAP),
        (replace_everything, Reason.STEP_GAP),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 1, 2])
@pytest.mark.parametrize("steps_after", [0, 2])
def test_a_doubt_between_two_steps_lasts_until_the_commit(
    harm: Any, reason: Reason, steps_before: int, steps_after: int
) -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=ON)
    trainer.train_step()
    trainer.committed()
    for _ in range(steps_before):
        trainer.train_step()
    harm(trainer)
    for _ in range(steps_after):
        trainer.train_step()
    for _ in range(2):
        assert trainer.detect().reason is reason
    if not (harm is replace_weights and steps_after == 0):
        trainer.committed()
        truth = Truth(trainer)
        for _ in range(3):
            trainer.train_step()
        truth.judge(trainer.detect())


def test_lost_moments_are_a_doubt() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, settings=ON)
    trainer.committed()
    trainer.train_step()
    lose_moments(trainer)
    assert trainer.detect().reason is Reason.MOMENTS_MISSING


def test_a_failing_detection_never_stops_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, settings=ON)
    trainer.committed()

    def fail(*_: object) -> Detection:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(invert, "detect_changes", fail)
    for _ in range(3):
        trainer.train_step()
    monkeypatch.undo()
    detection = trainer.detect()
    assert (detection.reason, "out of memory" in detection.detail) == (Reason.DETECTION_FAILED, True)


@pytest.fixture
def both() -> tuple[TorchAdamWTrainer, baselines.Baseline]:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=ON)
    return trainer, trainer._baselines.add()


def test_each_baseline_counts_from_its_own_commit(both: tuple[TorchAdamWTrainer, baselines.Baseline]) -> None:
    trainer, slow = both
    trainer.committed()
    slow.committed()
    fast_truth, slow_truth = Truth(trainer), Truth(trainer)
    for step in range(9):
        trainer.train_step()
        fast_truth.judge(trainer.detect())
        trainer.committed()
        fast_truth = Truth(trainer)
        if step % 3 == 2:
            slow_truth.judge(slow.detect())
            slow.committed()
            slow_truth = Truth(trainer)
    slow.detach()
    slow.committed()
    trainer.train_step()
    assert slow.detect().reason is Reason.NO_STEP_RECORD
    fast_truth.judge(trainer.detect())


def test_memory_is_one_byte_an_owned_element_and_none_before_the_first_commit() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-3, dp_rank=1, dp_size=2, settings=ON)
    baseline: Any = trainer._baseline

    def held() -> int:
        return int(baseline.num_bytes)

    trainer.train_step()
    trainer.train_step()
    assert held() == 0
    for _ in range(3):
        trainer.committed()
        for _ in range(4):
            trainer.train_step()
        assert held() == trainer.detect().num_owned == 32 * 96 + 25 + 53


def test_hooks_come_only_with_the_setting_and_go_with_the_last_baseline() -> None:
    plain, on = TorchAdamWTrainer.create(SHAPES), TorchAdamWTrainer.create(SHAPES, settings=ON)
    alone, followed = (trainer.optimizer._optimizer_step_pre_hooks for trainer in (plain, on))
    assert (len(alone), len(followed)) == (1, 2)
    other = on._baselines.add()
    on.detach()
    assert len(followed) == 2
    other.detach()
    assert len(followed) == 0


def test_no_memory_for_the_codes_makes_the_next_update_full_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, settings=ON, lr=1e-5)
    trainer.committed()
    zeros = torch.zeros

    def no_room(*sizes: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.int8:
            raise RuntimeError("out of memory")
        return zeros(*sizes, **options)

    trainer.train_step()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", no_room)
        trainer.train_step()
    found = trainer.detect()
    assert (found.reason, found.detail) == (Reason.DETECTION_FAILED, "RuntimeError: out of memory")
    trainer.committed()
    truth = Truth(trainer)
    trainer.train_step()
    trainer.train_step()
    assert truth.judge(trainer.detect())[0] > 0
