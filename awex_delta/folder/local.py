"""What a local checkpoint that follows a folder is made of: its index, and shards of safetensors."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from awex_delta.errors import UNREADABLE
from awex_delta.folder.folder import INDEX, Folder
from awex_delta.folder.manifest import Checksum, Count, FileName, Manifest, checksum
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


class Marker(BaseModel):
    """What the local checkpoint is. shards: shard -> tensor -> xxh3 of its bytes."""

    model_config = ConfigDict(frozen=True)

    id: str
    run_id: str
    version: Count
    shards: dict[FileName, dict[str, Checksum]]


def parse_marker(index: bytes) -> Marker | None:
    """Which version an index says that the checkpoint is, None where it is none of a folder's."""
    try:
        return Marker.model_validate(json.loads(index)["metadata"][_SECTION])
    except UNREADABLE:
        return None


def read_marker(folder: Folder) -> Marker | None:
    """As `parse_marker`, of a checkpoint; None where it has no index."""
    try:
        return parse_marker(folder.read(INDEX))
    except (FileNotFoundError, NotADirectoryError):
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


def open_in_place(path: Path) -> tuple[Tensors, np.memmap[Any, Any]]:
    """The tensors of a shard as memory that *is* the file; `flush` of the second result puts it on the disk.

    Raises DamagedBaseError if its header makes no sense.
    """
    tensors: Tensors = {}
    try:
        memory = np.memmap(path, dtype=np.uint8, mode="r+")
        data = torch.from_numpy(memory)
        start = 8 + int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8:start].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = (start + offset for offset in entry["data_offsets"])
                tensors[name] = data[first:last].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    except (RuntimeError, *UNREADABLE) as error:
        raise DamagedBaseError(f"the header of {path.name} cannot be read: {error!r}") from error
    return tensors, memory


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


def total_bytes(layout: Layout) -> int:
    """Bytes of all tensors of a layout."""
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in layout.values())


def names_by_file(anchor: Manifest) -> dict[str, list[str]]:
    """Which tensors lie together in a full version."""
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in anchor.tensors:
        groups[entry.file].append(entry.name)
    return groups


def empty_tensors(anchor: Manifest, names: Sequence[str]) -> Tensors:
    """Room for some tensors of a full version."""
    wanted = set(names)
    return {
        entry.name: torch.empty(entry.shape, dtype=WIRE_DTYPES[entry.dtype])
        for entry in anchor.tensors
        if entry.name in wanted
    }
