"""How Transformer Engine's FusedAdam keeps masters and moments in less than fp32, without a GPU.

Written from `transformer_engine/pytorch/optimizers/fused_adam.py` of release 2.20 (`_apply_scale`,
`get_unscaled_state`, `initialize_state`, `step`) and `multi_tensor_adam.cu` of 2.3, the last release whose
sources of that kernel are on PyPI: the update is taken from the fp32 moments, which are rounded afterwards.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from awex_delta.detection.adamw import AdamWStep
from tests import kernels
from tests.kernels import KernelForm, adamw_kernel_step

E4M3 = torch.float8_e4m3fn
_LARGEST = {torch.float16: 65504.0 / 2.0, E4M3: 448.0}


class Fp8Type(IntEnum):
    """Of Transformer Engine's `DType`, what counts here. As there, it prints as its number."""

    kFloat8E4M3 = 7  # noqa: N815 - the name that is looked for


class Float8Tensor(torch.Tensor):
    """A quantised tensor that says it is fp32. Who computes with it, instead of its numbers, fails here."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _fp8_dtype = Fp8Type.kFloat8E4M3

    @staticmethod
    def make(data: torch.Tensor, scale: torch.Tensor) -> Float8Tensor:
        made: Any = torch.Tensor._make_wrapper_subclass(Float8Tensor, data.shape, dtype=torch.float32)
        made._data, made._scale_inv = data.view(torch.uint8), scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called for a quantised tensor")


def keep(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is kept of an fp32 tensor, and its scale."""
    if dtype not in _LARGEST:
        return value.to(dtype), None
    scale = (value.abs().max() / _LARGEST[dtype]).view(1)
    inverse = scale.reciprocal()
    if dtype is E4M3:  # NaN, if all are zero
        return (value * inverse).clamp(-448.0, 448.0).to(dtype), inverse.reciprocal()
    return (value * torch.where(scale > 0, inverse, 0.0)).to(dtype), scale


def read(kept: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What the next step begins with: fp32."""
    return kept.float() if scale is None else kept.float() * scale


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its remainder, by halves, as the kernel does it."""
    upper = weight.view(torch.int16) - (remainder < 0).to(torch.int16)
    return torch.stack([remainder, upper], dim=-1).view(torch.float32).squeeze(-1)


def split(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `join`: bf16 weight, rounded to nearest with ties away from zero, and int16 remainder."""
    remainder, upper = main.contiguous().view(torch.int16).view(-1, 2).unbind(-1)
    return (upper + (remainder < 0).to(torch.int16)).view(torch.bfloat16), remainder.contiguous()


class FusedAdam(kernels.FusedAdam):
    """With `master_weights` it steps bf16 parameters, and writes those itself.

    A test has to give it the `__module__` of Transformer Engine's.
    """

    def __init__(
        self,
        params: Any,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, use_decoupled_grad=use_decoupled_grad, **options)
        self.master_weight_dtype = master_weight_dtype
        given = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.dtypes = {name: E4M3 if dtype is torch.uint8 else dtype for name, dtype in given.items()}
        self.master_weights, self.store_param_remainders = master_weights, store_param_remainders
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, param: torch.Tensor) -> None:
        for name, dtype in self.dtypes.items():
            self._scales.setdefault(param, {})[name] = torch.ones(1)  # also where it is not used
            zeros = torch.zeros(param.numel()).to(dtype)
            self.state[param][name] = Float8Tensor.make(zeros, torch.ones(1)) if dtype is E4M3 else zeros
        if self.master_weights and param.dtype is torch.bfloat16:
            flat = param.detach().view(-1)
            self.state[param]["master_param"] = (
                torch.zeros_like(flat, dtype=torch.int16)
                if self.store_param_remainders
                else flat.to(self.master_weight_dtype)
            )

    def _step(self, param: torch.Tensor, grad: torch.Tensor, used: AdamWStep) -> None:
        if not self.state[param]:
            self.initialize_state(param)
        state = self.state[param]
        m, v = (self._get(param, name) for name in self.dtypes)
        model, master = param.data.view(-1), state.get("master_param")
        main = model if master is None else master.data.float()
        if master is not None and self.store_param_remainders:
            main = join(model, master)
        adamw_kernel_step(main, grad.float().reshape(-1), m, v, used, KernelForm())
        if master is not None and self.store_param_remainders:
            weight, remainder = split(main)
            model.copy_(weight)
            master.data.copy_(remainder)
        elif master is not None:
            model.copy_(main)
            master.data.copy_(main)
        self._put(param, "exp_avg", m)
        self._put(param, "exp_avg_sq", v)

    def _get(self, param: torch.Tensor, name: str) -> torch.Tensor:
        kept = self.state[param][name]
        if isinstance(kept, Float8Tensor):
            return read(kept._data.view(E4M3), kept._scale_inv)
        return read(kept, self._scales[param][name] if kept.dtype is torch.float16 else None)

    def _put(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        kept, scale = keep(value, self.dtypes[name])
        held = self.state[param][name]
        if isinstance(held, Float8Tensor):
            held._data.copy_(kept.view(torch.uint8))
            held._scale_inv.copy_(scale)  # type: ignore[arg-type]
        else:
            held.data.copy_(kept)
        if scale is not None and not isinstance(held, Float8Tensor):
            self._scales[param][name].copy_(scale)
