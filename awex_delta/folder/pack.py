"""What one trainer rank stores of a version: tensors in the layout of safetensors, and their entries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from awex_delta.folder.layout import WholeTensor
from awex_delta.folder.manifest import WHOLE, FileEntry, TensorEntry, checksum
from awex_delta.plan.describe import dtype_name
from awex_delta.plan.pairs import Region
from awex_delta.wire.codec import Codec, RegionChange, as_bytes, whole_is_smaller
from awex_delta.wire.indices import IndicesCodec

SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""What safetensors calls the dtypes."""

_UNKNOWN = "0" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor of a file. entry: complete but for its place in the file and its checksum."""

    entry: TensorEntry
    stored: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """One file in memory. chunks: its bytes in order."""

    file: FileEntry
    entries: tuple[TensorEntry, ...]
    chunks: tuple[Any, ...]


def file_name(stem: str, rank: int, num_ranks: int) -> str:
    """The name of one writer's file, as HF numbers shards: `model-00001-of-00002.safetensors`."""
    return f"{stem}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def whole_item(whole: WholeTensor, value: torch.Tensor) -> Item:
    """A tensor of a full version."""
    origin = (0,) * len(whole.shape)
    return _item(
        whole.name,
        whole.name,
        value,
        shape=whole.shape,
        start=origin,
        extent=whole.shape,
        encoding=WHOLE,
        dtype=dtype_name(whole.dtype),
        count=value.numel(),
    )


def changed_item(name: str, value: torch.Tensor, index: torch.Tensor) -> Item:
    """The changed elements of a whole tensor; all of them where that is smaller.

    Args:
        name: of the tensor.
        value: the tensor as it is to be.
        index: int64 [n], ascending flat positions of what changed.
    """
    codec = IndicesCodec()
    change = RegionChange(numel=value.numel(), value=value.reshape(-1)[index], index=index)
    whole = whole_is_smaller(codec, change, value.dtype)
    return _item(
        name,
        name,
        value if whole else codec.encode([change], value.dtype),
        shape=tuple(value.shape),
        start=(0,) * value.dim(),
        extent=tuple(value.shape),
        encoding=WHOLE if whole else codec.name,
        dtype=dtype_name(value.dtype),
        count=value.numel() if whole else index.numel(),
    )


def delta_items(
    found: Iterable[tuple[Region, RegionChange]], shapes: Mapping[str, tuple[int, ...]], codec: Codec
) -> list[Item]:
    """What this rank found changed, one tensor of bytes a region; regions without changes are left out.

    Args:
        found: this rank's regions and their changes.
        shapes: HF name -> shape of the whole tensor.
        codec: packs the sparse regions.

    Collective: no.
    """
    items: list[Item] = []
    for region, change in found:
        if change.value.numel():
            items.append(_delta_item(region, change, shapes[region.name], codec, len(items)))
    return items


def _delta_item(
    region: Region, change: RegionChange, shape: tuple[int, ...], codec: Codec, number: int
) -> Item:
    if change.index is None:
        encoding, stored = WHOLE, as_bytes(change.value.to(region.dtype)).clone()
    else:
        encoding, stored = codec.name, codec.encode([change], region.dtype)
    return _item(
        region.name,
        f"{region.name}#{number}",  # no loader may take it for the tensor itself
        stored,
        shape=shape,
        start=region.target.start,
        extent=region.target.shape,
        encoding=encoding,
        dtype=dtype_name(region.dtype),
        count=change.value.numel(),
        owned=change.context.owned if change.context is not None and encoding != WHOLE else (),
    )


def _item(name: str, key: str, stored: torch.Tensor, **fields: Any) -> Item:
    size = stored.numel() * stored.element_size()
    entry = TensorEntry(name=name, key=key, file="-", offset=0, size=size, xxh3=_UNKNOWN, **fields)
    return Item(entry=entry, stored=stored)


def pack_file(name: str, items: Sequence[Item]) -> PackedFile:
    """Lay tensors out as a safetensors file, without copying them.

    Args:
        name: of the file.
        items: tensors on the CPU, contiguous; they must not change before the file is written.

    Returns:
        The file, its entry in the manifest, and those of its tensors.

    Collective: no.
    """
    # Wide dtypes first, so that every tensor of a mapped file is aligned.
    ordered = sorted(items, key=lambda item: (-item.stored.element_size(), item.entry.key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in ordered:
        begin, end = end, end + item.entry.size
        header[item.entry.key] = {
            "dtype": SAFETENSORS[item.stored.dtype],
            "shape": list(item.stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    chunks = [as_bytes(item.stored).numpy().data for item in ordered]
    entries, offset = [], len(head)
    for item, chunk in zip(ordered, chunks, strict=True):
        update = {"file": name, "offset": offset, "xxh3": checksum([chunk])}
        entries.append(item.entry.model_copy(update=update))
        offset += item.entry.size
    file = FileEntry(name=name, size=offset, xxh3=checksum([head, *chunks]))
    return PackedFile(file=file, entries=tuple(entries), chunks=(head, *chunks))
