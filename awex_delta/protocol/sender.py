"""The trainer's half of one update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch

from awex_delta.detection.slices import Detection
from awex_delta.errors import WeightsAwayError
from awex_delta.lines.changes import Changes
from awex_delta.lines.ends import LineEnd
from awex_delta.lines.finite import not_finite
from awex_delta.observe.runlog.tally import count_parts
from awex_delta.plan.rank import PairKey
from awex_delta.plan.shards import dense_volume, sent_names
from awex_delta.protocol.agreement import Decision, check_arrived
from awex_delta.protocol.finite import FiniteCheck
from awex_delta.protocol.ledger import check_version
from awex_delta.protocol.outgoing import Outgoing
from awex_delta.protocol.pipeline import Pack, send_frames
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.replicas import hash_copies, parity, warn_of_drift
from awex_delta.protocol.session import Stopwatch, in_step
from awex_delta.protocol.stats import PartCount, UpdateStats
from awex_delta.protocol.trainer_end import TrainerEnd
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.protocol.verify import Scope, Verifier
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.view import TrainerView
from awex_delta.wire.buckets import Bucket, cut
from awex_delta.wire.choice import MIN_SAMPLE_BYTES, cheapest
from awex_delta.wire.digest import pays_to_compile
from awex_delta.wire.frame import pack_frame
from awex_delta.wire.guard import num_unstated
from awex_delta.wire.pieces import elements

logger = logging.getLogger(__name__)

_EXPECTED_FULL = frozenset({Reason.NONE, Reason.ANCHOR_DUE, Reason.FIRST_SYNC, Reason.DELTA_DISABLED})
_WARN_AFTER = 3


class Sender(TrainerEnd):
    """Keeps the engines of one pairing identical to this trainer. One object for each trainer rank.

    Example:
        >>> sender = Sender(view, rendezvous, trainer_rank=rank, settings=settings)  # doctest: +SKIP
        >>> sender.connect()                                                         # doctest: +SKIP
        >>> for version in range(steps):                                             # doctest: +SKIP
        ...     train_step()
        ...     stats = sender.update_weights(version)
    """

    def __init__(
        self,
        view: TrainerView,
        rendezvous: Rendezvous,
        trainer_rank: int,
        settings: DeltaSettings,
        *,
        on_phase: Callable[[str], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Check the arguments; nothing is opened before `connect`.

        Args:
            view: the training framework's adapter.
            rendezvous: where the ranks meet; the same on all of them.
            trainer_rank: this rank in the trainer's world, from 0.
            settings: as both sides resolved them.
            on_phase: called as each local phase begins; what it raises counts as a failure there.
            device: where the weights live, None for the CPU.

        Raises:
            ConfigError: an argument has a wrong type, or a rank or the world size is not allowed.
        """
        super().__init__(view, rendezvous, trainer_rank, settings, on_phase=on_phase, device=device)
        rendezvous.require_both_sides()
        self._changed_by_key: Mapping[str, int] | None = None  # of the last committed delta
        self._sums: Mapping[str, int] = {}  # in a full sync, digests of what other ranks hold copies of
        self._unexpected_full = 0
        self._finite, self._num_not_finite = FiniteCheck(settings), 0
        self._bytes_per_second: float | None = None  # of the last transfer that was large enough to tell

    @property
    def changed_by(self) -> tuple[PartCount, ...]:
        """Where the last committed delta found changes on this rank; empty after a full sync.

        Over all trainer ranks the counts add up to `total_changed` and `total_owned` of the update.
        """
        return () if self._changed_by_key is None else count_parts(self._routes, self._changed_by_key)

    def connect(self) -> None:
        """Meet the engines, agree on the plan, refuse what does not fit. Idempotent.

        Raises:
            ConfigError: it is closed.
            ConnectError: a rank is missing, or the two sides do not fit. No weight was touched.

        Collective: yes, over all transfer ranks.
        """
        self._comm.require_open("Sender")
        self._join("connect")

    def update_weights(self, version: int) -> UpdateStats:
        """Bring every engine to the trainer's current weights, as `version`.

        Call it on all trainer and engine ranks after an optimizer step. Sends a delta if all ranks
        are sure of the base, and a full sync otherwise.

        Args:
            version: one more than the last committed one for a delta; anything else means full.

        Returns:
            What this rank did. Every rank of both sides has committed `version`, or failed.

        Raises:
            ConfigError: `version` is not an int of at least 0, or this is closed.
            ConnectError: ranks are missing, or do not fit.
            WeightsAwayError: live weights of a rank of either side were freed, moved or replaced; nothing
                was begun. Bring them back and call again.
            UpdateError: the update did not commit anywhere that this rank knows of; the next one is
                full. Call again with any version.

        Collective: yes, over all transfer ranks.
        """
        check_version(version)
        self._comm.require_open("Sender")
        watch = Stopwatch()
        try:
            with in_step(self._comm):
                outgoing = self._join(f"version {version}")
                watch.lap("connect")
                try:
                    detection, decision = self._propose(version, outgoing, watch)
                    outgoing = self._bind()  # an engine may have described itself anew
                    stats, counts = self._send(decision, detection, outgoing, watch)
                finally:
                    outgoing.release()
        except WeightsAwayError:
            raise  # nothing was begun, so that what is known of the engines stays true
        except BaseException:
            self._ledger = self._ledger.abort()
            raise
        # All ranks have committed: nothing from here on calls what is not ours.
        self._ledger = self._ledger.commit(version, decision.verdict.kind)
        self._changed_by_key = counts if decision.verdict.kind is Kind.DELTA else None
        if stats.wire_bytes >= MIN_SAMPLE_BYTES:
            self._bytes_per_second = stats.wire_bytes / max(stats.seconds["transfer"], 1e-6)
        with suppress(Exception):  # a log handler of the caller's
            self._report(stats)
        return stats

    def disconnect(self) -> None:
        """Leave the pairing until the next `connect` or `update_weights`. Engines keep what they hold."""
        self._comm.leave()

    def close(self) -> None:
        """Leave the pairing for good. Engines keep what they hold."""
        self._comm.close()

    def _send(
        self, decision: Decision, detection: Detection, outgoing: Outgoing, watch: Stopwatch
    ) -> tuple[UpdateStats, Mapping[str, int]]:
        """This rank's half of the update, up to the last agreement; and elements that changed, by key."""
        verifier, held = Verifier(self._session, decision, watch), ExitStack()
        _, failure = self._session.attempt("release", lambda: held.enter_context(self._view.transfer()))
        try:
            if decision.verdict.kind is Kind.DELTA:
                work = decision, detection, outgoing, watch, verifier
                num_bytes, num_elements = self._send_delta(*work, failure)
                self._sums = {}
            else:
                detection = Detection()
                num_bytes, num_elements = self._send_full(outgoing, watch, verifier, failure)
        except BaseException as error:
            _, failure = self._session.attempt(None, held.close)
            if failure:
                error.add_note(f"{self._comm.me} could not end the transfer either: {failure}")
            raise

        def settle() -> Mapping[str, int]:
            held.close()
            # Before all agree, because it may fail. If they do not, the next update is full in any case.
            self._view.committed()
            return outgoing.counts(detection.changes)

        counts, failure = self._session.attempt(None, settle)
        mine = {"bytes": num_bytes, "changed": detection.num_changed, "owned": detection.num_owned}
        mine["not_finite"] = self._num_not_finite
        copies, sums = self._session.met.plan.copies, self._sums
        told = parity(self._rank, copies, sums)
        failure = verifier.failure or failure
        facts = self._session.agree("apply", failure, sent=num_elements, parity=told, **mine)
        check_arrived(facts)
        watch.lap("apply")
        warn_of_drift(self._session, decision.version, facts, copies, sums)
        verifier.agree()
        mine["elements"] = num_elements
        stats = self._session.stats(
            decision, facts, mine=mine, verified=verifier.scope.value, seconds=watch.seconds
        )
        return stats, counts or {}

    def _send_delta(
        self,
        decision: Decision,
        detection: Detection,
        outgoing: Outgoing,
        watch: Stopwatch,
        verifier: Verifier,
        failure: str,
    ) -> tuple[int, int]:
        if self._shares_whole:
            failure = self._gather(outgoing) or failure
        _, late = self._session.attempt(None, outgoing.conversion.convert_together)
        failure = failure or late
        work = partial(self._pack, decision, detection, outgoing, watch, verifier)
        packed, here = self._session.attempt("encode", work)
        self._session.agree("encode", failure or here or verifier.failure)
        watch.lap("encode")
        frames, num_elements = packed or ({}, 0)
        num_bytes, failure = 0, ""
        for dtype in self._session.met.dtypes:
            due = {peer: packs for (peer, kind), packs in frames.items() if kind is dtype}
            sent, here = send_frames(self._session, dtype, due, watch)
            num_bytes, failure = num_bytes + sent, failure or here
        self._session.agree("stage", failure)
        watch.lap("stage")
        self._verify_all(outgoing, verifier)  # while the engines write
        return num_bytes, num_elements

    def _pack(
        self,
        decision: Decision,
        detection: Detection,
        outgoing: Outgoing,
        watch: Stopwatch,
        verifier: Verifier,
    ) -> tuple[dict[PairKey, list[Pack]], int]:
        """Functions that make the frames of each line, and how many elements all frames carry.

        A line in which nothing changed and nothing travels whole has no frames.
        """
        share = detection.num_changed / detection.num_owned if detection.num_owned else 0.0
        codec = cheapest(self._session.codecs, share, self._bytes_per_second)
        frames: dict[PairKey, list[Pack]] = {}
        total = 0
        found = outgoing.with_values(detection.changes)
        self._num_not_finite = self._finite.count(outgoing.not_finite(found))
        for key, changes in outgoing.changes(found).items():
            pair, end = outgoing.pairs[key], outgoing.ends[key]
            if not changes.num_changed and not pair.whole:
                continue
            unstated = None if verifier.scope is Scope.OFF else num_unstated(codec, changes)
            limits = pair.numel, self._settings.bucket_bytes
            buckets = cut(changes, codec, pair.dtype, *limits, whole_prefix=pair.whole, unstated=unstated)
            identity = self._session.frame_identity(decision, pair)
            compiled = pays_to_compile(changes.pos.device, self._session.met.full_bytes)
            frames[key] = [
                partial(pack_frame, identity, codec, bucket, changes, end.read, compiled=compiled)
                for bucket in buckets
            ]
            total += sum(bucket.num_sent for bucket in buckets)
            watch.lap("encode")
            verifier.add(Scope.TOUCHED, pair, partial(_sent, end, changes, buckets))
        return frames, total

    def _verify_all(self, outgoing: Outgoing, verifier: Verifier) -> None:
        for key, pair in outgoing.pairs.items():
            verifier.add(Scope.FULL, pair, outgoing.ends[key].rows)

    def _send_full(
        self, outgoing: Outgoing, watch: Stopwatch, verifier: Verifier, failure: str
    ) -> tuple[int, int]:
        late = self._gather(outgoing)
        _, later = self._session.attempt(None, outgoing.conversion.convert_together)
        tensors, here = self._session.attempt("prepare", lambda: self._prepare(outgoing))
        self._session.agree("prepare", failure or late or later or here)
        watch.lap("prepare")
        plan = self._session.met.plan.dense
        self._comm.send_weights(tensors or {}, plan, phase="send weights")
        watch.lap("transfer")
        copies = {} if verifier.scope is Scope.OFF else self._session.met.plan.copies
        self._sums, failure = hash_copies(self._session, copies, (tensors or {}).items())
        verifier.failure = verifier.failure or failure
        watch.lap("digest")
        del tensors
        self._verify_all(outgoing, verifier)
        return dense_volume(plan)

    def _prepare(self, outgoing: Outgoing) -> dict[str, torch.Tensor]:
        """All HF tensors of this rank."""
        tensors, sends = outgoing.conversion.all(), sent_names(self._session.met.plan.dense)
        found = not_finite({name: tensor for name, tensor in tensors.items() if name in sends})
        self._num_not_finite = self._finite.count(found)
        return tensors

    def _report(self, stats: UpdateStats) -> None:
        self._finite.tell(stats, self._rank)
        self._unexpected_full = 0 if stats.verdict.reason in _EXPECTED_FULL else self._unexpected_full + 1
        share = stats.total_changed / stats.total_owned if stats.total_owned else 0.0
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG,
            "version %d: %s; %.2f%% of the owned elements changed, %d bytes (%.4f of a full sync), %.3f s",
            stats.version,
            stats.verdict,
            100 * share,
            stats.total_wire_bytes,
            stats.total_wire_bytes / max(stats.full_bytes, 1),
            sum(stats.seconds.values()),
        )
        if self._unexpected_full == _WARN_AFTER and self._rank == 0:
            logger.warning(
                "%d updates in a row were full syncs, the last because %s: deltas save nothing here. "
                "Remedy: see %s in docs/en/reasons.md",
                self._unexpected_full,
                stats.verdict.reason.text,
                stats.verdict.reason.name,
            )


def _sent(
    end: LineEnd, changes: Changes, buckets: Sequence[Bucket]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements that the frames of one line carry."""
    for bucket in buckets:
        if bucket.whole:
            yield from elements(end.read, bucket.span)
        elif changes.value is not None:
            here = slice(bucket.first, bucket.last)
            yield changes.pos[here], changes.value[here]
