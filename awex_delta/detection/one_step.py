"""What changed since a commit, by inverting the one step that lies between."""

from __future__ import annotations

from collections.abc import Sequence

from awex_delta.detection.invert import base_doubt, detect_changes, failed
from awex_delta.detection.journal import StepJournal
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.slices import Detection, OwnedSlices
from awex_delta.protocol.verdict import Reason


class OneStepBaseline:
    """Covers one step since its commit, without any memory: the step is inverted."""

    def __init__(self, owned_slices: OwnedSlices, watched: Sequence[SteppedParams]) -> None:
        """Record every later step of the optimizers."""
        self._owned_slices = owned_slices
        self._checked = False
        self._doubt: Detection | None = None
        self._journal = StepJournal()
        for stepped in watched:
            self._journal.watch(stepped)

    def detect(self) -> Detection:
        """Invert the one step."""
        self._checked = False  # what was found for an update that failed counts no more
        if self._doubt is not None:
            return self._doubt
        slices = tuple(self._owned_slices())
        detection = self._journal.explained(detect_changes(slices, self._journal.plan))
        if detection.reason is Reason.NONE:
            detection = self._journal.doubt(slices) or detection
        self._checked = detection.reason is Reason.NONE
        return detection

    def committed(self) -> None:
        """Later detections count from the weights as they are now. Never raises: what fails is a doubt."""
        checked, self._checked = self._checked, False
        try:
            self._doubt = None if checked else base_doubt(tuple(self._owned_slices()))
            self._journal.commit()
        except Exception as error:  # noqa: BLE001 - the next update is full, whatever it was
            self._doubt = failed(error)

    def weights_replaced(self) -> None:
        """No step leads back to the last commit any more."""
        self._journal.forget()

    def detach(self) -> None:
        """Remove the hooks."""
        self._journal.detach()
