"""A few masters of the last commit, to compare what a step did with what was recorded of it. Rank-local.

Records say what a step should have done, the sample shows what it did. It finds a kernel or wrapper that used
other hyper-parameters than its group says, a step that was counted and skipped, and masters or moments that
were changed where no trace shows it. A whole model that was reloaded is found; one element that was edited
may not be.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_delta.detection import adamw
from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.optimizers import SteppedParams, flat, kept_master, local, moments
from awex_delta.detection.stored import REMAINDER, Moment, Storage, slack, whole
from awex_delta.lines.storages import unreadable
from awex_delta.protocol.verdict import Reason

# At most so many masters of an optimizer, and so many elements of each: other ones after each commit.
_MASTERS, _ELEMENTS = 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Elements of one master from `start` on, fp32 [n], as they were."""

    start: int
    main: torch.Tensor

    @property
    def part(self) -> slice:
        """Where they are."""
        return slice(self.start, self.start + self.main.numel())


class MasterSample:
    """What some masters were at the last commit."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._turn = 0

    def keys(self) -> KeysView[str]:
        """The keys of the masters of which elements are held."""
        return self._held.keys()

    def take(self, optimizer: torch.optim.Optimizer, live: Mapping[str, torch.Tensor]) -> None:
        """Forget what was held of these masters, and copy elements of some of them.

        Args:
            optimizer: steps them.
            live: what it steps, by key. Masters that are not fp32, or whose memory is away, are
                passed over.
        """
        stride = -(-len(live) // _MASTERS) or 1
        for place, (key, stepped) in enumerate(live.items()):
            self._held.pop(key, None)
            param = local(stepped)
            if (place + self._turn) % stride == 0 and param.numel() and _is_readable(optimizer, stepped):
                start = self._turn * _ELEMENTS % param.numel()
                main = _main(optimizer, stepped, slice(start, start + _ELEMENTS))
                self._held[key] = _Held(start=start, main=main.clone())
        self._turn += 1

    def wrong(self, stepped: SteppedParams, steps: Mapping[str, AdamWStep | Reason | None]) -> str | None:
        """Name a master that the recorded steps do not explain; None where they explain all.

        Args:
            stepped: one optimizer, whose moments are as long as the masters, of dtypes that are served.
            steps: by key: the one step since `take`, or None if there was none. Other keys are not looked at.

        Waits for the device once for each distinct step.
        """
        live = stepped.live()
        same: dict[AdamWStep | Reason | None, dict[str, torch.Tensor]] = {}
        for key in live.keys() & self.keys() & steps.keys():
            same.setdefault(steps[key], {})[key] = live[key]
        for step, params in same.items():
            if not isinstance(step, Reason) and bool(self._marks(stepped.optimizer, step, params).any()):
                key = next(k for k, p in params.items() if self._marks(stepped.optimizer, step, {k: p}).any())
                return f"{key}: {_recorded(step)}, but its master shows something else"
        return None

    def _marks(
        self, optimizer: torch.optim.Optimizer, step: AdamWStep | None, params: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Which of the held elements are not explained: bool [n]."""
        held = [self._held[key] for key in params]
        before = torch.cat([one.main for one in held])
        main = torch.cat(
            [_main(optimizer, param, one.part) for one, param in zip(held, params.values(), strict=True)]
        )
        if step is None:
            return before.view(torch.int32) != main.view(torch.int32)
        live = [moments(optimizer, param) for param in params.values()]
        exp_avg = _moment(held, [one.exp_avg for one in live], [one.exp_avg_scale for one in live])
        exp_avg_sq = _moment(held, [one.exp_avg_sq for one in live], [one.exp_avg_sq_scale for one in live])
        storage = Storage(main=main.dtype, exp_avg=exp_avg.dtype, exp_avg_sq=exp_avg_sq.dtype)
        inversion = storage.invert(step)
        return adamw.disproved(
            main,
            exp_avg.values,
            exp_avg_sq.values,
            before,
            inversion.coefficients(before.device),
            slack(exp_avg, exp_avg_sq, inversion) if storage.is_scaled else None,
        )


def _recorded(step: AdamWStep | None) -> str:
    if step is None:
        return "no step was recorded"
    return (
        f"step {step.step} was recorded with lr={step.lr}, weight_decay={step.weight_decay}, "
        f"betas=({step.beta1}, {step.beta2}), eps={step.eps}"
    )


def _moment(
    held: Sequence[_Held], live: Sequence[torch.Tensor | None], scales: Sequence[torch.Tensor | None]
) -> Moment:
    return Moment.of([flat(t)[h.part] for h, t in zip(held, live, strict=True) if t is not None], scales)


def _main(optimizer: torch.optim.Optimizer, param: torch.Tensor, part: slice) -> torch.Tensor:
    """Elements of the master of what is stepped, fp32."""
    master = kept_master(optimizer, param)
    if master is None:
        return flat(local(param))[part].float()
    main = flat(master)[part]
    return whole(flat(local(param))[part], main) if main.dtype is REMAINDER else main


def _is_readable(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> bool:
    master, param = kept_master(optimizer, param), local(param)
    if master is None:
        # A master that its first step is going to make begins as the weight.
        begins = hasattr(optimizer, "master_weights") and bool(optimizer.master_weights)
        served = param.dtype is torch.float32 or (begins and param.dtype is torch.bfloat16)
    else:
        served = master.dtype in (torch.float32, REMAINDER) and master.numel() == param.numel()
    both = (param,) if master is None else (param, master)
    return served and not any(unreadable(one) or not one.is_contiguous() for one in both)
