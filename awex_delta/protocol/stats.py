"""What one update did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from awex_delta.protocol.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What one update did. Returned by `update_weights` on every rank.

    wire_bytes, num_elements: payload bytes and elements that this rank sent (trainer) or received (engine).
    num_changed, num_owned: certified changes in the optimizer slices that this rank owns, and their
        size (trainers; 0 where nothing was detected, as in most full syncs).
    total_wire_bytes, total_changed, total_owned: the same, summed over all trainer ranks.
    total_not_finite: NaN and infinite values among what all trainer ranks sent: in a delta what changed or
        travels whole, in a full sync everything.
    full_bytes: payload of a full sync of this pairing, over all ranks.
    verified: what was compared before the commit: "off", "touched" or "full".
    seconds: wall time by phase.
    """

    version: int
    verdict: Verdict
    wire_bytes: int = 0
    num_elements: int = 0
    num_changed: int = 0
    num_owned: int = 0
    total_wire_bytes: int = 0
    total_changed: int = 0
    total_owned: int = 0
    total_not_finite: int = 0
    full_bytes: int = 0
    verified: str = "off"
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCount:
    """Changed and owned elements of one kind of tensor in one layer.

    layer: index in the whole model, whatever pipeline stage holds it; None outside the layers.
    kind: the trainer's name of the parameter inside its layer; the experts of a layer count together.
    """

    layer: int | None
    kind: str
    changed: int
    owned: int
