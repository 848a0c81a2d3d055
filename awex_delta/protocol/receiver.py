"""The engine's half of one update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from awex_delta.engines.view import EngineView
from awex_delta.errors import LayoutError
from awex_delta.lines.storages import gather_from, read_range, scatter_into, write_range
from awex_delta.plan.describe import EngineSpec, TensorSpec, dtype_name
from awex_delta.plan.pairs import Region, dense_volume
from awex_delta.protocol.agreement import Decision, Proposal, check_arrived
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.ledger import EngineLedger, check_version
from awex_delta.protocol.pipeline import receive_frames
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.session import Session, Stopwatch, in_step
from awex_delta.protocol.staging import StagedChange, Staging
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind
from awex_delta.protocol.verify import Verifier
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.wire.codec import Context, RegionChange, settle
from awex_delta.wire.pieces import slices

logger = logging.getLogger(__name__)


class Receiver:
    """Keeps one engine rank identical to the trainer. One object an engine rank.

    Example:
        >>> receiver = Receiver(view, rendezvous, 0, "a", settings)  # doctest: +SKIP
        >>> receiver.connect()  # doctest: +SKIP
        >>> stats = receiver.update_weights(version)  # doctest: +SKIP
    """

    def __init__(
        self,
        view: EngineView,
        rendezvous: Rendezvous,
        engine_rank: int,
        engine: str,
        settings: DeltaSettings,
        *,
        on_phase: Callable[[str], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Check the arguments; nothing is opened before `connect`.

        Args:
            view: the engine's adapter.
            rendezvous: where the ranks meet; the same on all of them.
            engine_rank: this rank among all engine ranks of the pairing, from 0.
            engine: name of the engine instance; ranks that share it hold one model together.
            settings: as both sides resolved them.
            on_phase: called as each local phase begins; what it raises counts as a failure there.
            device: where the weights live, None for the CPU.

        Raises:
            ConfigError: a rank or the world size is not allowed.

        Collective: no.
        """
        rendezvous.require_both_sides()
        self._view = view
        self._rank = engine_rank
        self._engine = engine
        self._comm = Comm(rendezvous, rendezvous.engine_seat(engine_rank), settings, device)
        self._session = Session(self._comm, settings, self._describe, on_phase)
        self._ledger = EngineLedger()
        self._targets: dict[str, torch.Tensor] = {}

    @property
    def version(self) -> int | None:
        """The committed version whose weights this rank holds; None before the first."""
        return self._ledger.version

    @property
    def ready(self) -> bool:
        """True when the weights are exactly `version`, so they may be served."""
        return self._ledger.ready

    @property
    def dirty(self) -> bool:
        """True when weights were written that no commit followed: a mixture, never to be served."""
        return self._ledger.dirty

    @property
    def view(self) -> EngineView:
        """The engine's adapter, as it was given."""
        return self._view

    @property
    def comm(self) -> Comm:
        """This rank's seat, for tests and diagnosis."""
        return self._comm

    def invalidate(self) -> None:
        """Say that the weights were lost or replaced (sleep, reload): the next update is full.

        Collective: no.
        """
        self._ledger = EngineLedger()

    def connect(self) -> None:
        """Meet the trainer, agree on the plan, refuse what does not fit. Idempotent.

        Raises:
            ConnectError: a rank is missing, or the two sides do not fit. No weight was touched.

        Collective: yes, over all transfer ranks.
        """
        self._session.ensure_connected("connect")

    def update_weights(self, version: int) -> UpdateStats:
        """Take part in one update; the counterpart of `Sender.update_weights`.

        Args:
            version: the same as on every other rank.

        Returns:
            What this rank did. Its weights are `version` now, and `ready` is True.

        Raises:
            ConfigError: `version` is not an int of at least 0.
            ConnectError: ranks are missing, or do not fit.
            UpdateError: the update did not commit. `ready` tells whether the weights are still the
                version before; where a write had begun, they are not served until a full sync.

        Collective: yes, over all transfer ranks.
        """
        check_version(version)
        watch = Stopwatch()
        with in_step(self._comm):
            self._session.ensure_connected(f"version {version}")
            watch.lap("connect")
            decision = self._session.propose(self._proposal(version))
            watch.lap("propose")
            verifier = Verifier(self._session, decision, watch)
            if decision.verdict.kind is Kind.DELTA:
                num_bytes, num_elements, failure = self._receive_delta(decision, watch, verifier)
            else:
                num_bytes, num_elements, failure = self._receive_full(watch, verifier)
            facts = self._session.agree("apply", failure or verifier.failure, applied=num_elements)
            check_arrived(facts)
            watch.lap("apply")
            verifier.agree()
        self._commit(decision)
        mine = {"bytes": num_bytes, "elements": num_elements}
        stats = self._session.stats(
            decision, facts, mine=mine, verified=verifier.scope.value, seconds=watch.seconds
        )
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG,
            "version %d: %s; received %d bytes in %.3f s",
            version,
            decision.verdict,
            num_bytes,
            sum(stats.seconds.values()),
        )
        return stats

    def close(self) -> None:
        """Leave the pairing; the weights stay as they are. Collective: no."""
        self._comm.close()

    def _describe(self, agreed: Mapping[str, Any]) -> Mapping[str, Any]:
        tensors = self._view.tensors()
        for once, again in zip(tensors, self._view.tensors(), strict=True):
            if once.view.data_ptr() != again.view.data_ptr():
                raise LayoutError(
                    f"{once.name}: tensors() of engine {self._engine!r} gives copies, which the engine would "
                    "never read; give views of the live weights"
                )
        self._targets = {tensor.name: tensor.view for tensor in tensors if tensor.tied_to is None}
        return EngineSpec(
            rank=self._rank,
            engine=self._engine,
            agreed=dict(agreed),
            tensors=tuple(
                TensorSpec(
                    name=tensor.name,
                    dtype=dtype_name(tensor.view.dtype),
                    shape=tuple(tensor.view.shape),
                    global_shape=tensor.global_shape,
                    global_offset=tensor.global_offset,
                    tied_to=tensor.tied_to,
                )
                for tensor in tensors
            ),
        ).model_dump(mode="json")

    def _proposal(self, version: int) -> Proposal:
        held = self._ledger
        return Proposal(
            role="engine", version=version, run_id=held.run_id, held=held.version, dirty=held.dirty
        )

    def _receive_delta(
        self, decision: Decision, watch: Stopwatch, verifier: Verifier
    ) -> tuple[int, int, str]:
        """Stage every frame, agree, then write. Nothing is written before all ranks have staged."""
        self._session.agree("encode", "")
        watch.lap("encode")
        staging = Staging(self._session, decision, self._settle, self._context, self._old)
        num_bytes, failure = 0, ""
        for dtype in self._session.plan.dtypes:
            received, here = receive_frames(self._session, dtype, staging.of(dtype), watch)
            num_bytes, failure = num_bytes + received, failure or here
        staged, late = self._session.attempt("stage", staging.finish)
        if staging.has_drifted:
            self._ledger = self._ledger.touch()  # what it holds is no version, so it must not be served
        self._session.agree("stage", failure or late)
        watch.lap("stage")
        self._ledger = self._ledger.touch()
        applied, failure = self._session.attempt("apply", lambda: self._apply(staged or []))
        if not failure:
            watch.lap("apply")
            # A region that was sent whole, in however many frames, is read back once.
            verifier.written(self._targets, [(p.region, p.change) for p in staged or [] if not p.start])
        return num_bytes, applied or 0, failure

    def _old(self, region: Region, index: torch.Tensor) -> torch.Tensor:
        target = self._target(region)
        return gather_from(target, index.to(target.device))

    def _settle(self, region: Region, change: RegionChange) -> RegionChange:
        """Values for steps, from the live weights: all ranks agreed that they are the base version."""
        if change.index is None or change.code is None:
            return change
        target = self._target(region)
        for piece in slices(change.index.numel()):
            old = gather_from(target, change.index[piece].to(target.device)).cpu()
            here = replace(change, value=change.value[piece], code=change.code[piece])
            change.value[piece] = settle(here, old).value
        return replace(change, code=None)

    def _context(self, region: Region) -> Context:
        return Context(owned=region.owned, read=partial(read_range, self._target(region)))

    def _target(self, region: Region) -> torch.Tensor:
        return self._targets[region.name][region.target.slices]

    def _apply(self, staged: list[StagedChange]) -> int:
        applied = 0
        for part in staged:
            target, change = self._target(part.region), part.change
            if change.index is None:
                write_range(target, part.start, change.value.to(target.device))
            else:
                for piece in slices(change.index.numel()):
                    index, value = (t[piece].to(target.device) for t in (change.index, change.value))
                    scatter_into(target, index, value)
            applied += change.value.numel()
        self._view.synchronize()
        return applied

    def _receive_full(self, watch: Stopwatch, verifier: Verifier) -> tuple[int, int, str]:
        """AWEX's dense path writes in place, so the engine is dirty from here to the commit."""
        _, failure = self._session.attempt("prepare", lambda: None)
        self._session.agree("prepare", failure)
        watch.lap("prepare")
        self._ledger = self._ledger.touch()
        plan = self._session.plan.dense_plan(self._comm.seat, sending=False)
        self._comm.receive_weights(self._targets, plan, phase="send weights")
        watch.lap("transfer")
        _, failure = self._session.attempt("apply", self._view.synchronize)
        if not failure:
            watch.lap("apply")
            verifier.dense(self._targets, plan)
        return *dense_volume(plan), failure

    def _commit(self, decision: Decision) -> None:
        self._ledger = self._ledger.commit(decision.run_id, decision.version)
        try:
            self._view.committed(decision.version)
        except BaseException:
            self._ledger = self._ledger.touch()  # caches may be stale: not ready until a full sync
            raise
