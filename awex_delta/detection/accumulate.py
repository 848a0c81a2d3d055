"""What changed since a commit, by inverting every step and adding up what it changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from awex_delta.detection.invert import detect_or_doubt, failed
from awex_delta.detection.journal import StepJournal, is_capturing
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.pieces import Runs, nonzero
from awex_delta.detection.slices import Detection, OwnedSlice, OwnedSlices
from awex_delta.lines.bits import add_codes
from awex_delta.lines.changes import Changes, joined
from awex_delta.protocol.verdict import Reason

# Codes at a time: a piece takes one more byte for each.
_PIECE = 1 << 22


class StepFollower:
    """Inverts every step once it is over, and adds what it changed to each of its baselines.

    A step is over when the next one of the same optimizer begins, or when a baseline asks: by then the
    masters have been rounded into the model's weights, and the moments are still those of the step.
    """

    def __init__(self, owned_slices: OwnedSlices, watched: Sequence[SteppedParams]) -> None:
        """Record every later step of the optimizers, and look at each before the next one begins."""
        self._owned_slices = owned_slices
        self._baselines: list[AccumulatedBaseline] = []
        self._journal = StepJournal()
        self._handles: list[RemovableHandle] = []
        for stepped in watched:
            self._journal.watch(stepped)
            hook = partial(self._before_step, frozenset(stepped.live()))
            self._handles.append(stepped.optimizer.register_step_pre_hook(hook))

    def add(self) -> AccumulatedBaseline:
        """One more baseline."""
        baseline = AccumulatedBaseline(self)
        self._baselines.append(baseline)
        return baseline

    def remove(self, baseline: AccumulatedBaseline) -> None:
        """Forget a baseline, and remove the hooks with the last one."""
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
            keys: names the slices to look at; None means all.
            without: a baseline to leave out.

        Returns:
            The slices, as they stand now.
        """
        slices = [owned for owned in self._owned_slices() if keys is None or owned.key in keys]
        following = [one for one in self._baselines if one.follows and one is not without]
        if following:
            detection = detect_or_doubt(slices, self._journal.plan)
            if detection.reason is Reason.NONE:
                detection = self._journal.doubt(slices) or detection
            for baseline in following:
                baseline.add(detection)
        self._journal.commit(None if keys is None else frozenset(keys))
        return slices

    def _before_step(self, keys: Collection[str], *_: Any) -> None:
        if not is_capturing():
            self.look(keys)


class AccumulatedBaseline:
    """Covers any number of steps since its commit. Its code plane takes one byte for each owned element.

    If the changes of one step are not known, that doubt stays until the next commit, and the plane is freed.
    """

    def __init__(self, follower: StepFollower) -> None:
        """Nothing is held before the first `committed`."""
        self._follower = follower
        self._owned = Runs.of([])
        self._plane: torch.Tensor | None = None
        self._doubt: Detection | None = Detection(reason=Reason.FIRST_SYNC)
        self._detached = False

    @property
    def follows(self) -> bool:
        """False while a full sync is due anyway."""
        return self._doubt is None

    @property
    def num_bytes(self) -> int:
        """Memory of the code plane."""
        return 0 if self._plane is None else self._plane.nbytes

    def add(self, detection: Detection) -> None:
        """Add what one step changed. If memory is short, the step stays unknown, and training goes on.

        Args:
            detection: of some or all owned slices.
        """
        if detection.reason is not Reason.NONE:
            self._distrust(detection)
            return
        try:
            self._add(detection.changes)
        except (RuntimeError, MemoryError) as error:
            self._distrust(failed(error))

    def _add(self, changes: Changes) -> None:
        if changes.code is None or not changes.num_changed:
            return
        if self._plane is None:
            self._owned = self._owned.to(changes.pos.device)
            self._plane = torch.zeros(self._owned.numel, dtype=torch.int8, device=changes.pos.device)
        place = self._owned.index_of(changes.pos)
        self._plane[place] = add_codes(self._plane[place], changes.code)

    def detect(self) -> Detection:
        """What all steps since the commit changed together."""
        self._follower.look()
        if self._doubt is not None:
            return self._doubt
        parts = []
        for number, codes in enumerate(() if self._plane is None else torch.split(self._plane, _PIECE)):
            index = nonzero(codes != 0)
            parts.append(Changes(pos=self._owned.in_line(index + number * _PIECE), code=codes[index]))
        return Detection(changes=joined(parts), num_owned=self._owned.numel)

    def committed(self) -> None:
        """Later detections count from the weights as they are now."""
        self._doubt = Detection(reason=Reason.STEP_GAP)  # stays if anything below fails
        slices = self._follower.look(without=self)
        self._owned = Runs.of((owned.begin, owned.stop - owned.start) for owned in slices)
        if self._plane is not None:
            self._owned = self._owned.to(self._plane.device)
            self._plane = self._plane.zero_() if self._plane.numel() == self._owned.numel else None
        self._doubt = Detection(reason=Reason.NO_STEP_RECORD) if self._detached else None

    def weights_replaced(self) -> None:
        """No sum of steps leads back to the last commit any more."""
        if self._doubt is None:
            self._distrust(Detection(reason=Reason.STEP_GAP))

    def detach(self) -> None:
        """Follow no more steps: full from now on."""
        self._detached = True
        self._follower.remove(self)
        self._distrust(Detection(reason=Reason.NO_STEP_RECORD))

    def _distrust(self, detection: Detection) -> None:
        self._doubt = detection
        self._plane = None
