"""What a local checkpoint that follows a folder is made of: its index, and shards of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from awex_delta import disk
from awex_delta.folder.folder import INDEX, Folder
from awex_delta.folder.manifest import Checksum, Count, FileName, Manifest, checksum
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.wire.codec import as_bytes

_SECTION = "awex_delta_pull"

Tensors = dict[str, torch.Tensor]
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype, as safetensors calls it, and shape."""


class DamagedBaseError(Exception):
    """The local checkpoint is not what its index says."""


class Marker(BaseModel):
    """What the local checkpoint is.

    total_size: bytes of all tensors.
    shards: shard -> tensor -> xxh3 of its bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    run_id: str
    version: Count
    total_size: Count
    shards: dict[FileName, dict[str, Checksum]]


def parse_marker(index: bytes) -> Marker | None:
    """Which version an index says that the checkpoint is, None where it is none of a folder's."""
    try:
        metadata = json.loads(index)["metadata"]
        return Marker.model_validate({**metadata[_SECTION], "total_size": metadata["total_size"]})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_marker(folder: Folder) -> Marker | None:
    """As `parse_marker`, of a checkpoint; None where it has no index."""
    try:
        return parse_marker(folder.read(INDEX))
    except FileNotFoundError:
        return None


def dump_index(tip: Manifest, shards: Mapping[str, Mapping[str, str]], total_size: int) -> bytes:
    """The index of a checkpoint that is version `tip`. shards, total_size: as in `Marker`."""
    marker = {"id": tip.id, "run_id": tip.run_id, "version": tip.version, "shards": shards}
    index = {
        "metadata": {"total_size": total_size, _SECTION: marker},
        "weight_map": {name: shard for shard, sums in sorted(shards.items()) for name in sums},
    }
    return json.dumps(index, indent=1).encode()


def load(path: Path, names: Iterable[str]) -> Tensors:
    """Tensors of a shard, memory of the process alone that is read from the file where it is used.

    Raises DamagedBaseError if a tensor is missing, or the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise DamagedBaseError(f"{path.name} cannot be read: {error}") from error


def load_checked(path: Path, sums: Mapping[str, str]) -> Tensors:
    """As `load`, of a shard that is what was written: `sums` has the xxh3 of each tensor's bytes."""
    tensors = load(path, sums)
    for name, tensor in tensors.items():
        if sum_of(tensor) != sums[name]:
            raise DamagedBaseError(f"{name} in {path.name} is not what was written there")
    return tensors


def sum_of(tensor: torch.Tensor) -> str:
    """The xxh3 of a tensor's bytes."""
    return checksum([as_bytes(tensor).numpy().data])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A shard as memory that *is* the file.

    memory: uint8 [n], all of it.
    units: its data, uint16 [n].
    places: where each tensor begins and ends there.
    layout: its tensors.
    """

    memory: np.memmap[Any, Any]
    units: np.ndarray[Any, Any]
    places: dict[str, tuple[int, int]]
    layout: Layout


def open_shard(path: Path) -> Shard:
    """Map a shard for writing. Raises DamagedBaseError if it is gone, or its header makes no sense."""
    try:
        memory = disk.mapped(path)
        start = 8 + int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8:start].tobytes())
        header.pop("__metadata__", None)
        ends = {name: entry["data_offsets"] for name, entry in header.items()}
        return Shard(
            memory=memory,
            units=memory[start:].view(np.uint16),
            places={name: (first // 2, last // 2) for name, (first, last) in ends.items()},
            layout={name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()},
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedBaseError(f"{path.name} cannot be read: {error!r}") from error


def empty_shards(anchor: Manifest) -> Iterator[tuple[str, Tensors]]:
    """Room for the tensors of a full version, one file after the other."""
    by_file = attrgetter("file")
    for file, entries in groupby(sorted(anchor.tensors, key=by_file), by_file):
        yield (
            file,
            {one.name: torch.empty(one.shape, dtype=WIRE_DTYPES[one.dtype], device="cpu") for one in entries},
        )
