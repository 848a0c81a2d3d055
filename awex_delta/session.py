"""What both halves of an update share: connecting, proposing, agreeing.

Every phase ends in one agreement over all transfer ranks. A rank-local failure is carried as a value
into the next agreement and raised there by every rank at once, so that no rank ever waits for one
that gave up. Only a peer that does not answer breaks this pattern; then `Comm` gives the epoch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from awex_delta.comm import Comm
from awex_delta.errors import AwexDeltaError, ConnectError, LockstepError, UpdateAborted, UpdateError
from awex_delta.plan.ledger import EngineLedger
from awex_delta.plan.regions import Plan, build_plan
from awex_delta.plan.rounds import Meeting, meetings_of
from awex_delta.plan.specs import World, dtype_name, parse_world
from awex_delta.types import DeltaSettings, Kind, Reason, Verdict
from awex_delta.wire.frame import PROTOCOL_VERSION, max_frame_bytes
from awex_delta.wire.registry import codecs_for

ROW_BYTES = 4096
"""Width of every proposal and every status on the wire."""

_DETAIL_CHARS = 600
_LOCAL_SETTINGS = frozenset({"release_grad_buffers", "timeout_seconds", "connect_timeout_seconds"})

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank says before an update.

    role: "trainer" or "engine".
    version: the version that the caller asked for.
    run_id, held: of a trainer its own run and watermark, of an engine what it holds. held is None
        when there is nothing, dirty when writes were not committed.
    reason, detail: a trainer's own doubt.
    """

    role: str
    version: int
    run_id: str
    held: int | None
    dirty: bool = False
    reason: Reason = Reason.NONE
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a phase ended on one rank: why it cannot go on (empty when it can), and counts for all."""

    phase: str
    version: int
    failure: str
    facts: dict[str, int]


_PROPOSAL = TypeAdapter(Proposal)
_STATUS = TypeAdapter(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks concluded from the proposals. base is the version that a delta builds on."""

    version: int
    run_id: str
    base: int
    verdict: Verdict


def _clip(text: str) -> str:
    """Short and plain enough for any text to fit a row, whatever JSON makes of it."""
    return text.encode("ascii", "backslashreplace").decode()[:_DETAIL_CHARS]


def decide(proposals: Sequence[Proposal]) -> Decision:
    """Full or delta: the worst reason of any rank wins. Pure, so every rank concludes the same.

    Args:
        proposals: by transfer rank.

    Raises:
        LockstepError: ranks were asked for different versions, or trainers belong to different runs.

    Collective: no.
    """
    versions = {proposal.version for proposal in proposals}
    if len(versions) > 1:
        who = {v: [seat for seat, p in enumerate(proposals) if p.version == v] for v in sorted(versions)}
        raise LockstepError(f"ranks were asked for different versions (version: seats): {who}")
    trainers = [proposal for proposal in proposals if proposal.role == "trainer"]
    if len({trainer.run_id for trainer in trainers}) != 1:
        raise LockstepError("trainer ranks belong to different runs: restart the trainer as a whole")
    run_id, base = trainers[0].run_id, trainers[0].held
    reasons = []
    for proposal in proposals:
        if proposal.role == "engine":
            ledger = EngineLedger(run_id=proposal.run_id, version=proposal.held, dirty=proposal.dirty)
            reasons.append(ledger.doubt(run_id, base))
        elif proposal.held != base:  # an earlier commit reached only some ranks
            reasons.append(max(proposal.reason, Reason.PREVIOUS_ABORTED))
        else:
            reasons.append(proposal.reason)
    worst = max(reasons)
    ranks = tuple(seat for seat, reason in enumerate(reasons) if reason is worst) if worst else ()
    detail = next((proposals[seat].detail for seat in ranks if proposals[seat].detail), "")
    verdict = Verdict(kind=Kind.FULL if worst else Kind.DELTA, reason=worst, ranks=ranks, detail=detail)
    return Decision(version=versions.pop(), run_id=run_id, base=-1 if base is None else base, verdict=verdict)


