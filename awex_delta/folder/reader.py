"""The engine's half of updates through a folder."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from awex_delta.engines.view import Bound, EngineView, publish
from awex_delta.errors import (
    AwexDeltaError,
    ChainError,
    UpdateAborted,
    UpdateError,
    VerificationError,
    WireError,
    listed,
)
from awex_delta.folder.apply import Staged, stage, write
from awex_delta.folder.chain import Catalogue, Chain, find_chain
from awex_delta.folder.content import PartSum, differing, dump_sums, load_sums, matching, sums_of
from awex_delta.folder.folder import Folder
from awex_delta.folder.lease import Lease, leased_chain
from awex_delta.folder.live import Live
from awex_delta.folder.manifest import Manifest
from awex_delta.folder.peers import Peers, Word
from awex_delta.protocol.ledger import EngineLedger, check_version
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.session import Stopwatch
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason, Verdict
from awex_delta.settings.agreed import DeltaSettings

logger = logging.getLogger(__name__)


class DiskReader:
    """Keeps one engine rank at a version of a folder. One object an engine rank.

    Example:
        >>> reader = DiskReader(view, settings)       # doctest: +SKIP
        >>> stats = reader.update_weights()           # the newest version  # doctest: +SKIP
        >>> stats = reader.update_weights(version=7)  # this one            # doctest: +SKIP
    """

    def __init__(
        self,
        view: EngineView,
        settings: DeltaSettings,
        *,
        engine: str = "engine",
        rendezvous: Rendezvous | None = None,
        engine_rank: int = 0,
        options: Mapping[str, Any] | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """Check the arguments; nothing is read.

        Args:
            view: the engine's adapter.
            settings: as resolved; names the folder.
            engine: name of the engine instance, for its lease and for messages.
            rendezvous: where the ranks of this one engine meet, with no trainer ranks; None where it has
                one rank.
            engine_rank: this rank among those of this engine, from 0.
            options: fsspec's options of the filesystem.
            on_phase: called as each local phase begins; what it raises counts as a failure there.

        Raises:
            ConfigError: the URL cannot be opened, or the rank is not allowed.
        """
        self._view = view
        self._settings = settings
        self._engine = engine
        self._peers = Peers(rendezvous, engine_rank, settings)
        self._folder = Folder(settings.disk_url, options)
        holder = f"{engine}-{engine_rank}-{uuid.uuid4().hex[:8]}"
        self._lease = Lease(self._folder, holder, settings.timeout_seconds)
        self._on_phase = on_phase or (lambda phase: None)
        self._ledger = EngineLedger()
        self._held: Manifest | None = None  # what the weights are exactly
        self._bound = Bound(view)
        self._live: Live | None = None  # the tables for what is bound, of the version that was read last
        self._served = ""  # id of what all ranks of the engine agreed to hold
        self._bytes_read = self._num_written = 0
        self._sums: dict[str, list[PartSum]] = {}  # by version just written, what this rank holds

    @property
    def version(self) -> int | None:
        """The version whose weights this rank holds; None before the first."""
        return self._ledger.version

    @property
    def ready(self) -> bool:
        """True when the weights are exactly `version` on every rank of the engine, so they may be served."""
        return self._ledger.ready and self._held is not None and self._held.id == self._served

    @property
    def dirty(self) -> bool:
        """True when a write was begun and not ended: a mixture, never to be served."""
        return self._ledger.dirty

    def invalidate(self) -> None:
        """Say that the weights were lost or replaced: the next update begins at a full version."""
        self._ledger, self._held, self._served = EngineLedger(), None, ""

    def latest(self) -> int | None:
        """The newest version that exists in the folder now, None where there is none."""
        catalogue = Catalogue(self._folder)
        return next((v for v in reversed(catalogue.versions) if catalogue.get(v) is not None), None)

    def update_weights(self, version: int | None = None) -> UpdateStats:
        """Bring this engine to a version of the folder.

        Args:
            version: which one; None for the newest that can be reached.

        Returns:
            What this rank read. Its weights are `version` of the result now, and `ready` is True.

        Raises:
            ConfigError: `version` is not an int of at least 0.
            ChainError: no chain of whole versions of one run leads to the version, or to any. The weights
                are a version as before, and `ready` tells whether they may be served.
            VerificationError: the weights are not what the trainer had; nothing is served until a full
                version was read.
            UpdateError: a rank of this engine failed, or its view could not publish the version. If a write
                had begun, nothing is served until a full version was read.

        Collective: yes, over the ranks of this engine.
        """
        if version is not None:
            check_version(version)
        watch = Stopwatch()
        self._bytes_read = self._num_written = 0
        self._sums.clear()
        refused: set[str] = set()
        # Another purpose each time: ranks that try again together meet, whoever of them gave up before.
        with self._peers.in_step(f"read {uuid.uuid4().hex}"):
            try:
                tip = self._choose(version, refused)
                while blamed := self._reach(tip, refused):
                    refused |= blamed
                    tip = self._choose(version, refused)
            finally:
                self._lease.end()
        watch.lap("read")
        self._publish(tip)
        reason = Reason[tip.reason] if tip.reason in Reason.__members__ else Reason.NONE
        verdict = Verdict(kind=tip.kind, reason=reason)
        if self._bound.moved:  # so this rank began at a full version
            verdict = replace(verdict, kind=Kind.FULL, reason=Reason.ENGINE_MOVED, detail=self._bound.moved)
            self._bound.moved = ""
        logger.info("engine %s: %s, %d bytes read", self._engine, tip.label, self._bytes_read)
        return UpdateStats(
            version=tip.version,
            verdict=verdict,
            wire_bytes=self._bytes_read,
            num_elements=self._num_written,
            total_wire_bytes=tip.size,
            total_changed=tip.changed,
            total_owned=tip.owned,
            verified=tip.scope if tip.digest else "off",
            seconds=watch.seconds,
        )

    def close(self) -> None:
        """Leave; the weights stay as they are."""
        self._lease.end()
        self._peers.close()

    def _choose(self, version: int | None, refused: Collection[str]) -> Manifest:
        """The version that all ranks of this engine go to: rank 0 says which. Raises ChainError."""
        chain, tip, word = Chain(), None, self._look()
        failure = word.failure
        try:
            chain = find_chain(Catalogue(self._folder), self._held, target=version, refused=refused)
            tip = chain.links[-1] if chain.links else self._held
        except OSError as error:
            failure = failure or f"{self._folder.url} cannot be read: {type(error).__name__}: {error}"
        problems = "; ".join(chain.problems)
        if tip is None or not chain.reachable:
            tip = None
            failure = failure or problems
        elif problems:
            logger.warning("engine %s: newer versions cannot be used: %s", self._engine, problems)
        word = replace(word, version=tip.version, id=tip.id) if tip else word
        words = self._peers.tell(replace(word, failure=failure))
        self._failures(words)
        if (chosen := words[0]).failure:
            raise ChainError(f"engine {self._engine}: {chosen.failure}")
        if tip is None or tip.id != chosen.id:
            tip = self._find(chosen)
        return tip

    def _find(self, chosen: Word) -> Manifest:
        """The manifest that rank 0 chose, where this rank would have chosen another one."""
        found = Catalogue(self._folder).get(chosen.version)
        if isinstance(found, Manifest) and found.id == chosen.id:
            return found
        raise ChainError(f"engine {self._engine}: version {chosen.version}, as rank 0 chose it, is not there")

    def _reach(self, tip: Manifest, refused: Collection[str]) -> set[str]:
        """Go to `tip` with all ranks. Returns ids of versions that turned out unusable; then ranks differ."""
        links: Sequence[Manifest] = ()
        held: dict[str, Any] = {}
        staged = Staged()
        word = Word(phase="stage")
        try:
            links = self._links(tip, refused)
            held = self._held_sums(links)
        except Exception as error:  # noqa: BLE001 - the phase boundary: every rank must learn of it
            word = self._blame("stage", tip, error)
        ranks = self._peers.exchange(held, phase="what is held")
        try:
            if links and not word.failure:
                known = [load_sums(rank[links[0].id]) for rank in ranks if links[0].id in rank]
                staged = self._stage(links[0], matching(links[0], known) if held else ())
        except Exception as error:  # noqa: BLE001 - the phase boundary: every rank must learn of it
            word = self._blame("stage", links[0], error)
        if blamed := self._conclude(word):
            return blamed  # nobody has written anything
        word, link = Word(phase="apply"), tip
        try:
            for place, link in enumerate(links):
                self._write(link, staged if place == 0 else self._stage(link))
            reached, self._held = self._held, None  # what moved is no version
            self._bound.require_unmoved()
            self._held = reached
        except Exception as error:  # noqa: BLE001 - the phase boundary: every rank must learn of it
            word = self._blame("apply", link, error)
        return self._conclude(word) or self._compare(links)

    def _compare(self, links: Sequence[Manifest]) -> set[str]:
        """Do all ranks hold the trainers' contents? Of every version that all of them have just written.

        Raises VerificationError: on every rank alike; nothing is served until a full version was read.
        """
        sums = {link.id: dump_sums(self._sums[link.id]) for link in links if link.id in self._sums}
        wrong: dict[str, list[str]] = {}
        ranks = self._peers.exchange(sums, phase="verify")
        for link in links:
            held = [load_sums(rank[link.id]) for rank in ranks if link.id in rank]
            wrong |= {link.label: names} if (names := differing(link, held)) else {}
        self._sums.clear()
        word = Word(phase="compare", fatal=bool(wrong))
        if wrong:
            self._ledger, self._held = self._ledger.touch(), None
            names = [f"{listed(n)} after {label}" for label, n in wrong.items()]
            word = replace(
                word, failure="the engine holds other contents than the trainer had: " + "; ".join(names)
            )
        failed = [one.failure for one in self._peers.tell(word) if one.failure]
        if failed:
            self._ledger, self._held = self._ledger.touch(), None
            raise VerificationError(f"engine {self._engine}: {failed[0]}")
        return set()

    def _links(self, tip: Manifest, refused: Collection[str]) -> Sequence[Manifest]:
        """What to apply. From here on, none of it is removed."""
        if self._held is not None and tip.id == self._held.id:
            return ()
        chain = leased_chain(self._folder, self._lease, self._held, target=tip.version, refused=refused)
        if not chain.links or chain.links[-1].id != tip.id:
            raise FileNotFoundError("; ".join(chain.problems) or f"{tip.label} was replaced")
        return chain.links

    def _held_sums(self, links: Sequence[Manifest]) -> dict[str, Any]:
        """What this rank holds, where a full version comes next: it may hold that already."""
        if self._held is None or not links or links[0].kind is not Kind.FULL:
            return {}
        return {links[0].id: dump_sums(sums_of(links[0], self._tables(links[0]), ()))}

    def _stage(self, link: Manifest, skip: Collection[str] = ()) -> Staged:
        self._on_phase("stage")
        return stage(
            self._folder,
            link,
            self._tables(link),
            workers=self._settings.read_workers,
            skip=skip,
            on_read=self._note_read,
        )

    def _look(self) -> Word:
        """Bind what the engine computes with now; if that moved, or cannot be bound, it is no version."""
        word = Word(phase="choose")
        try:
            if self._bound.look():
                self._live = None
        except Exception as error:  # noqa: BLE001 - every rank must learn of it, whatever an adapter raises
            word = replace(word, failure=f"{type(error).__name__}: {error}", fatal=True)
        if word.failure or self._bound.moved:
            self._ledger, self._held, self._served = EngineLedger(dirty=self._ledger.dirty), None, ""
        return word

    def _tables(self, link: Manifest) -> Live:
        """The bound tensors, by their places in a version."""
        if self._live is None or self._live.space != link.hf:
            self._live = Live(link, self._bound.parts)
        return self._live

    def _note_read(self, num_bytes: int) -> None:
        self._lease.renew()
        self._bytes_read += num_bytes

    def _write(self, link: Manifest, staged: Staged) -> None:
        """Write one version that was staged completely; dirty until it ended."""
        self._ledger, self._held = self._ledger.touch(), None
        self._on_phase("apply")
        live = self._tables(link)
        self._num_written += write(live, staged)
        self._view.synchronize()
        self._sums[link.id] = sums_of(link, live, staged.pieces())
        self._ledger, self._held = self._ledger.commit(link.run_id, link.version), link

    def _blame(self, phase: str, link: Manifest, error: Exception) -> Word:
        """An error as a word: of one version, which another may replace, or of this engine."""
        if isinstance(error, UpdateError):
            raise error
        usable_again = isinstance(error, WireError | OSError) and not self._ledger.dirty
        text = str(error) if isinstance(error, AwexDeltaError) else f"{type(error).__name__}: {error}"
        return Word(phase=phase, failure=f"{link.label}: {text}", refused=link.id, fatal=not usable_again)

    def _conclude(self, word: Word) -> set[str]:
        """End a phase on all ranks: ids of versions to avoid, none if all is well. Raises UpdateAborted."""
        words = self._peers.tell(word)
        if text := self._failures(words):
            logger.warning("engine %s: %s; trying another way", self._engine, text)
        return {one.refused for one in words if one.failure}

    def _failures(self, words: Sequence[Word]) -> str:
        """What failed, by rank. Raises UpdateAborted if trying another version would not help."""
        text = "; ".join(f"rank {rank}: {one.failure}" for rank, one in enumerate(words) if one.failure)
        if any(one.fatal for one in words):
            raise UpdateAborted(f"engine {self._engine} was not updated: {text}")
        return text

    def _publish(self, tip: Manifest) -> None:
        if self._served == tip.id:
            return
        try:
            publish(self._view, tip.version, f"engine {self._engine}")
        except BaseException:
            self._ledger, self._held = self._ledger.touch(), None  # caches may be stale
            raise
        self._served = tip.id
