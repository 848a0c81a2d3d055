"""Changes to the shards of a local checkpoint, in place: a journal of what is to come, and the work itself.

The journal is a folder: what changes in each shard, 16 bits at a time, the index to come, and a file that
names them all, written last. From then on the change is certain, and is done by these steps, each of which
may be done again:

    the index goes                  no loader begins any more
    shards are called SHARD.patching, which no loader looks for
    values are stored in them, synced, read back and compared
    shards get their names back
    the index to come is written    the checkpoint is the new version
    the journal goes

So what lies under the names of shards is never a mixture, and where there is an index it is whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.numpy
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError

from awex_delta import disk
from awex_delta.errors import DiskError, UpdateError
from awex_delta.folder.folder import INDEX, Folder, Step, told
from awex_delta.folder.local import (
    DamagedBaseError,
    Layout,
    Marker,
    Tensors,
    load_checked,
    open_shard,
    parse_marker,
    read_marker,
)
from awex_delta.folder.manifest import Count, FileEntry, Manifest, checksum
from awex_delta.folder.pack import SAFETENSORS
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.protocol.verdict import Kind
from awex_delta.wire.codec import as_bytes

JOURNAL = ".awex_delta"
"""The folder in a checkpoint that holds what belongs to pulls alone; no loader looks into it."""

HIDDEN = ".patching"

_NEXT = f"{JOURNAL}/next"
_COMMIT, _INDEX = "commit.json", "index.json"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else changes the checkpoint meanwhile; a process that dies lets go.

    Raises UpdateError if another process changes it.
    """
    disk.make_folder(path / JOURNAL)
    with disk.locked(path / JOURNAL / "lock") as mine:
        if not mine:
            raise UpdateError(f"another pull changes {path}: wait for it, or stop it")
        yield


def why_not_in_place(path: Path, held: Marker | None, link: Manifest) -> str:
    """Why shards that are there cannot be changed in place; empty if they can, or there are none.

    held is what the checkpoint is, None if it is no version; `link` is the version to come. Raises
    DamagedBaseError if it is not what it says.
    """
    if held is None:
        found = [name for name in disk.names(path) if name.endswith(".safetensors")]
        return f"{found[0]} is of no version that is known" if found else ""
    layout: Layout = {}
    for name in held.shards:
        try:  # before the index goes: otherwise no pull could ever finish
            layout |= open_shard(path / name).layout
            if disk.is_shared(path / name):
                return f"{name} is shared with another checkpoint by a link"
        except DiskError as error:
            return f"{name} cannot be written in place ({os.strerror(error.errno or errno.EIO)})"
    wanted = {one.name: (SAFETENSORS[WIRE_DTYPES[one.dtype]], one.shape) for one in link.tensors}
    if link.kind is Kind.FULL and layout != wanted:
        return f"{link.label} has other tensors than the checkpoint"
    return ""


class _Changed(FileEntry):
    """A file of changes to the shard of that name. stored: bytes that it stores there."""

    stored: Count


