"""Inverting one AdamW step with a certified error bound. `docs/en/numerics.md` derives every constant.

A step moved the fp32 master `p'` to `p`, with the moments `m`, `v` as they are stored now:

    p = p' (1 - lr wd) - u,    u = lr / c1 · m / (sqrt(v / c2) + eps),    c = 1 - beta^t

so that, with s = 1 - lr wd,

    p' = p + d,                d = (u + lr wd p) / s

up to the rounding of the kernel that took the step and of the evaluation here, together at most

    r = err_weight |p| + err_update |u / s| + err_floor

whatever order of operations, fused multiply-adds, approximate division or flushing of subnormals the
kernel used. Rounding to bf16 is monotone: where p + (d - r) and p + (d + r) round to the same bf16 value,
that value was the weight before the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from awex_delta.errors import NumericsError
from awex_delta.lines.bits import MAX_STEP, round_to_bf16

_E = 2.0**-24  # unit roundoff of fp32
_OPERATIONS = 2.0**-16  # relative error of u: kernel and evaluation, at most 2^-18, with a margin
_FLUSH = 2.0**-120  # 64 results below the normal range of fp32 (2^-126), each flushed to zero
_NEXT_ORDER = 1.0 + 2.0**-16  # products of errors, and the rounding of r itself

# Below this eps, a flushed exp_avg_sq matters: then only normal ones are inverted.
_SMALL_EPS = 2.0**-40
# Outside these, scalars under- or overflow in some kernels.
_MIN_LR, _MAX_EPS = 2.0**-64, 2.0**60
# The pattern of 2^126: nothing up to here overflows when it is rounded to bf16.
_LARGEST = 0x7E800000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """The plain floats that one AdamW step used for one parameter, taken inside that step.

    `step` is the bias-correction step t (the first step is 1).
    """

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inversion:
    """One AdamW step as the coefficients of its inverse and of the error bound.

    root_scale: 1 / sqrt(c2).
    eps: as in the step.
    update_scale: lr / (c1 s).
    decay_scale: lr wd / s.
    err_weight, err_update, err_floor: coefficients of r.
    min_sq, max_sq: exp_avg_sq outside of this range is not inverted (the element is uncertain).
    err_slack: coefficient of what else the update may be off, for `stored.slack`.
    zeros_stay: whether a weight of zero with no momentum is known to have been that zero before.
    """

    root_scale: float
    eps: float
    update_scale: float
    decay_scale: float
    err_weight: float
    err_update: float
    err_floor: float
    min_sq: float
    max_sq: float
    err_slack: float
    zeros_stay: bool

    def coefficients(self, device: torch.device) -> torch.Tensor:
        """The numbers as a tensor, so that new values need no new compilation.

        Args:
            device: where the parameter lives.

        Returns:
            fp32 [9], in the order of the fields: all up to max_sq.
        """
        values = (
            self.root_scale,
            self.eps,
            self.update_scale,
            self.decay_scale,
            self.err_weight,
            self.err_update,
            self.err_floor,
            self.min_sq,
            self.max_sq,
        )
        return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A parameter, or some elements of it, after the step.

    main, exp_avg, exp_avg_sq: fp32 [n], as the optimizer keeps them.
    weight: bf16 [n], the model's own.
    slack: fp32 [n], what moments with a scale add to r (`stored.slack`); None for others.
    """

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight: torch.Tensor
    slack: torch.Tensor | None = None

    def pick(self, index: torch.Tensor) -> State:
        """The elements at `index` (int64), copied."""
        return State(
            main=self.main.take(index),
            exp_avg=self.exp_avg.take(index),
            exp_avg_sq=self.exp_avg_sq.take(index),
            weight=self.weight.take(index),
            slack=None if self.slack is None else self.slack.take(index),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """A second, exact look at the few elements whose old weight is not certain.

    still_zero: bool [n], certainly unchanged after all.
    master_mismatch: bool scalar; some weight is not its rounded master.
    moments_invalid: bool scalar; some moment is not finite, or some exp_avg_sq is negative.
    """

    still_zero: torch.Tensor
    master_mismatch: torch.Tensor
    moments_invalid: torch.Tensor


def invert(step: AdamWStep, *, moment_error: float = 0.0) -> Inversion:
    """Prepare the inversion of a step.

    Args:
        step: what the optimizer used.
        moment_error: relative error of u from how moments are stored; 0 for fp32, as the kernel used them.

    Raises:
        NumericsError: the step cannot be inverted, or not with any useful bound.
    """
    _check_domain(step)
    decay = step.lr * step.weight_decay
    kept = 1.0 - decay
    c1, c2 = (1.0 - beta**step.step for beta in (step.beta1, step.beta2))
    step_size = step.lr / c1
    small_eps = step.eps < _SMALL_EPS
    root_scale = 1.0 / math.sqrt(c2)

    kernel_error = _OPERATIONS
    kernel_error += _correction_error(step.beta1, step.step) + _correction_error(step.beta2, step.step) / 2
    if not small_eps:
        kernel_error += 2.0**-63 * root_scale / step.eps  # sqrt of a flushed exp_avg_sq
    update_error = kernel_error + moment_error * (1.0 + kernel_error)
    # The kernel's own errors: at the scale of p' (the factor s and the product), and of p (the sum).
    err_old, err_new = _decay_error(decay) + kernel_error * decay, _E
    if step.lr == 0.0:
        err_old, err_new = 0.0, 0.0
    if err_old >= kept / 2:
        raise NumericsError(
            f"lr * weight_decay = {decay} leaves no useful bound for the weight before the step"
        )

    inverse = _NEXT_ORDER / (kept - err_old)
    denominator = max(step.eps, 2.0**-63)
    return Inversion(
        root_scale=root_scale,
        eps=step.eps,
        update_scale=step_size / kept,
        decay_scale=decay / kept,
        err_weight=inverse * (err_old / kept + err_new),
        err_update=inverse * (err_old + update_error * kept),
        err_floor=inverse * _FLUSH * (1.0 + step_size) * (1.0 + 1.0 / denominator),
        # One that was rounded up to the smallest normal number may have been flushed.
        min_sq=(2.0**-126 if moment_error == 0.0 else 2.0**-125) if small_eps else 0.0,
        max_sq=2.0**126 * c2,
        err_slack=inverse * kept * (1.0 + kernel_error),
        zeros_stay=step.step >= 2 and moment_error == 0.0,
    )


def codes(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    weight: torch.Tensor,
    coefficients: torch.Tensor,
    slack: torch.Tensor | None = None,
    *,
    is_split: bool = False,
) -> torch.Tensor:
    """How far the step moved each weight, as far as that is certain.

    The old weight is not certain if the interval of old masters holds a rounding boundary, or if anything is
    irregular: a weight that is zero, not finite or not its rounded master, and moments that are
    invalid or out of range. So `examine` has to see no other elements.

    One expression that compiles to one pass over memory. That pass computes longer than it waits for memory,
    and a compiler for CPUs makes many instructions of a comparison, a cast to bf16 or any work on 16 bits.
    So bit patterns are rounded and compared as 32-bit integers, and a condition that fails sets a sign bit.

    Args:
        main, exp_avg, exp_avg_sq: fp32 [n].
        weight: bf16 [n].
        coefficients, slack: fp32 [9], of `Inversion.coefficients`; fp32 [n], as in `State`.
        is_split: ties were rounded away from zero, as where masters are made of weights (`stored.whole`).

    Returns:
        int8 [n], as `lines.bits.step_code` makes them of the old and the new weight: 0 for a weight that
        certainly did not change, and UNSTATED for one that moved far or whose old value is not certain.
    """
    first, last = old_masters(main, exp_avg, exp_avg_sq, coefficients, slack)
    lowest, square = first.view(torch.int32), exp_avg_sq.view(torch.int32)
    low, high = _rounded(lowest, is_split), _rounded(last.view(torch.int32), is_split)
    now, master = weight.float().view(torch.int32) >> 16, _rounded(main.view(torch.int32), is_split)
    # Patterns of one sign are ordered by magnitude, and those of two signs are more than MAX_STEP apart.
    sign = now >> 31
    step = ((now - low) ^ sign) - sign
    differs = (low ^ high) | (master ^ now)  # low is never -0.0 with a high of 0.0: those differ, too
    min_sq, max_sq = coefficients[7:].view(torch.int32).unbind()
    failed = differs | -differs | (MAX_STEP - step.abs()) | (_LARGEST - (lowest & 0x7FFFFFFF))
    failed = (failed | square | (square - min_sq) | (max_sq - square)) >> 31
    return (step & ~failed | (failed << 7)).to(torch.int8)


def _rounded(bits: torch.Tensor, ties_away: bool) -> torch.Tensor:
    """The bf16 pattern, as int32, to which fp32 patterns round. Means nothing for a NaN."""
    return (bits + 0x8000 if ties_away else bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def disproved(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    before: torch.Tensor,
    coefficients: torch.Tensor,
    slack: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mark the masters that the recorded step cannot have brought from `before` to `main`.

    Args:
        main, exp_avg, exp_avg_sq: fp32 [n], after the step.
        before: fp32 [n], the masters before it.
        coefficients, slack: as in `codes`.

    Returns:
        bool [n]. Elements for which there is no bound are not marked.
    """
    min_sq, max_sq = coefficients[7:].unbind()
    low, high = old_masters(main, exp_avg, exp_avg_sq, coefficients, slack)
    bounded = (exp_avg_sq >= min_sq) & (exp_avg_sq <= max_sq) & (main.abs().view(torch.int32) <= _LARGEST)
    return bounded & ((before < low) | (before > high))


def old_masters(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    coefficients: torch.Tensor,
    slack: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The interval that holds the masters before the step: fp32 [n] twice. Arguments as of `codes`."""
    root_scale, eps, update_scale, decay_scale, err_weight, err_update, err_floor, _, _ = (
        coefficients.unbind()
    )
    update = update_scale * (exp_avg / (exp_avg_sq.sqrt() * root_scale + eps))
    move = update + decay_scale * main
    error = err_weight * main.abs() + err_update * update.abs() + err_floor
    if slack is not None:
        error = error + slack
    return main + (move - error), main + (move + error)


def examine(state: State, *, zeros_stay: bool, is_split: bool = False) -> Examination:
    """Look by bit patterns at elements whose old weight is not certain.

    Args:
        state: those elements.
        zeros_stay, is_split: see `Inversion` and `codes`. Split masters cannot differ from their weights.
    """
    exp_avg, exp_avg_sq = state.exp_avg, state.exp_avg_sq
    still_zero = (state.main.view(torch.int32) & 0x7FFFFFFF | exp_avg.view(torch.int32)) == 0
    valid = torch.isfinite(exp_avg) & torch.isfinite(exp_avg_sq) & (exp_avg_sq >= 0)
    return Examination(
        still_zero=still_zero & zeros_stay,
        master_mismatch=differs_from_master(state.main, state.weight).any() & (not is_split),
        moments_invalid=~valid.all(),
    )


def differs_from_master(main: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mark the weights that are not their rounded masters, bit for bit.

    Any NaN stands for any other: which one a cast makes of a NaN depends on the device.

    Args:
        main: fp32 [n].
        weight: bf16 [n].

    Returns:
        bool [n].
    """
    same = round_to_bf16(main).view(torch.int16) == weight.view(torch.int16)
    return ~(same | (torch.isnan(main) & torch.isnan(weight)))


def _decay_error(decay: float) -> float:
    """Error of s p', relative to p', over all kernels."""
    if decay < _E / 2 * (1.0 - 2.0**-20):
        return decay  # s rounds to 1 and the product is exact, or the decay is applied inside u
    return 1.5 * _E  # half a unit for s, below 1, and one for the product


def _correction_error(beta: float, step: int) -> float:
    """Relative error of 1 / (1 - beta^t) when beta is rounded to fp32 and the power taken in fp32."""
    power = beta**step
    error = _E * (4 * step + 8) * power / (1.0 - power)
    if error >= 0.5:
        raise NumericsError(f"beta = {beta} at step {step} is too close to 1 for a bias correction in fp32")
    return error / (1.0 - error)


def _check_domain(step: AdamWStep) -> None:
    if step.step < 1:
        raise NumericsError(f"the first step is 1, not {step.step}")
    for name in ("lr", "weight_decay", "beta1", "beta2", "eps"):
        value = getattr(step, name)
        if not math.isfinite(value) or value < 0.0:
            raise NumericsError(f"{name} = {value} is not a finite number of at least 0")
    if step.beta1 >= 1.0 or step.beta2 >= 1.0:
        raise NumericsError(f"betas ({step.beta1}, {step.beta2}) have to be below 1")
    if step.lr * step.weight_decay >= 1.0:
        raise NumericsError(f"lr * weight_decay = {step.lr * step.weight_decay} leaves nothing of the weight")
    if 0.0 < step.lr < _MIN_LR or step.eps > _MAX_EPS:
        raise NumericsError(f"lr = {step.lr} with eps = {step.eps} can leave the range of fp32")
