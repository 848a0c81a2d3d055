"""Changes to the shards of a local checkpoint, in place: a journal of what is to come, and the work itself.

The journal is a folder of one version, a delta whose base is the checkpoint as it is: the new elements of
each shard in a file of their own, the index to come, and a manifest, written last. From then on the change
is certain, and is done by these steps, each of which may be done again:

    the index goes                  no loader begins any more
    shards are called SHARD.patching, which no loader looks for
    elements are stored in them, synced, read back and compared
    shards get their names back
    the index to come is written    the checkpoint is the new version
    the journal goes

So what lies under the names of shards is never a mixture, and where there is an index it is whole.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from awex_delta.errors import LayoutError, UpdateError, WireError
from awex_delta.folder.apply import stage, write
from awex_delta.folder.chain import Catalogue
from awex_delta.folder.folder import INDEX, Folder, Step, version_name
from awex_delta.folder.live import Live, whole_parts
from awex_delta.folder.local import (
    DamagedBaseError,
    Layout,
    Marker,
    Tensors,
    layout_of,
    load_checked,
    open_in_place,
    parse_marker,
    read_marker,
)
from awex_delta.folder.manifest import FileEntry, HfSpace, LineEntry, Manifest, checksum, dump_manifest
from awex_delta.folder.pack import Line, pack_boxes, pack_line, pack_lines
from awex_delta.lines.boxes import Boxes
from awex_delta.lines.changes import Changes
from awex_delta.lines.storages import BITS, Storages
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.protocol.verdict import Kind
from awex_delta.wire.indices import IndicesCodec

JOURNAL = ".awex_delta"
"""The folder in a checkpoint that holds what belongs to pulls alone; no loader looks into it."""

HIDDEN = ".patching"

_INDEX_TO_COME = "index.json"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else changes the checkpoint meanwhile; a process that dies lets go.

    Raises UpdateError if another process changes it.
    """
    room = path / JOURNAL
    room.mkdir(parents=True, exist_ok=True)
    with (room / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpdateError(f"another pull changes {path}: wait for it, or stop it") from error
        yield


def why_not_in_place(path: Path, held: Marker | None, link: Manifest) -> str:
    """Why shards that are there cannot be changed in place; empty if they can, or there are none.

    held is what the checkpoint is, None if it is no version; `link` is the version to come.
    """
    if held is None:
        found = sorted(path.glob("*.safetensors"))
        return f"{found[0].name} is of no version that is known" if found else ""
    for shard in held.shards:
        file = path / shard
        if file.is_symlink() or (file.exists() and file.stat().st_nlink > 1):
            return f"{shard} is shared with another checkpoint by a link"
        try:
            open_in_place(file)  # before the index goes: otherwise no pull could ever finish
        except FileNotFoundError:
            continue  # damage, which is noticed when it is read
        except OSError as error:
            return f"{shard} cannot be written in place ({error.strerror})"
    wanted: Layout = {entry.name: (entry.dtype, entry.shape) for entry in link.tensors}
    if link.kind is Kind.FULL and layout_of(path, held) != wanted:
        return f"{link.label} has other tensors than the checkpoint"
    return ""


class Journal:
    """The change of one checkpoint that is being made. One at a time."""

    def __init__(self, path: Path, step: Step) -> None:
        """Remember where; nothing is read or written. `step` is called as each step begins."""
        self._path = path
        self._local = Folder(str(path))
        self._folder = Folder(str(path / JOURNAL))
        self._step = step
        self._files: list[FileEntry] = []
        self._lines: list[LineEntry] = []

    def begin(self) -> None:
        """Forget what was noted and not committed."""
        for version in self._folder.versions():
            self._folder.remove_version(version)
        self._files, self._lines = [], []

    def add(self, tip: Manifest, shard: str, old: Tensors, new: Tensors) -> int:
        """Note the elements of one shard in which `new` differs from `old`, bit by bit, for the version
        `tip`.

        Returns the bytes written to the journal.
        """
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in sorted(new.items()):
            by_dtype.setdefault(tensor.dtype, []).append(name)
        lines = [_line(tip.hf, names, old, new) for names in by_dtype.values()]
        lines = [line for line in lines if line.bodies]
        if not lines:
            return 0
        packed = pack_lines(shard, lines)
        self._folder.put(f"{version_name(tip.version)}/{shard}", packed.chunks, self._step)
        self._files.append(packed.file)
        self._lines += packed.lines
        return packed.file.size

    def commit(self, tip: Manifest, base: Marker, index: bytes) -> int:
        """Make the change from `base` to `tip` certain: `finish` does it, now or after a kill.

        `index` is the index to come. Returns the bytes written to the journal.
        """
        folder = version_name(tip.version)
        self._folder.put(f"{folder}/{_INDEX_TO_COME}", [index], self._step)
        file = FileEntry(name=_INDEX_TO_COME, size=len(index), xxh3=checksum([index]))
        manifest = tip.model_copy(
            update={
                "kind": Kind.DELTA,
                "base_version": base.version,
                "base_id": base.id,
                "files": (*self._files, file),
                "tensors": (),
                "space": tip.hf,
                "lines": tuple(self._lines),
                "scope": "off",
                "digest": {},
            }
        )
        text = dump_manifest(manifest)
        self._folder.put(f"{folder}/{INDEX}", [text], self._step)
        return len(index) + len(text)

    def finish(self, begin: Callable[[int], None], on_write: Callable[[int], None]) -> str:
        """Do what a journal says that was committed, and drop one that was not.

        Args:
            begin: called with the bytes of elements that are to be stored.
            on_write: called with those that were, shard by shard.

        Returns:
            Why the change cannot be made, and the checkpoint has to be written anew; empty where all is well.

        Raises:
            OSError: the checkpoint cannot be written; the next call goes on.
        """
        problem = ""
        for version in self._folder.versions():
            manifest = Catalogue(self._folder).get(version)
            if isinstance(manifest, Manifest):
                try:
                    begin(_num_bytes(manifest.lines))
                    self._redo(manifest, on_write)
                except (DamagedBaseError, WireError, LayoutError, FileNotFoundError) as error:
                    problem = f"the change to {manifest.label} cannot be made in place: {error}"
            self._step(f"forget {version_name(version)}")
            self._folder.remove_version(version)
        return problem

    def _redo(self, manifest: Manifest, on_write: Callable[[int], None]) -> None:
        index = self._folder.read(f"{version_name(manifest.version)}/{_INDEX_TO_COME}")
        marker = parse_marker(index)
        shards = sorted({line.boxes.file for line in manifest.lines})
        is_whole = manifest.files[-1:] and manifest.files[-1].xxh3 == checksum([index])
        if marker is None or not is_whole or not marker.shards.keys() >= set(shards):
            raise DamagedBaseError("the index to come is damaged")
        held = read_marker(self._local)
        if held is not None and held.id == manifest.id:
            return  # killed after the last step
        if held is not None and held.id != manifest.base_id:
            raise DamagedBaseError("the checkpoint was replaced meanwhile")
        self._step("withdraw the index")
        self._local.remove(INDEX)
        for shard in shards:
            self._move(shard, shard + HIDDEN)
        for shard in shards:
            self._store(shard, manifest, on_write)
            load_checked(self._path / (shard + HIDDEN), marker.shards[shard])
        for shard in shards:
            self._move(shard + HIDDEN, shard)
        self._local.put(INDEX, [index], self._step)

    def _move(self, old: str, new: str) -> None:
        """Rename, where it was not done before."""
        self._step(f"rename {old}")
        if (self._path / old).exists():
            self._local.rename(old, new)
        elif not (self._path / new).exists():
            raise DamagedBaseError(f"{old} is gone")

    def _store(self, shard: str, manifest: Manifest, on_write: Callable[[int], None]) -> None:
        """Store the new elements of one shard, and wait until they are on the disk."""
        tensors, memory = open_in_place(self._path / (shard + HIDDEN))
        lines = tuple(line for line in manifest.lines if line.boxes.file == shard)
        here = manifest.model_copy(update={"lines": lines})
        live = Live(here, whole_parts(tensors))
        staged = stage(self._folder, here, live, workers=1)
        self._step(f"patch {shard}")
        write(live, staged)
        self._step(f"flush {shard}")
        memory.flush()
        on_write(_num_bytes(lines))


def _line(space: HfSpace, names: Sequence[str], old: Tensors, new: Tensors) -> Line:
    """What changed in some tensors of one dtype, one after the other."""
    bits, dtype = BITS[new[names[0]].element_size()], new[names[0]].dtype
    places, begin = list[torch.Tensor](), 0
    for name in names:
        differ = (old[name].view(bits) != new[name].view(bits)).view(-1).nonzero().view(-1)
        places.append(differ + begin)
        begin += new[name].numel()
    storages, pos = Storages([new[name] for name in names]), torch.cat(places)
    held = [name for name in names if new[name].numel()]
    numels = torch.tensor([new[name].numel() for name in held], dtype=torch.int64)
    boxes = Boxes(
        source=numels.cumsum(0) - numels,
        source_pitch=numels,
        target=space.line.starts[[space.places[name] for name in held]],
        target_pitch=numels,
        rows=torch.ones_like(numels),
        width=numels,
    )
    return pack_line(
        Changes(pos=pos, value=storages.gather(pos, dtype)),
        IndicesCodec(),
        dtype,
        pack_boxes(boxes),
        lambda start, stop: storages.gather(torch.arange(start, stop), dtype),
        numel=begin,
    )


def _num_bytes(lines: Sequence[LineEntry]) -> int:
    return sum(body.count * WIRE_DTYPES[line.dtype].itemsize for line in lines for body in line.bodies)
