"""Which step to invert: real torch optimizers, and what users do between two updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.journal import StepJournal
from awex_delta.detection.optimizers import SteppedParams, step_counts
from awex_delta.detection.slices import OwnedSlice
from awex_delta.errors import UnsupportedError
from awex_delta.protocol.verdict import Reason
from tests.kernels import FusedAdam

Plans = Mapping[str, AdamWStep | Reason | None]


class Training:
    """Two parameters, an optimizer and a journal that watches it."""

    def __init__(self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self.params = {name: torch.randn(5, requires_grad=True) for name in ("first", "second")}
        self.optimizer = make([{"params": [param]} for param in self.params.values()])
        self.journal = StepJournal()
        self.journal.watch(self.stepped())
        self.commit()

    def stepped(self) -> SteppedParams:
        return SteppedParams(self.optimizer, {f"0/{name}": param for name, param in self.params.items()})

    def slices(self) -> list[OwnedSlice]:
        steps = step_counts(self.optimizer, list(self.params.values()))
        return [
            OwnedSlice(
                param=name,
                chunk=0,
                start=0,
                stop=5,
                begin=0,
                main=param.detach(),
                weight=param.detach().bfloat16(),
                exp_avg=None,
                exp_avg_sq=None,
                step=step,
            )
            for (name, param), step in zip(self.params.items(), steps, strict=True)
        ]

    def step(self, *without_grad: str, zero: bool = False) -> None:
        for name, param in self.params.items():
            grad = torch.zeros(5) if zero else torch.randn(5)
            param.grad = None if name in without_grad else grad
        self.optimizer.step()

    def commit(self) -> None:
        self.journal.commit()

    def plans(self) -> Plans:
        return {owned.param: self.journal.plan(owned) for owned in self.slices()}

    def set_lr(self, lr: float | torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


def adamw(**options: Any) -> Training:
    return Training(
        lambda groups: torch.optim.AdamW(
            groups, **{"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, **options}
        )
    )


USED = AdamWStep(lr=1e-3, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6, step=1)
BOTH = {"first", "second"}


def test_the_step_is_stated_with_what_it_used() -> None:
    training = adamw()
    training.step()
    assert training.plans() == dict.fromkeys(BOTH, USED)


def test_before_any_commit_there_is_no_base() -> None:
    training = adamw()
    training.journal = StepJournal()
    training.journal.watch(training.stepped())
    training.step()
    assert training.plans() == dict.fromkeys(BOTH, Reason.FIRST_SYNC)


def test_a_scheduler_changes_nothing_whether_it_ran_or_not() -> None:
    training = adamw()
    scheduler = torch.optim.lr_scheduler.LinearLR(
        training.optimizer, start_factor=1.0, end_factor=0.0, total_iters=3
    )
    for step, lr in enumerate((1e-3, 1e-3 * 2 / 3, 1e-3 / 3), start=1):
        training.step()
        before = training.plans()
        scheduler.step()
        assert training.plans() == before
        for plan in before.values():
            assert isinstance(plan, AdamWStep)
            assert plan.lr == pytest.approx(lr, rel=1e-9)
            assert plan.step == step
        training.commit()
    assert training.optimizer.param_groups[0]["lr"] == 0.0


def test_a_schedule_of_the_weight_decay_is_followed() -> None:
    training = adamw(weight_decay=0.0)
    for used in (0.0, 0.01, 0.02):
        training.step()
        for group in training.optimizer.param_groups:
            group["weight_decay"] = used + 0.01
        assert {plan.weight_decay for plan in training.plans().values() if isinstance(plan, AdamWStep)} == {
            used
        }
        training.commit()


def test_no_step_is_no_change_however_often_it_is_asked() -> None:
    training = adamw()
    training.step()
    training.commit()
    for _ in range(2):
        assert training.plans() == dict.fromkeys(BOTH, None)
        training.commit()


def test_a_step_without_gradient_is_sat_out_and_one_with_zero_gradient_is_not() -> None:
    training = adamw()
    training.step("second")
    assert training.plans() == {"first": USED, "second": None}
    training.commit()
    training.step(zero=True)
    assert training.plans() == {"first": replace(USED, step=2), "second": USED}


def test_two_steps_are_more_than_one_inversion_covers() -> None:
    training = adamw()
    training.step()
    training.step("second")
    assert training.plans() == {"first": Reason.STEP_GAP, "second": USED}
    training.commit()
    assert training.plans() == dict.fromkeys(BOTH, None)


def test_a_counter_that_went_back_is_a_gap() -> None:
    training = adamw()
    training.step()
    training.step()
    training.commit()
    training.optimizer.state[training.params["first"]]["step"].fill_(1)
    assert training.plans() == {"first": Reason.STEP_GAP, "second": None}


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_loaded_state_is_a_gap_even_where_its_counter_fits(steps_after: int) -> None:
    training, other = adamw(), adamw()
    training.step()
    other.step()
    training.commit()
    training.optimizer.load_state_dict(other.optimizer.state_dict())
    for _ in range(steps_after):
        training.step()
    assert training.plans() == dict.fromkeys(BOTH, Reason.STEP_GAP)
    training.commit()
    training.step()
    assert training.plans() == dict.fromkeys(BOTH, replace(USED, step=2 + steps_after))


def test_weights_replaced_by_hand_are_a_gap_once_told() -> None:
    training = adamw()
    training.journal.forget()
    assert training.plans() == dict.fromkeys(BOTH, Reason.STEP_GAP)


def test_a_skipped_step_is_told_by_the_counter() -> None:
    training = adamw()
    training.step("first", "second")
    training.set_lr(9.0)
    assert training.plans() == dict.fromkeys(BOTH, None)


def test_a_fused_step_that_found_inf_is_told_by_the_counter() -> None:
    training = adamw(fused=True)
    training.step()
    training.commit()
    optimizer: Any = training.optimizer
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    training.step()
    assert training.plans() == dict.fromkeys(BOTH, None)


def test_a_real_and_a_skipped_step_with_equal_values_need_no_telling_apart() -> None:
    training = adamw()
    training.step()
    training.step("first", "second")
    assert training.plans() == dict.fromkeys(BOTH, USED)


@pytest.mark.parametrize("idle_first", [False, True])
def test_a_step_and_one_without_gradients_are_told_apart(idle_first: bool) -> None:
    training = adamw()
    training.step(*(BOTH if idle_first else ()))
    training.set_lr(5e-4)
    training.step(*(() if idle_first else BOTH))
    assert training.plans() == dict.fromkeys(BOTH, replace(USED, lr=5e-4) if idle_first else USED)


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("lr", [1e-3, 5e-4])
def test_a_step_and_an_overflow_are_told_apart_only_by_equal_values(skipped: int, lr: float) -> None:
    training = adamw(fused=True)
    optimizer: Any = training.optimizer
    for call in range(2):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(float(call == skipped))
        training.step()
        training.set_lr(lr)
    assert training.plans() == dict.fromkeys(BOTH, USED if lr == USED.lr else Reason.LOSSY_RECORD)


def test_a_step_that_no_hook_saw_has_no_record() -> None:
    training = adamw()
    training.journal.detach()
    training.step()
    assert training.plans() == dict.fromkeys(BOTH, Reason.NO_STEP_RECORD)


def test_groups_may_change_their_order() -> None:
    training = adamw()
    first, second = training.optimizer.param_groups
    first.update(lr=1e-2, weight_decay=0.0)
    second.update(lr=1e-4, eps=1e-5)
    training.optimizer.param_groups.reverse()
    training.step()
    expected = {
        "first": replace(USED, lr=1e-2, weight_decay=0.0),
        "second": replace(USED, lr=1e-4, eps=1e-5),
    }
    assert training.plans() == expected
    training.optimizer.param_groups.reverse()
    assert training.plans() == expected


def test_a_learning_rate_in_a_tensor_is_copied() -> None:
    training = adamw()
    lr = torch.tensor(0.25)
    training.set_lr(lr)
    training.step()
    lr.fill_(0.5)
    assert training.plans() == dict.fromkeys(BOTH, replace(USED, lr=0.25))


@pytest.mark.parametrize(
    ("make", "accepted"),
    [
        pytest.param(torch.optim.AdamW, True, id="AdamW"),
        pytest.param(lambda g: torch.optim.AdamW(g, maximize=True), True, id="AdamW, maximize"),
        pytest.param(lambda g: torch.optim.AdamW(g, amsgrad=True), False, id="amsgrad"),
        pytest.param(lambda g: torch.optim.Adam(g, weight_decay=0.5), False, id="L2 decay"),
        pytest.param(torch.optim.Adam, True, id="Adam without decay"),
        pytest.param(
            lambda g: torch.optim.Adam(g, weight_decay=0.5, decoupled_weight_decay=True),
            True,
            id="Adam with decoupled decay",
        ),
        pytest.param(torch.optim.NAdam, False, id="NAdam"),
        pytest.param(lambda g: torch.optim.SGD(g, lr=0.1), False, id="SGD"),
        pytest.param(type("Mine", (torch.optim.AdamW,), {}), False, id="subclass"),
    ],
)
def test_only_a_decoupled_adamw_is_inverted(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    accepted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(make)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            training.step()
            plans = training.plans()
            training.commit()
    if accepted:
        assert all(isinstance(plan, AdamWStep) for plan in plans.values())
        assert not caplog.records
    else:
        assert plans == dict.fromkeys(BOTH, Reason.NOT_ADAMW)
        assert len(caplog.records) == 1


def test_an_optimizer_whose_counter_is_unknown_never_means_no_change() -> None:
    training = Training(lambda groups: torch.optim.SGD(groups, lr=0.1))
    assert training.plans() == dict.fromkeys(BOTH, Reason.NOT_ADAMW)


@pytest.fixture(params=["transformer_engine.pytorch.optimizers.fused_adam", "apex.optimizers.fused_adam"])
def fused_adam(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[FusedAdam]:
    monkeypatch.setattr(FusedAdam, "__module__", request.param)
    return FusedAdam


@pytest.mark.parametrize(("adam_w_mode", "bias_correction"), [(1, True), (0, True), (1, False)])
def test_fused_optimizers_are_judged_by_their_flags(
    fused_adam: type[FusedAdam], adam_w_mode: int, bias_correction: bool
) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer: Any = fused_adam(groups, bias_correction=bias_correction)
        optimizer.adam_w_mode = adam_w_mode
        return optimizer  # type: ignore[no-any-return]

    training = Training(make)
    training.step()
    expected = USED if adam_w_mode and bias_correction else Reason.NOT_ADAMW
    assert training.plans() == dict.fromkeys(BOTH, expected)
    training.commit()
    assert training.plans() == dict.fromkeys(BOTH, None)
    training.step()
    training.step()
    assert training.plans() == dict.fromkeys(BOTH, Reason.STEP_GAP)


def test_a_fused_optimizer_without_the_flag_is_an_error_at_once(fused_adam: type[FusedAdam]) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = fused_adam(groups)
        del optimizer.adam_w_mode
        return optimizer

    with pytest.raises(UnsupportedError, match="adam_w_mode"):
        Training(make)
