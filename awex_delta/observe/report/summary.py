"""What a run comes to: the sums and medians at the top of the page, and why updates were full."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from awex_delta.observe.runlog.writer import UpdateLine
from awex_delta.protocol.verdict import Reason

EXPECTED = frozenset(reason.name for reason in (Reason.ANCHOR_DUE, Reason.FIRST_SYNC, Reason.DELTA_DISABLED))
"""Reasons that a working training gives; every other full sync is a fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts and ratios of a run. A ratio or median is None where there is nothing to divide or to order.

    num_expected_full, num_fallbacks: full syncs for a reason in `EXPECTED`, and for any other.
    total_wire_bytes: of all committed updates; all_full_bytes: had each been a full sync.
    delta_share: median share of the owned elements that deltas found changed.
    delta_ratio: bytes of all deltas, of what full syncs would have taken in their place.
    seconds: median of a whole update, without connecting.
    """

    num_updates: int
    num_deltas: int
    num_expected_full: int
    num_fallbacks: int
    num_aborted: int
    first_version: int | None
    last_version: int | None
    total_wire_bytes: int
    all_full_bytes: int
    ratio: float | None
    delta_ratio: float | None
    delta_share: float | None
    delta_seconds: float | None
    full_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason for full or aborted updates: where, and the detail of the last one that had any."""

    kind: str
    reason: str
    text: str
    expected: bool
    versions: tuple[int, ...]
    seats: tuple[int, ...]
    detail: str


def summarize(updates: Sequence[UpdateLine]) -> Summary:
    """Sums and medians of a run."""
    committed = [line for line in updates if line.kind != "aborted"]
    deltas = [line for line in committed if line.kind == "delta"]
    fulls = [line for line in committed if line.kind == "full"]
    expected = [line for line in fulls if line.reason in EXPECTED]
    sent, whole = sum(u.total_wire_bytes for u in committed), sum(u.full_bytes for u in committed)
    delta_sent, delta_whole = sum(u.total_wire_bytes for u in deltas), sum(u.full_bytes for u in deltas)
    return Summary(
        num_updates=len(updates),
        num_deltas=len(deltas),
        num_expected_full=len(expected),
        num_fallbacks=len(fulls) - len(expected),
        num_aborted=len(updates) - len(committed),
        first_version=committed[0].version if committed else None,
        last_version=committed[-1].version if committed else None,
        total_wire_bytes=sent,
        all_full_bytes=whole,
        ratio=sent / whole if whole else None,
        delta_ratio=delta_sent / delta_whole if delta_whole else None,
        delta_share=_median([share_of(line) for line in deltas]),
        delta_seconds=_median([duration_of(line) for line in deltas]),
        full_seconds=_median([duration_of(line) for line in fulls]),
    )


def causes(updates: Sequence[UpdateLine]) -> list[Cause]:
    """Why updates were not deltas, fallbacks and failures first."""
    groups: dict[tuple[str, str], list[UpdateLine]] = {}
    for line in updates:
        if line.kind != "delta":
            groups.setdefault((line.kind, line.reason), []).append(line)
    found = [
        Cause(
            kind=kind,
            reason=reason,
            text=lines[-1].text,
            expected=kind == "full" and reason in EXPECTED,
            versions=tuple(line.version for line in lines),
            seats=tuple(sorted({seat for line in lines for seat in line.seats})),
            detail=next((line.detail for line in reversed(lines) if line.detail), ""),
        )
        for (kind, reason), lines in groups.items()
    ]
    return sorted(found, key=lambda cause: (cause.expected, cause.kind != "aborted", -len(cause.versions)))


def share_of(line: UpdateLine) -> float:
    """Changed elements of one update, of all that the trainers own."""
    return line.total_changed / line.total_owned if line.total_owned else 0.0


def ratio_of(line: UpdateLine) -> float:
    """Bytes of one update, of a full sync's."""
    return line.total_wire_bytes / line.full_bytes if line.full_bytes else 0.0


def duration_of(line: UpdateLine) -> float:
    """Seconds of one update on rank 0, without connecting, which happens once."""
    return sum(seconds for phase, seconds in line.seconds.items() if phase != "connect")


def parts_of(updates: Sequence[UpdateLine]) -> dict[tuple[int | None, str], tuple[int, int]]:
    """Changed and owned elements by layer and kind, over all deltas, in the order of the model."""
    changed: Counter[tuple[int | None, str]] = Counter()
    owned: Counter[tuple[int | None, str]] = Counter()
    for line in updates:
        for part in line.changed_by:
            changed[part.layer, part.kind] += part.changed
            owned[part.layer, part.kind] += part.owned
    return {place: (changed[place], owned[place]) for place in owned}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
