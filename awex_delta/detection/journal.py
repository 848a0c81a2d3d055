"""The record of what each optimizer step really used, kept from one commit to the next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.optimizers import (
    HyperParameters,
    SteppedParams,
    Trace,
    counter_traces,
    counts_skips,
    had_gradients,
    hyper_parameters,
    is_known,
    kept_master,
    knows_overflow,
    moments,
    step_counts,
    trace,
)
from awex_delta.detection.sample import MasterSample
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.protocol.verdict import Reason

_log = logging.getLogger(__name__)

Used = HyperParameters | Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The calls of `step()` since the last commit that had a gradient of one parameter.

    used: what they used, or why that is not known.
    calls: how many.
    skippable: each may have been skipped because of an overflow.
    moments: traces of `exp_avg` and `exp_avg_sq` after the last one.
    """

    used: Used
    calls: int
    skippable: bool
    moments: tuple[Trace, Trace]


_Standing = tuple[Trace, Trace, Trace]
"""The traces of one parameter's step counter, of what is stepped, and of a master kept beside that."""

_COUNTER = "its step counter was changed"


class StepJournal:
    """Hooks optimizers, and says for each owned slice which AdamW step to invert.

    Hyper-parameters are read right before and right after a step, because a scheduler moves them soon after.
    What the hooks saw and what the optimizer's own step counter says have to agree, and nothing else may
    have touched counters, masters, or the moments after the step: otherwise it is not known what the step
    did. A step that a parameter sat out (no gradient, a skipped update) is no step for it.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._watched: list[SteppedParams] = []
        self._refused: set[str] = set()
        self._before: dict[torch.optim.Optimizer, Sequence[Used]] = {}
        self._records: dict[str, _Record] = {}
        self._disturbed: dict[str, Reason] = {}
        self._base: dict[str, int] = {}
        self._standing: dict[str, _Standing] = {}
        self._sample = MasterSample()
        self._not_adamw: set[str] = set()  # classes

    def watch(self, stepped: SteppedParams) -> None:
        """Record every later step of an optimizer.

        Args:
            stepped: what it steps for the owned slices.

        Raises:
            UnsupportedError: the class is known, but lacks the attribute that tells AdamW from Adam.
        """
        optimizer = stepped.optimizer
        if not is_known(optimizer):
            self._warn_not_adamw(optimizer)
            self._refused.update(stepped.live())
            return
        _used_now(optimizer)
        self._watched.append(stepped)
        after = optimizer.register_step_post_hook(partial(self._after_step, stepped))
        # Before the hooks of schedulers and of whoever restores values or frees gradients.
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]  # noqa: SLF001
        self._handles += [
            optimizer.register_step_pre_hook(partial(self._before_step, stepped)),
            after,
            optimizer.register_load_state_dict_post_hook(
                lambda _: self._disturb(stepped.live(), Reason.STEP_GAP)
            ),
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
        base = self._base.get(key)
        if base is None:
            return Reason.FIRST_SYNC
        if key in self._disturbed:
            return self._disturbed[key]
        num_steps, record = owned.step - base, self._records.get(key)
        if record is None:
            return {0: None, 1: Reason.NO_STEP_RECORD}.get(num_steps, Reason.STEP_GAP)
        if num_steps == 0 and record.skippable:
            return None
        if num_steps != 1 or (record.calls > 1 and not record.skippable):
            return Reason.STEP_GAP
        return record.used if isinstance(record.used, Reason) else record.used.at(owned.step)

    def explained(self, detection: Detection) -> Detection:
        """A detection; one that refuses an optimizer says of which class it is, and what to do."""
        if detection.reason is not Reason.NOT_ADAMW:
            return detection
        names = ", ".join(sorted(self._not_adamw))
        remedy = "set weight_update_delta_method: capture, or train with a decoupled AdamW without amsgrad"
        return replace(detection, detail=f"{detection.detail}: the optimizer is {names}. Remedy: {remedy}")

    def doubt(self, slices: Iterable[OwnedSlice]) -> Detection | None:
        """What speaks against the steps that `plan` gave, once the slices have been looked at.

        Args:
            slices: what was looked at, with a plan that is no reason: all of each optimizer.

        Returns:
            None where nothing does.
        """
        sampled = self._sample.keys()
        steps = {key: self.plan(owned) for owned in slices if (key := owned.key) in sampled}
        for stepped in self._watched:
            for key, what in self._touched(stepped, after_step=True):
                return Detection(reason=Reason.STATE_REPLACED, detail=f"{key}: {what}")
            wrong = self._sample.wrong(stepped, steps)
            if wrong is not None:
                return Detection(reason=Reason.STEP_DISPROVED, detail=wrong)
        return None

    def commit(self, keys: Collection[str] | None = None) -> None:
        """The current weights are what later plans count from.

        Args:
            keys: of the slices that this is true of; None means all.
        """
        for stepped in self._watched:
            live = {key: p for key, p in stepped.live().items() if keys is None or key in keys}
            self._base.update(_counts(stepped, live))
            self._standing.update(_standings(stepped, live))
            self._sample.take(stepped.optimizer, live)
            for key in live:
                self._records.pop(key, None)
                self._disturbed.pop(key, None)

    def forget(self) -> None:
        """The weights were replaced by something else than a step: no plan until the next commit."""
        self._disturb(self._base, Reason.STEP_GAP)

    def detach(self) -> None:
        """Remove every hook. The journal then answers `NO_STEP_RECORD` for later steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, stepped: SteppedParams, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_capturing():
            return
        for key, what in self._touched(stepped, after_step=False):
            self._disturb([key], Reason.STEP_GAP if what is _COUNTER else Reason.STATE_REPLACED)
        self._before[optimizer] = _used_now(optimizer)

    def _after_step(
        self, stepped: SteppedParams, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        before = self._before.pop(optimizer, ())
        if len(before) != len(optimizer.param_groups):
            return  # its beginning was not seen: the counter will show the step
        may_skip, counted = knows_overflow(optimizer, args, kwargs), counts_skips(optimizer)
        for group, earlier, later in zip(optimizer.param_groups, before, _used_now(optimizer), strict=True):
            if later is Reason.NOT_ADAMW:
                self._warn_not_adamw(optimizer)
            used = Reason.LOSSY_RECORD if later != earlier or (may_skip and not counted) else later
            params = group["params"]
            for param, had_gradient in zip(params, had_gradients(optimizer, params), strict=True):
                key = stepped.key_of(param)
                if key is None:
                    continue
                if had_gradient:
                    self._record(key, used, may_skip and counted, _moment_traces(stepped, param))
                elif not counted:
                    self._sat_out(key)
        self._standing.update(_standings(stepped, stepped.live()))

    def _record(self, key: str, used: Used, skippable: bool, left: tuple[Trace, Trace]) -> None:
        # Several calls and one counted step: if they used different values, nobody can tell which one
        # moved the parameter. Equal values need no telling.
        earlier = self._records.get(key)
        if earlier is not None and earlier.used != used:
            used = Reason.LOSSY_RECORD
        self._records[key] = _Record(
            used=used,
            calls=1 if earlier is None else earlier.calls + 1,
            skippable=skippable and (earlier is None or earlier.skippable),
            moments=left,
        )

    def _sat_out(self, key: str) -> None:
        """Its group counted a step, but the parameter had no gradient."""
        if key in self._records:
            self._disturb([key], Reason.STEP_GAP)
        elif key in self._base:
            self._base[key] += 1

    def _touched(self, stepped: SteppedParams, *, after_step: bool) -> Iterator[tuple[str, str]]:
        """By key, what something else than a recorded step did since all was last known to be in order."""
        live = stepped.live()
        moved: set[str] = set()
        counts: dict[str, int] = {}
        for key, now in _standings(stepped, live):
            record, last = self._records.get(key), self._standing.get(key, now)
            left = _moment_traces(stepped, live[key]) if after_step and record is not None else None
            if now == last and (left is None or record is None or left == record.moments):
                continue
            if now[0] != last[0] and key in self._base:
                # Another tensor with the same number counts on as before.
                counts = counts or _counts(stepped, live)
                if not self._expects(key, counts[key]):
                    yield key, _COUNTER
                    continue
            pairs = list(zip(now[1:], last[1:], strict=True))
            if left is not None and record is not None:
                pairs += zip(left, record.moments, strict=True)
            if any(one[0] != other[0] for one, other in pairs):
                moved.add(key)
            elif any(one != other for one, other in pairs):
                yield key, "its master or moments were written, but not by a recorded step"
        # What lies elsewhere may be the same, as after an offload: the sample tells, if it has some of it.
        if moved and not self._sample.keys() & moved:
            yield min(moved), "its master or moments were moved or replaced"

    def _expects(self, key: str, count: int) -> bool:
        """Whether a counter shows the steps that hooks saw since the last commit."""
        record, num_steps = self._records.get(key), count - self._base[key]
        if record is None:
            return num_steps == 0
        return num_steps == record.calls or (record.skippable and 0 <= num_steps < record.calls)

    def _disturb(self, keys: Iterable[str], reason: Reason) -> None:
        self._disturbed.update(dict.fromkeys(keys, reason))

    def _warn_not_adamw(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._not_adamw:
            _log.warning("%s is not a decoupled AdamW: every update is a full sync", type(optimizer).__name__)
        self._not_adamw.add(type(optimizer).__name__)


def _used_now(optimizer: torch.optim.Optimizer) -> Sequence[Used]:
    return [hyper_parameters(optimizer, group) for group in optimizer.param_groups]


def _standings(stepped: SteppedParams, live: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, _Standing]]:
    counters = counter_traces(stepped.optimizer, list(live.values()))
    for (key, param), counter in zip(live.items(), counters, strict=True):
        yield key, (counter, trace(param), trace(kept_master(stepped.optimizer, param)))


def _counts(stepped: SteppedParams, live: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(live, step_counts(stepped.optimizer, list(live.values())), strict=True))


def _moment_traces(stepped: SteppedParams, param: torch.Tensor) -> tuple[Trace, Trace]:
    live = moments(stepped.optimizer, param)
    return trace(live.exp_avg), trace(live.exp_avg_sq)


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded: nothing is computed then, and nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
