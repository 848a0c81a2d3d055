"""What changed since a commit: by inverting the one step that lies between, by following every step, or
by comparing with a copy.

A baseline belongs to the engines of one pairing, and moves when an update of theirs commits. One trainer may
have several, each at its own pace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.utils.hooks import RemovableHandle

from awex_delta.detection.invert import Plan, detect_changes
from awex_delta.detection.journal import StepJournal
from awex_delta.detection.slices import ChangeSet, Detection, OwnedSlice
from awex_delta.detection.snapshot import SnapshotBaseline
from awex_delta.errors import UnsupportedError
from awex_delta.lines.bits import add_codes
from awex_delta.protocol.verdict import Reason

OwnedSlices = Callable[[], Iterable[OwnedSlice]]
"""The owned slices of a trainer, as they stand now."""

Watched = Mapping[torch.optim.Optimizer, Mapping[str, torch.Tensor]]
"""By inner optimizer: key of the owned slice -> the tensor that it steps (the fp32 master)."""


class Baseline(Protocol):
    """The weights that some engines hold, as far as a trainer rank has to know them. Rank-local."""

    def detect(self) -> Detection:
        """What changed since the last `committed`, or why that is not known."""

    def committed(self) -> None:
        """The engines hold the current weights."""

    def weights_replaced(self) -> None:
        """Masters were changed by something else than a step: full until the next `committed`."""

    def detach(self) -> None:
        """Remove the hooks on the optimizers that exist for this baseline alone."""


class Baselines:
    """The baselines of one trainer rank."""

    def __init__(
        self, owned_slices: OwnedSlices, watched: Watched, *, accumulate: bool, snapshot: bool = False
    ) -> None:
        """Hook nothing yet.

        Args:
            owned_slices: every owned slice with its live optimizer state.
            watched: what steps them; optimizers that are not decoupled AdamW make every update full.
            accumulate: follow every step. Otherwise a baseline covers one step at most.
            snapshot: compare with a copy of the weights; no optimizer is hooked then.
        """
        self._owned_slices = owned_slices
        self._watched = watched
        self._snapshot = snapshot
        self._follower = StepFollower(owned_slices, watched) if accumulate and not snapshot else None
        self._all: WeakSet[Baseline] = WeakSet()

    def add(self) -> Baseline:
        """A baseline that holds nothing before its first `committed`. Collective: no."""
        baseline: Baseline
        if self._snapshot:
            baseline = SnapshotBaseline(self._owned_slices)
        elif self._follower is not None:
            baseline = self._follower.add()
        else:
            baseline = OneStepBaseline(self._owned_slices, self._watched)
        self._all.add(baseline)
        return baseline

    def weights_replaced(self) -> None:
        """Tell all baselines that masters were changed by something else than a step. Collective: no."""
        for baseline in self._all:
            baseline.weights_replaced()


class OneStepBaseline:
    """Covers one step since its commit, without any memory: the step is inverted."""

    def __init__(self, owned_slices: OwnedSlices, watched: Watched) -> None:
        """Record every later step of the optimizers."""
        self._owned_slices = owned_slices
        self._checked = False
        self._doubt: Detection | None = None
        self._journal = StepJournal()
        for optimizer, params in watched.items():
            self._journal.watch(optimizer, params)

    def detect(self) -> Detection:
        """Invert the one step. Collective: no."""
        if self._doubt is not None:
            return self._doubt
        detection = detect_changes(self._owned_slices(), self._journal.plan)
        self._checked = detection.reason is Reason.NONE
        return detection

    def committed(self) -> None:
        """Later detections count from the weights as they are now. Collective: no."""
        slices = tuple(self._owned_slices())
        self._doubt = None
        if not self._checked:
            # The next step writes its masters over weights that were not theirs, and inverting it would
            # lead back to the masters, not to what the engines hold.
            base = _detect(slices, lambda _: None)
            self._doubt = base if base.reason is Reason.MASTER_MISMATCH else None
        self._checked = False
        self._journal.commit(slices)

    def weights_replaced(self) -> None:
        """No step leads back to the last commit any more. Collective: no."""
        self._journal.forget()

    def detach(self) -> None:
        """Remove the hooks. Collective: no."""
        self._journal.detach()


class StepFollower:
    """Inverts every step once it is over, and adds what it changed to each of its baselines.

    A step is over when the next one of the same optimizer begins, or when a baseline asks: by then the
    masters have been rounded into the model's weights, and the moments are still those of the step.
    """

    def __init__(self, owned_slices: OwnedSlices, watched: Watched) -> None:
        """Record every later step of the optimizers, and look at each before the next one begins."""
        self._owned_slices = owned_slices
        self._baselines: list[AccumulatedBaseline] = []
        self._journal = StepJournal()
        self._handles: list[RemovableHandle] = []
        for optimizer, params in watched.items():
            self._journal.watch(optimizer, params)
            hook = partial(self._before_step, frozenset(params))
            self._handles.append(optimizer.register_step_pre_hook(hook))

    def add(self) -> AccumulatedBaseline:
        """One more baseline. Collective: no."""
        baseline = AccumulatedBaseline(self)
        self._baselines.append(baseline)
        return baseline

    def remove(self, baseline: AccumulatedBaseline) -> None:
        """Forget a baseline, and remove the hooks with the last one. Collective: no."""
        self._baselines = [other for other in self._baselines if other is not baseline]
        if not self._baselines:
            self._journal.detach()
            for handle in self._handles:
                handle.remove()

    def look(
        self, keys: Collection[str] | None = None, *, without: AccumulatedBaseline | None = None
    ) -> Sequence[OwnedSlice]:
        """Add the step that is over to the baselines that follow.

        Args:
            keys: of the slices to look at; None means all.
            without: a baseline that need not know.

        Returns:
            The slices, as they stand now.

        Collective: no.
        """
        slices = [owned for owned in self._owned_slices() if keys is None or owned.key in keys]
        following = [one for one in self._baselines if one.follows and one is not without]
        if following:
            detection = _detect(slices, self._journal.plan)
            for baseline in following:
                baseline.add(detection, slices)
        self._journal.commit(slices)
        return slices

    def _before_step(self, keys: Collection[str], *_: Any) -> None:
        self.look(keys)


class AccumulatedBaseline:
    """Covers any number of steps since its commit, for one byte an owned element: its code plane.

    What makes one step's changes unknown stays a doubt until the next commit, and the planes are freed.
    """

    def __init__(self, follower: StepFollower) -> None:
        """Nothing is held before the first `committed`."""
        self._follower = follower
        self._planes: dict[str, torch.Tensor] = {}
        self._doubt: Detection | None = Detection(reason=Reason.FIRST_SYNC)
        self._detached = False

    @property
    def follows(self) -> bool:
        """False while a full sync is due anyway."""
        return self._doubt is None

    def add(self, detection: Detection, slices: Sequence[OwnedSlice]) -> None:
        """Add what one step changed. Where memory is short the step stays unknown, and training goes on.

        Args:
            detection: of these slices.
            slices: as they were looked at.

        Collective: no.
        """
        if detection.reason is not Reason.NONE:
            self._distrust(detection)
            return
        try:
            self._add(detection, slices)
        except (RuntimeError, MemoryError) as error:
            self._distrust(_failed(error))

    def _add(self, detection: Detection, slices: Sequence[OwnedSlice]) -> None:
        of_key = {owned.key: owned for owned in slices}
        for changes in detection.changes:
            owned = of_key[changes.key]
            plane = self._planes.get(changes.key)
            if plane is None:
                plane = torch.zeros(owned.stop - owned.start, dtype=torch.int8, device=changes.code.device)
                self._planes[changes.key] = plane
            place = changes.index - owned.start
            plane[place] = add_codes(plane[place], changes.code)

    def detect(self) -> Detection:
        """What all steps since the commit changed together. Collective: no."""
        slices = self._follower.look()
        if self._doubt is not None:
            return self._doubt
        changes = []
        for owned in slices:
            plane = self._planes.get(owned.key)
            place = plane.nonzero().view(-1) if plane is not None else torch.empty(0)
            if plane is not None and place.numel():
                changes.append(ChangeSet(key=owned.key, index=place + owned.start, code=plane[place]))
        return Detection(changes=tuple(changes), num_owned=sum(owned.stop - owned.start for owned in slices))

    def committed(self) -> None:
        """Later detections count from the weights as they are now. Collective: no."""
        self._doubt = Detection(reason=Reason.STEP_GAP)  # stays if anything below fails
        self._follower.look(without=self)
        for plane in self._planes.values():
            plane.zero_()
        self._doubt = Detection(reason=Reason.NO_STEP_RECORD) if self._detached else None

    def weights_replaced(self) -> None:
        """No sum of steps leads back to the last commit any more. Collective: no."""
        if self._doubt is None:
            self._distrust(Detection(reason=Reason.STEP_GAP))

    def detach(self) -> None:
        """Follow no more steps: full from now on. Collective: no."""
        self._detached = True
        self._follower.remove(self)
        self._distrust(Detection(reason=Reason.NO_STEP_RECORD))

    def _distrust(self, detection: Detection) -> None:
        self._doubt = detection
        self._planes.clear()


def _detect(slices: Sequence[OwnedSlice], plan: Plan) -> Detection:
    """What changed, where nobody waits for an error: training goes on, and the next update is full."""
    try:
        return detect_changes(slices, plan)
    except (UnsupportedError, RuntimeError, MemoryError) as error:
        return _failed(error)


def _failed(error: Exception) -> Detection:
    return Detection(reason=Reason.DETECTION_FAILED, detail=f"{type(error).__name__}: {error}")
