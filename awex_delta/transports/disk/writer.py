"""The trainer's half of updates through a folder."""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from awex_delta.comm import Comm
from awex_delta.errors import LockstepError, UpdateAborted
from awex_delta.plan.agreement import Decision, Proposal
from awex_delta.plan.ledger import TrainerLedger, check_version
from awex_delta.plan.specs import TrainerSpec
from awex_delta.rendezvous import Rendezvous
from awex_delta.routes import Route, Router, find_routes, param_specs
from awex_delta.session import Session, Stopwatch
from awex_delta.transports.disk.collect import Taken, bring_together, take_weights
from awex_delta.transports.disk.content import Digests, of_changes, of_items, to_text
from awex_delta.transports.disk.folder import Folder, Step, ignore_step
from awex_delta.transports.disk.layout import (
    FOLDER_SEAT,
    WholeTensor,
    assign_writers,
    tied_names,
    with_folder,
)
from awex_delta.transports.disk.pack import PackedFile, delta_items, file_name, pack_file
from awex_delta.transports.disk.publish import Job, Publisher, Ranks, Writing
from awex_delta.types import DeltaSettings, Detection, TrainerView, UpdateStats
from awex_delta.verdict import Kind, Reason
from awex_delta.verify import Scope, scope_of
from awex_delta.wire.choice import cheapest

logger = logging.getLogger(__name__)


