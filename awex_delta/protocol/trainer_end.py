"""What a trainer rank does in every update, wherever it goes: describe, detect, propose, keep the ledger."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from awex_delta.conversion.routes import Route, find_routes
from awex_delta.detection.slices import Detection
from awex_delta.errors import ConnectError
from awex_delta.plan.describe import TrainerColumns, TrainerSpec, dtype_name
from awex_delta.plan.rank import Plan
from awex_delta.plan.world import World
from awex_delta.protocol.agreement import Decision, Proposal
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.ledger import TrainerLedger
from awex_delta.protocol.outgoing import Outgoing
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.session import Session, Stopwatch, in_step
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require
from awex_delta.trainers.view import TrainerView
from awex_delta.wire.context import numba_is_installed


class TrainerEnd:
    """What `Sender` and `DiskWriter` have in common."""

    def __init__(
        self,
        view: TrainerView,
        rendezvous: Rendezvous,
        trainer_rank: int,
        settings: DeltaSettings,
        *,
        on_phase: Callable[[str], None] | None,
        device: torch.device | None = None,
        plan: Callable[[World], Plan] | None = None,
    ) -> None:
        """Check what can be checked alone; nothing is opened.

        Args:
            view: the training framework's adapter.
            rendezvous: where the ranks meet; the same on all of them.
            trainer_rank: this rank in the trainer's world, from 0.
            settings: as resolved.
            on_phase: called as each local phase begins; what it raises counts as a failure there.
            device: where the weights live, None for the CPU.
            plan: plans this rank's transfers, if they do not go to the other ranks of the rendezvous.

        Raises:
            ConfigError: an argument has a wrong type, or a rank, the world size or the encoding is refused.
        """
        require(TrainerView, "a TrainerView, such as MegatronTrainer.attach makes", view=view)
        require(Rendezvous, "a Rendezvous", rendezvous=rendezvous)
        require(DeltaSettings, "what resolve(...).settings is", settings=settings)
        self._view = view
        self._device = device
        self._rank = trainer_rank
        self._settings = settings
        self._comm = Comm(rendezvous, rendezvous.trainer_seat(trainer_rank), settings, device)
        self._session = Session(self._comm, settings, self._describe, on_phase, plan)
        self._ledger = TrainerLedger(run_id=uuid.uuid4().hex)
        self._routes: dict[str, Route] = {}  # found at the first connect
        self._shares_whole = False  # some parameter is owned in parts, but has to be sent whole
        self._outgoing: Outgoing | None = None  # bound at connect

    @property
    def version(self) -> int | None:
        """The last committed version, None before the first."""
        return self._ledger.version

    @property
    def run_id(self) -> str:
        """Identity of this trainer's life, the same on all its ranks once connected."""
        return self._ledger.run_id

    @property
    def comm(self) -> Comm:
        """This rank's seat, for tests and diagnosis."""
        return self._comm

    def _join(self, purpose: str) -> Outgoing:
        """Meet the other ranks if that is due. Returns the lines that this rank sends."""
        with in_step(self._comm, ConnectError):
            self._session.ensure_connected(purpose)
            return self._bind()

    def _bind(self) -> Outgoing:
        """The lines that this rank sends by what all ranks agreed on last."""
        met = self._session.met
        if self._outgoing is not None and self._outgoing.pairs is met.plan.pairs:
            return self._outgoing
        if met.world.run_id != self._ledger.run_id:  # rank 0 names the run
            self._ledger = TrainerLedger(run_id=met.world.run_id)
        self._shares_whole = any(
            bool(trainer.owners[param]) and not sparse
            for trainer in met.world.trainers
            for param, sparse in zip(
                trainer.layout.params.tolist(), trainer.layout.sparse.tolist(), strict=True
            )
        )
        self._outgoing = Outgoing(self._view, self._routes, met.plan, self._device)
        return self._outgoing

    def _propose(self, version: int, outgoing: Outgoing, watch: Stopwatch) -> tuple[Detection, Decision]:
        """Look at the live weights, find what changed, and conclude with all ranks what to do.

        Raises:
            WeightsAwayError: weights of a rank cannot be read. Nothing was read of any rank's either.
            LockstepError, PeerError: see `Session.propose`.
        """
        _, failure = self._session.attempt(None, outgoing.look)
        detection = Detection() if failure else self._detect(version)
        watch.lap("detect")
        decision = self._session.propose(self._proposal(version, detection, failure))
        watch.lap("propose")
        return detection, decision

    def _gather(self, outgoing: Outgoing) -> str:
        """Make all local weights current. Returns why that failed. Collective among the trainers."""
        outgoing.release()  # before others are made: an average holds a copy of all weights
        _, failure = self._session.attempt(None, self._view.gather_params)
        return failure

    def _detect(self, version: int) -> Detection:
        """What changed, or this rank's reason for a full sync. Never raises for a local cause."""
        if not self._settings.enabled:
            return Detection(reason=Reason.DELTA_DISABLED)
        doubt = self._ledger.doubt(version, self._settings.anchor_interval)
        if doubt is Reason.ANCHOR_DUE:
            return Detection(reason=doubt)
        # Asked even if the answer cannot be used: a baseline may still know what it found for an update that
        # failed, and would take it for what is true of the weights that are sent now.
        detection, failure = self._session.attempt("detect", self._view.detect)
        if doubt is not Reason.NONE:
            detail = f"{self._ledger.version} was committed, {version} was asked for"
            return Detection(reason=doubt, detail=detail if doubt is Reason.VERSION_GAP else "")
        return detection or Detection(reason=Reason.DETECTION_FAILED, detail=failure)

    def _proposal(self, version: int, detection: Detection, failure: str) -> Proposal:
        return Proposal(
            role="trainer",
            version=version,
            run_id=self._ledger.run_id,
            held=self._ledger.version,
            reason=detection.reason,
            detail=detection.detail,
            changed=detection.num_changed,
            owned=detection.num_owned,
            failure=failure,
        )

    def _describe(self, agreed: Mapping[str, Any]) -> TrainerSpec:
        if not self._routes:
            self._routes = find_routes(self._view, self._rank)
        layout, infos = self._view.layout(), [route.info for route in self._routes.values()]
        columns, held = _columns(self._routes), layout.parts
        parts = () if held is None else [held[name] for name in columns.names]
        return TrainerSpec(
            rank=self._rank,
            run_id=self._ledger.run_id,
            agreed=dict(agreed),
            context=numba_is_installed(),
            architecture=layout.architecture,
            rank_info=dict(layout.rank_info),
            vocab_size=layout.vocab_size,
            tied_embeddings=layout.tied_embeddings,
            owners=tuple(info.owners for info in infos),
            owned=np.array([[i.owned_start, i.owned_stop] for i in infos], np.int64).reshape(-1, 2).T,
            layout=columns,
            offsets=tuple(part.offset for part in parts),
            wholes=tuple(part.whole for part in parts),
        )


def _columns(routes: Mapping[str, Route]) -> TrainerColumns:
    """The layout of this rank: its parameters, what they convert to, and where their elements go."""
    outputs = [(place, output) for place, route in enumerate(routes.values()) for output in route.outputs]
    moves = [move for route in routes.values() for move in route.relocations or [None] * len(route.outputs)]
    runs = [
        np.stack([np.full(move.src.numel(), number), move.src.numpy(), move.dst.numpy(), move.length.numpy()])
        for number, move in enumerate(moves)
        if move is not None
    ]
    return TrainerColumns(
        keys=tuple(routes),
        numels=np.array([torch.Size(r.info.shape).numel() for r in routes.values()], np.int64),
        params=np.array([place for place, _ in outputs], np.int64),
        names=tuple(output.name for _, output in outputs),
        shapes=tuple(output.shape for _, output in outputs),
        dtypes=tuple(dtype_name(output.dtype) for _, output in outputs),
        sparse=np.array([output.sparse for _, output in outputs], bool),
        runs=np.concatenate([np.zeros((4, 0), np.int64), *runs], axis=1).astype(np.int64),
    )