class _Commit(BaseModel):
    """What makes a change certain. base: id of the version that the checkpoint is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    shards: tuple[_Changed, ...]
    index: FileEntry


class Journal:
    """The change of one checkpoint that is being made. One at a time."""

    def __init__(self, path: Path, step: Step) -> None:
        """Remember where; nothing is read or written. `step` is called as each step begins."""
        self._path = path
        self._folder = Folder(str(path))
        self._step = step
        self._shards: list[_Changed] = []

    def begin(self) -> None:
        """Forget what was noted; what is stuck of it does no harm once nothing is certain any more."""
        self._shards = []
        self._folder.remove(f"{_NEXT}/{_COMMIT}")
        with told():
            disk.remove_folder(self._path / _NEXT)

    def add(self, shard: str, new: Tensors) -> int:
        """Note where the tensors of a shard are to differ from what it holds. Returns the bytes written."""
        old = open_shard(self._path / shard)
        values = {old.places[name]: as_bytes(tensor).numpy().view(np.uint16) for name, tensor in new.items()}
        changed = {
            place: np.flatnonzero(old.units[slice(*place)] != value) for place, value in values.items()
        }
        pos = np.concatenate([found + first for (first, _), found in sorted(changed.items())])
        if not pos.size:
            return 0
        noted = {
            "pos": pos.astype(np.uint32 if old.units.size >> 32 == 0 else np.uint64),
            "value": np.concatenate([values[place][found] for place, found in sorted(changed.items())]),
        }
        if sum(column.nbytes for column in noted.values()) > old.units.nbytes:
            noted = {"value": np.concatenate([value for _, value in sorted(values.items())])}
        file = self._put(shard, safetensors.numpy.save(noted))
        self._shards.append(_Changed(**file.model_dump(), stored=noted["value"].nbytes))
        return file.size

    def commit(self, base: Marker, index: bytes) -> int:
        """Make the change of a checkpoint that is `base` certain: `finish` does it, now or after a kill.

        `index` is the index to come. Returns the bytes written to the journal.
        """
        commit = _Commit(base=base.id, shards=tuple(self._shards), index=self._put(_INDEX, index))
        return commit.index.size + self._put(_COMMIT, commit.model_dump_json().encode()).size

    def finish(self, begin: Callable[[int], None], on_write: Callable[[int], None]) -> str:
        """Do what a journal says that was committed, and drop one that was not.

        Args:
            begin: called with the bytes that are to be stored in shards.
            on_write: called with those that were, shard by shard.

        Returns:
            Why the change cannot be made, and the checkpoint has to be written anew; empty where all is well.

        Raises:
            DiskError: the checkpoint cannot be written; the next call goes on.
        """
        problem = ""
        try:
            commit = _Commit.model_validate_json(self._folder.read(f"{_NEXT}/{_COMMIT}"))
            begin(sum(shard.stored for shard in commit.shards))
            self._redo(commit, on_write)
        except FileNotFoundError as error:
            if _COMMIT in self._folder.names(_NEXT):
                problem = f"the change that was begun cannot be made in place: {error}"
        except (DamagedBaseError, SafetensorError, ValueError, KeyError, IndexError) as error:
            problem = f"the change that was begun cannot be made in place: {error}"
        self._step("forget the journal")
        self.begin()
        return problem

    def _put(self, name: str, content: bytes) -> FileEntry:
        self._folder.put(f"{_NEXT}/{name}", [content], self._step)
        return FileEntry(name=name, size=len(content), xxh3=checksum([content]))

    def _get(self, file: FileEntry) -> bytes:
        content = self._folder.read(f"{_NEXT}/{file.name}")
        if checksum([content]) != file.xxh3:
            raise DamagedBaseError(f"{file.name} in the journal is damaged")
        return content

    def _redo(self, commit: _Commit, on_write: Callable[[int], None]) -> None:
        index = self._get(commit.index)
        marker = parse_marker(index)
        if marker is None or not marker.shards.keys() >= {shard.name for shard in commit.shards}:
            raise DamagedBaseError("the index to come is none of these shards")
        held = read_marker(self._folder)
        if held is not None and held.id == marker.id:
            return  # killed after the last step
        if held is not None and held.id != commit.base:
            raise DamagedBaseError("the checkpoint was replaced meanwhile")
        self._step("withdraw the index")
        self._folder.remove(INDEX)
        for shard in commit.shards:
            self._move(shard.name, shard.name + HIDDEN)
        for shard in commit.shards:
            self._store(shard, on_write)
            load_checked(self._path / (shard.name + HIDDEN), marker.shards[shard.name])
        for shard in commit.shards:
            self._move(shard.name + HIDDEN, shard.name)
        self._folder.put(INDEX, [index], self._step)

    def _move(self, old: str, new: str) -> None:
        """Rename, where it was not done before."""
        self._step(f"rename {old}")
        try:
            self._folder.rename(old, new)
        except FileNotFoundError:
            if not disk.exists(self._path / new):
                raise DamagedBaseError(f"{old} is gone") from None

    def _store(self, shard: _Changed, on_write: Callable[[int], None]) -> None:
        """Store the new values of one shard, and wait until they are on the disk."""
        path = self._path / (shard.name + HIDDEN)
        noted = safetensors.numpy.load(self._get(shard))
        patched = open_shard(path)
        self._step(f"patch {shard.name}")
        patched.units[noted.get("pos", slice(None))] = noted["value"]
        self._step(f"flush {shard.name}")
        disk.flush(patched.memory, path)
        on_write(shard.stored)