class DiskWriter:
    """Writes this trainer's versions to a folder. One object a trainer rank.

    Example:
        >>> writer = DiskWriter(view, rendezvous, trainer_rank=rank, settings=settings)  # doctest: +SKIP
        >>> for version in range(steps):                                                 # doctest: +SKIP
        ...     train_step()
        ...     writer.update_weights(version)
        >>> writer.close()                                                               # doctest: +SKIP
    """

    def __init__(
        self,
        view: TrainerView,
        rendezvous: Rendezvous,
        trainer_rank: int,
        settings: DeltaSettings,
        *,
        extra_files: Mapping[str, bytes] | None = None,
        options: Mapping[str, Any] | None = None,
        on_phase: Callable[[str], None] | None = None,
        on_step: Step = ignore_step,
    ) -> None:
        """Check the arguments; nothing is opened before `connect`.

        Args:
            view: the training framework's adapter.
            rendezvous: where the trainer ranks meet, with no engine ranks; `Rendezvous.alone()` for one.
            trainer_rank: this rank in the trainer's world, from 0.
            settings: as resolved; names the folder.
            extra_files: what lies beside the weights of a full version, such as config.json and the
                files of the tokenizer, by name; rank 0's are written.
            options: fsspec's options of the filesystem.
            on_phase: called as each local phase begins; what it raises counts as a failure there.
            on_step: called in the background as each step of writing begins; what it raises fails the
                version.

        Raises:
            ConfigError: the URL cannot be opened, or the rank is not allowed.

        Collective: no.
        """
        self._view = view
        self._rank = trainer_rank
        # The schedule between ranks is not used here, so any number of them will do.
        self._settings = replace(settings, allow_any_world_size=True)
        self._extra = dict(extra_files or {})
        self._comm = Comm(
            rendezvous,
            rendezvous.trainer_seat(trainer_rank),
            timeout_seconds=settings.timeout_seconds,
            connect_timeout_seconds=settings.connect_timeout_seconds,
        )
        self._session = Session(self._comm, self._settings, self._describe, on_phase, with_folder)
        ranks = Ranks(rendezvous, trainer_rank, settings.timeout_seconds)
        folder = Folder(settings.disk_url, options)
        self._publisher = Publisher(folder, ranks, settings.keep_anchors, on_step)
        self._ledger = TrainerLedger(run_id=uuid.uuid4().hex)
        self._routes: dict[str, Route] = {}
        self._router: Router | None = None  # bound at connect
        self._wholes: tuple[WholeTensor, ...] = ()
        self._shares_whole = False
        self._writing: Writing | None = None
        self._unreported = ""  # why the last version does not exist, until all ranks were told

    @property
    def version(self) -> int | None:
        """The last version known to exist in the folder, None before the first."""
        return self._ledger.version

    @property
    def run_id(self) -> str:
        """Identity of this trainer's life, the same on all its ranks once connected."""
        return self._ledger.run_id

    def connect(self) -> None:
        """Meet the other trainer ranks, and agree on who writes what. Idempotent.

        Raises:
            ConnectError: a rank is missing, or what they hold does not fit together.

        Collective: yes, over the trainer ranks.
        """
        self._join("connect")

    def update_weights(self, version: int) -> UpdateStats:
        """Pack the trainer's current weights as `version`, and begin to write them.

        Waits for the version before, which is written in the background; `wait` waits for this one.
        Until it is written this rank holds a copy of its part: of a delta the packed changes, of a
        full version its share of all weights.

        Args:
            version: one more than the last for a delta; anything else means full.

        Returns:
            What this rank packed.

        Raises:
            ConfigError: `version` is not an int of at least 0.
            ConnectError: ranks are missing, or do not fit.
            UpdateError: the version before could not be written, or this one not packed. The next one is
                full. Call again with any version.

        Collective: yes, over the trainer ranks.
        """
        check_version(version)
        watch = Stopwatch()
        self._finish()
        watch.lap("wait")
        try:
            with self._session.in_step():
                self._join(f"version {version}")
                watch.lap("connect")
                detection = self._detect(version)
                watch.lap("detect")
                decision = self._session.propose(self._proposal(version, detection))
                failure, self._unreported = self._unreported, ""
                self._session.agree("the version before", failure)
                watch.lap("propose")
                stats, job = self._pack(decision, detection, watch)
        except BaseException:
            self._ledger = self._ledger.abort()
            raise
        self._view.committed()
        self._writing = Writing(self._publisher, job)
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG, "version %d: %s", version, stats.verdict
        )
        return stats

    def wait(self) -> None:
        """Wait until the last version is in the folder.

        Raises:
            UpdateAborted: it could not be written; the next one is full.

        Collective: no.
        """
        self._finish()
        failure, self._unreported = self._unreported, ""
        if failure:
            raise UpdateAborted(failure)

    def close(self) -> None:
        """Finish writing and leave. Raises what `wait` raises. Collective: no."""
        try:
            self.wait()
        finally:
            self._comm.close()

    def _finish(self) -> None:
        """Take note of how the background write ended."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        failure = writing.join()
        if failure:
            self._ledger = self._ledger.abort()
            self._unreported = f"version {writing.version} was not written: {failure}"
        else:
            self._ledger = self._ledger.commit(writing.version, writing.kind)

    def _join(self, purpose: str) -> None:
        if not self._session.ensure_connected(purpose) and self._router is not None:
            return
        world, plan = self._session.world, self._session.plan
        if world.run_id != self._ledger.run_id:  # rank 0 names the run
            self._ledger = TrainerLedger(run_id=world.run_id)
        self._router = Router(self._view, self._routes, plan, self._plan_seat)
        self._wholes = assign_writers(world, plan)
        params = [param for trainer in world.trainers for param in trainer.params]
        self._shares_whole = any(p.owners and not all(o.sparse for o in p.outputs) for p in params)

    @property
    def _bound_router(self) -> Router:
        if self._router is None:
            raise LockstepError("nothing can be packed before the ranks have met")
        return self._router

    @property
    def _plan_seat(self) -> int:
        return FOLDER_SEAT + 1 + self._rank

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
            params=param_specs(self._routes, with_ranges=False),
        ).model_dump(mode="json")

    def _detect(self, version: int) -> Detection:
        """What changed, or this rank's reason for a full version. Never raises for a local cause."""
        if not self._settings.enabled or self._settings.disk_kind == "full":
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

    def _pack(self, decision: Decision, detection: Detection, watch: Stopwatch) -> tuple[UpdateStats, Job]:
        """Take from the live weights what the version needs, and agree that all ranks did."""
        kind, failure = decision.verdict.kind, ""
        if kind is Kind.FULL or self._shares_whole:
            _, failure = self._session.attempt(None, self._view.gather_params)
        scope = scope_of(self._settings, decision)
        if kind is Kind.DELTA:
            packed, here = self._session.attempt("encode", lambda: self._pack_delta(detection, scope))
        else:
            detection = Detection()
            taken, here = self._session.attempt("prepare", self._take_weights)
            self._session.agree("prepare", failure or here)
            packed, here = self._session.attempt("encode", lambda: self._pack_full(taken or {}, scope))
        file, digests = packed or (None, {})
        mine = {
            "token": random.getrandbits(62),  # rank 0's names this attempt
            "bytes": file.file.size if file else 0,
            "elements": sum(entry.count for entry in file.entries) if file else 0,
            "changed": detection.num_changed,
            "owned": detection.num_owned,
        }
        facts = self._session.agree("encode", failure or here, **mine)
        watch.lap("encode")
        total = {name: sum(fact[name] for fact in facts) for name in mine}
        stats = UpdateStats(
            version=decision.version,
            verdict=decision.verdict,
            wire_bytes=mine["bytes"],
            num_elements=mine["elements"],
            num_changed=mine["changed"],
            num_owned=mine["owned"],
            total_wire_bytes=total["bytes"],
            total_changed=total["changed"],
            total_owned=total["owned"],
            full_bytes=self._session.plan.full_bytes,
            verified=scope.value,
            seconds=watch.seconds,
        )
        is_delta = kind is Kind.DELTA
        job = Job(
            token=f"{facts[0]['token']:x}",
            version=decision.version,
            kind=kind,
            packed=file,
            digest=to_text(digests),
            facts={
                "run_id": decision.run_id,
                "base_version": decision.base if is_delta else None,
                "reason": decision.verdict.reason.name,
                "changed": total["changed"],
                "owned": total["owned"],
                "tied": tied_names(self._session.world),
                "scope": scope.value,
            },
            extra=self._extra if self._rank == 0 and not is_delta else {},
        )
        return stats, job

    def _pack_delta(self, detection: Detection, scope: Scope) -> tuple[PackedFile | None, Digests]:
        share = detection.num_changed / detection.num_owned if detection.num_owned else 0.0
        codec = cheapest(self._session.codecs, share, None)
        router, seat = self._bound_router, self._plan_seat
        shapes = {whole.name: whole.shape for whole in self._wholes}
        stored = [
            pair
            for (receiver, dtype), changes in router.frames(detection, codec).items()
            for pair in zip(self._session.plan.between(seat, receiver, dtype), changes, strict=True)
        ]
        items = delta_items(stored, shapes, codec)
        packed = pack_file(self._file_name("delta"), items) if items else None
        if scope is Scope.OFF:
            return packed, {}
        return packed, of_changes(router.owned() if scope is Scope.FULL else stored, shapes)

    def _take_weights(self) -> Taken:
        return take_weights(self._view, self._routes, self._wholes, self._rank)

    def _pack_full(self, taken: Taken, scope: Scope) -> tuple[PackedFile | None, Digests]:
        items = bring_together(self._comm, taken, self._wholes, self._rank)
        digests = {} if scope is Scope.OFF else of_items(items)
        return (pack_file(self._file_name("model"), items) if items else None), digests

    def _file_name(self, stem: str) -> str:
        return file_name(stem, self._rank, self._comm.rendezvous.num_trainer_ranks)
