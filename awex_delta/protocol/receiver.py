"""The engine's half of one update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from awex_delta.engines.view import Bound, EngineTensor, EngineView, publish
from awex_delta.errors import ConnectError, listed
from awex_delta.lines.boxes import BoxMap
from awex_delta.lines.ends import LineEnd
from awex_delta.lines.storages import Storages
from awex_delta.plan.describe import EngineColumns, EngineSpec, dtype_name
from awex_delta.plan.pairs import Pair, engine_line
from awex_delta.plan.rank import PairKey
from awex_delta.plan.shards import dense_volume
from awex_delta.protocol.agreement import Decision, Proposal, check_arrived
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.ledger import EngineLedger, check_version
from awex_delta.protocol.pipeline import receive_frames
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.replicas import warn_of_drift
from awex_delta.protocol.session import Session, Stopwatch, in_step
from awex_delta.protocol.staging import Staging
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.protocol.verify import Scope, Verifier
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require
from awex_delta.wire.context import numba_is_installed

logger = logging.getLogger(__name__)


class Receiver:
    """Keeps one engine rank identical to the trainer. One object for each engine rank.

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
            ConfigError: an argument has a wrong type, or a rank or the world size is not allowed.
        """
        require(Rendezvous, "a Rendezvous", rendezvous=rendezvous)
        require(str, "a name", engine=engine)
        require(DeltaSettings, "what resolve(...).settings is", settings=settings)
        self._bound = Bound(view)
        rendezvous.require_both_sides()
        self._view = view
        self._rank = engine_rank
        self._engine = engine
        self._comm = Comm(rendezvous, rendezvous.engine_seat(engine_rank), settings, device)
        self._session = Session(self._comm, settings, self._describe, on_phase)
        self._ledger = EngineLedger()
        self._described: dict[str, tuple[Any, ...]] = {}  # what all ranks know of the tensors
        self._targets: dict[str, torch.Tensor] = {}  # in the order of the engine's line
        self._storages: Storages | None = None
        self._ends: dict[PairKey, LineEnd] = {}

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
        """Say that the weights were lost or replaced (sleep, reload): the next update is full."""
        self._ledger = EngineLedger()

    def connect(self) -> None:
        """Meet the trainer, agree on the plan, refuse what does not fit. Idempotent.

        Raises:
            ConfigError: it is closed.
            ConnectError: a rank is missing, or the two sides do not fit. No weight was touched.

        Collective: yes, over all transfer ranks.
        """
        self._comm.require_open("Receiver")
        with in_step(self._comm, ConnectError):
            self._session.ensure_connected("connect")

    def update_weights(self, version: int) -> UpdateStats:
        """Take part in one update; the counterpart of `Sender.update_weights`.

        Args:
            version: the same as on every other rank.

        Returns:
            What this rank did. Its weights are `version` now, and `ready` is True.

        Raises:
            ConfigError: `version` is not an int of at least 0, or this is closed.
            ConnectError: ranks are missing, or do not fit.
            UpdateError: the update did not commit, or the view could not publish it. `ready` tells whether
                the weights are still the version before; if a write had begun, they are not served until a
                full sync.

        Collective: yes, over all transfer ranks.
        """
        check_version(version)
        self._comm.require_open("Receiver")
        watch = Stopwatch()
        with in_step(self._comm):
            self._session.ensure_connected(f"version {version}")
            watch.lap("connect")
            decision = self._session.propose(self._proposal(version))
            watch.lap("propose")
            _, failure = self._session.attempt(None, self._make_tables)
            verifier = Verifier(self._session, decision, watch)
            if decision.verdict.kind is Kind.DELTA:
                num_bytes, num_elements, failure = self._receive_delta(decision, watch, verifier, failure)
            else:
                num_bytes, num_elements, failure = self._receive_full(watch, verifier, failure)
            _, moved = self._session.attempt(None, self._bound.require_unmoved)
            failure = failure or verifier.failure or moved
            facts = self._session.agree("apply", failure, applied=num_elements)
            check_arrived(facts)
            watch.lap("apply")
            warn_of_drift(self._session, version, facts, {}, {})  # the trainers tell among themselves
            verifier.agree()
        # All ranks have committed: nothing from here on may fail, but for what publishes.
        self._commit(decision)
        mine = {"bytes": num_bytes, "elements": num_elements}
        stats = self._session.stats(
            decision, facts, mine=mine, verified=verifier.scope.value, seconds=watch.seconds
        )
        with suppress(Exception):  # a log handler of the caller's
            logger.log(
                logging.INFO if self._rank == 0 else logging.DEBUG,
                "version %d: %s; received %d bytes in %.3f s",
                version,
                decision.verdict,
                num_bytes,
                sum(stats.seconds.values()),
            )
        return stats

    def disconnect(self) -> None:
        """Leave the pairing until the next `connect` or `update_weights`; the weights stay as they are."""
        self._comm.leave()

    def close(self) -> None:
        """Leave the pairing for good; the weights stay as they are."""
        self._comm.close()

    def _describe(self, agreed: Mapping[str, Any]) -> EngineSpec:
        self._bound.look()
        tensors = _by_storage(self._bound.parts)
        self._targets = {tensor.name: tensor.view for tensor in tensors if tensor.tied_to is None}
        self._described = self._bound.looks()
        self._storages = None
        self._ends = {}
        return EngineSpec(
            rank=self._rank,
            engine=self._engine,
            agreed=dict(agreed),
            context=numba_is_installed(),
            layout=EngineColumns(
                names=tuple(tensor.name for tensor in tensors),
                dtypes=tuple(dtype_name(tensor.view.dtype) for tensor in tensors),
                shapes=tuple(tuple(tensor.view.shape) for tensor in tensors),
                global_shapes=tuple(tuple(tensor.global_shape) for tensor in tensors),
                global_offsets=tuple(tuple(tensor.global_offset) for tensor in tensors),
                tied_to=tuple(tensor.tied_to or "" for tensor in tensors),
            ),
        )

    def _look(self) -> None:
        """Bind what the engine computes with now. The order of the line stays, until ranks meet anew."""
        if self._bound.look():
            views = {tensor.name: tensor.view for tensor in self._bound.parts}
            self._targets = {name: views[name] for name in self._targets if name in views}
            self._storages = None

    def _make_tables(self) -> None:
        """After the ranks met, make the tables of all lines."""
        if not self._ends:
            pairs = self._session.met.plan.pairs
            self._ends = {key: LineEnd(pair.stored, self._memory, pair.dtype) for key, pair in pairs.items()}

    def _memory(self) -> Storages:
        if self._storages is None:
            self._storages = Storages(list(self._targets.values()))
        return self._storages

    def _proposal(self, version: int) -> Proposal:
        _, failure = self._session.attempt(None, self._look)
        moved = self._bound.moved
        if failure or moved:  # no version any more, whatever lies there
            self._ledger = EngineLedger(dirty=self._ledger.dirty)
        held = self._ledger
        return Proposal(
            role="engine",
            version=version,
            run_id=held.run_id,
            held=held.version,
            dirty=held.dirty,
            reason=Reason.ENGINE_MOVED if moved else Reason.NONE,
            detail=moved,
            failure=failure,
            anew=bool(moved) and self._bound.looks() != self._described,
        )

    def _receive_delta(
        self, decision: Decision, watch: Stopwatch, verifier: Verifier, failure: str
    ) -> tuple[int, int, str]:
        """Stage every frame, agree, then write. Nothing is written before all ranks have staged.

        failure: why this rank cannot go on, if something has failed on it already.
        """
        self._session.agree("encode", failure)
        watch.lap("encode")
        staging = Staging(self._session, decision, self._ends, self._names)
        num_bytes, failure = 0, ""
        for dtype in self._session.met.dtypes:
            received, here = receive_frames(self._session, dtype, staging.of(dtype), watch)
            num_bytes, failure = num_bytes + received, failure or here
        _, late = self._session.attempt("stage", staging.finish)
        if staging.has_drifted:
            self._ledger = self._ledger.touch()  # what it holds is no version, so it must not be served
        self._session.agree("stage", failure or late)
        watch.lap("stage")
        self._ledger = self._ledger.touch()
        applied, failure = self._session.attempt("apply", lambda: self._apply(staging))
        if not failure:
            watch.lap("apply")
            for key in staging.keys():  # noqa: SIM118 - of lines, no mapping
                pair = self._session.met.plan.pairs[key]
                verifier.add(Scope.TOUCHED, pair, partial(staging.live, key))
            self._verify_all(verifier)
        return num_bytes, applied or 0, failure

    def _apply(self, staging: Staging) -> int:
        applied = staging.write()
        self._view.synchronize()
        return applied

    def _verify_all(self, verifier: Verifier) -> None:
        for key, pair in self._session.met.plan.pairs.items():
            verifier.add(Scope.FULL, pair, self._ends[key].rows)

    def _names(self, pair: Pair, pos: torch.Tensor) -> str:
        """The tensors in which some positions of a line lie, for messages."""
        there, _ = BoxMap(pair.stored).map(pos)
        return listed(engine_line(self._session.met.world.engines[self._rank].layout).names_at(there))

    def _receive_full(self, watch: Stopwatch, verifier: Verifier, failure: str) -> tuple[int, int, str]:
        """A full sync writes in place, so the engine is dirty from here to the commit."""
        _, here = self._session.attempt("prepare", lambda: None)
        self._session.agree("prepare", failure or here)
        watch.lap("prepare")
        self._ledger = self._ledger.touch()
        plan = self._session.met.plan.dense
        self._comm.receive_weights(self._targets, plan, phase="send weights")
        watch.lap("transfer")
        _, failure = self._session.attempt("apply", self._view.synchronize)
        if not failure:
            watch.lap("apply")
            self._verify_all(verifier)
        return *dense_volume(plan), failure

    def _commit(self, decision: Decision) -> None:
        self._ledger, self._bound.moved = self._ledger.commit(decision.run_id, decision.version), ""
        try:
            publish(self._view, decision.version, self._comm.me)
        except BaseException:
            self._ledger = self._ledger.touch()  # caches may be stale: not ready until a full sync
            raise


def _by_storage(tensors: Sequence[EngineTensor]) -> list[EngineTensor]:
    """Put tensors of one storage together, so that each storage is one range of the engine's line."""
    order: dict[int, int] = {}
    for tensor in tensors:
        order.setdefault(tensor.view.untyped_storage().data_ptr(), len(order))
    return sorted(tensors, key=lambda tensor: order[tensor.view.untyped_storage().data_ptr()])
