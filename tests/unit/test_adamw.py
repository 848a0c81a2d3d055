"""The bound of the inverse, and its answers at zero, at infinity and at the edges of its domain."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import pytest
import torch

from awex_delta.detection.adamw import AdamWStep, Examination, State, codes, examine, invert
from awex_delta.errors import NumericsError
from awex_delta.lines.bits import UNSTATED, step_code
from tests.kernels import KernelForm, adamw_kernel_step, fused_multiply_add

STEP = AdamWStep(lr=1e-5, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8, step=3)
DECAYS: tuple[Literal["in update", "subtracted", "multiplied"], ...] = (
    "in update",
    "subtracted",
    "multiplied",
)
FORMS = [
    KernelForm(decay=decay, fma=fma, fast_math=fast_math, fp32_power=fp32_power)
    for decay in DECAYS
    for fma, fast_math, fp32_power in itertools.product((True, False), repeat=3)
]


def fp32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


CPU = torch.device("cpu")


def stated(state: State, step: AdamWStep, *, moment_error: float = 0.0) -> torch.Tensor:
    """Codes after the first look."""
    coefficients = invert(step, moment_error=moment_error).coefficients(CPU)
    return codes(state.main, state.exp_avg, state.exp_avg_sq, state.weight, coefficients)


def look(state: State, step: AdamWStep) -> Examination:
    return examine(state, zeros_stay=invert(step).zeros_stay)


def both_looks(state: State, step: AdamWStep) -> list[int]:
    """What detection makes of both looks."""
    code = stated(state, step)
    return code.masked_fill((code == UNSTATED) & look(state, step).still_zero, 0).tolist()


def state(
    main: torch.Tensor, exp_avg: float | torch.Tensor = 0.0, exp_avg_sq: float | torch.Tensor = 0.0
) -> State:
    """A state whose weight is the rounded master."""
    return State(
        main=main,
        exp_avg=torch.as_tensor(exp_avg).expand_as(main).contiguous(),
        exp_avg_sq=torch.as_tensor(exp_avg_sq).expand_as(main).contiguous(),
        weight=main.to(torch.bfloat16),
    )


def taken(old: torch.Tensor, grad: torch.Tensor, step: AdamWStep, form: KernelForm) -> State:
    """The state after `step.step` kernel steps from zero moments with scaled copies of one gradient.

    `old` is what the last of them starts from.
    """
    exp_avg, exp_avg_sq = torch.zeros_like(old), torch.zeros_like(old)
    for number in range(1, step.step + 1):
        main = old.clone()
        adamw_kernel_step(main, grad / number, exp_avg, exp_avg_sq, replace(step, step=number), form)
    return state(main, exp_avg, exp_avg_sq)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    "step",
    [
        STEP,
        replace(STEP, step=1, beta2=0.9999),
        replace(STEP, lr=1e-7, weight_decay=0.0),
        replace(STEP, lr=1e-7, weight_decay=0.1),  # lr * weight_decay vanishes beside 1
        replace(STEP, lr=1e-6, weight_decay=0.04),  # and here it is half of what can be told from 1
        replace(STEP, lr=0.5, weight_decay=0.5),
        replace(STEP, lr=3e-4, eps=1e-15),
        replace(STEP, lr=0.0),
    ],
    ids=str,
)
def test_the_old_master_lies_within_the_bound(form: KernelForm, step: AdamWStep) -> None:
    old = torch.cat([torch.randn(1 << 13) * 0.02, torch.randn(1 << 12) * 1e-6, torch.randn(1 << 12) * 10])
    after = taken(old, torch.randn_like(old) * torch.randn_like(old).exp() * 1e-3, step, form)
    inversion = invert(step)
    main, exp_avg, exp_avg_sq = after.main.double(), after.exp_avg.double(), after.exp_avg_sq.double()
    update = inversion.update_scale * exp_avg / (exp_avg_sq.sqrt() * inversion.root_scale + inversion.eps)
    distance = (old.double() - main - update - inversion.decay_scale * main).abs()
    bound = inversion.err_weight * main.abs() + inversion.err_update * update.abs() + inversion.err_floor
    assert float((distance / bound).max()) <= 1.0


def test_the_bound_is_not_idle() -> None:
    # A bound that is never nearly reached is paid for at every step.
    old = torch.randn(1 << 16) * 0.02
    worst = 0.0
    for form in FORMS:
        after = taken(old, torch.randn_like(old), replace(STEP, lr=1e-6), form)
        inversion = invert(replace(STEP, lr=1e-6))
        update = inversion.update_scale * after.exp_avg.double()
        update = update / (after.exp_avg_sq.double().sqrt() * inversion.root_scale + inversion.eps)
        move = update + inversion.decay_scale * after.main.double()
        bound = inversion.err_weight * after.main.abs() + inversion.err_update * update.abs()
        worst = max(worst, float(((old.double() - after.main - move).abs() / bound).max()))
    assert 0.3 < worst <= 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0}, "first step is 1"),
        ({"step": -3}, "first step is 1"),
        ({"lr": math.nan}, "lr"),
        ({"lr": -1e-6}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"lr": 1e-30}, "range of fp32"),
        ({"weight_decay": math.inf}, "weight_decay"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"eps": -1e-8}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"eps": 1e30}, "range of fp32"),
        ({"beta1": 1.0}, "betas"),
        ({"beta2": 1.0}, "betas"),
        ({"beta2": -0.1}, "beta2"),
        ({"beta1": math.nan}, "beta1"),
        ({"beta2": 1.0 - 1e-9}, "too close to 1"),
        ({"lr": 1.0, "weight_decay": 1.0}, "leaves nothing"),
        ({"lr": 2.0, "weight_decay": 1.0}, "leaves nothing"),
        ({"lr": 1.0, "weight_decay": 1.0 - 1e-6}, "no useful bound"),
    ],
)
def test_what_cannot_be_inverted_is_refused(changes: dict[str, float], message: str) -> None:
    values = {name: getattr(STEP, name) for name in STEP.__slots__} | changes
    with pytest.raises(NumericsError, match=message):
        invert(AdamWStep(**values))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lr_zero_changes_nothing(decay: float) -> None:
    weights = torch.randn(1 << 14) * 0.02
    midpoints = (weights.view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    after = state(torch.cat([weights, midpoints]), 1e-3, 1e-6)
    assert not stated(after, replace(STEP, lr=0.0, weight_decay=decay)).any()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_zero_weights_against_every_kernel(form: KernelForm) -> None:
    # Both zeros, with every kind of gradient and a history of none, twice with the same kernel.
    olds, grads = zip(*itertools.product((0.0, -0.0), (0.0, -0.0, 1e-3, -1e-3)), strict=True)
    main, grad = fp32(*olds), fp32(*grads)
    exp_avg, exp_avg_sq = torch.zeros_like(main), torch.zeros_like(main)
    for number in (1, 2, 3):
        old = main.to(torch.bfloat16)
        step = replace(STEP, step=number)
        adamw_kernel_step(main, grad, exp_avg, exp_avg_sq, step, form)
        after = state(main.clone(), exp_avg.clone(), exp_avg_sq.clone())
        sent = [code != 0 for code in both_looks(after, step)]
        changed = (old.view(torch.int16) != after.weight.view(torch.int16)).tolist()
        assert all(sent[i] for i in range(len(sent)) if changed[i])
        assert bool((stated(after, step)[after.weight == 0] == UNSTATED).all())
        assert sent[0] == (number == 1)  # +0 without a gradient is sent once


def test_a_zero_with_negative_zero_momentum_is_sent() -> None:
    # Such momentum turns -0 into +0 where decay is applied inside the update.
    assert both_looks(state(fp32(0.0, 0.0), fp32(0.0, -0.0)), STEP) == [0, UNSTATED]


def test_flushing_is_covered_at_the_first_step() -> None:
    old = fp32(2.0**-127, -(2.0**-127), 2.0**-130)
    form = KernelForm(fast_math=True)
    step = replace(STEP, step=1)
    after = taken(old, torch.zeros_like(old), step, form)
    assert after.main.tolist() == [0.0, 0.0, 0.0]
    assert both_looks(after, step) == [UNSTATED] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])  # the last rounds to infinity
@pytest.mark.parametrize("lr", [1e-5, 0.0])
def test_weights_that_are_not_finite_are_always_sent(value: float, lr: float) -> None:
    for decay in (0.0, 0.1):
        step = replace(STEP, lr=lr, weight_decay=decay)
        after = state(fp32(value), 1e-3, 1e-6)
        assert both_looks(after, step) == [UNSTATED]
        assert not look(after, step).master_mismatch
        assert not look(after, step).moments_invalid


@pytest.mark.parametrize(
    ("exp_avg", "exp_avg_sq"),
    [
        (math.nan, 1e-6),
        (math.inf, 1e-6),
        (-math.inf, 1e-6),
        (1e-3, math.nan),
        (1e-3, math.inf),
        (1e-3, -1e-6),
        (math.inf, math.inf),
        (0.0, -1e-30),
    ],
)
@pytest.mark.parametrize("lr", [1e-5, 0.0])
def test_invalid_moments_are_never_overlooked(exp_avg: float, exp_avg_sq: float, lr: float) -> None:
    step = replace(STEP, lr=lr)
    after = state(fp32(0.5), exp_avg, exp_avg_sq)
    assert both_looks(after, step) == [UNSTATED]
    assert look(after, step).moments_invalid


def test_moments_that_overflow_in_some_kernel_are_uncertain() -> None:
    after = state(fp32(0.5), 1.0, 3e38)  # exp_avg_sq / c2 is infinite, and the update zero
    assert both_looks(after, STEP) == [UNSTATED]


def test_eps_zero_inverts_what_has_a_gradient_and_nothing_else() -> None:
    step = replace(STEP, eps=0.0)
    after = state(fp32(0.5, 0.5, 0.5), fp32(0.0, 1e-3, 1e-25), fp32(0.0, 1e-6, 2.0**-130))
    assert both_looks(after, step) == [UNSTATED, 0, UNSTATED]


@pytest.mark.parametrize("lr", [1e-5, 0.0])
def test_a_weight_that_is_not_its_rounded_master_is_found(lr: float) -> None:
    main = torch.randn(1000) * 0.02
    replaced = main.to(torch.bfloat16).view(torch.int16)
    replaced[500] += 1
    after = replace(state(main, 1e-3, 1e-6), weight=replaced.view(torch.bfloat16))
    step = replace(STEP, lr=lr)
    assert both_looks(after, step)[500] == UNSTATED
    assert look(after, step).master_mismatch
    assert not look(state(main, 1e-3, 1e-6), step).master_mismatch


def test_weights_that_lag_one_step_behind_their_masters_are_found() -> None:
    # They are exactly what the inversion gives, so the interval of the old weights alone would hide them.
    old = torch.randn(1000) * 0.02
    after = taken(old, torch.randn_like(old), replace(STEP, lr=0.01), KernelForm())
    lagging = replace(after, weight=old.to(torch.bfloat16))
    moved = after.weight != lagging.weight
    assert int(moved.sum()) > 900
    assert bool((stated(lagging, replace(STEP, lr=0.01))[moved] == UNSTATED).all())


def test_the_sign_of_zero_counts_and_the_payload_of_nan_does_not() -> None:
    signs = replace(state(fp32(0.0)), weight=torch.tensor([-0.0], dtype=torch.bfloat16))
    assert look(signs, STEP).master_mismatch
    assert not look(replace(signs, main=fp32(-0.0)), STEP).master_mismatch
    payload = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert not look(replace(state(fp32(math.nan)), weight=payload), STEP).master_mismatch


def test_bf16_moments_need_the_wider_bound_and_it_suffices() -> None:
    step = replace(STEP, lr=1e-4)
    old = torch.randn(1 << 18) * 0.02
    after = taken(old, torch.randn_like(old), step, KernelForm())
    stored = replace(
        after, exp_avg=after.exp_avg.bfloat16().float(), exp_avg_sq=after.exp_avg_sq.bfloat16().float()
    )
    changed = old.to(torch.bfloat16) != after.weight

    def missed(moment_error: float) -> int:
        return int((changed & (stated(stored, step, moment_error=moment_error) == 0)).sum())

    assert missed(0.0) > 0
    assert missed(2.0**-7) == 0


def test_stated_codes_lead_back_to_the_old_weight() -> None:
    old = torch.cat([torch.randn(1 << 13) * 0.02, torch.randn(1 << 13) * 1e-4])
    for lr in (1e-5, 1e-3):
        step = replace(STEP, lr=lr)
        after = taken(old, torch.randn_like(old), step, KernelForm(fma=True))
        code = stated(after, step)
        exact = step_code(old.to(torch.bfloat16), after.weight)
        assert bool((code == exact)[code != UNSTATED].all())
        withheld = (code == UNSTATED) & (exact != UNSTATED)
        assert int(withheld.sum()) < 0.01 * old.numel()


def test_fused_multiply_add_rounds_once() -> None:
    numbers = torch.cat([torch.randn(500), torch.randn(500) * 2.0**-12, torch.tensor([1.0, 0.0, -0.0])])
    a, b, c = (numbers[torch.randperm(numbers.numel())] for _ in range(3))
    # A product that is a midpoint, and an addend too small for fp64 to keep: the double rounding.
    a = torch.cat([a, fp32(1 + 2.0**-12)])
    b = torch.cat([b, fp32(1 + 2.0**-12)])
    c = torch.cat([c, fp32(2.0**-60)])
    for x, y, z, fused in zip(*(t.tolist() for t in (a, b, c, fused_multiply_add(a, b, c))), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        neighbours = torch.nextafter(fp32(fused, fused), fp32(-math.inf, math.inf)).tolist()
        assert all(abs(exact - Fraction(fused)) <= abs(exact - Fraction(other)) for other in neighbours)
    assert (a[-1:].double() * b[-1:] + c[-1:]).float().item() == 1 + 2.0**-11  # what rounding twice gives
    assert fused_multiply_add(a[-1:], b[-1:], c[-1:]).item() == 1 + 2.0**-11 + 2.0**-23
