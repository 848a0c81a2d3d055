"""What the trainers of all frameworks do alike."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from awex_delta.detection.baselines import Baselines
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.view import TrainerLayout


class FollowedTrainer(ABC):
    """One rank of a trainer whose optimizer steps are followed, so that it knows what they changed."""

    def __init__(self, layout: TrainerLayout, settings: DeltaSettings) -> None:
        """Follow nothing yet: a subclass calls `_follow` as soon as `owned_slices` works.

        Args:
            layout: this rank among the trainers.
            settings: as agreed with the engines.
        """
        self._layout = layout
        self._settings = settings

    def _follow(self, watched: Sequence[SteppedParams]) -> None:
        """Hook the optimizers as the settings ask. watched: what steps the owned slices."""
        self._baselines = Baselines(self.owned_slices, watched, self._settings)
        self._baseline = self._baselines.add()

    @abstractmethod
    def owned_slices(self) -> list[OwnedSlice]:
        """The ranges whose optimizer state this rank holds."""

    def layout(self) -> TrainerLayout:
        """This rank among the trainers."""
        return self._layout

    def detect(self) -> Detection:
        """What changed in the owned ranges, found as `settings.method` says."""
        if not self._settings.enabled:
            return Detection(reason=Reason.DELTA_DISABLED)
        return self._baseline.detect()

    def committed(self) -> None:
        """Later detections count from the weights as they are now."""
        self._baseline.committed()

    def weights_replaced(self) -> None:
        """Tell that something else than an optimizer step changed weights: the next update is full.

        Loading an optimizer state is seen without this call.
        """
        self._baselines.weights_replaced()

    def fork(self) -> Self:
        """The same trainer, with changes counted from commits of its own."""
        twin = copy.copy(self)
        twin._baseline = self._baselines.add()  # noqa: SLF001 - of the same class
        return twin

    def detach(self) -> None:
        """Remove the optimizer hooks that exist for this view."""
        self._baseline.detach()
