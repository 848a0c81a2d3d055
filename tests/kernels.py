"""AdamW steps as fused kernels take them: oracles whose rounding is not torch's.

Transformer Engine, Apex, DeepSpeed and torch's CUDA kernels apply the same formula in other orders of
operations than `torch.optim.AdamW` on a CPU, with scalars and betas in fp32. Tests of detection judge
against all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from awex_delta.detection.adamw import AdamWStep

_NORMAL_MIN = 2.0**-126


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """How a kernel computes one AdamW step.

    decay: "in update" for `p -= lr * (mhat / (sqrt(vhat) + eps) + wd * p)` (Transformer Engine, Apex);
        before the update `lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)`, "subtracted" for `p -= lr * wd * p`
        (torch's CUDA kernel) and "multiplied" for `p *= 1 - lr * wd` (torch otherwise).
    fma: multiply-adds are fused, with one rounding.
    fast_math: square roots and quotients are wrong by up to two units in the last place (drawn from
        `seed`), and subnormal operands and results of every operation are flushed to zero.
    fp32_power: bias corrections come from an fp32 power, as where the step counter lives on the device.
    """

    decay: Literal["in update", "subtracted", "multiplied"] = "in update"
    fma: bool = False
    fast_math: bool = False
    fp32_power: bool = False
    seed: int = 0


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` with a single rounding to fp32, exactly as hardware does it.

    In fp64 the product of two fp32 numbers is exact, but the sum is rounded to 53 bits, and rounding it
    again to 24 could break a tie wrongly. So the sum is rounded *to odd* first: where it was inexact,
    the neighbour whose last bit is 1 is taken, which no tie of the second rounding can be.

    Args:
        a, b, c: fp32, finite, broadcastable.

    Returns:
        fp32.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # The exact error of the sum (Knuth's two-sum).
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    away_from_zero = torch.where((error > 0) == (total > 0), 1, -1)
    is_odd = (bits & 1) == 1
    bits = torch.where((error == 0) | is_odd, bits, bits + away_from_zero)
    return bits.view(torch.float64).float()


class _Arithmetic:
    """fp32 arithmetic of one kernel form."""

    def __init__(self, form: KernelForm) -> None:
        self._form = form
        self._generator = torch.Generator().manual_seed(form.seed)

    def flushed(self, value: torch.Tensor) -> torch.Tensor:
        if not self._form.fast_math:
            return value
        return torch.where(value.abs() < _NORMAL_MIN, value * 0.0, value)

    def _approximate(self, value: torch.Tensor) -> torch.Tensor:
        if self._form.fast_math:
            units = torch.randint(-2, 3, value.shape, generator=self._generator, dtype=torch.int32)
            near = (value.view(torch.int32) + units).view(torch.float32)
            value = torch.where((value != 0) & value.isfinite(), near, value)
        return self.flushed(value)

    def sqrt(self, value: torch.Tensor) -> torch.Tensor:
        return self._approximate(value.sqrt())

    def divide(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._approximate(a / b)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.flushed(a * b)

    def multiply_add(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if self._form.fma:
            return self.flushed(fused_multiply_add(a, b, c))
        return self.flushed(self.multiply(a, b) + c)


def adamw_kernel_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: AdamWStep,
    form: KernelForm,
) -> None:
    """Take one AdamW step in place, as a kernel of this form would.

    Args:
        param, exp_avg, exp_avg_sq: fp32 [n] on a CPU, written.
        grad: fp32 [n].
        step: hyper-parameters, with the number of this step.
        form: order of operations and rounding.
    """
    math = _Arithmetic(form)
    lr, decay, eps, beta1, beta2 = (
        torch.tensor(value, dtype=torch.float32)
        for value in (step.lr, step.weight_decay, step.eps, step.beta1, step.beta2)
    )
    c1, c2 = (_bias_correction(beta, step.step, form) for beta in (beta1, beta2))
    p, g, m, v = (math.flushed(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq))
    m = math.multiply_add(beta1, m, math.multiply(1 - beta1, g))
    v = math.multiply_add(beta2, v, math.multiply(math.multiply(1 - beta2, g), g))
    if form.decay == "in update":
        denominator = math.sqrt(math.divide(v, c2)) + eps
        update = math.multiply_add(decay, p, math.divide(math.divide(m, c1), denominator))
        p = math.multiply_add(-lr, update, p)
    else:
        if form.decay == "multiplied":
            p = math.multiply(p, torch.tensor(1 - step.lr * step.weight_decay, dtype=torch.float32))
        elif step.weight_decay != 0.0:
            p = math.multiply_add(-math.multiply(lr, decay), p, p)
        denominator = math.divide(math.sqrt(v), c2.sqrt()) + eps
        update = math.divide(math.multiply(math.divide(lr, c1), m), denominator)
        p = math.flushed(p - update)
    param.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _bias_correction(beta: torch.Tensor, step: int, form: KernelForm) -> torch.Tensor:
    if form.fp32_power:
        return 1 - beta ** torch.tensor(step, dtype=torch.float32)
    return torch.tensor(1 - float(beta) ** step, dtype=torch.float32)


class FusedAdam(torch.optim.Optimizer):
    """The fused optimizers of Transformer Engine and Apex without a GPU: their counters and gradients.

    A test has to give it the `__module__` of one of them. As they do, it counts by group, also for parameters
    without a gradient, and writes behind torch's back. With `capturable`, the counter follows the overflow of
    the step before.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.8, 0.9),
        eps: float = 1e-6,
        weight_decay: float = 0.1,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.use_decoupled_grad = use_decoupled_grad
        self._overflow = torch.zeros(1, dtype=torch.int)

    def step(self, _: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved: Any = (self._overflow != 1).int() if self.capturable else 1
            group["step"] = group["step"] + moved if "step" in group else moved
        if self.capturable:
            self._overflow.fill_(0 if grad_scaler is None else int(grad_scaler.found_inf))
        if self._overflow.item():
            return
        for group in self.param_groups:
            used = AdamWStep(
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                step=int(group["step"]),
            )
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad" if self.use_decoupled_grad else "grad", None)
                if grad is not None:
                    self._step(param, grad, used)

    def _step(self, param: torch.Tensor, grad: torch.Tensor, used: AdamWStep) -> None:
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(param.detach()))
        tensors = [t.data.view(-1) for t in (param, state["exp_avg"], state["exp_avg_sq"])]
        main, exp_avg, exp_avg_sq = tensors
        adamw_kernel_step(main, grad.float().view(-1), exp_avg, exp_avg_sq, used, KernelForm())
