"""What both halves of an update share: connecting, proposing, agreeing.

Every phase ends in one agreement over all transfer ranks. A rank-local failure is carried as a value
into the next agreement and raised there by every rank at once, so that no rank ever waits for one
that gave up. Only a peer that does not answer breaks this pattern; then `Comm` gives the epoch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from awex_delta.errors import (
    AwexDeltaError,
    ConnectError,
    LockstepError,
    UpdateAborted,
    UpdateError,
    WeightsAwayError,
)
from awex_delta.garbage import uncollected
from awex_delta.plan.describe import Spec, dtype_name
from awex_delta.plan.pairs import Pair
from awex_delta.plan.rank import Plan, plan_rank
from awex_delta.plan.schedule import Meeting, meetings_of
from awex_delta.plan.world import World
from awex_delta.protocol.agreement import Decision, Proposal, Status, decide
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.connecting import Met, meet
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.wire.frame import PROTOCOL_VERSION, FrameIdentity
from awex_delta.wire.registry import codecs_for

ROW_BYTES = 4096
"""Width of every proposal and every status on the wire."""

_DETAIL_CHARS = 600
_TOTALS = ("bytes", "changed", "owned", "not_finite")

Value = TypeVar("Value")


_PROPOSAL = TypeAdapter(Proposal)
_STATUS = TypeAdapter(Status)


def _clip(text: str) -> str:
    """The begin of a text in plain ASCII: JSON then never makes it longer than a row."""
    return text.encode("ascii", "backslashreplace").decode()[:_DETAIL_CHARS]


@contextmanager
def in_step(comm: Comm, kind: type[AwexDeltaError] = UpdateError) -> Iterator[None]:
    """Around all that a rank does in an update, or to connect.

    The epoch is left when anything but an agreed failure ends it. The peers, who do not know of it, then hear
    at once, and never take this rank's next message for the one that they wait for. Inference mode is left:
    what is kept for later could not be written outside of it.

    Raises:
        ConnectError, UpdateError: as they come.
        kind: from any other exception, which is its cause. What is no `Exception` stays what it is.
    """
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    except UpdateError:
        raise
    except Exception as error:
        comm.abandon()
        if isinstance(error, ConnectError):
            raise
        raise kind(f"{comm.me}: {_named(error)}") from error
    except BaseException:
        comm.abandon()
        raise


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap on `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class Session:
    """One rank's part in the agreements of one pairing, over one `Comm`.

    Attributes:
        met: what all ranks agreed on at connect; valid while connected.
        meetings: this rank's schedule.
        codecs: the encodings that frames may have.
    """

    met: Met

    def __init__(
        self,
        comm: Comm,
        settings: DeltaSettings,
        describe: Callable[[Mapping[str, Any]], Spec],
        on_phase: Callable[[str], None] | None,
        plan: Callable[[World], Plan] | None = None,
    ) -> None:
        """Check what can be checked alone; nothing is opened.

        Args:
            comm: this rank's seat.
            settings: must be equal on every rank, except for timeouts and local memory choices.
            describe: gives this rank's description, from the settings that all must share.
            on_phase: called with the name of each phase as it begins; an exception that it raises
                counts as this rank's failure in that phase.
            plan: plans this rank's transfers, if they do not go to the other ranks of the world.

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
        self._plan = plan or (lambda world: plan_rank(world, comm.seat))
        self._is_paired = plan is None
        self._version = 0
        self._causes: dict[str, Exception] = {}  # by the text that tells others of it

    def ensure_connected(self, purpose: str) -> bool:
        """Meet all ranks in the current epoch, and agree on the plan. True when it had to be done.

        Args:
            purpose: what begins, such as "version 7".

        Raises:
            PeerError: another rank already gave the same purpose up.
            ConnectError: a rank is missing, or the two sides do not fit together. Nothing moved.

        Collective: yes, over all transfer ranks, unless already connected.
        """
        if self.comm.begin(purpose):
            return False
        self.comm.connect()
        self._meet()
        return True

    def propose(self, proposal: Proposal) -> Decision:
        """Tell all ranks what this rank holds and doubts, and conclude together.

        If a rank has to describe itself anew, all meet anew: `met` is another object afterwards.

        Raises:
            WeightsAwayError: names the ranks that cannot take part, and why.
            LockstepError: see `decide`.
            ConnectError: as one describes itself now, the two sides do not fit together. Nothing moved.
            PeerError: a rank did not answer.

        Collective: yes, over all transfer ranks.
        """
        self._version = proposal.version
        mine = replace(proposal, detail=_clip(proposal.detail), failure=_clip(proposal.failure))
        rows = self._rows(_PROPOSAL, mine, "propose")
        decision = decide(rows, [codec.name for codec in self.codecs])
        self._raise_failed("propose", [row.failure for row in rows], proposal.failure, WeightsAwayError)
        if any(row.anew for row in rows):
            self._meet()
        return decision

    def attempt(self, phase: str | None, work: Callable[[], Value]) -> tuple[Value | None, str]:
        """Run rank-local work of a phase, and turn a failure into a text for the next agreement.

        If `phase` is None, `on_phase` is not called: `work` is a part of another phase, or has a collective
        of the training framework, which no rank may miss because its `on_phase` raised. An update that failed
        already (a peer is gone, and the epoch was left) is not local: its error passes through.
        """
        try:
            if phase is not None:
                self._on_phase(phase)
            with uncollected():
                return work(), ""
        except Exception as error:
            if isinstance(error, UpdateError) and not self.comm.is_connected:
                raise
            self._causes[_named(error)] = error
            return None, _named(error)

    def agree(self, phase: str, failure: str, **facts: int) -> list[dict[str, int]]:
        """End a phase: raise on every rank if it failed on any, else return every rank's facts.

        Raises:
            UpdateAborted: names the ranks that failed, and why; its cause is what was raised on this rank.
            LockstepError: a rank ended another phase, or another version.
            PeerError: a rank did not answer.

        Collective: yes, over all transfer ranks.
        """
        mine = Status(phase=phase, version=self._version, failure=_clip(failure), facts=facts)
        rows = self._rows(_STATUS, mine, phase)
        if {(row.phase, row.version) for row in rows} != {(phase, self._version)}:
            places = [(seat, row.phase, row.version) for seat, row in enumerate(rows)]
            raise LockstepError(f"ranks are in different phases (seat, phase, version): {places}")
        self._raise_failed(phase, [row.failure for row in rows], failure)
        return [row.facts for row in rows]

    def exchange_counts(self, dtype: torch.dtype, counts: Mapping[int, int]) -> list[list[int]]:
        """Tell all ranks how many frames this rank will send to each in the round of `dtype`.

        Args:
            dtype: wire dtype of the round.
            counts: frames by receiver.

        Returns:
            The matrix [sender][receiver].

        Raises:
            LockstepError: a count is larger than its line can need, on every rank alike.

        Collective: yes, over all transfer ranks.
        """
        world_size = self.comm.rendezvous.world_size
        mine = b"".join(counts.get(peer, 0).to_bytes(8, "little") for peer in range(world_size))
        phase = f"frames of {dtype_name(dtype)}, version {self._version}"
        rows = self.comm.gather(mine, width=8 * world_size + 4, phase=phase)
        matrix = [
            [int.from_bytes(row[8 * p : 8 * p + 8], "little") for p in range(world_size)] for row in rows
        ]
        for sender, receiver in product(range(world_size), repeat=2):
            count, limit = matrix[sender][receiver], self.met.limits.get((sender, receiver, dtype), 0)
            if count > limit:
                place = self.comm.rendezvous.place
                raise LockstepError(
                    f"{place(sender)} announces {count} frames for {place(receiver)}, "
                    f"whose line needs at most {limit}"
                )
        return matrix

    def frame_identity(self, decision: Decision, pair: Pair) -> FrameIdentity:
        """What the frames of one pair carry, and what their receiver expects."""
        return FrameIdentity(
            run_id=decision.run_id,
            base_version=decision.base,
            target_version=decision.version,
            pair=pair.digest,
            sender=pair.sender,
            receiver=pair.receiver,
            dtype=pair.dtype,
            key=self.comm.seal.frame_key,
        )

    def stats(
        self,
        decision: Decision,
        facts: Sequence[Mapping[str, int]],
        *,
        mine: Mapping[str, int],
        verified: str,
        seconds: Mapping[str, float],
    ) -> UpdateStats:
        """What an update did, from what all ranks said as it ended.

        Args:
            decision: what was agreed at the beginning.
            facts: what every rank said: `_TOTALS`, as far as it has them.
            mine: the same for this rank, and `elements`.
            verified: what was compared.
            seconds: wall time by phase.
        """
        total = {name: sum(fact.get(name, 0) for fact in facts) for name in _TOTALS}
        return UpdateStats(
            version=decision.version,
            verdict=decision.verdict,
            wire_bytes=mine["bytes"],
            num_elements=mine["elements"],
            num_changed=mine.get("changed", 0),
            num_owned=mine.get("owned", 0),
            total_wire_bytes=total["bytes"],
            total_changed=total["changed"],
            total_owned=total["owned"],
            total_not_finite=total["not_finite"],
            full_bytes=self.met.full_bytes,
            verified=verified,
            seconds=seconds,
        )

    def _meet(self) -> None:
        """Describe, plan and compare. Collective: yes, over all transfer ranks."""
        try:
            self.met = meet(
                self.comm, lambda: self._describe(self._agreed()), self._plan, paired=self._is_paired
            )
        except BaseException:  # half connected is not connected, and the peers hear of it at once
            self.comm.abandon()
            raise
        # Unverified, what reads drifted weights could write beside what changed: not of its own accord.
        context = self.met.context and self.settings.verify != "off"
        self.codecs = codecs_for(self.settings.encoding, context=context)

    def _raise_failed(
        self, phase: str, failures: Sequence[str], mine: str, kind: type[UpdateAborted] = UpdateAborted
    ) -> None:
        """Raise `kind` on every rank, if a phase failed on any: by seat, why. mine: of this rank."""
        place = self.comm.rendezvous.place
        cause = self._causes.get(mine)
        self._causes.clear()  # an error keeps the memory of what raised it
        if failed := [f"{place(seat)}: {text}" for seat, text in enumerate(failures) if text]:
            text = f"version {self._version} was given up in phase {phase!r}: {'; '.join(failed)}"
            raise kind(text) from cause

    def _rows(self, rows: TypeAdapter[Value], mine: Value, phase: str) -> list[Value]:
        """Give this rank's row to all and get theirs. Raises LockstepError for a row of another kind."""
        blobs = self.comm.gather(
            rows.dump_json(mine), width=ROW_BYTES, phase=f"{phase} of version {self._version}"
        )
        found: list[Value] = []
        for seat, blob in enumerate(blobs):
            try:
                found.append(rows.validate_json(blob))
            except ValidationError as error:
                cause = error.errors(include_url=False)[0]["msg"]
                raise LockstepError(
                    f"{self.comm.rendezvous.place(seat)} is not in phase {phase!r} of version "
                    f"{self._version}, or speaks another protocol: {cause}"
                ) from error
        return found

    def _agreed(self) -> dict[str, Any]:
        return {"protocol": PROTOCOL_VERSION, **self.settings.shared()}
