"""Writing one version, in the background: every rank its file, then rank 0 the manifest.

Ranks tell each other through the rendezvous store, over connections of their own:

    disk/TOKEN/part/RANK    the entries of the file that RANK wrote, or why it could not
    disk/TOKEN/outcome      empty once the manifest is written, else why there is none
"""

from __future__ import annotations

import errno
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict

from awex_delta import disk
from awex_delta.errors import ConnectError, PeerError, UpdateAborted
from awex_delta.folder.chain import Catalogue, expired
from awex_delta.folder.content import added
from awex_delta.folder.folder import INDEX, Folder, Step, told, version_name
from awex_delta.folder.lease import retire
from awex_delta.folder.manifest import FileEntry, LineEntry, Manifest, TensorEntry, checksum, dump_manifest
from awex_delta.folder.pack import PackedFile
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.store import BoundedStore
from awex_delta.protocol.verdict import Kind
from awex_delta.wire.choice import MIN_SAMPLE_BYTES

_POLL_SECONDS = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank writes of one version.

    token: of this attempt, the same on all ranks.
    packed: this rank's file; None when it has nothing to store.
    digest: this rank's part of the content digests.
    facts: fields of the manifest that all ranks agreed on.
    extra: small files that lie beside the weights of a full version, such as config.json; of rank 0.
    """

    token: str
    version: int
    kind: Kind
    packed: PackedFile | None
    facts: Mapping[str, Any]
    digest: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, bytes] = field(default_factory=dict)


class _Part(BaseModel):
    """What one rank tells rank 0: the entries of its file, or why there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failure: str = ""
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    lines: tuple[LineEntry, ...] = ()
    digest: dict[str, str] = {}


class Ranks:
    """How the background threads of the trainer ranks hear of each other."""

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        """Remember where; the store is opened at the first use."""
        self.rank = rank
        self._num_ranks = rendezvous.num_trainer_ranks
        self._rendezvous = rendezvous
        self._timeout_seconds = timeout_seconds
        self._store: BoundedStore | None = None
        self._last_outcome: str | None = None

    def tell(self, token: str, part: str) -> None:
        """Give rank 0 this rank's part."""
        self._open().put(f"disk/{token}/part/{self.rank}", part)

    def parts(self, token: str) -> list[str]:
        """Every other rank's part, at rank 0. Raises PeerError where one does not come."""
        found: list[str] = []
        deadline = time.monotonic() + self._timeout_seconds  # for all of them together
        for rank in range(1, self._num_ranks):
            key = f"disk/{token}/part/{rank}"
            found.append(self._await(key, f"trainer rank {rank} to write its file", deadline))
            self._open().drop(key)  # with very many tensors it is large
        return found

    def conclude(self, token: str, failure: str) -> None:
        """Tell all ranks how it ended, at rank 0."""
        if self._num_ranks > 1:
            store, key = self._open(), f"disk/{token}/outcome"
            store.put(key, failure or "ok")
            if self._last_outcome is not None:
                store.drop(self._last_outcome)
            self._last_outcome = key

    def outcome(self, token: str) -> str:
        """How it ended, as rank 0 says. Raises PeerError where it does not say."""
        # Twice as long: rank 0 may wait for another rank, and then knows better who is missing.
        deadline = time.monotonic() + 2 * self._timeout_seconds
        text = self._await(f"disk/{token}/outcome", "trainer rank 0 to write the manifest", deadline)
        return "" if text == "ok" else text

    def _await(self, key: str, what: str, deadline: float) -> str:
        begin = time.monotonic()
        while (value := self._open().find(key)) is None:
            if time.monotonic() > deadline:
                raise PeerError(f"waited {deadline - begin:.3g} s for {what}")
            time.sleep(_POLL_SECONDS)
        return value

    def _open(self) -> BoundedStore:
        if self._store is None or self._store.broken:
            self._store = BoundedStore(self._rendezvous, timedelta(seconds=self._timeout_seconds))
        return self._store


