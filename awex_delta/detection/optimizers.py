"""What is known about each optimizer class: is its step a decoupled AdamW, and where is its state?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from awex_delta.detection.adamw import AdamWStep
from awex_delta.errors import UnsupportedError
from awex_delta.lines.storages import unreadable
from awex_delta.protocol.verdict import Reason

Group = Mapping[str, Any]

_NO_STATE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperParameters:
    """The plain floats that one optimizer step used for one parameter group."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float

    def at(self, step: int) -> AdamWStep:
        """These values as the step with bias-correction step `step`, always the same object."""
        return _step_of(self, step)


@functools.lru_cache(maxsize=256)
def _step_of(used: HyperParameters, step: int) -> AdamWStep:
    return AdamWStep(
        lr=used.lr,
        weight_decay=used.weight_decay,
        beta1=used.beta1,
        beta2=used.beta2,
        eps=used.eps,
        step=step,
    )


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """True when the class keeps the counter and moments of an Adam where `step_counts` looks."""
    return _class_path(optimizer) in _DECOUPLED


def hyper_parameters(optimizer: torch.optim.Optimizer, group: Group) -> HyperParameters | Reason:
    """The hyper-parameters of one group now, as plain floats.

    Args:
        optimizer: the inner `torch.optim.Optimizer`, not Megatron's wrapper.
        group: one of its `param_groups`.

    Returns:
        The values, or `NOT_ADAMW` when the step of this group is not a decoupled AdamW with bias
        correction.

    Raises:
        UnsupportedError: a known class lacks the attribute that tells AdamW from Adam.

    A learning rate held in a device tensor is copied to the host.
    """
    decoupled = _DECOUPLED.get(_class_path(optimizer))
    if decoupled is None or not decoupled(optimizer, group):
        return Reason.NOT_ADAMW
    beta1, beta2 = group["betas"]
    return HyperParameters(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
    )


