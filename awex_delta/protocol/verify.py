"""Do the engines hold what the trainers have? Digests of both, compared before an update commits.

A digest sums hashes of (position in the pair's line, bits). Trainers hash the values that they own or send;
an engine reads its live weights back after all writes, and hashes those. Every rank adds the digests of its
lines up for each engine rank, engines with a minus sign, so that each sum over all ranks is zero if contents
are equal. Sums by tensor are taken only after a mismatch, to name it. Nothing is kept between updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

from awex_delta.errors import LockstepError, VerificationError, listed
from awex_delta.lines.space import Space
from awex_delta.plan.pairs import Pair, engine_line
from awex_delta.protocol.agreement import Decision
from awex_delta.protocol.session import Session, Stopwatch
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.wire.digest import (
    MODULUS,
    as_unsigned,
    pays_to_compile,
    signed,
    sum_at,
    sums_by_group,
)

Content = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Gives elements of a pair's line, some at a time: positions int64 [k], and values on the same device.

Values are [k], or rows [k, w] of elements next to each other, and positions those of the first of each row.
"""


class Scope(StrEnum):
    """What one update compares."""

    OFF = "off"
    TOUCHED = "touched"
    FULL = "full"


def scope_of(settings: DeltaSettings, decision: Decision) -> Scope:
    """What the ranks compare in this update: the same on all of them.

    Args:
        settings: those that all ranks agreed on.
        decision: what the ranks decided for this update. A full sync touches every element.
    """
    if not settings.enabled or settings.verify == Scope.OFF:
        return Scope.OFF
    due = settings.verify_interval > 0 and decision.version % settings.verify_interval == 0
    if decision.verdict.kind is Kind.FULL or due:
        return Scope.FULL
    return Scope(settings.verify)


class Verifier:
    """The digests of one rank in one update.

    Attributes:
        scope: what is compared; with `OFF` nothing is read, and no collective entered.
        failure: why this rank's digests could not be taken, for the next agreement; empty if they could.
    """

    def __init__(self, session: Session, decision: Decision, watch: Stopwatch) -> None:
        """Begin an update that all ranks decided on. Seconds are booked as `digest` and `verify`."""
        self.scope = scope_of(session.settings, decision)
        self.failure = ""
        self._session = session
        self._watch = watch
        self._version = decision.version
        self._is_engine = session.comm.seat < session.comm.rendezvous.num_engine_ranks
        self._contents: list[tuple[Pair, Content]] = []
        self._sums: dict[int, int] = {}  # by line: engines of one layout get the same from one trainer rank

    def add(self, scope: Scope, pair: Pair, content: Content) -> None:
        """Take the digest of what this rank holds of one line, if `scope` is what this update compares.

        Args:
            scope: what `content` gives: the elements that this update touches, or all of the line.
            pair: the line.
            content: reads them; an engine's live weights, once they are written. Asked again, before the next
                update, if a mismatch has to be named.
        """
        if scope is not self.scope:
            return
        self._contents.append((pair, content))
        if pair.digest in self._sums and not self._is_engine:
            return
        total, failure = self._session.attempt("verify", lambda: self._sum(pair, content))
        self._sums[pair.digest] = (self._sums.get(pair.digest, 0) + (total or 0)) % MODULUS
        self.failure = self.failure or failure
        self._watch.lap("digest")

    def agree(self) -> None:
        """Compare the digests of all ranks.

        Raises:
            VerificationError: on every rank alike, naming the engine ranks and the tensors.
            PeerError: a rank did not answer.

        Collective: yes, over all transfer ranks, unless the scope is `OFF`.
        """
        if self.scope is Scope.OFF:
            return
        comm = self._session.comm
        folded = [0] * comm.rendezvous.num_engine_ranks
        if self._is_engine:
            folded[comm.seat] = -sum(self._sums.values()) % MODULUS
        else:
            for pair, _ in self._contents:
                folded[pair.receiver] = (folded[pair.receiver] + self._sums[pair.digest]) % MODULUS
        row = b"".join(total.to_bytes(8, "little") for total in folded)
        phase = f"verify of version {self._version}"
        rows = comm.gather(row, width=len(row) + 4, phase=phase)
        wrong = [
            engine
            for engine in range(len(folded))
            if sum(int.from_bytes(row[8 * engine : 8 * engine + 8], "little") for row in rows) % MODULUS
        ]
        if wrong:
            self._name_tensors(wrong, f"tensors in {phase}")
        self._watch.lap("verify")

    def _sum(self, pair: Pair, content: Content) -> int:
        total: torch.Tensor | None = None
        for pos, value in content():
            compiled = pays_to_compile(value.device, self._session.met.full_bytes)
            here = sum_at(pos, value, pair.digest, compiled=compiled)
            total = here if total is None else total + here
        return 0 if total is None else as_unsigned(total)

    def _name_tensors(self, wrong: Sequence[int], phase: str) -> None:
        engines = self._session.met.world.engines
        lines = {engine: engine_line(engines[engine].layout) for engine in wrong}
        mine, failure = self._session.attempt(
            None, lambda: {str(engine): self._sums_by_tensor(engine, line) for engine, line in lines.items()}
        )
        rows = self._session.comm.gather_json(failure or mine, phase=phase)
        place = self._session.comm.rendezvous.place
        failed = [f"{place(seat)}: {row}" for seat, row in enumerate(rows) if isinstance(row, str)]
        if failed:
            unnamed = {engine: [f"tensors that cannot be named ({'; '.join(failed)})"] for engine in lines}
            raise VerificationError(_explanation(self._version, unnamed))
        differ: dict[int, list[str]] = defaultdict(list)
        for engine, line in lines.items():
            sums = [0] * len(line.names)
            for seat, row in enumerate(rows):
                told: Any = row.get(str(engine)) if isinstance(row, dict) else None
                if not _are_sums(told, len(sums)):
                    raise LockstepError(f"{place(seat)} sent no digests in phase {phase!r}")
                sums = [total + one for total, one in zip(sums, told, strict=True)]
            names = zip(line.names, sums, strict=True)
            differ[engine] = [name for name, total in names if total % MODULUS]
        raise VerificationError(_explanation(self._version, differ))

    def _sums_by_tensor(self, engine: int, line: Space) -> list[int]:
        """This rank's digests of the tensors of one engine rank."""
        totals = torch.zeros(len(line.names), dtype=torch.int64, device="cpu")
        for pair, content in self._contents:
            if pair.receiver != engine:
                continue
            tensor_of_box = torch.searchsorted(line.starts, pair.stored.target, right=True) - 1
            salts = torch.full_like(totals, signed(pair.digest))
            for pos, value in content():
                box = torch.searchsorted(pair.stored.source, pos.cpu(), right=True) - 1
                totals += sums_by_group(pos.cpu(), value.cpu(), salts, tensor_of_box[box])
        sign = -1 if self._is_engine else 1
        return [sign * total % MODULUS for total in totals.tolist()]


def _are_sums(told: Any, count: int) -> bool:
    return isinstance(told, list) and len(told) == count and all(type(one) is int for one in told)


def _explanation(version: int, differ: Mapping[int, Sequence[str]]) -> str:
    named = "; ".join(f"engine rank {rank}: {listed(names)}" for rank, names in differ.items())
    return (
        f"version {version} was given up: live weights differ from the trainer's after the writes, "
        f"{named}. The next update is a full sync"
    )
