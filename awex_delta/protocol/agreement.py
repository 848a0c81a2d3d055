"""What ranks tell each other in an update, and what follows from it: the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from awex_delta.errors import LockstepError, UpdateAborted
from awex_delta.protocol.ledger import EngineLedger
from awex_delta.protocol.verdict import Kind, Reason, Verdict
from awex_delta.wire.choice import expected_bytes

Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank says before an update.

    role: "trainer" or "engine".
    version: the version that the caller asked for.
    run_id, held: of a trainer its own run and watermark, of an engine what it holds. held is None
        when there is nothing, dirty when writes were not committed.
    reason, detail: this rank's own doubt.
    changed, owned: elements that a trainer found changed, of those that it owns.
    failure: why this rank cannot take part; empty when it can.
    anew: the rank's description is another one than all know, so that all have to meet anew.
    """

    role: str
    version: Count
    run_id: str
    held: Count | None
    dirty: bool = False
    reason: Reason = Reason.NONE
    detail: str = ""
    changed: Count = 0
    owned: Count = 0
    failure: str = ""
    anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a phase ended on one rank: why it cannot go on (empty when it can), and counts for all."""

    phase: str
    version: Count
    failure: str
    facts: dict[str, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks concluded from the proposals. base is the version that a delta builds on."""

    version: int
    run_id: str
    base: int
    verdict: Verdict


def decide(proposals: Sequence[Proposal], encodings: Sequence[str]) -> Decision:
    """Full or delta: the worst reason of any rank wins. Pure, so every rank concludes the same.

    Args:
        proposals: by transfer rank.
        encodings: those that frames may have; a delta that would be larger than a full sync is none.

    Raises:
        LockstepError: ranks were asked for different versions, or trainers belong to different runs.
    """
    versions = {proposal.version for proposal in proposals}
    if len(versions) > 1:
        who = {v: [seat for seat, p in enumerate(proposals) if p.version == v] for v in sorted(versions)}
        raise LockstepError(f"ranks were asked for different versions (version: seats): {who}")
    trainers = [proposal for proposal in proposals if proposal.role == "trainer"]
    if len({trainer.run_id for trainer in trainers}) != 1:
        raise LockstepError("trainer ranks belong to different runs: restart the trainer as a whole")
    run_id, base = trainers[0].run_id, trainers[0].held
    reasons, details = [], [proposal.detail for proposal in proposals]
    for seat, proposal in enumerate(proposals):
        if proposal.role == "engine":
            ledger = EngineLedger(run_id=proposal.run_id, version=proposal.held, dirty=proposal.dirty)
            reasons.append(max(proposal.reason, ledger.doubt(run_id, base)))
            if reasons[-1] is Reason.ENGINE_STALE:
                details[seat] = _stale(proposal, run_id, base)
        elif proposal.held != base:  # an earlier commit reached only some ranks
            reasons.append(max(proposal.reason, Reason.PREVIOUS_ABORTED))
            details[seat] = f"trainer ranks committed {base} and {proposal.held}"
        else:
            reasons.append(proposal.reason)
    if not any(reasons) and _too_dense(trainers, encodings):
        reasons = [Reason.TOO_DENSE if p.role == "trainer" else Reason.NONE for p in proposals]
    worst = max(reasons)
    ranks = tuple(seat for seat, reason in enumerate(reasons) if reason is worst) if worst else ()
    detail = next((details[seat] for seat in ranks if details[seat]), "")
    verdict = Verdict(kind=Kind.FULL if worst else Kind.DELTA, reason=worst, ranks=ranks, detail=detail)
    return Decision(version=versions.pop(), run_id=run_id, base=-1 if base is None else base, verdict=verdict)


def _stale(engine: Proposal, run_id: str, base: int | None) -> str:
    """What an engine holds in place of the base."""
    if engine.held is None:
        return f"it holds no version, and the trainer committed {base}"
    whose = "" if engine.run_id == run_id else " of another run"
    return f"it holds version {engine.held}{whose}, and the trainer committed {base}"


def _too_dense(trainers: Sequence[Proposal], encodings: Sequence[str]) -> bool:
    """True when the changes take more bytes than all bf16 weights do."""
    changed, owned = sum(t.changed for t in trainers), sum(t.owned for t in trainers)
    if not changed or not owned:
        return False
    share = min(1.0, changed / owned)
    return share * min(expected_bytes(name, share) for name in encodings) >= torch.bfloat16.itemsize


def check_arrived(facts: Sequence[Mapping[str, int]]) -> None:
    """Every element that was sent has been written, over all ranks.

    Args:
        facts: of the last agreement: "sent" by trainers, "applied" by engines.

    Raises:
        UpdateAborted: on every rank alike, with both counts.
    """
    sent = sum(fact.get("sent", 0) for fact in facts)
    applied = sum(fact.get("applied", 0) for fact in facts)
    if sent != applied:
        raise UpdateAborted(f"trainers sent {sent} elements, engines wrote {applied}")
