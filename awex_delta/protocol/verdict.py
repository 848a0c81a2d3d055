"""Full or delta, and why: the outcome that all ranks of an update share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Kind(StrEnum):
    """What an update sends."""

    FULL = "full"
    DELTA = "delta"


class Reason(IntEnum):
    """Why an update is a delta (0) or a full sync (the rest). The largest over all ranks wins."""

    NONE = 0
    TOO_DENSE = 5
    ANCHOR_DUE = 10
    VERSION_GAP = 20
    STEP_GAP = 30
    LOSSY_RECORD = 31
    NO_STEP_RECORD = 32
    STATE_REPLACED = 33
    STEP_DISPROVED = 34
    UNSEEN_CHANGE = 35
    MOMENTS_COARSE = 36
    NOT_ADAMW = 40
    MOMENTS_MISSING = 41
    MOMENTS_INVALID = 42
    NO_FP32_MASTER = 43
    MASTER_MISMATCH = 44
    HYPERPARAMETERS_INVALID = 45
    STATE_AWAY = 48
    DETECTION_FAILED = 49
    ENGINE_STALE = 60
    ENGINE_DIRTY = 61
    ENGINE_MOVED = 62
    PREVIOUS_ABORTED = 70
    FIRST_SYNC = 80
    DELTA_DISABLED = 90

    @property
    def text(self) -> str:
        """One sentence for a person."""
        return _REASON_TEXT[self]


_REASON_TEXT: Mapping[Reason, str] = {
    Reason.NONE: "delta",
    Reason.TOO_DENSE: "so much changed that a delta would be larger than a full sync",
    Reason.ANCHOR_DUE: "a periodic full sync (anchor) is due",
    Reason.VERSION_GAP: "the version does not follow the last committed one",
    Reason.STEP_GAP: "the step counter does not lead from the last commit to here by one recorded step",
    Reason.LOSSY_RECORD: "it is not known which hyper-parameters moved a parameter",
    Reason.NO_STEP_RECORD: "no record of the hyper-parameters that the last optimizer step used",
    Reason.UNSEEN_CHANGE: "weights changed outside of the optimizer steps that were captured",
    Reason.STATE_REPLACED: "masters or moments were moved, replaced or written by something else than a step",
    Reason.STEP_DISPROVED: "a sample of the masters contradicts the recorded step",
    Reason.MOMENTS_COARSE: "moments are kept too coarsely to invert a step: take the method capture",
    Reason.NOT_ADAMW: "the optimizer is not a decoupled AdamW",
    Reason.MOMENTS_MISSING: "exp_avg or exp_avg_sq is missing",
    Reason.MOMENTS_INVALID: "exp_avg or exp_avg_sq is not finite, is negative, or has an unsupported dtype",
    Reason.NO_FP32_MASTER: "a trained parameter has no fp32 master weight, whole or as a remainder",
    Reason.MASTER_MISMATCH: "the model's weights are not the rounded masters (was the model reloaded?)",
    Reason.HYPERPARAMETERS_INVALID: "the recorded step or hyper-parameters cannot be inverted",
    Reason.STATE_AWAY: "masters or moments were freed or moved (are they offloaded?)",
    Reason.DETECTION_FAILED: "detection raised an error on a rank",
    Reason.ENGINE_STALE: "an engine does not hold the base version",
    Reason.ENGINE_DIRTY: "an engine holds weights that were written but never committed",
    Reason.ENGINE_MOVED: "an engine's weights lie in other memory than at its last update, or look otherwise",
    Reason.PREVIOUS_ABORTED: "the previous update was aborted",
    Reason.FIRST_SYNC: "first sync of this pairing",
    Reason.DELTA_DISABLED: "enable_delta_weight_update is off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Full or delta, with its reason and the seats (transfer ranks) that gave it. The same on every rank."""

    kind: Kind
    reason: Reason
    ranks: tuple[int, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.DELTA:
            return "delta"
        where = f" (seat {', '.join(map(str, self.ranks))})" if self.ranks else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"full, {self.reason.text}{where}{detail}"
