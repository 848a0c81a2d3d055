"""A trainer rank's end of every update, wherever it goes: what it owns, doubts, proposes, committed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from awex_delta.conversion.routes import Route, Router, find_routes, param_specs
from awex_delta.detection.slices import Detection
from awex_delta.errors import LockstepError
from awex_delta.plan.describe import TrainerSpec, World
from awex_delta.protocol.agreement import Proposal
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.ledger import TrainerLedger
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.session import Session
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.view import TrainerView


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
        complete: Callable[[World], World] | None = None,
        plan_seat: int | None = None,
    ) -> None:
        """Check what can be checked alone; nothing is opened.

        Args:
            view: the training framework's adapter.
            rendezvous: where the ranks meet; the same on all of them.
            trainer_rank: this rank in the trainer's world, from 0.
            settings: as resolved.
            on_phase: called as each local phase begins; what it raises counts as a failure there.
            device: where the weights live, None for the CPU.
            complete: adds to the world what has no seat, such as a folder that is written to.
            plan_seat: this rank's number in the plan, where that is not its seat in the rendezvous.

        Raises:
            ConfigError: a rank, the world size or the encoding is not allowed.

        Collective: no.
        """
        self._view = view
        self._rank = trainer_rank
        self._settings = settings
        self._comm = Comm(rendezvous, rendezvous.trainer_seat(trainer_rank), settings, device)
        self._session = Session(self._comm, settings, self._describe, on_phase, complete)
        self._ledger = TrainerLedger(run_id=uuid.uuid4().hex)
        self._routes: dict[str, Route] = {}  # found at the first connect
        self._shares_whole = False  # some parameter is owned in parts, but has to be sent whole
        self._plan_seat = self._comm.seat if plan_seat is None else plan_seat
        self._bound_router: Router | None = None  # bound at connect

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

    @property
    def _router(self) -> Router:
        if self._bound_router is None:
            raise LockstepError("nothing can be packed before the ranks have met")
        return self._bound_router

    def _join(self, purpose: str) -> bool:
        """Meet the other ranks and bind what follows from their plan. True when it had to be done."""
        if not self._session.ensure_connected(purpose) and self._bound_router is not None:
            return False
        world = self._session.world
        if world.run_id != self._ledger.run_id:  # rank 0 names the run
            self._ledger = TrainerLedger(run_id=world.run_id)
        self._bound_router = Router(self._view, self._routes, self._session.plan, self._plan_seat)
        params = [param for trainer in world.trainers for param in trainer.params]
        self._shares_whole = any(p.owners and not all(o.sparse for o in p.outputs) for p in params)
        return True

    def _detect(self, version: int) -> Detection:
        """What changed, or this rank's reason for a full sync. Never raises for a local cause."""
        if not self._settings.enabled:
            return Detection(reason=Reason.DELTA_DISABLED)
        doubt = self._ledger.doubt(version, self._settings.anchor_interval)
        if doubt is not Reason.NONE:
            return Detection(reason=doubt)
        detection, failure = self._session.attempt("detect", self._view.detect)
        return detection or Detection(reason=Reason.DETECTION_FAILED, detail=failure)

    def _proposal(self, version: int, detection: Detection) -> Proposal:
        return Proposal(
            role="trainer",
            version=version,
            run_id=self._ledger.run_id,
            held=self._ledger.version,
            reason=detection.reason,
            detail=detection.detail,
            changed=detection.num_changed,
            owned=detection.num_owned,
        )

    def _describe(self, agreed: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._routes:
            self._routes = find_routes(self._view, self._rank)
        layout = self._view.layout()
        return TrainerSpec(
            rank=self._rank,
            run_id=self._ledger.run_id,
            agreed=dict(agreed),
            architecture=layout.architecture,
            rank_info=dict(layout.rank_info),
            vocab_size=layout.vocab_size,
            tied_embeddings=layout.tied_embeddings,
            params=param_specs(self._routes, with_ranges=self._session.uses_context),
        ).model_dump(mode="json")
