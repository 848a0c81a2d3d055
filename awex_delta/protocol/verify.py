"""Do the engines hold what the trainers have? Digests of both, compared before an update commits.

A *unit* is what is compared: the part of one HF tensor on one engine rank that one shard of the trainers
covers, the same in deltas and in full syncs. Trainers hash the values that they own or send, wherever they
are; an engine reads its live weights back after all writes, and hashes those. Every rank adds the digests of
its units up for each engine rank, engines with a minus sign, so that each sum over all ranks is zero where
contents are equal. Nothing is kept from one update to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from awex.transfer.transfer_plan import TransferPlan

from awex_delta.conversion.routes import Frames
from awex_delta.errors import LockstepError, VerificationError
from awex_delta.lines.geometry import Box
from awex_delta.lines.storages import gather_from
from awex_delta.plan.pairs import Plan, Region
from awex_delta.protocol.agreement import Decision
from awex_delta.protocol.session import Session, Stopwatch
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.wire.codec import RegionChange
from awex_delta.wire.digest import MODULUS, pays_to_compile, salt_of, sum_at, sum_whole

_MAX_NAMED = 8  # units that an error names


class Scope(StrEnum):
    """What one update compares."""

    OFF = "off"
    TOUCHED = "touched"
    FULL = "full"


def scope_of(settings: DeltaSettings, decision: Decision) -> Scope:
    """What the ranks compare in this update: the same on all of them.

    Args:
        settings: those that all ranks agreed on.
        decision: of this update. A full sync writes every element, so every element is touched.

    Collective: no.
    """
    if not settings.enabled or settings.verify == Scope.OFF:
        return Scope.OFF
    due = settings.verify_interval > 0 and decision.version % settings.verify_interval == 0
    if decision.verdict.kind is Kind.FULL or due:
        return Scope.FULL
    return Scope(settings.verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One engine rank's part of one HF tensor, or what one trainer shard covers of it."""

    receiver: int
    name: str
    target: Box

    @property
    def salt(self) -> int:
        """Sets this unit apart from others, also from another part of the same tensor."""
        return salt_of(f"{self.name}@{','.join(map(str, self.target.start))}")

    def __str__(self) -> str:
        ranges = (f"{a}:{a + n}" for a, n in zip(self.target.start, self.target.shape, strict=True))
        return f"{self.name} [{', '.join(ranges)}]"


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
        self._found: list[tuple[Unit, torch.Tensor]] = []

    def sent(self, frames: Frames) -> None:
        """A trainer rank's part where touched elements are compared: what its frames hold. Collective: no."""
        if self.scope is Scope.TOUCHED:
            plan, seat = self._session.plan, self._session.comm.seat
            self._run(
                lambda: self._add_changes(
                    pair
                    for (receiver, dtype), changes in frames.items()
                    for pair in zip(plan.between(seat, receiver, dtype), changes, strict=True)
                )
            )

    def owned(self, found: Iterable[tuple[Region, RegionChange]]) -> None:
        """A trainer rank's part of a delta where everything is compared. Collective: no.

        Args:
            found: all elements that the rank speaks for; not asked for where they are not compared.
        """
        if self.scope is Scope.FULL:
            self._run(lambda: self._add_changes(found))

    def written(
        self, targets: Mapping[str, torch.Tensor], staged: Sequence[tuple[Region, RegionChange]]
    ) -> None:
        """An engine rank's part of a delta: its live weights, to be read after all writes. Collective: no.

        Args:
            targets: live tensors by HF name.
            staged: what was written; only the positions are used.
        """
        if self.scope is Scope.TOUCHED:
            self._run(lambda: self._add_live(targets, staged))
        else:
            self.dense(targets, self._session.plan.dense_plan(self._session.comm.seat, sending=False))

    def dense(self, tensors: Mapping[str, torch.Tensor], plan: TransferPlan) -> None:
        """A rank's part of a full sync: all that it sent, or all that it holds. Collective: no.

        Args:
            tensors: by HF name, a trainer rank's converted ones or an engine rank's live ones.
            plan: this rank's operations.
        """
        if self.scope is Scope.FULL:
            self._run(lambda: self._add_all(tensors, plan))

    def agree(self) -> None:
        """Compare the digests of all ranks.

        Raises:
            VerificationError: on every rank alike, naming the engine ranks and the tensors.
            PeerError: a rank did not answer.

        Collective: yes, over all transfer ranks, unless the scope is `OFF`.
        """
        if self.scope is Scope.OFF:
            return
        sums, comm = self._sums(), self._session.comm
        folded = [0] * comm.rendezvous.num_engine_ranks
        for unit, total in sums.items():
            folded[unit.receiver] = (folded[unit.receiver] + total) % MODULUS
        row = b"".join(total.to_bytes(8, "little") for total in folded)
        phase = f"verify of version {self._version}"
        rows = comm.gather(row, width=len(row) + 4, phase=phase)
        wrong = [
            engine
            for engine in range(len(folded))
            if sum(int.from_bytes(row[8 * engine : 8 * engine + 8], "little") for row in rows) % MODULUS
        ]
        if wrong:
            self._name_tensors(sums, wrong, f"tensors in {phase}")
        self._watch.lap("verify")

    def _name_tensors(self, sums: Mapping[Unit, int], wrong: list[int], phase: str) -> None:
        units = _units_of(self._session.plan, wrong)
        mine = [sums.get(unit, 0) for unit in units]
        rows = self._session.comm.gather_json(mine, phase=phase)
        for seat, row in enumerate(rows):
            whole = isinstance(row, list) and all(type(total) is int for total in row)
            if not whole or len(row) != len(units):
                place = self._session.comm.rendezvous.place(seat)
                raise LockstepError(f"{place} sent no digests in phase {phase!r}")
        differ = [
            unit for unit, totals in zip(units, zip(*rows, strict=True), strict=True) if sum(totals) % MODULUS
        ]
        raise VerificationError(_explanation(self._version, differ))

    def _run(self, work: Callable[[], object]) -> None:
        _, failure = self._session.attempt("verify", work)
        self.failure = self.failure or failure
        self._watch.lap("digest")

    def _add_changes(self, found: Iterable[tuple[Region, RegionChange]]) -> None:
        for region, change in found:
            if change.value.numel():
                self._add(_unit_of(region), change.index, change.value)

    def _add_live(
        self, targets: Mapping[str, torch.Tensor], staged: Sequence[tuple[Region, RegionChange]]
    ) -> None:
        whole = {region for region, change in staged if change.index is None and change.value.numel()}
        for region in whole:  # once, in however many pieces it came
            self._add(_unit_of(region), None, targets[region.name][region.target.slices])
        for region, change in staged:
            target = targets[region.name][region.target.slices]
            if change.index is not None and change.index.numel():
                index = change.index.to(target.device)
                self._add(_unit_of(region), index, gather_from(target, index))

    def _add_all(self, tensors: Mapping[str, torch.Tensor], plan: TransferPlan) -> None:
        for op in (op for ops in plan.operations.values() for op in ops):
            target = Box(start=tuple(op.recv_offset), shape=tuple(op.overlap_shape))
            here = target if self._is_engine else replace(target, start=tuple(op.send_offset))
            unit = Unit(receiver=op.recv_rank, name=op.send_shard_meta.name, target=target)
            self._add(unit, None, tensors[unit.name].detach()[here.slices])

    def _add(self, unit: Unit, index: torch.Tensor | None, value: torch.Tensor) -> None:
        compiled = pays_to_compile(value.device, self._session.plan.full_bytes)
        if index is None:
            total = sum_whole(value, unit.salt, compiled=compiled)
        else:
            total = sum_at(index, value, unit.salt, compiled=compiled)
        self._found.append((unit, total))

    def _sums(self) -> dict[Unit, int]:
        """Digest of each unit, of an engine with a minus sign. Waits for each device once."""
        by_device: dict[torch.device, list[tuple[Unit, torch.Tensor]]] = defaultdict(list)
        for unit, total in self._found:
            by_device[total.device].append((unit, total))
        sums: dict[Unit, int] = defaultdict(int)
        sign = -1 if self._is_engine else 1
        for found in by_device.values():
            totals = torch.stack([total for _, total in found]).tolist()
            for (unit, _), total in zip(found, totals, strict=True):
                sums[unit] = (sums[unit] + sign * total) % MODULUS
        return sums


def _unit_of(region: Region) -> Unit:
    return Unit(receiver=region.receiver, name=region.name, target=region.target)


def _units_of(plan: Plan, receivers: list[int]) -> list[Unit]:
    """All units of some engine ranks, in one order on all ranks."""
    units = {
        _unit_of(region)
        for regions in plan.regions.values()
        for region in regions
        if region.receiver in receivers
    }
    return sorted(units, key=lambda unit: (unit.receiver, unit.name, unit.target.start))


def _explanation(version: int, differ: list[Unit]) -> str:
    by_engine: dict[int, list[str]] = defaultdict(list)
    for unit in differ[:_MAX_NAMED]:
        by_engine[unit.receiver].append(str(unit))
    named = "; ".join(f"engine rank {rank}: {', '.join(names)}" for rank, names in by_engine.items())
    more = f" and {len(differ) - _MAX_NAMED} more" if len(differ) > _MAX_NAMED else ""
    return (
        f"version {version} was given up: live weights differ from the trainer's after the writes, "
        f"{named}{more}. The next update is a full sync"
    )
