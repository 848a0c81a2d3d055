"""A few masters of the last commit, to compare what a step did with what was recorded of it. Rank-local.

Records say what a step should have done, the sample shows what it did. It finds a kernel or wrapper that used
other hyper-parameters than its group says, a step that was counted and skipped, and masters or moments that
were changed where no trace shows it. A whole model that was reloaded is found; one element that was edited
may not be.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from dataclasses import dataclass

import torch

from awex_delta.detection import adamw
from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.optimizers import SteppedParams, flat, local, moments
from awex_delta.lines.storages import unreadable
from awex_delta.protocol.verdict import Reason

# At most so many masters of an optimizer, and so many elements of each: other ones after each commit.
_MASTERS, _ELEMENTS = 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Elements of one master from `start` on, fp32 [n], as they were."""

    start: int
    main: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of another tensor of that parameter."""
        return flat(local(tensor))[self.start : self.start + self.main.numel()]


class MasterSample:
    """What some masters were at the last commit."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._turn = 0

    def keys(self) -> KeysView[str]:
        """The keys of the masters of which elements are held."""
        return self._held.keys()

    def take(self, live: Mapping[str, torch.Tensor]) -> None:
        """Forget what was held of these masters, and copy elements of some of them.

        Args:
            live: the masters of one optimizer by key. Those that are not fp32, or whose memory is away, are
                passed over.
        """
        stride = -(-len(live) // _MASTERS) or 1
        for place, (key, stepped) in enumerate(live.items()):
            self._held.pop(key, None)
            param = local(stepped)
            if (place + self._turn) % stride == 0 and param.numel() and _is_readable(param):
                start = self._turn * _ELEMENTS % param.numel()
                self._held[key] = _Held(start=start, main=flat(param)[start : start + _ELEMENTS].clone())
        self._turn += 1

    def wrong(self, stepped: SteppedParams, steps: Mapping[str, AdamWStep | Reason | None]) -> str | None:
        """Name a master that the recorded steps do not explain; None where they explain all.

        Args:
            stepped: one optimizer, whose moments are fp32 and as long as the masters.
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
        main = torch.cat([one.of(param) for one, param in zip(held, params.values(), strict=True)])
        if step is None:
            return before.view(torch.int32) != main.view(torch.int32)
        both = zip(*(moments(optimizer, param) for param in params.values()), strict=True)
        exp_avg, exp_avg_sq = (
            torch.cat(
                [one.of(tensor) for one, tensor in zip(held, of_all, strict=True) if tensor is not None]
            )
            for of_all in both
        )
        coefficients = adamw.invert(step).coefficients(before.device)
        return adamw.disproved(main, exp_avg, exp_avg_sq, before, coefficients)


def _recorded(step: AdamWStep | None) -> str:
    if step is None:
        return "no step was recorded"
    return (
        f"step {step.step} was recorded with lr={step.lr}, weight_decay={step.weight_decay}, "
        f"betas=({step.beta1}, {step.beta2}), eps={step.eps}"
    )


def _is_readable(param: torch.Tensor) -> bool:
    return not unreadable(param) and param.is_contiguous() and param.dtype is torch.float32
