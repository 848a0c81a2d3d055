"""The trainer's half of updates through a folder."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from awex_delta.detection.slices import Detection
from awex_delta.errors import UpdateAborted, WeightsAwayError
from awex_delta.folder.chain import foreign_version
from awex_delta.folder.claim import Claim
from awex_delta.folder.collect import Taken, bring_together, take_weights
from awex_delta.folder.content import Digests, Sums, to_text
from awex_delta.folder.folder import Folder, Step, ignore_step
from awex_delta.folder.layout import FolderPlan, plan_folder
from awex_delta.folder.manifest import HfSpace
from awex_delta.folder.pack import (
    Line,
    PackedFile,
    file_name,
    pack_boxes,
    pack_line,
    pack_lines,
    pack_tensors,
)
from awex_delta.folder.publish import Job, Publisher, Ranks
from awex_delta.lines.boxes import BoxMap
from awex_delta.lines.finite import not_finite
from awex_delta.plan.pairs import Pair
from awex_delta.plan.rank import Plan
from awex_delta.plan.world import World
from awex_delta.protocol.agreement import Decision
from awex_delta.protocol.finite import FiniteCheck
from awex_delta.protocol.ledger import check_version
from awex_delta.protocol.outgoing import Outgoing
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.replicas import hash_copies, parity, warn_of_drift
from awex_delta.protocol.session import Stopwatch, in_step
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.trainer_end import TrainerEnd
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.protocol.verify import Scope, scope_of
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.view import TrainerView
from awex_delta.wire.choice import cheapest
from awex_delta.wire.digest import digests as digests_of
from awex_delta.wire.pieces import elements
from awex_delta.wire.registry import codecs_for
from awex_delta.wire.spans import Span

logger = logging.getLogger(__name__)


class _Table(NamedTuple):
    """Where a line leads to in the folder. packed: the same as bytes."""

    map: BoxMap
    packed: torch.Tensor


class DiskWriter(TrainerEnd):
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
        """
        super().__init__(
            view,
            rendezvous,
            trainer_rank,
            # The schedule between ranks is not used here, so any number of them will do.
            replace(settings, allow_any_world_size=True),
            on_phase=on_phase,
            plan=self._plan_folder,
        )
        self._extra = dict(extra_files or {})
        self._finite, self._num_not_finite = FiniteCheck(settings), 0
        ranks = Ranks(rendezvous, trainer_rank, settings.timeout_seconds)
        folder = Folder(settings.disk_url, options)
        self._claim = Claim(folder, settings.timeout_seconds / 3)  # the other ranks wait meanwhile
        self._publisher = Publisher(folder, ranks, settings.keep_anchors, on_step, self._claim.check)
        self._folder = folder
        self._is_ours = False  # no other release has written there
        self._codecs = codecs_for(settings.encoding)  # who reads is not known, so none that `auto` may add
        self._met: FolderPlan  # what all trainers together write, as of the last connect
        self._tables: dict[int, _Table] = {}  # by line
        # A process that ends waits for this thread, so that no version is lost.
        self._background = ThreadPoolExecutor(max_workers=1)
        self._writing: tuple[Job, Future[str]] | None = None
        self._unreported = ""  # why the last version does not exist, until all ranks were told

    def connect(self) -> None:
        """Meet the other trainer ranks, and agree on who writes what. Idempotent.

        Raises ConnectError if a rank is missing, or what they hold does not fit together.
        Collective: yes, over the trainer ranks.
        """
        self._comm.require_open("DiskWriter")
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
            ConfigError: `version` is not an int of at least 0, or this is closed.
            ConnectError: ranks are missing, or do not fit.
            WeightsAwayError: live weights of a trainer rank were freed, moved or replaced; nothing was
                begun. Bring them back and call again.
            UpdateError: the version before could not be written, or this one not packed, or another run
                writes to the folder. The next one is full. Call again with any version.

        Collective: yes, over the trainer ranks.
        """
        check_version(version)
        self._comm.require_open("DiskWriter")
        watch = Stopwatch()
        self._finish()
        watch.lap("wait")
        try:
            with in_step(self._session.comm):
                outgoing = self._join(f"version {version}")
                watch.lap("connect")
                try:
                    detection, decision = self._propose(version, outgoing, watch)
                    failure, self._unreported = self._unreported, ""
                    self._session.agree("the version before", failure)
                    self._session.agree("claim the folder", self._claim_folder())
                    watch.lap("propose")
                    stats, job = self._pack(decision, detection, outgoing, watch)
                finally:
                    outgoing.release()
        except WeightsAwayError:
            raise  # nothing was begun
        except BaseException:
            self._ledger = self._ledger.abort()
            raise
        self._writing = job, self._background.submit(self._publisher.publish, job)
        self._finite.tell(stats, self._rank)
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG, "version %d: %s", version, stats.verdict
        )
        return stats

    def wait(self) -> None:
        """Wait until the last version is in the folder. Raises UpdateAborted if it could not be written.

        The next version is full then.
        """
        self._finish()
        failure, self._unreported = self._unreported, ""
        if failure:
            raise UpdateAborted(failure)

    def close(self) -> None:
        """Finish writing and leave. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            self._claim.release()
            self._comm.close()

    def _claim_folder(self) -> str:
        """Why this run may not write, as rank 0 finds before any rank does."""
        if self._rank:
            return ""
        problem, failure = self._session.attempt(None, lambda: self._claim.take(self.run_id))
        if not (problem or failure) and not self._is_ours:
            problem, failure = self._session.attempt(None, lambda: foreign_version(self._folder))
            self._is_ours = not (problem or failure)
        return problem or failure

    def _finish(self) -> None:
        """Take note of how the background write ended."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        job, published = writing
        if failure := published.exception() or published.result():
            self._ledger = self._ledger.abort()
            self._unreported = f"version {job.version} was not written: {failure}"
        else:
            self._ledger = self._ledger.commit(job.version, job.kind)

    def _plan_folder(self, world: World) -> Plan:
        """This rank's lines to the folder."""
        self._met, self._tables = plan_folder(world, self._rank), {}
        return self._met.plan

    def _detect(self, version: int) -> Detection:
        """As of every trainer; a folder of full versions gets no deltas."""
        if self._settings.disk_kind == "full":
            return Detection(reason=Reason.DELTA_DISABLED)
        return super()._detect(version)

    def _pack(
        self, decision: Decision, detection: Detection, outgoing: Outgoing, watch: Stopwatch
    ) -> tuple[UpdateStats, Job]:
        """Take from the live weights what the version needs, and agree that all ranks did."""
        kind, failure = decision.verdict.kind, ""
        if kind is Kind.FULL or self._shares_whole:
            failure = self._gather(outgoing)
        _, late = self._session.attempt(None, outgoing.conversion.convert_together)
        failure = failure or late
        scope = scope_of(self._settings, decision)
        if kind is Kind.DELTA:
            packed, here = self._session.attempt(
                "encode", lambda: self._pack_delta(outgoing, detection, scope)
            )
        else:
            detection = Detection()
            taken, here = self._session.attempt(
                "prepare", lambda: take_weights(outgoing.conversion, self._met.wholes, self._rank)
            )
            self._session.agree("prepare", failure or here)
            packed, here = self._session.attempt("encode", lambda: self._pack_full(taken or {}, scope))
        is_compared = kind is Kind.FULL and scope is not Scope.OFF
        copies = self._session.met.plan.copies if is_compared else {}
        sums, late = hash_copies(self._session, copies, outgoing.conversion.some(copies))
        file, digests = packed or (None, {})
        mine = {
            "token": random.getrandbits(62),  # rank 0's names this attempt
            "bytes": file.file.size if file else 0,
            "elements": file.num_elements if file else 0,
            "changed": detection.num_changed,
            "owned": detection.num_owned,
            "not_finite": self._num_not_finite,
            "parity": parity(self._rank, copies, sums),
        }
        # Before all agree, because it may fail. If they do not, the next version is full in any case.
        _, last = self._session.attempt(None, self._view.committed)
        facts = self._session.agree("encode", failure or here or late or last, **mine)
        warn_of_drift(self._session, decision.version, facts, copies, sums)
        watch.lap("encode")
        stats = self._session.stats(decision, facts, mine=mine, verified=scope.value, seconds=watch.seconds)
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
                "changed": stats.total_changed,
                "owned": stats.total_owned,
                "tied": dict(self._met.tied),
                "space": self._met.space if is_delta else HfSpace(),
                "scope": scope.value,
            },
            extra=self._extra if self._rank == 0 and not is_delta else {},
        )
        return stats, job

    def _pack_delta(
        self, outgoing: Outgoing, detection: Detection, scope: Scope
    ) -> tuple[PackedFile | None, Digests]:
        share = detection.num_changed / detection.num_owned if detection.num_owned else 0.0
        codec = cheapest(self._codecs, share, self._publisher.bytes_per_second)
        lines, sums = list[Line](), Sums(self._met.space)
        found = outgoing.with_values(detection.changes)
        self._num_not_finite = self._finite.count(outgoing.not_finite(found))
        for key, changes in outgoing.changes(found).items():
            pair, end = outgoing.pairs[key], outgoing.ends[key]
            if scope is Scope.FULL:
                sums.add(self._table(pair).map, elements(end.read, Span(0, pair.numel)))
            if not changes.num_changed and not pair.whole:
                continue
            line = pack_line(
                changes,
                codec,
                pair.dtype,
                self._table(pair).packed,
                end.read,
                numel=pair.numel,
                whole=pair.whole,
                bucket_bytes=self._settings.bucket_bytes,
            )
            lines.append(line)
            if scope is Scope.TOUCHED:
                sums.add(self._table(pair).map, line.sent(changes))
        packed = pack_lines(self._file_name("delta"), lines) if lines else None
        return packed, sums.digests()

    def _table(self, pair: Pair) -> _Table:
        """Where a line leads to in the folder: the same until the next connect."""
        if pair.digest not in self._tables:
            self._tables[pair.digest] = _Table(map=BoxMap(pair.stored), packed=pack_boxes(pair.stored))
        return self._tables[pair.digest]

    def _pack_full(self, taken: Taken, scope: Scope) -> tuple[PackedFile | None, Digests]:
        tensors = bring_together(self._comm, taken, self._met.wholes, self._rank)
        self._num_not_finite = self._finite.count(not_finite(tensors))
        digests = {} if scope is Scope.OFF else digests_of(tensors.items())
        return (pack_tensors(self._file_name("model"), tensors) if tensors else None), digests

    def _file_name(self, stem: str) -> str:
        return file_name(stem, self._rank, self._comm.rendezvous.num_trainer_ranks)
