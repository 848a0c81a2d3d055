"""What changed since a commit: by inverting the one step that lies between, by inverting or capturing every
step, or by comparing with a copy.

A baseline belongs to the engines of one pairing, and moves when an update of theirs commits. One trainer may
have several, each at its own pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

from awex_delta.detection.accumulate import Follower, StepFollower
from awex_delta.detection.capture import StepCapture
from awex_delta.detection.one_step import OneStepBaseline
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.slices import Detection, OwnedSlices
from awex_delta.detection.snapshot import SnapshotBaseline
from awex_delta.settings.agreed import DeltaSettings


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
        self, owned_slices: OwnedSlices, watched: Sequence[SteppedParams], settings: DeltaSettings
    ) -> None:
        """Hook what `settings` say has to be followed at every step, and nothing else yet.

        Args:
            owned_slices: every owned slice with its live optimizer state.
            watched: what steps them.
            settings: `enabled`, `method` and `accumulate` are looked at.
        """
        self._owned_slices = owned_slices
        self._watched = watched
        self._copies = settings.enabled and settings.method == "snapshot"
        self._follower: Follower | None = None
        if settings.enabled and settings.method == "capture":
            self._follower = StepCapture(owned_slices, watched)
        elif settings.accumulate and not self._copies:
            self._follower = StepFollower(owned_slices, watched)
        self._all: WeakSet[Baseline] = WeakSet()

    def add(self) -> Baseline:
        """A baseline that holds nothing before its first `committed`."""
        baseline: Baseline
        if self._copies:
            baseline = SnapshotBaseline(self._owned_slices)
        elif self._follower is not None:
            baseline = self._follower.add()
        else:
            baseline = OneStepBaseline(self._owned_slices, self._watched)
        self._all.add(baseline)
        return baseline

    def weights_replaced(self) -> None:
        """Tell all baselines that masters were changed by something else than a step."""
        for baseline in self._all:
            baseline.weights_replaced()
