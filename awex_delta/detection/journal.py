"""The record of what each optimizer step really used, kept from one commit to the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.optimizers import HyperParameters, hyper_parameters, is_known
from awex_delta.detection.slices import OwnedSlice
from awex_delta.protocol.verdict import Reason

_log = logging.getLogger(__name__)


class StepJournal:
    """Hooks optimizers, and says for each owned slice which AdamW step to invert.

    Hyper-parameters are read inside `optimizer.step()`, because a scheduler moves them right after.
    They are kept per parameter, so that groups may be reordered. Whether a step happened is never
    concluded from a call of the hook, which also runs for steps that a parameter sat out (no gradient,
    a skipped update): only the optimizer's own step counter tells.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._key_of: dict[torch.Tensor, str] = {}
        self._refused: set[str] = set()
        self._records: dict[str, HyperParameters | Reason] = {}
        self._committed_step: dict[str, int] = {}
        self._state_replaced = False
        self._warned = False

    def watch(self, optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
        """Record every later step of an optimizer.

        Args:
            optimizer: the inner `torch.optim.Optimizer`, not Megatron's wrapper.
            params: key of the owned slice -> the tensor that the optimizer steps (the fp32 master).

        Raises:
            UnsupportedError: the class is known, but lacks the attribute that tells AdamW from Adam.
        """
        if not is_known(optimizer):
            self._warn_not_adamw(optimizer)
            self._refused.update(params)
            return
        for group in optimizer.param_groups:
            hyper_parameters(optimizer, group)
        self._key_of.update({param: key for key, param in params.items()})
        self._handles += [
            optimizer.register_step_post_hook(self._on_step),
            optimizer.register_load_state_dict_post_hook(self._on_load),
        ]

    def plan(self, owned: OwnedSlice) -> AdamWStep | Reason | None:
        """Which step to invert for one slice.

        Args:
            owned: the slice, with the optimizer's step counter as it stands now.

        Returns:
            The step to invert; None when no step moved the slice since the last commit; or the reason
            why one inversion does not lead back to that commit.
        """
        key = owned.key
        if key in self._refused:
            return Reason.NOT_ADAMW
        committed = self._committed_step.get(key)
        if committed is None:
            return Reason.FIRST_SYNC
        if self._state_replaced:
            return Reason.STEP_GAP
        num_steps = owned.step - committed
        if num_steps == 0:
            return None
        if num_steps != 1:
            return Reason.STEP_GAP
        record = self._records.get(key, Reason.NO_STEP_RECORD)
        return record if isinstance(record, Reason) else record.at(owned.step)

    def commit(self, steps: Mapping[str, int]) -> None:
        """The current weights of these slices are what later plans count from.

        Args:
            steps: by key of every owned slice, or of those whose step was looked at: the optimizer's step
                counter as it stands now.
        """
        self._committed_step.update(steps)
        for key in steps:
            self._records.pop(key, None)
        self._state_replaced = False

    def forget(self) -> None:
        """The weights were replaced by something else than a step: no plan until the next commit."""
        self._state_replaced = True

    def detach(self) -> None:
        """Remove every hook. The journal then answers `NO_STEP_RECORD` for later steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            used = hyper_parameters(optimizer, group)
            if used is Reason.NOT_ADAMW:
                self._warn_not_adamw(optimizer)
            for param in group["params"]:
                key = self._key_of.get(param)
                if key is not None:
                    self._record(key, used)

    def _record(self, key: str, used: HyperParameters | Reason) -> None:
        # Several calls and one counted step: if they used different values, nobody can tell which one
        # moved the parameter. Equal values need no telling.
        earlier = self._records.get(key, used)
        self._records[key] = used if earlier == used else Reason.LOSSY_RECORD

    def _on_load(self, _: torch.optim.Optimizer) -> None:
        # Loaded counters may equal ours and yet belong to other weights.
        self._state_replaced = True

    def _warn_not_adamw(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._warned:
            _log.warning("%s is not a decoupled AdamW: every update is a full sync", type(optimizer).__name__)
        self._warned = True
