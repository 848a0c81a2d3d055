"""The verdict is a pure function of what the ranks proposed: the worst reason wins, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from awex_delta.errors import LockstepError, UpdateAborted
from awex_delta.protocol import agreement
from awex_delta.protocol.agreement import Decision, Proposal, check_arrived
from awex_delta.protocol.verdict import Kind, Reason

RUN = "a" * 32


def decide(proposals: Sequence[Proposal]) -> Decision:
    """What follows when frames hold plain positions and values."""
    return agreement.decide(proposals, ["indices"])


ENGINE = Proposal(role="engine", version=8, run_id=RUN, held=7)
TRAINER = Proposal(role="trainer", version=8, run_id=RUN, held=7)


def test_sure_ranks_make_a_delta_on_the_watermark() -> None:
    decision = decide([ENGINE, ENGINE, TRAINER, TRAINER])
    assert (decision.verdict.kind, decision.base, decision.version, decision.run_id) == (
        Kind.DELTA,
        7,
        8,
        RUN,
    )
    assert decision.verdict.ranks == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"held": 6}, Reason.ENGINE_STALE),
        ({"held": None}, Reason.ENGINE_STALE),
        ({"run_id": "b" * 32}, Reason.ENGINE_STALE),
        ({"dirty": True}, Reason.ENGINE_DIRTY),
    ],
)
def test_one_engine_in_doubt_makes_it_full(change: dict[str, object], reason: Reason) -> None:
    decision = decide([ENGINE, replace(ENGINE, **change), TRAINER])  # type: ignore[arg-type]
    assert (decision.verdict.kind, decision.verdict.reason, decision.verdict.ranks) == (
        Kind.FULL,
        reason,
        (1,),
    )


def test_the_worst_reason_wins_in_any_order_and_brings_its_detail() -> None:
    small = replace(TRAINER, reason=Reason.ANCHOR_DUE, detail="small")
    large = replace(TRAINER, reason=Reason.MASTER_MISMATCH, detail="layer 3")
    for order in permutations([small, large, TRAINER]):
        verdict = decide([ENGINE, *order]).verdict
        assert (verdict.reason, verdict.detail) == (Reason.MASTER_MISMATCH, "layer 3")
        assert "layer 3" in str(verdict)


def test_trainers_with_different_watermarks_go_full() -> None:
    verdict = decide([ENGINE, TRAINER, replace(TRAINER, held=6)]).verdict
    assert (verdict.reason, verdict.ranks) == (Reason.PREVIOUS_ABORTED, (2,))


def test_the_first_sync_has_no_base() -> None:
    fresh = replace(TRAINER, held=None, reason=Reason.FIRST_SYNC)
    decision = decide([replace(ENGINE, held=None, run_id=""), fresh])
    assert (decision.base, decision.verdict.reason) == (-1, Reason.FIRST_SYNC)


def test_different_versions_and_different_runs_are_errors() -> None:
    with pytest.raises(LockstepError, match=r"\{8: \[0\], 9: \[1\]\}"):
        decide([ENGINE, replace(TRAINER, version=9)])
    with pytest.raises(LockstepError, match="different runs"):
        decide([ENGINE, TRAINER, replace(TRAINER, run_id="b" * 32)])


def test_every_sent_element_must_have_been_written() -> None:
    check_arrived([{"applied": 3}, {"applied": 4}, {"sent": 7}])
    with pytest.raises(UpdateAborted, match="sent 8 elements, engines wrote 7"):
        check_arrived([{"applied": 3}, {"applied": 4}, {"sent": 7}, {"sent": 1}])


@pytest.mark.parametrize(
    ("encoding", "changed", "reason"),
    [
        ("indices", 0, Reason.NONE),
        ("indices", 333, Reason.NONE),
        ("indices", 334, Reason.TOO_DENSE),
        ("gaps", 600, Reason.NONE),
        ("gaps", 700, Reason.TOO_DENSE),
        ("ulp_zstd", 1000, Reason.NONE),
    ],
)
def test_a_delta_that_would_be_larger_than_a_full_sync_is_none(
    encoding: str, changed: int, reason: Reason
) -> None:
    halves = [
        replace(TRAINER, changed=changed // 2, owned=500),
        replace(TRAINER, changed=changed - changed // 2, owned=500),
    ]
    verdict = agreement.decide([ENGINE, *halves], [encoding]).verdict
    assert verdict.reason is reason
    assert verdict.ranks == ((1, 2) if reason else ())


def test_a_doubt_is_told_before_the_density() -> None:
    dense = replace(TRAINER, changed=1000, owned=1000)
    verdict = agreement.decide([replace(ENGINE, dirty=True), dense], ["indices"]).verdict
    assert verdict.reason is Reason.ENGINE_DIRTY
