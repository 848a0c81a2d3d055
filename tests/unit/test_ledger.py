"""Versions move at commit and nowhere else."""

from __future__ import annotations

import pytest

from awex_delta.protocol.ledger import EngineLedger, TrainerLedger
from awex_delta.protocol.verdict import Kind, Reason

RUN = "a" * 32


def test_the_first_sync_is_full() -> None:
    assert TrainerLedger(run_id=RUN).doubt(1, 20) is Reason.FIRST_SYNC


@pytest.mark.parametrize(
    ("version", "reason"),
    [(8, Reason.NONE), (7, Reason.VERSION_GAP), (9, Reason.VERSION_GAP), (3, Reason.VERSION_GAP)],
)
def test_only_the_next_version_is_a_delta(version: int, reason: Reason) -> None:
    assert TrainerLedger(run_id=RUN, version=7).doubt(version, 0) is reason


@pytest.mark.parametrize(
    ("interval", "kinds"),
    [(0, "FDDDDDDD"), (1, "FDFDFDFD"), (2, "FDDFDDFD"), (3, "FDDDFDDD"), (20, "FDDDDDDD")],
)
def test_an_interval_counts_committed_deltas_between_full_syncs(interval: int, kinds: str) -> None:
    ledger, seen = TrainerLedger(run_id=RUN), ""
    for version in range(len(kinds)):
        kind = Kind.FULL if ledger.doubt(version, interval) else Kind.DELTA
        ledger = ledger.commit(version, kind)
        seen += "F" if kind is Kind.FULL else "D"
    assert seen == kinds


def test_a_failed_delta_does_not_count_and_a_fallback_resets_the_count() -> None:
    ledger = TrainerLedger(run_id=RUN, version=1, deltas=2)
    failed = ledger.abort()
    assert (failed.version, failed.deltas, failed.doubt(2, 3)) == (1, 2, Reason.PREVIOUS_ABORTED)
    healed = failed.commit(2, Kind.FULL)
    assert (healed.version, healed.deltas, healed.aborted) == (2, 0, False)


def test_an_engine_is_ready_only_with_one_committed_version() -> None:
    fresh = EngineLedger()
    assert not fresh.ready
    assert fresh.doubt(RUN, None) is Reason.ENGINE_STALE
    held = fresh.touch().commit(RUN, 4)
    assert held.ready
    assert held.doubt(RUN, 4) is Reason.NONE
    assert held.doubt(RUN, 5) is Reason.ENGINE_STALE
    assert held.doubt("b" * 32, 4) is Reason.ENGINE_STALE
    dirty = held.touch()
    assert (dirty.ready, dirty.version, dirty.doubt(RUN, 4)) == (False, 4, Reason.ENGINE_DIRTY)
