"""What changed since a commit, by finding what each step changed and adding it up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from awex_delta.detection.invert import base_doubt, detect_or_doubt, failed
from awex_delta.detection.journal import StepJournal, is_capturing
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.pieces import Runs, ascending, nonzero, take
from awex_delta.detection.slices import Detection, OwnedSlice, OwnedSlices
from awex_delta.lines.bits import add_codes
from awex_delta.lines.changes import Changes, joined
from awex_delta.protocol.verdict import Reason

# Codes at a time: a piece takes one more byte for each.
_PIECE = 1 << 22
_BYTES_A_CHANGE = 9  # a position and a code


class Follower(ABC):
    """Finds what each step changes, and tells its baselines."""

    def __init__(self) -> None:
        self._baselines: list[AccumulatedBaseline] = []
        self._handles: list[RemovableHandle] = []

    def add(self) -> AccumulatedBaseline:
        """One more baseline."""
        baseline = AccumulatedBaseline(self)
        self._baselines.append(baseline)
        return baseline

    def remove(self, baseline: AccumulatedBaseline) -> None:
        """Forget a baseline, and remove the hooks with the last one."""
        self._baselines = [other for other in self._baselines if other is not baseline]
        if not self._baselines:
            self._unhook()

    @abstractmethod
    def look(self, *, without: AccumulatedBaseline | None = None) -> Sequence[OwnedSlice]:
        """Tell all baselines what is not told yet.

        Args:
            without: a baseline that commits now. It learns only why no later step would lead back to it.

        Returns:
            All slices, as they stand now.
        """

    def _is_followed(self) -> bool:
        """False while a full sync is due for all baselines. One that commits just now does not follow."""
        return any(baseline.follows for baseline in self._baselines)

    def _tell(self, detection: Detection) -> None:
        for baseline in self._baselines:
            baseline.hear(detection)
            if baseline.follows:
                baseline.add(detection)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()


class StepFollower(Follower):
    """Inverts every step once it is over.

    A step is over when the next one of the same optimizer begins, or when a baseline asks: by then the
    masters have been rounded into the model's weights, and the moments are still those of the step.
    """

    def __init__(self, owned_slices: OwnedSlices, watched: Sequence[SteppedParams]) -> None:
        """Record every later step of the optimizers, and look at each before the next one begins."""
        super().__init__()
        self._owned_slices = owned_slices
        self._journal = StepJournal()
        for stepped in watched:
            self._journal.watch(stepped)
            hook = partial(self._before_step, frozenset(stepped.live()))
            self._handles.append(stepped.optimizer.register_step_pre_hook(hook))

    def look(self, *, without: AccumulatedBaseline | None = None) -> Sequence[OwnedSlice]:
        """Add the step that is over to the baselines that follow."""
        return self._look(None, without)

    def _look(
        self, keys: Collection[str] | None, without: AccumulatedBaseline | None = None
    ) -> Sequence[OwnedSlice]:
        """keys: names the slices to look at; None means all."""
        slices = [owned for owned in self._owned_slices() if keys is None or owned.key in keys]
        if self._is_followed():
            detection = self._journal.explained(detect_or_doubt(slices, self._journal.plan))
            if detection.reason is Reason.NONE:
                detection = self._journal.doubt(slices) or detection
            self._tell(detection)
        if without is not None and (doubt := base_doubt(slices)) is not None:
            without.add(doubt)
        self._journal.commit(None if keys is None else frozenset(keys))
        return slices

    def _before_step(self, keys: Collection[str], *_: Any) -> None:
        if is_capturing():
            return
        try:
            self._look(keys)
        except Exception as error:  # noqa: BLE001 - training goes on, and the next update is full
            self._tell(failed(error))

    def _unhook(self) -> None:
        super()._unhook()
        self._journal.detach()


class AccumulatedBaseline:
    """Covers any number of steps since its commit.

    It keeps positions and codes of what changed, or one code for each owned element if that is smaller. If
    the changes of one step are not known, that doubt stays until the next commit, and they are freed.
    """

    def __init__(self, follower: Follower) -> None:
        """Nothing is held before the first `committed`."""
        self._follower = follower
        self._owned = Runs.of([])
        self._held = Changes.none()
        self._plane: torch.Tensor | None = None
        self._doubt: Detection | None = Detection(reason=Reason.FIRST_SYNC)
        self._late: Detection | None = None
        self._asked = False  # since the commit
        self._detached = False

    @property
    def follows(self) -> bool:
        """False while a full sync is due anyway."""
        return self._doubt is None

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        held, plane = self._held, self._plane
        return held.num_changed * _BYTES_A_CHANGE + (0 if plane is None else plane.nbytes)

    def hear(self, detection: Detection) -> None:
        """Keep what an update that is under way may not send, so that its commit does not forget it.

        An anchor does not ask, so what no step wrote since the last commit counts as well.

        Args:
            detection: as of `add`; of any time, also while a full sync is due.
        """
        if detection.reason is Reason.UNSEEN_CHANGE or (self._asked and detection.reason is not Reason.NONE):
            self._late = detection
        elif self._asked and detection.num_changed and self._late is None:
            self._late = Detection(reason=Reason.STEP_GAP, detail="a step was made during an update")

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
        if not changes.num_changed:
            return
        if self._plane is None:
            changes = _sum(self._held, changes)
            if changes.num_changed * _BYTES_A_CHANGE < self._owned.numel:
                self._held = changes
                return
            self._owned, self._held = self._owned.to(changes.pos.device), Changes.none()
            self._plane = torch.zeros(self._owned.numel, dtype=torch.int8, device=changes.pos.device)
        if changes.code is not None:
            place = self._owned.index_of(changes.pos)
            self._plane[place] = add_codes(self._plane[place], changes.code)

    def detect(self) -> Detection:
        """What all steps since the commit changed together."""
        self._follower.look()
        self._late, self._asked = None, True
        if self._doubt is not None:
            return self._doubt
        if self._plane is None:
            return Detection(changes=self._held, num_owned=self._owned.numel)
        parts = []
        for number, codes in enumerate(torch.split(self._plane, _PIECE)):
            index = nonzero(codes != 0)
            parts.append(Changes(pos=self._owned.in_line(index + number * _PIECE), code=codes[index]))
        return Detection(changes=joined(parts), num_owned=self._owned.numel)

    def committed(self) -> None:
        """Later detections count from the weights as they are now."""
        unsure = Detection(reason=Reason.STEP_GAP)
        self._doubt = unsure  # stays if anything below fails
        late, self._late, self._asked = self._late, None, False
        try:
            slices = self._follower.look(without=self)
        except Exception as error:  # noqa: BLE001 - the next update is full, whatever it was
            self._distrust(failed(error))
            return
        self._owned = Runs.of((owned.begin, owned.stop - owned.start) for owned in slices)
        self._held, self._plane = Changes.none(), None
        if self._doubt is unsure:
            self._doubt = Detection(reason=Reason.NO_STEP_RECORD) if self._detached else late

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
        self._held, self._plane = Changes.none(), None


def _sum(first: Changes, second: Changes) -> Changes:
    """Two moves of some elements, one after the other, as one. Values are left out."""
    if first.code is None or second.code is None or not first.num_changed:
        return Changes(pos=second.pos, code=second.code)
    pos, code = torch.cat([first.pos, second.pos]), torch.cat([first.code, second.code])
    order = ascending(pos)
    pos, code = pos[order], code[order]
    twice = nonzero(pos[1:] == pos[:-1])
    code[twice] = add_codes(code[twice], code[twice + 1])
    code[twice + 1] = 0
    return take(Changes(pos=pos, code=code), nonzero(code != 0))
