"""A local HF checkpoint that follows a folder, and loads as exactly one version at any time.

New values go to new shard files beside the old ones. The index of the checkpoint names the shards, and says
which version they are; replacing it, by one rename, is the moment at which the checkpoint changes.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from awex_delta.errors import ChainError, CorruptFrameError, WireError
from awex_delta.plan.specs import WIRE_DTYPES
from awex_delta.transports.disk.apply import stage, whole_parts, write
from awex_delta.transports.disk.content import differing, sums_of
from awex_delta.transports.disk.folder import INDEX, Folder, Step, ignore_step, version_name
from awex_delta.transports.disk.layout import WholeTensor
from awex_delta.transports.disk.lease import Lease, leased_chain
from awex_delta.transports.disk.manifest import Manifest, checksum
from awex_delta.transports.disk.pack import PackedFile, pack_file, whole_item
from awex_delta.verdict import Kind
from awex_delta.wire.codec import as_bytes

logger = logging.getLogger(__name__)

_SECTION = "awex_delta_pull"
_LEFT_OVER = re.compile(r"model-v\d{6,}-\d+\.safetensors|.*\.[0-9a-f]{32}\.tmp")
_SINGLE_FILE = "model.safetensors"  # HF loaders look for it before they look for an index

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What the local checkpoint is. shards: shard -> tensor -> xxh3 of its bytes."""

    id: str
    run_id: str
    version: int
    shards: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What one pull did. links: versions that were applied, in order; none where nothing was new."""

    version: int
    links: tuple[Manifest, ...] = ()
    bytes_read: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Callbacks for a progress bar, called with bytes: of a pull that begins, and as it goes on."""

    begin: Callable[[int], None] = field(default=lambda total: None)
    advance: Callable[[int], None] = field(default=lambda done: None)


class _UnusableVersion(Exception):
    """Something of one version cannot be used; another way may lead around it."""

    def __init__(self, link: Manifest, error: Exception) -> None:
        super().__init__(f"{link.label}: {error}")
        self.link = link


class _DamagedBase(Exception):
    """The local checkpoint is not what its marker says."""


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
        self._read_bytes = 0

    def marker(self) -> Marker | None:
        """Which version the checkpoint is, None where it is none of a folder's."""
        try:
            section = json.loads(self._local.read(INDEX))["metadata"][_SECTION]
            return Marker(
                id=str(section["id"]),
                run_id=str(section["run_id"]),
                version=int(section["version"]),
                shards={str(shard): dict(sums) for shard, sums in section["shards"].items()},
            )
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def pull(self, version: int | None = None, progress: Progress | None = None) -> Pulled:
        """Bring the checkpoint to a version.

        Needs room for a second copy of the weights. Killed at any moment, it leaves the checkpoint as it
        was or as it is to be.

        Args:
            version: which one; None for the newest that can be reached.
            progress: hears of bytes read.

        Returns:
            What was done. The checkpoint is its `version` now.

        Raises:
            ChainError: no chain of whole versions leads there. The checkpoint is as it was.
            OSError: the checkpoint cannot be written. It is as it was.
        """
        self._read_bytes = 0
        held, refused, problems = self.marker(), set[str](), list[str]()
        try:
            while True:
                try:
                    return self._attempt(held, version, refused, problems, progress or Progress())
                except _UnusableVersion as error:
                    logger.warning("%s; trying another way", error)
                    problems.append(str(error))
                    refused.add(error.link.id)
                except _DamagedBase as error:
                    logger.warning("%s: %s; starting from a full version", self.path, error)
                    problems.append(str(error))
                    held = None
        finally:
            self._lease.end()

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
        self._apply(held, chain.links, progress)
        return Pulled(
            version=chain.links[-1].version,
            links=chain.links,
            bytes_read=self._read_bytes,
            problems=(*problems, *chain.problems),
        )

    def _apply(self, held: Marker | None, links: Sequence[Manifest], progress: Progress) -> None:
        """Write every shard anew, one at a time, then the index that names them."""
        tip, first = links[-1], links[0]
        progress.begin(sum(entry.size for link in links for entry in link.tensors))
        if first.kind is Kind.FULL:
            self._copy_extra_files(first)
            groups = _tensors_by_file(first)
        else:
            groups = {shard: list(sums) for shard, sums in held.shards.items()} if held else {}
        packed: list[PackedFile] = []
        for number, (shard, names) in enumerate(sorted(groups.items()), start=1):
            if first.kind is Kind.FULL:
                tensors = _empty(first, names)
            else:
                tensors = self._load(shard, held.shards[shard] if held else {})
            for link in links:
                wrong = self._bring(link, tensors, progress)
                if wrong and first.kind is Kind.FULL:
                    raise _UnusableVersion(link, CorruptFrameError(f"it does not lead to its own {wrong}"))
                if wrong:
                    raise _DamagedBase(f"{link.label} does not lead to its {wrong}")
            name = f"model-v{tip.version:06d}-{number:05d}.safetensors"
            packed.append(self._save(name, tensors))
        index = _index(tip, packed)
        self._local.put(INDEX, [json.dumps(index, indent=1).encode()], self._step)
        self._sweep({file.file.name for file in packed})

    def _bring(self, link: Manifest, tensors: Tensors, progress: Progress) -> list[str]:
        """Apply one version to the tensors of one shard; those that are not what the trainer had then."""

        def note(num_bytes: int) -> None:
            self._lease.renew()
            self._read_bytes += num_bytes
            progress.advance(num_bytes)

        try:
            parts = whole_parts(tensors)
            staged = stage(self._source, link, parts, workers=self._workers, on_read=note)
        except (WireError, OSError) as error:
            raise _UnusableVersion(link, error) from error
        write(staged)
        return differing(link, [sums_of(link, parts, staged)])

    def _load(self, shard: str, sums: Mapping[str, str]) -> Tensors:
        """The tensors of a local shard, each with the checksum it was written with. Raises _DamagedBase."""
        tensors: Tensors = {}
        try:
            with safe_open(self.path / shard, framework="pt") as file:
                for name in sums:
                    tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _DamagedBase(f"{shard} cannot be read: {error}") from error
        for name, tensor in tensors.items():
            if checksum([as_bytes(tensor).numpy().data]) != sums[name]:
                raise _DamagedBase(f"{name} in {shard} is not what was written there")
        return tensors

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


def _tensors_by_file(anchor: Manifest) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in anchor.tensors:
        groups[entry.file].append(entry.name)
    return groups


def _empty(anchor: Manifest, names: Sequence[str]) -> Tensors:
    wanted = set(names)
    return {
        entry.name: torch.empty(entry.shape, dtype=WIRE_DTYPES[entry.dtype])
        for entry in anchor.tensors
        if entry.name in wanted
    }


def _index(tip: Manifest, packed: Sequence[PackedFile]) -> dict[str, Any]:
    entries = [entry for file in packed for entry in file.entries]
    marker = {
        "id": tip.id,
        "run_id": tip.run_id,
        "version": tip.version,
        "shards": {file.file.name: {entry.key: entry.xxh3 for entry in file.entries} for file in packed},
    }
    return {
        "metadata": {"total_size": sum(entry.size for entry in entries), _SECTION: marker},
        "weight_map": {entry.key: entry.file for entry in entries},
    }