class Publisher:
    """Writes the versions of one trainer rank, one after the other. Used by one thread at a time.

    Attributes:
        bytes_per_second: of this rank's last file that was large enough to tell; None before the first.
    """

    def __init__(
        self,
        folder: Folder,
        ranks: Ranks,
        keep_anchors: int,
        on_step: Step,
        check: Callable[[], str] = lambda: "",
    ) -> None:
        """Remember where; nothing is read or written.

        Args:
            keep_anchors: full versions to keep.
            on_step: called as each step of writing begins; what it raises fails the version.
            check: why this run may not write any more, empty where it may; asked by rank 0 before it changes
                what others have written.
        """
        self._folder = folder
        self._ranks = ranks
        self._keep_anchors = keep_anchors
        self._step = on_step
        self._check = check
        self.bytes_per_second: float | None = None
        self._last: Manifest | None = None  # what rank 0 published last
        self._run_id = self._life = ""
        self._anchors: list[int] | None = None

    def publish(self, job: Job) -> str:
        """Write this rank's file, and at rank 0 the manifest once all ranks did.

        Returns why the version does not exist, empty where it does: the same on all ranks, unless one of them
        cannot be reached. Collective: yes, over the trainer ranks.
        """
        part = self._write(job)
        try:
            if self._ranks.rank:
                self._ranks.tell(job.token, part.model_dump_json())
                return self._ranks.outcome(job.token)
            failure = self._conclude(job, part)
            if failure:
                self._drop(job.version)
            self._ranks.conclude(job.token, failure)
        except (PeerError, ConnectError) as error:
            return _told(error)
        self._retire(job.version)
        return failure

    def _write(self, job: Job) -> _Part:
        packed, since = job.packed, time.perf_counter()
        if packed is None:
            return _Part(digest=dict(job.digest))
        try:
            self._check_room(packed.file.size)
            self._folder.put(f"{version_name(job.version)}/{packed.file.name}", packed.chunks, self._step)
        except Exception as error:  # noqa: BLE001 - the thread's edge: every rank must learn of it
            return _Part(failure=_told(error))
        if packed.file.size >= MIN_SAMPLE_BYTES:
            self.bytes_per_second = packed.file.size / max(time.perf_counter() - since, 1e-6)
        return _Part(
            files=(packed.file,), tensors=packed.tensors, lines=packed.lines, digest=dict(job.digest)
        )

    def _check_room(self, num_bytes: int) -> None:
        """Raises DiskError where a file of so many bytes does not fit."""
        free = self._folder.free_bytes()
        if free is not None and free < num_bytes:
            cause = OSError(errno.ENOSPC, f"it has {num_bytes} bytes, and {free} are free")
            raise disk.refusal(self._folder.url, "written", cause)

    def _conclude(self, job: Job, own: _Part) -> str:
        """Rank 0: the manifest of what all ranks wrote, or why there is none."""
        try:
            parts = [own, *map(_Part.model_validate_json, self._ranks.parts(job.token))]
            failed = [
                f"trainer rank {rank}: {part.failure}" for rank, part in enumerate(parts) if part.failure
            ]
            if not failed:
                self._publish(job, parts)
            return "; ".join(failed)
        except PeerError as error:
            return _told(error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: every rank must learn of it
            return f"trainer rank 0: {_told(error)}"

    def _publish(self, job: Job, parts: list[_Part]) -> None:
        if problem := self._check():
            raise UpdateAborted(problem)
        manifest = self._manifest(job, parts)
        folder = version_name(job.version)
        if job.kind is Kind.FULL:
            self._withdraw_from(job.version)
        for name, content in job.extra.items():
            self._folder.put(f"{folder}/{name}", [content], self._step)
        known = {file.name for file in manifest.files}
        for name in self._folder.names(folder):
            if name not in known:  # of a writer that died here; it does no harm, since no manifest names it
                with told():
                    self._folder.remove(f"{folder}/{name}")
        self._folder.put(f"{folder}/{INDEX}", [dump_manifest(manifest)], self._step)
        self._last = manifest
        if job.kind is Kind.FULL:
            self._anchors = [*self._known_anchors(), job.version]
            self._watch_room(manifest.size)

    def _manifest(self, job: Job, parts: list[_Part]) -> Manifest:
        base = self._last if job.kind is Kind.DELTA else None
        if job.kind is Kind.DELTA and (base is None or base.version != job.facts["base_version"]):
            raise RuntimeError(f"version {job.version} is a delta, but its base is not the last one written")
        extra = [FileEntry(name=n, size=len(c), xxh3=checksum([c])) for n, c in job.extra.items()]
        return Manifest(
            id=uuid.uuid4().hex,
            version=job.version,
            kind=job.kind,
            base_id=base.id if base else None,
            created=time.time(),
            files=(*(file for part in parts for file in part.files), *extra),
            tensors=tuple(entry for part in parts for entry in part.tensors),
            lines=tuple(line for part in parts for line in part.lines),
            digest=added(part.digest for part in parts),
            **{**job.facts, "run_id": self._life_of(job)},
        )

    def _life_of(self, job: Job) -> str:
        """The run as the folder calls it: versions that begin again are another run to a reader."""
        run_id = str(job.facts["run_id"])
        begins_again = self._last is not None and job.version <= self._last.version
        if run_id != self._run_id or begins_again:
            self._run_id = run_id
            self._life = uuid.uuid4().hex if begins_again else run_id
        return self._life

    def _withdraw_from(self, version: int) -> None:
        """Nothing may follow a full version but its own deltas: not what an earlier life left there."""
        later = [one for one in self._folder.versions() if one >= version]
        for one in reversed(later):
            self._step(f"withdraw {version_name(one)}")
            self._folder.remove(f"{version_name(one)}/{INDEX}")
        self._anchors = [anchor for anchor in self._known_anchors() if anchor < version]
        if beyond := [one for one in later if one > version]:
            retire(self._folder, beyond, self._step)

    def _watch_room(self, num_bytes: int) -> None:
        """Say it while the next full version will not fit, before that one fails."""
        free = self._folder.free_bytes()
        if free is not None and free < num_bytes:
            _log.warning(
                "%s has %d bytes left, and a full version takes %d: free some room there, "
                "or lower weight_update_keep_anchors",
                self._folder.url,
                free,
                num_bytes,
            )

    def _known_anchors(self) -> list[int]:
        if self._anchors is None:
            catalogue = Catalogue(self._folder)
            found = [(version, catalogue.get(version)) for version in catalogue.versions]
            self._anchors = [v for v, m in found if isinstance(m, Manifest) and m.kind is Kind.FULL]
        return self._anchors

    def _drop(self, version: int) -> None:
        """Leave nothing of a version that failed: what was short may be room."""
        try:
            if not self._check() and INDEX not in self._folder.names(version_name(version)):
                self._folder.discard(version)
        except OSError as error:
            _log.warning("version %d stays unfinished: %s", version, error)

    def _retire(self, version: int) -> None:
        """Remove what nobody needs any more, whether or not this version was written."""
        try:
            if not self._check():
                versions = [one for one in self._folder.versions() if one < version]
                leased = self._folder.oldest_leased()
                old = expired(versions, self._known_anchors(), self._keep_anchors, leased)
                retire(self._folder, old, self._step)
        except OSError as error:
            _log.warning("old versions stay, the next one tries again: %s", error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
