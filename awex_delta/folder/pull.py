"""A local HF checkpoint that follows a folder, and loads as exactly one version or not at all.

Where it is a version already, the elements that change are stored in its shards, in place (`patch`).
Otherwise new values go to new shards beside the old ones; the index of the checkpoint names the shards, and
says which version they are, so replacing it, by one rename, is the moment at which the checkpoint changes.
"""

from __future__ import annotations

import fcntl
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from awex_delta.errors import ChainError, CorruptFrameError, UpdateError, WireError
from awex_delta.folder.apply import stage, whole_parts, write
from awex_delta.folder.content import differing, matching, sums_of
from awex_delta.folder.folder import INDEX, Folder, Step, ignore_step, version_name
from awex_delta.folder.layout import WholeTensor
from awex_delta.folder.lease import Lease, leased_chain
from awex_delta.folder.local import (
    DamagedBaseError,
    Layout,
    Marker,
    Tensors,
    dump_index,
    empty_tensors,
    layout_of,
    load_checked,
    names_by_file,
    open_in_place,
    read_marker,
    sum_of,
    total_bytes,
)
from awex_delta.folder.manifest import Manifest, checksum
from awex_delta.folder.pack import PackedFile, pack_file, whole_item
from awex_delta.folder.patch import HIDDEN, JOURNAL, Journal
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
    """

    version: int
    links: tuple[Manifest, ...] = ()
    in_place: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    problems: tuple[str, ...] = ()


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
        self.path = path
        self._source = source
        self._local = Folder(str(path))
        self._workers = workers
        self._step = on_step
        self._lease = Lease(source, f"pull-{uuid.uuid4().hex}", lease_seconds)
        self._journal = Journal(path, on_step)
        self._read_bytes = self._written_bytes = 0

    def marker(self) -> Marker | None:
        """Which version the checkpoint is, None where it is none of a folder's, or is being changed."""
        return read_marker(self._local)

    def pull(self, version: int | None = None, progress: Progress | None = None) -> Pulled:
        """Finish what an earlier call left behind, and bring the checkpoint to a version.

        Killed at any moment, it leaves the checkpoint as it was, as it is to be, or without an index and
        without shards of which it could load: then the next call goes on.

        Args:
            version: which one; None for the newest that can be reached.
            progress: hears of bytes read and stored.

        Returns:
            What was done. The checkpoint is its `version` now.

        Raises:
            ChainError: no chain of whole versions leads there. The checkpoint is as it was.
            UpdateError: another process changes this checkpoint.
            OSError: the checkpoint cannot be written; the next call goes on.
        """
        self._read_bytes = self._written_bytes = 0
        refused, problems, heard = set[str](), list[str](), progress or Progress()
        with self._alone():
            self._finish(problems, heard)
            held = self.marker()
            try:
                while True:
                    try:
                        return self._attempt(held, version, refused, problems, heard)
                    except _UnusableVersion as error:
                        logger.warning("%s; trying another way", error)
                        problems.append(str(error))
                        refused.add(error.link.id)
                    except DamagedBaseError as error:
                        logger.warning("%s: %s; starting from a full version", self.path, error)
                        problems.append(f"{error}; starting from a full version")
                        held = None
            finally:
                self._lease.end()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes the checkpoint meanwhile; a process that dies lets go. Raises UpdateError."""
        room = self.path / JOURNAL
        room.mkdir(parents=True, exist_ok=True)
        with (room / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UpdateError(f"another pull changes {self.path}: wait for it, or stop it") from error
            yield

    def _attempt(
        self,
        held: Marker | None,
        version: int | None,
        refused: set[str],
        problems: list[str],
        progress: Progress,
    ) -> Pulled:
        chain = leased_chain(self._source, self._lease, held, target=version, refused=refused)
        if not chain.reachable:
            raise ChainError("; ".join([*problems, *chain.problems]))
        if not chain.links:
            if held is None:
                raise ChainError("; ".join([*problems, *chain.problems]))
            self._sweep(set(held.shards))  # of a pull that was killed
            return Pulled(version=held.version, problems=(*problems, *chain.problems))
        in_place = self._apply(held, chain.links, problems, progress)
        return Pulled(
            version=chain.links[-1].version,
            links=chain.links,
            in_place=in_place,
            bytes_read=self._read_bytes,
            bytes_written=self._written_bytes,
            problems=(*problems, *chain.problems),
        )

    def _apply(
        self, held: Marker | None, links: Sequence[Manifest], problems: list[str], progress: Progress
    ) -> bool:
        """Go to the last of `links`. True where that was done in place."""
        progress.begin("reading", sum(entry.size for link in links for entry in link.tensors))
        if links[0].kind is Kind.FULL:
            self._copy_extra_files(links[0])
        obstacle = self._obstacle(held, links[0])
        if held is None or obstacle:
            problems += [f"{obstacle}: whole shards are written"] if obstacle else []
            self._rewrite(links, held, progress)
            return False
        self._patch(held, links, progress)
        self._finish(problems, progress)
        now = self.marker()
        if now is None or now.id != links[-1].id:
            raise DamagedBaseError("the checkpoint could not be changed in place")
        self._sweep(set(held.shards))
        return True

    def _obstacle(self, held: Marker | None, first: Manifest) -> str:
        """Why shards that are there cannot be changed in place; empty where they can, or there are none."""
        if held is None:
            found = sorted(self.path.glob("*.safetensors"))
            return f"{found[0].name} is of no version that is known" if found else ""
        for shard in held.shards:
            file = self.path / shard
            if file.is_symlink() or (file.exists() and file.stat().st_nlink > 1):
                return f"{shard} is shared with another checkpoint by a link"
            try:
                open_in_place(file)  # before the index goes: otherwise no pull could ever finish
            except FileNotFoundError:
                continue  # damage, which is noticed when it is read
            except OSError as error:
                return f"{shard} cannot be written in place ({error.strerror})"
        wanted: Layout = {entry.name: (entry.dtype, entry.shape) for entry in first.tensors}
        if first.kind is Kind.FULL and layout_of(self.path, held) != wanted:
            return f"{first.label} has other tensors than the checkpoint"
        return ""

    def _patch(self, held: Marker, links: Sequence[Manifest], progress: Progress) -> None:
        """Note in the journal what changes in each shard, one at a time."""
        tip, shards = links[-1], dict[str, dict[str, str]]()
        self._journal.begin()
        for shard, sums in sorted(held.shards.items()):
            old, new = (load_checked(self.path / shard, sums) for _ in range(2))
            self._bring_to(links, new, progress, hold=True)
            shards[shard] = {name: sum_of(tensor) for name, tensor in new.items()}
            self._written_bytes += self._journal.add(tip.version, shard, old, new)
        index = dump_index(tip, shards, total_bytes(layout_of(self.path, held)))
        self._written_bytes += self._journal.commit(tip, held, index) + len(index)

    def _finish(self, problems: list[str], progress: Progress) -> None:
        """Do what the journal says, if there is one."""

        def note(num_bytes: int) -> None:
            self._written_bytes += num_bytes
            progress.advance(num_bytes)

        problem = self._journal.finish(lambda total: progress.begin("patching", total), note)
        if problem:
            logger.warning("%s: %s", self.path, problem)
            problems.append(problem)

    def _rewrite(self, links: Sequence[Manifest], held: Marker | None, progress: Progress) -> None:
        """Write every shard anew, one at a time, then the index that names them."""
        tip, first = links[-1], links[0]
        if first.kind is Kind.FULL:
            groups = names_by_file(first)
        else:
            groups = {shard: list(sums) for shard, sums in held.shards.items()} if held else {}
        name, shards, total = uuid.uuid4().hex[:8], dict[str, dict[str, str]](), 0
        for number, (shard, names) in enumerate(sorted(groups.items()), start=1):
            if first.kind is Kind.FULL:
                tensors = empty_tensors(first, names)
            else:
                tensors = load_checked(self.path / shard, held.shards[shard] if held else {})
            self._bring_to(links, tensors, progress, hold=first.kind is Kind.DELTA)
            packed = self._save(f"model-{name}-{number:05d}.safetensors", tensors)
            shards[packed.file.name] = {entry.key: entry.xxh3 for entry in packed.entries}
            total += sum(entry.size for entry in packed.entries)
        index = dump_index(tip, shards, total)
        self._local.put(INDEX, [index], self._step)
        self._written_bytes += len(index)
        self._sweep(set(shards))

    def _bring_to(
        self, links: Sequence[Manifest], tensors: Tensors, progress: Progress, *, hold: bool
    ) -> None:
        """Apply versions to the tensors of one shard, and compare each with the trainer's digests.

        hold: the tensors are some version now, so a full one may be there already.
        """
        for link in links:
            wrong = self._bring(link, tensors, progress, hold=hold)
            if wrong and links[0].kind is Kind.FULL:
                raise _UnusableVersion(link, CorruptFrameError(f"it does not lead to its own {wrong}"))
            if wrong:
                raise DamagedBaseError(f"{link.label} does not lead to its {wrong}")

    def _bring(self, link: Manifest, tensors: Tensors, progress: Progress, *, hold: bool) -> list[str]:
        """Apply one version to the tensors of one shard; those that are not what the trainer had then."""

        def note(num_bytes: int) -> None:
            self._lease.renew()
            self._read_bytes += num_bytes
            progress.advance(num_bytes)

        try:
            parts = whole_parts(tensors)
            full = hold and link.kind is Kind.FULL
            skip = matching(link, [sums_of(link, parts, ())]) if full else ()
            staged = stage(self._source, link, parts, workers=self._workers, skip=skip, on_read=note)
        except (WireError, OSError) as error:
            raise _UnusableVersion(link, error) from error
        write(staged)
        return differing(link, [sums_of(link, parts, staged)])

    def _save(self, name: str, tensors: Tensors) -> PackedFile:
        items = [
            whole_item(
                WholeTensor(
                    name=tensor_name, dtype=tensor.dtype, shape=tuple(tensor.shape), writer=0, pieces=()
                ),
                tensor,
            )
            for tensor_name, tensor in sorted(tensors.items())
        ]
        packed = pack_file(name, items)
        self._local.put(name, packed.chunks, self._step)
        self._written_bytes += packed.file.size
        return PackedFile(file=packed.file, entries=packed.entries, chunks=())

    def _copy_extra_files(self, anchor: Manifest) -> None:
        for file in anchor.extra_files:
            try:
                content = self._source.read(f"{version_name(anchor.version)}/{file.name}")
                if checksum([content]) != file.xxh3:
                    raise CorruptFrameError(f"{file.name} is damaged")
            except (WireError, OSError) as error:
                raise _UnusableVersion(anchor, error) from error
            self._local.put(file.name, [content], self._step)

    def _sweep(self, current: set[str]) -> None:
        """Remove shards that no index names any more: older ones, and those of a pull that was killed."""
        for name in self._local.names(""):
            if name not in current and (_LEFT_OVER.fullmatch(name) or name == _SINGLE_FILE):
                self._step(f"sweep {name}")
                self._local.remove(name)
