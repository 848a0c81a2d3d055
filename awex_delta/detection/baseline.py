"""What every way of detection offers, and what it works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from awex_delta.detection.invert import Plan, detect_changes
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.errors import UnsupportedError
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


def detect_or_doubt(slices: Sequence[OwnedSlice], plan: Plan) -> Detection:
    """What changed, where nobody waits for an error: training goes on, and the next update is full."""
    try:
        return detect_changes(slices, plan)
    except (UnsupportedError, RuntimeError, MemoryError) as error:
        return failed(error)


def failed(error: Exception) -> Detection:
    """What a detection that failed says."""
    return Detection(reason=Reason.DETECTION_FAILED, detail=f"{type(error).__name__}: {error}")
