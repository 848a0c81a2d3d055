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
from safetensors import SafetensorError, safe_open

from awex_delta.folder.folder import INDEX, Folder
from awex_delta.folder.manifest import Manifest, checksum
from awex_delta.folder.pack import SAFETENSORS
from awex_delta.plan.describe import WIRE_DTYPES, dtype_name
from awex_delta.wire.codec import as_bytes

_SECTION = "awex_delta_pull"
_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}

Tensors = dict[str, torch.Tensor]
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""


class DamagedBaseError(Exception):
    """The local checkpoint is not what its index says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What the local checkpoint is.

    total_size: bytes of all tensors.
    shards: shard -> tensor -> xxh3 of its bytes.
    """

    id: str
    run_id: str
    version: int
    total_size: int
    shards: Mapping[str, Mapping[str, str]]


def parse_marker(index: bytes) -> Marker | None:
    """Which version an index says that the checkpoint is, None where it is none of a folder's."""
    try:
        metadata = json.loads(index)["metadata"]
        section = metadata[_SECTION]
        return Marker(
            id=str(section["id"]),
            run_id=str(section["run_id"]),
            version=int(section["version"]),
            total_size=int(metadata["total_size"]),
            shards={str(shard): dict(sums) for shard, sums in section["shards"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_marker(folder: Folder) -> Marker | None:
    """As `parse_marker`, of a checkpoint; None where it has no index."""
    try:
        return parse_marker(folder.read(INDEX))
    except FileNotFoundError:
        return None


def dump_index(tip: Manifest, shards: Mapping[str, Mapping[str, str]], total_size: int) -> bytes:
    """The index of a checkpoint that is version `tip`. shards: as in `Marker`."""
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


def units_of(memory: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], dict[str, tuple[int, int]]]:
    """The data of a shard that is mapped, and where each tensor lies in it: 16 bits each, first and last.

    Raises DamagedBaseError if its header makes no sense.
    """
    try:
        start = 8 + int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8:start].tobytes())
        places = {
            name: (entry["data_offsets"][0] // 2, entry["data_offsets"][1] // 2)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        return memory[start:].view(np.uint16), places
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedBaseError(f"the header of a shard cannot be read: {error!r}") from error


def layout_of(path: Path, marker: Marker) -> Layout:
    """Every tensor of a checkpoint. Raises DamagedBaseError."""
    layout: Layout = {}
    for shard, sums in marker.shards.items():
        try:
            with safe_open(path / shard, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in sums}
        except (OSError, SafetensorError) as error:
            raise DamagedBaseError(f"{shard} cannot be read: {error}") from error
        for name, part in slices.items():
            dtype = _DTYPES.get(part.get_dtype(), torch.uint8)
            layout[name] = dtype_name(dtype), tuple(part.get_shape())
    return layout


def empty_shards(anchor: Manifest) -> Iterator[tuple[str, Tensors]]:
    """Room for the tensors of a full version, one file after the other."""
    by_file = attrgetter("file")
    for file, entries in groupby(sorted(anchor.tensors, key=by_file), by_file):
        yield file, {one.name: torch.empty(one.shape, dtype=WIRE_DTYPES[one.dtype]) for one in entries}
