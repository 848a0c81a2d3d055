"""A local HF checkpoint that follows a folder, and loads as exactly one version or not at all.

Where it is a version already, the elements that change are stored in its shards, in place (`patch`).
Otherwise new values go to new shards beside the old ones; the index of the checkpoint names the shards, and
says which version they are, so replacing it, by one rename, is the moment at which the checkpoint changes.

Several versions are followed one by one. Of a delta all changes are in memory, some ten bytes an element, and
one shard at a time.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from awex_delta.errors import ChainError, CorruptFrameError, DiskError, WireError
from awex_delta.folder.apply import Piece, Staged, stage, within, write, write_pieces
from awex_delta.folder.content import differing, matching, sums_of
from awex_delta.folder.folder import INDEX, Folder, Step, ignore_step, version_name
from awex_delta.folder.lease import Lease, leased_chain
from awex_delta.folder.live import Live, whole_parts
from awex_delta.folder.local import (
    DamagedBaseError,
    Marker,
    Tensors,
    dump_index,
    empty_shards,
    load,
    load_checked,
    read_marker,
    sum_of,
)
from awex_delta.folder.manifest import Manifest, checksum
from awex_delta.folder.pack import pack_tensors
from awex_delta.folder.patch import HIDDEN, Journal, alone, why_not_in_place
from awex_delta.protocol.verdict import Kind

logger = logging.getLogger(__name__)

_LEFT_OVER = re.compile(
    rf"model-[0-9a-f]{{8}}-\d+\.safetensors({re.escape(HIDDEN)})?|.*\.[0-9a-f]{{32}}\.tmp"
)
_SINGLE_FILE = "model.safetensors"  # HF loaders look for it before they look for an index


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What one pull did.

    links: versions that were applied, in order; none where nothing was new.
    in_place: only elements that changed were written, into the shards that were there.
    bytes_read: of the folder.
    bytes_written: to the checkpoint, the journal included.
    problems: what was in the way of a shorter way.
    unusable: why newer versions than this one could not be reached; empty if it is the newest.
    """

    version: int
    links: tuple[Manifest, ...] = ()
    in_place: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    problems: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Callbacks for a progress bar: what begins, with its bytes, and bytes as it goes on."""

    begin: Callable[[str, int], None] = field(default=lambda what, total: None)
    advance: Callable[[int], None] = field(default=lambda done: None)


class _UnusableVersion(Exception):
    """Something of one version cannot be used; another way may lead around it."""

    def __init__(self, link: Manifest, error: Exception) -> None:
        super().__init__(f"{link.label}: {error}")
        self.link = link


class LocalCheckpoint:
    """A folder on this machine with a HF checkpoint that `pull` brings to newer versions."""

    def __init__(
        self,
        path: Path,
        source: Folder,
        *,
        workers: int = 4,
        lease_seconds: float = 300.0,
        on_step: Step = ignore_step,
    ) -> None:
        """Remember where; nothing is read or written.

        Args:
            path: the checkpoint; made where it does not exist. Weights in it are replaced by the first
                pull, other files stay unless the source has one of that name.
            source: the versions.
            workers: reads at once.
            lease_seconds: how long the source keeps versions for this reader if it dies.
            on_step: called as each step of writing begins.

        Raises:
            ConfigError: the path cannot be opened.
        """
        self.path = path.absolute()  # the working directory may change
        self._source = source
        self._local = Folder(str(path))
        self._workers = workers
        self._step = on_step
        self._lease = Lease(source, f"pull-{uuid.uuid4().hex}", lease_seconds)
        self._journal = Journal(path, on_step)
        self._progress = Progress()
        self._read_bytes = self._written_bytes = 0
        self._held: Marker | None = None  # during a pull, what the checkpoint is
        self._links: list[Manifest] = []  # what was applied in it, and whether in place
        self._in_place: list[bool] = []
        self._problems: list[str] = []
        self._unusable: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The URL of the folder of versions."""
        return self._source.url

    def marker(self) -> Marker | None:
        """Which version the checkpoint is, None where it is none of a folder's, or is being changed."""
        return read_marker(self._local)

    def pull(self, version: int | None = None, progress: Progress | None = None) -> Pulled:
        """Finish what an earlier call left behind, and bring the checkpoint to a version, link by link.

        Killed at any moment, it leaves the checkpoint as it was, as a version on the way, as it is to be, or
        without an index and without shards of which it could load: then the next call goes on.

        Args:
            version: which one; None for the newest that can be reached.
            progress: hears of bytes read and stored.

        Raises:
            ChainError: no chain of whole versions leads there. The checkpoint is as it was, or a version on
                the way.
            UpdateError: another process changes this checkpoint.
            DiskError: the folder or the checkpoint cannot be used; the next call goes on.
        """
        self._read_bytes = self._written_bytes = 0
        self._links, self._in_place, self._problems = [], [], []
        self._progress = progress or Progress()
        if not self.path.exists() and not self._source.versions():  # then nothing is made there
            raise ChainError(f"there is no version in {self._source.url}")
        with alone(self.path):
            self._finish()
            self._held = self.marker()
            try:
                now = self._follow(version)
            finally:
                self._lease.end()
        return Pulled(
            version=now.version,
            links=tuple(self._links),
            in_place=bool(self._in_place) and all(self._in_place),
            bytes_read=self._read_bytes,
            bytes_written=self._written_bytes,
            problems=tuple(self._problems),
            unusable=self._unusable,
        )

    def _follow(self, version: int | None) -> Marker:
        """Try one way after the other. Returns what the checkpoint is then."""
        refused, damaged = set[str](), False
        while True:
            try:
                return self._attempt(version, refused, may_patch=not damaged)
            except _UnusableVersion as error:
                self._note(f"{error}")
                refused.add(error.link.id)
            except DamagedBaseError as error:
                self._note(f"{error}; starting from a full version")
                if damaged:  # again: what was written a moment ago does not stay
                    raise ChainError("; ".join(self._problems)) from error
                self._held, damaged = None, True

    def _attempt(self, version: int | None, refused: set[str], *, may_patch: bool) -> Marker:
        """Go the way that there is now."""
        chain = leased_chain(self._source, self._lease, self._held, target=version, refused=refused)
        if not chain.reachable or not (chain.links or self._held):
            raise ChainError("; ".join([*self._problems, *chain.problems]))
        self._progress.begin("reading", sum(one.size for link in chain.links for one in link.stored))
        for link in chain.links:
            in_place = self._apply(self._held, link, may_patch=may_patch)
            self._held = self.marker()
            self._links.append(link)
            self._in_place.append(in_place)
        if self._held is None:
            raise DamagedBaseError("the index that was written is gone")
        self._sweep(set(self._held.shards))  # and what a pull left that was killed
        self._problems += chain.problems
        self._unusable = chain.problems
        return self._held

    def _apply(self, held: Marker | None, link: Manifest, *, may_patch: bool) -> bool:
        """Go one version on. True if that was done in place."""
        if link.kind is Kind.FULL:
            self._copy_extra_files(link)
        obstacle = why_not_in_place(self.path, held, link)
        if obstacle:
            self._problems.append(f"{obstacle}: whole shards are written")
        if held is None or obstacle or not may_patch:
            self._rewrite(link, held)
            return False
        shards = dict[str, dict[str, str]]()
        self._journal.begin()
        for shard, new in self._brought(held, link):
            shards[shard] = {name: sum_of(tensor) for name, tensor in new.items()}
            self._written_bytes += self._journal.add(shard, new)
        index = dump_index(link, shards, held.total_size)
        self._written_bytes += self._journal.commit(held, index) + len(index)
        self._finish()
        now = self.marker()
        if now is None or now.id != link.id:
            raise DamagedBaseError("the checkpoint could not be changed in place")
        return True

    def _finish(self) -> None:
        """Do what the journal says, if there is one."""

        def note(num_bytes: int) -> None:
            self._written_bytes += num_bytes
            self._progress.advance(num_bytes)

        if problem := self._journal.finish(lambda total: self._progress.begin("patching", total), note):
            self._note(problem)

    def _rewrite(self, link: Manifest, held: Marker | None) -> None:
        """Write every shard anew, one at a time, then the index that names them."""
        stem, shards, total = uuid.uuid4().hex[:8], dict[str, dict[str, str]](), 0
        base = held if link.kind is Kind.DELTA else None
        for number, (_, tensors) in enumerate(self._brought(base, link), start=1):
            packed = pack_tensors(f"model-{stem}-{number:05d}.safetensors", tensors)
            self._put(packed.file.name, packed.chunks)
            shards[packed.file.name] = {entry.name: entry.xxh3 for entry in packed.tensors}
            self._written_bytes += packed.file.size
            total += sum(entry.size for entry in packed.tensors)
            del tensors, packed  # before the next ones come
        index = dump_index(link, shards, total)
        self._put(INDEX, [index])
        self._written_bytes += len(index)
        self._sweep(set(shards))

    def _brought(self, held: Marker | None, link: Manifest) -> Iterator[tuple[str, Tensors]]:
        """The shards as they are to be, one at a time, each compared with the trainer's digests.

        held is what the checkpoint is; None if it is no version, and the one to come is a full one.
        """
        if held is None:
            for shard, tensors in empty_shards(link):
                self._fill(link, tensors)
                yield shard, tensors
            return
        sums = sorted(held.shards.items())
        if link.kind is Kind.FULL:
            for shard, names_and_sums in sums:
                tensors = load_checked(self.path / shard, names_and_sums)
                self._fill(link, tensors, holds=True)
                yield shard, tensors
            return
        old = {shard: load_checked(self.path / shard, one) for shard, one in sums}
        parts = [part for tensors in old.values() for part in whole_parts(tensors)]
        staged, begins = self._staged(link, Live(link, parts)), dict[torch.dtype, int]()
        for shard, names_and_sums in sums:
            tensors = load(self.path / shard, names_and_sums)
            live = Live(link, whole_parts(tensors))
            pieces = list(within(staged.pieces(), live, begins))
            write_pieces(live, pieces)
            self._compare(link, live, pieces)
            begins |= {dtype: begins.get(dtype, 0) + line.line.numel for dtype, line in live.lines.items()}
            yield shard, tensors

    def _fill(self, link: Manifest, tensors: Tensors, *, holds: bool = False) -> None:
        """Write a full version into the tensors of one shard. holds: they may be that version already."""
        live = Live(link, whole_parts(tensors))
        skip = matching(link, [sums_of(link, live, ())]) if holds else ()
        write(live, self._staged(link, live, skip))
        self._compare(link, live, ())

    def _staged(self, link: Manifest, live: Live, skip: Collection[str] = ()) -> Staged:
        def note(num_bytes: int) -> None:
            self._lease.renew()
            self._read_bytes += num_bytes
            self._progress.advance(num_bytes)

        try:
            return stage(self._source, link, live, workers=self._workers, skip=skip, on_read=note)
        except (WireError, OSError) as error:
            raise _UnusableVersion(link, error) from error

    def _compare(self, link: Manifest, live: Live, pieces: Iterable[Piece]) -> None:
        """Are tensors what the trainer had? If not, the version is to blame, or what it was written into."""
        wrong = differing(link, [sums_of(link, live, pieces)])
        if wrong and any(one.kind is Kind.FULL for one in (link, *self._links)):
            raise _UnusableVersion(link, CorruptFrameError(f"it does not lead to its own {wrong}"))
        if wrong:
            raise DamagedBaseError(f"{link.label} does not lead to its {wrong}")

    def _copy_extra_files(self, anchor: Manifest) -> None:
        for file in anchor.extra_files:
            try:
                content = self._source.read(f"{version_name(anchor.version)}/{file.name}")
                if checksum([content]) != file.xxh3:
                    raise CorruptFrameError(f"{file.name} is damaged")
            except (WireError, OSError) as error:
                raise _UnusableVersion(anchor, error) from error
            self._put(file.name, [content])

    def _sweep(self, current: set[str]) -> None:
        """Remove shards that no index names any more: older ones, and those of a pull that was killed."""
        for name in self._local.names(""):
            if name not in current and (_LEFT_OVER.fullmatch(name) or name == _SINGLE_FILE):
                self._step(f"sweep {name}")
                try:
                    self._local.remove(name)
                except DiskError as error:  # the next pull tries it again
                    if name == _SINGLE_FILE:  # loaders would read it, and not this version
                        raise
                    self._note(str(error))

    def _put(self, name: str, chunks: Iterable[Any]) -> None:
        self._local.put(name, chunks, self._step)

    def _note(self, problem: str) -> None:
        logger.warning("%s: %s", self.path, problem)
        self._problems.append(problem)