def check_arrived(facts: Sequence[Mapping[str, int]]) -> None:
    """Every element that was sent has been written, over all ranks.

    Args:
        facts: of the last agreement: "sent" by trainers, "applied" by engines.

    Raises:
        UpdateAborted: on every rank alike, with both counts.

    Collective: no.
    """
    sent = sum(fact.get("sent", 0) for fact in facts)
    applied = sum(fact.get("applied", 0) for fact in facts)
    if sent != applied:
        raise UpdateAborted(f"trainers sent {sent} elements, engines wrote {applied}")


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap on `phase`. Collective: no."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class Session:
    """One rank's part in the agreements of one pairing, over one `Comm`.

    Attributes:
        world, plan: what all ranks agreed on at connect; valid while connected.
        meetings: this rank's schedule.
        codecs: the encodings that frames may have.
    """

    world: World
    plan: Plan

    def __init__(
        self,
        comm: Comm,
        settings: DeltaSettings,
        describe: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        on_phase: Callable[[str], None] | None,
    ) -> None:
        """Check what can be checked alone; nothing is opened.

        Args:
            comm: this rank's seat.
            settings: must be equal on every rank, but for timeouts and local memory choices.
            describe: gives this rank's spec as JSON, from the settings that all must share.
            on_phase: called with the name of each phase as it begins; an exception that it raises
                counts as this rank's failure in that phase.

        Raises:
            ConfigError: the world size is not allowed, or the encoding is unknown.
        """
        self.comm = comm
        self.settings = settings
        self.codecs = codecs_for(settings.encoding)
        allow_any = settings.allow_any_world_size or not settings.enabled
        self.meetings: tuple[Meeting, ...] = meetings_of(
            comm.seat, comm.rendezvous.world_size, allow_any=allow_any
        )
        self._describe = describe
        self._on_phase = on_phase or (lambda phase: None)
        self._version = 0

    def ensure_connected(self, purpose: str) -> bool:
        """Meet all ranks in the current epoch, and agree on the plan. True when it had to be done.

        Args:
            purpose: what begins, such as "version 7".

        Raises:
            PeerError: another rank already gave the same purpose up.
            ConnectError: a rank is missing, or the two sides do not fit together. Nothing moved.

        Collective: yes, over all transfer ranks, unless already connected.
        """
        if self.comm.usable(purpose):
            return False
        self.comm.connect()
        try:
            self._meet()
        except BaseException:  # half connected is not connected, and the peers hear of it at once
            self.comm.abandon()
            raise
        return True

    def _meet(self) -> None:
        """Exchange descriptions, and conclude the plan from all of them."""
        spec: Mapping[str, Any]
        try:
            spec = self._describe(self._agreed())
        except AwexDeltaError as error:
            spec = {"error": f"{type(error).__name__}: {error}"}
        values = self.comm.gather_json(spec, phase="describe")
        failed = {s: v["error"] for s, v in enumerate(values) if isinstance(v, dict) and "error" in v}
        if failed:
            raise ConnectError("; ".join(f"seat {seat}: {text}" for seat, text in failed.items()))
        self.world = parse_world(values, self.comm.rendezvous.num_engine_ranks)
        self.plan = build_plan(self.world)
        digests = self.comm.gather(self.plan.digest.to_bytes(8, "little"), width=16, phase="plan")
        if len(set(digests)) > 1:
            raise LockstepError("ranks computed different transfer plans: do all run the same versions?")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Leave the epoch when anything but an agreed failure ends an update here. Collective: no.

        The peers, who do not know of it, then hear at once, and never take this rank's next message for
        the one that they wait for.
        """
        try:
            yield
        except UpdateError:
            raise
        except BaseException:
            self.comm.abandon()
            raise

    def propose(self, proposal: Proposal) -> Decision:
        """Tell all ranks what this rank holds and doubts, and conclude together.

        Raises:
            LockstepError: see `decide`.
            PeerError: a rank did not answer.

        Collective: yes, over all transfer ranks.
        """
        self._version = proposal.version
        mine = replace(proposal, detail=_clip(proposal.detail))
        return decide(self._rows(_PROPOSAL, mine, "propose"))

    def attempt(self, phase: str, work: Callable[[], Value]) -> tuple[Value | None, str]:
        """Run rank-local work of a phase, and turn a failure into a text for the next agreement.

        A failed update (a peer that is gone) is not local and passes through. Collective: no.
        """
        try:
            self._on_phase(phase)
            return work(), ""
        except UpdateError:
            raise
        except Exception as error:  # noqa: BLE001 - the phase boundary: every rank must learn of it
            return None, f"{type(error).__name__}: {error}"

    def agree(self, phase: str, failure: str, **facts: int) -> list[dict[str, int]]:
        """End a phase: raise on every rank if it failed on any, else return every rank's facts.

        Raises:
            UpdateAborted: names the ranks that failed, and why.
            LockstepError: a rank ended another phase, or another version.
            PeerError: a rank did not answer.

        Collective: yes, over all transfer ranks.
        """
        mine = Status(phase=phase, version=self._version, failure=_clip(failure), facts=facts)
        rows = self._rows(_STATUS, mine, phase)
        if {(row.phase, row.version) for row in rows} != {(phase, self._version)}:
            places = [(seat, row.phase, row.version) for seat, row in enumerate(rows)]
            raise LockstepError(f"ranks are in different phases (seat, phase, version): {places}")
        failed = {seat: row.failure for seat, row in enumerate(rows) if row.failure}
        if failed:
            raise UpdateAborted(
                f"version {self._version} was given up in phase {phase!r}: "
                + "; ".join(f"seat {seat}: {text}" for seat, text in failed.items())
            )
        return [row.facts for row in rows]

    def exchange_sizes(self, dtype: torch.dtype, sizes: Mapping[int, int]) -> list[list[int]]:
        """Tell all ranks how many bytes this rank will send to each in the round of `dtype`.

        Args:
            dtype: wire dtype of the round.
            sizes: bytes by receiver.

        Returns:
            The matrix [sender][receiver].

        Raises:
            LockstepError: a size is larger than its regions can need. Every rank sees it, so none
                allocates memory for it.

        Collective: yes, over all transfer ranks.
        """
        world_size = self.comm.rendezvous.world_size
        mine = b"".join(sizes.get(peer, 0).to_bytes(8, "little") for peer in range(world_size))
        phase = f"sizes of {dtype_name(dtype)}, version {self._version}"
        rows = self.comm.gather(mine, width=8 * world_size + 4, phase=phase)
        matrix = [
            [int.from_bytes(row[8 * p : 8 * p + 8], "little") for p in range(world_size)] for row in rows
        ]
        for sender, receiver in product(range(world_size), repeat=2):
            regions = self.plan.between(sender, receiver, dtype)
            limit = max_frame_bytes([region.numel for region in regions], dtype) if regions else 0
            if matrix[sender][receiver] > limit:
                raise LockstepError(
                    f"seat {sender} announces {matrix[sender][receiver]} bytes for seat {receiver}, "
                    f"whose regions need at most {limit}"
                )
        return matrix

    def _rows(self, rows: TypeAdapter[Value], mine: Value, phase: str) -> list[Value]:
        """Give one row to every rank and get all. A row that is none of this kind ends the lockstep."""
        blobs = self.comm.gather(
            rows.dump_json(mine), width=ROW_BYTES, phase=f"{phase} of version {self._version}"
        )
        found: list[Value] = []
        for seat, blob in enumerate(blobs):
            try:
                found.append(rows.validate_json(blob))
            except ValidationError as error:
                raise LockstepError(
                    f"seat {seat} is not in phase {phase!r} of version {self._version}, or speaks another "
                    f"protocol: {error.errors(include_url=False)[0]['msg']}"
                ) from error
        return found

    def _agreed(self) -> dict[str, Any]:
        shared = {k: v for k, v in asdict(self.settings).items() if k not in _LOCAL_SETTINGS}
        return {"protocol": PROTOCOL_VERSION, **shared}