def step_counts(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[int]:
    """The optimizer's own step counter for each of its parameters; 0 before the first step.

    torch counts per parameter, the fused optimizers of Transformer Engine and Apex per group.

    Args:
        optimizer: the inner optimizer.
        params: tensors of its `param_groups`.

    Returns:
        One count for each parameter, in order; 0 for a tensor that the optimizer does not step, and for all
        of a class that is not known.

    Raises:
        UnsupportedError: the storage of a counter was freed.

    Counters held on a device are copied to the host together.
    """
    raw = [
        local(value) if isinstance(value, torch.Tensor) else value for value in _counters(optimizer, params)
    ]
    away = next((why for v in raw if isinstance(v, torch.Tensor) and (why := unreadable(v))), "")
    if away:
        raise UnsupportedError(f"a step counter of {_class_path(optimizer)}: {away}: bring it back first")
    there = [value for value in raw if _is_on_device(value)]
    host = iter(torch.cat([value.view(1) for value in there]).tolist() if there else ())
    return [int(next(host) if _is_on_device(value) else value) for value in raw]


def _counters(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[Any]:
    """The counters of some parameters as the optimizer keeps them: numbers or live tensors."""
    if not is_known(optimizer):
        return [0] * len(params)
    if _class_path(optimizer) in _COUNTED_BY_GROUP:
        of_group = {p: group.get("step", 0) for group in optimizer.param_groups for p in group["params"]}
        return [of_group.get(param, 0) for param in params]
    return [_state(optimizer, param).get("step", 0) for param in params]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The moments of one parameter, live; None before the first step.

    exp_avg_scale, exp_avg_sq_scale: fp32, one element: what they are multiples of, in fp16 and fp8.
    """

    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    exp_avg_scale: torch.Tensor | None
    exp_avg_sq_scale: torch.Tensor | None


def moments(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Moments:
    """The moments of one parameter, of Transformer Engine's quantised tensors the numbers behind them."""
    state = _state(optimizer, param)
    scales: Mapping[str, torch.Tensor] = _NO_STATE
    if hasattr(optimizer, "_scales"):
        scales = optimizer._scales.get(param, _NO_STATE)  # noqa: SLF001 - there is no public name
    first, first_scale = _numbers(state.get("exp_avg"), scales.get("exp_avg"))
    second, second_scale = _numbers(state.get("exp_avg_sq"), scales.get("exp_avg_sq"))
    return Moments(exp_avg=first, exp_avg_sq=second, exp_avg_scale=first_scale, exp_avg_sq_scale=second_scale)


def _numbers(
    tensor: torch.Tensor | None, scale: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    quantised: Any = tensor
    if hasattr(quantised, "_scale_inv"):  # it says that it is fp32, and would be read as if it were
        is_e4m3 = quantised._fp8_dtype.name == "kFloat8E4M3"  # noqa: SLF001
        dtype = torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2
        return quantised._data.view(dtype), quantised._scale_inv  # noqa: SLF001
    if tensor is None:
        return None, None
    return local(tensor), scale if tensor.dtype is torch.float16 else None


def kept_master(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor | None:
    """The master that an optimizer keeps of a bf16 parameter, live: fp32, or int16 (`stored.whole`).

    None if it keeps none, or before the first step. Only Transformer Engine's keeps any.
    """
    master: torch.Tensor | None = _state(optimizer, param).get("master_param")
    return None if master is None else local(master)


Trace = tuple[int, int]
"""The address of a tensor, and how many times torch has written to it.

Kernels outside of torch, and writes to `.data`, are not counted. So an equal trace proves nothing, but
another one shows that the tensor was moved, replaced or written."""


def trace(tensor: torch.Tensor | None) -> Trace:
    """Read the trace of a tensor; nothing of its contents is looked at."""
    if tensor is None:
        return (0, 0)
    tensor = local(tensor)
    try:
        return (tensor.data_ptr(), tensor._version)  # noqa: SLF001 - there is no public name
    except RuntimeError:  # made in inference mode: writes are not counted at all
        return (tensor.data_ptr(), 0)


def counter_traces(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[Trace]:
    """The traces of the counters that `step_counts` reads, without waiting for a device."""
    return [
        trace(value) if isinstance(value, torch.Tensor) else (0, int(value))
        for value in _counters(optimizer, params)
    ]


def had_gradients(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[bool]:
    """Which parameters the step that is over had a gradient of. Ask before anything frees it."""
    decoupled = hasattr(optimizer, "use_decoupled_grad") and optimizer.use_decoupled_grad
    name = "decoupled_grad" if decoupled else "grad"
    return [hasattr(param, name) and getattr(param, name) is not None for param in params]


def knows_overflow(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step was told of overflows, and so may have moved nothing although there were gradients.

    Args:
        optimizer: inside its step.
        args, kwargs: of that step, as its hooks get them.
    """
    if _class_path(optimizer) in _COUNTED_BY_GROUP:
        return len(args) > 2 or kwargs.get("grad_scaler") is not None
    return hasattr(optimizer, "found_inf") and optimizer.found_inf is not None


def counts_skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the counter stands still for a skipped step, and only then.

    In Transformer Engine and Apex it follows the overflow of the step before.
    """
    return _class_path(optimizer) not in _COUNTED_BY_GROUP


class SteppedParams:
    """The tensors that one optimizer steps, by key of the owned slice.

    Recipes that offload optimizers put other tensors into `param_groups` and move the state along: then what
    stands in the place of a tensor is taken for it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
        """Remember where the tensors stand.

        Args:
            optimizer: the inner `torch.optim.Optimizer`, not Megatron's wrapper.
            params: key of the owned slice -> the tensor that the optimizer steps (the fp32 master).
        """
        self.optimizer = optimizer
        self._params = dict(params)
        place_of = {param: place for place, param in enumerate(self._all())}
        self._places = {key: place_of[param] for key, param in params.items() if param in place_of}
        self._keys = {param: key for key, param in params.items()}

    def __contains__(self, key: str) -> bool:
        """True for the key of a tensor that the optimizer steps."""
        return key in self._params

    def live(self) -> Mapping[str, torch.Tensor]:
        """The tensors as they stand now, by key, in the order in which they were given."""
        there = self._all()
        for key, place in self._places.items():
            if place >= len(there) or there[place] is not self._params[key]:
                self._follow(there)
                break
        return self._params

    def key_of(self, param: torch.Tensor) -> str | None:
        """The key of a tensor that `live` names."""
        return self._keys.get(param)

    def _follow(self, there: Sequence[torch.Tensor]) -> None:
        place_of = {param: place for place, param in enumerate(there)}
        for key, place in self._places.items():
            param = self._params[key]
            if param in place_of:
                self._places[key] = place_of[param]  # groups in another order
            elif place < len(there) and there[place] not in self._keys and there[place].shape == param.shape:
                self._params[key] = there[place]
        self._keys = {param: key for key, param in self._params.items()}

    def _all(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, live and without gradients; any other tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    sharded: Any = tensor
    part: torch.Tensor = sharded._local_tensor  # noqa: SLF001 - `to_local` makes a new tensor at each call
    return part


def flat(tensor: torch.Tensor, part: slice | None = None) -> torch.Tensor:
    """The elements of a contiguous tensor, or a part of them, live, flat and without gradients.

    Raises RuntimeError if the tensor is not contiguous, or the part lies beyond a storage that was freed; see
    `slices.unusable`. A whole tensor is not looked at: ask `OwnedSlice.unreadable` before it is read.
    It is called for every tensor in every update, so it spends no operation on a tensor that is flat already.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    return tensor if part is None else tensor[part]


def part_of(numel: int, start: int, stop: int) -> slice | None:
    """A range of so many elements, for `flat`; None means all of them."""
    return None if (start, stop) == (0, numel) else slice(start, stop)


def _state(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Mapping[str, Any]:
    # `state` is a defaultdict: indexing it would make the optimizer believe that it has started.
    state: Mapping[str, Any] = optimizer.state.get(param, _NO_STATE)
    return state


def _is_on_device(value: torch.Tensor | int) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cpu


def _class_path(optimizer: torch.optim.Optimizer) -> str:
    # By name, so that no optional package is imported; exactly, since a subclass may step otherwise.
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _torch_adamw(_: torch.optim.Optimizer, group: Group) -> bool:
    # Older releases have no such key: their AdamW knows only decoupled decay.
    return bool(group.get("decoupled_weight_decay", True)) and not group["amsgrad"]


def _torch_adam(_: torch.optim.Optimizer, group: Group) -> bool:
    # Without weight decay Adam and AdamW are the same formula.
    decoupled = bool(group.get("decoupled_weight_decay", False)) or float(group["weight_decay"]) == 0.0
    return decoupled and not group["amsgrad"]


def _fused_adam(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    # Both classes refuse amsgrad when they are built.
    if not hasattr(optimizer, "adam_w_mode"):
        raise UnsupportedError(
            f"{_class_path(optimizer)} has no attribute adam_w_mode, so that it cannot be told whether "
            f"its weight decay is decoupled; use a release that has it, or torch.optim.AdamW"
        )
    return bool(optimizer.adam_w_mode) and bool(group["bias_correction"])


# `maximize` is not asked for: it flips the gradient before the moments, and the moments are all we use.
_DECOUPLED: Mapping[str, Callable[[torch.optim.Optimizer, Group], bool]] = {
    "torch.optim.adamw.AdamW": _torch_adamw,
    "torch.optim.adam.Adam": _torch_adam,
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": _fused_adam,
    "apex.optimizers.fused_adam.FusedAdam": _fused_adam,
}
_COUNTED_BY_GROUP = frozenset(
    {
        "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "apex.optimizers.fused_adam.FusedAdam",
    }
)
