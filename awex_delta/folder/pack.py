"""What one trainer rank stores of a version: tensors in the layout of safetensors, and their entries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from awex_delta.errors import ConnectError, CorruptFrameError
from awex_delta.folder.manifest import WHOLE, BodyEntry, FileEntry, LineEntry, Stored, TensorEntry, checksum
from awex_delta.lines.boxes import Boxes
from awex_delta.lines.changes import Changes
from awex_delta.plan.columns import pack, unpack
from awex_delta.plan.describe import dtype_name
from awex_delta.wire.buckets import Bucket, cut
from awex_delta.wire.codec import Codec, as_bytes
from awex_delta.wire.pieces import blocks
from awex_delta.wire.spans import Read

SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""What safetensors calls the dtypes."""

MAX_BODY_BYTES = 1 << 24
"""Of a delta a reader holds so much packed at a time, for each of its workers."""

_COLUMNS = ("target", "target_pitch", "rows", "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What changed in one line, packed.

    dtype, numel: of the line.
    boxes: its table, see `pack_boxes`.
    bodies: uint8 each on the CPU, with what they are made of and how.
    """

    dtype: torch.dtype
    numel: int
    boxes: torch.Tensor
    bodies: tuple[tuple[Bucket, str, torch.Tensor], ...]

    def sent(self, changes: Changes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The elements in the bodies: ascending positions in the line, and values.

        changes: those that the line was packed from.
        """
        for bucket, _, body in self.bodies:
            if bucket.whole:
                yield torch.arange(bucket.span.begin, bucket.span.end, device="cpu"), body.view(self.dtype)
            elif changes.value is not None:
                here = slice(bucket.first, bucket.last)
                yield changes.pos[here], changes.value[here]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """One file in memory, and what the manifest says of it. chunks: its bytes in order."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...] = ()
    lines: tuple[LineEntry, ...] = ()
    chunks: tuple[Any, ...]

    @property
    def num_elements(self) -> int:
        """Elements whose values it holds."""
        whole = sum(torch.Size(entry.shape).numel() for entry in self.tensors)
        return whole + sum(body.count for line in self.lines for body in line.bodies)


def file_name(stem: str, rank: int, num_ranks: int) -> str:
    """The name of one writer's file, as HF numbers shards: `model-00001-of-00002.safetensors`."""
    return f"{stem}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def pack_boxes(boxes: Boxes) -> torch.Tensor:
    """The table of a line as bytes, uint8 [n] on the CPU.

    boxes lead from the line to the folder's; at the source each begins where the one before it ends.
    """
    columns = {name: getattr(boxes, name).numpy() for name in _COLUMNS}
    return torch.frombuffer(bytearray(pack({}, columns, {})), dtype=torch.uint8)


def unpack_boxes(blob: bytes, numel: int, end: int) -> Boxes:
    """Undo `pack_boxes` for a line of `numel` elements and a folder's line of `end` elements.

    Raises CorruptFrameError if the table does not hold the line, or leads out of the folder's.
    """
    try:
        _, columns, _ = unpack(blob)
    except ConnectError as error:
        raise CorruptFrameError(f"a table of boxes cannot be read: {error}") from error
    if set(columns) != set(_COLUMNS) or len({column.size for column in columns.values()}) != 1:
        raise CorruptFrameError("a table of boxes has other columns")
    target, pitch, rows, width = (torch.from_numpy(columns[name]) for name in _COLUMNS)
    room = end - width - target  # without an overflow, whatever the numbers are
    fits = (target >= 0) & (rows > 0) & (width > 0) & (pitch >= width) & (room >= 0)
    fits &= rows - 1 <= room // pitch.clamp(min=1)
    sizes, last = rows * width, target + (rows - 1) * pitch + width
    order = target.argsort()
    apart = bool((target[order][1:] >= last[order][:-1]).all())
    if not bool(fits.all()) or not apart or int(sizes.sum()) != numel:
        raise CorruptFrameError(f"a table of boxes does not hold a line of {numel} elements")
    source = sizes.cumsum(0) - sizes
    return Boxes(source=source, source_pitch=width, target=target, target_pitch=pitch, rows=rows, width=width)


def pack_line(
    changes: Changes,
    codec: Codec,
    dtype: torch.dtype,
    boxes: torch.Tensor,
    read: Read,
    *,
    numel: int,
    whole: int = 0,
    bucket_bytes: int = MAX_BODY_BYTES,
) -> Line:
    """Pack what changed in one line; spans without changes are left out.

    Args:
        changes: of the line, with values.
        codec: packs them, where all values of a span do not take less.
        boxes: the line's table as bytes.
        read: its values after the step.
        numel: its elements; the first `whole` of them are always stored.
        bucket_bytes: see `buckets.cut`.
    """
    buckets = cut(changes, codec, dtype, numel, min(bucket_bytes, MAX_BODY_BYTES), whole_prefix=whole)
    bodies = []
    for bucket in buckets:
        if bucket.whole:
            values = torch.cat([block for _, block in blocks(read, bucket.span)])
            bodies.append((bucket, WHOLE, as_bytes(values)))
        elif bucket.num_sent:
            here = changes.part(bucket.first, bucket.last)
            bodies.append((bucket, codec.name, codec.encode(here, bucket.span, dtype, read=read).clone()))
    return Line(dtype=dtype, numel=numel, boxes=boxes, bodies=tuple(bodies))


def pack_lines(name: str, lines: Sequence[Line]) -> PackedFile:
    """A file of what changed in some lines, of as many dtypes."""
    stem = name.removesuffix(".safetensors")
    keys = [f"{stem}/{dtype_name(line.dtype)}" for line in lines]  # no loader knows such a tensor
    tensors = {
        f"{key}/{number:06d}": body
        for key, line in zip(keys, lines, strict=True)
        for number, (_, _, body) in enumerate(line.bodies)
    }
    tables = {f"{key}/boxes": line.boxes for key, line in zip(keys, lines, strict=True)}
    file, stored, chunks = _laid_out(name, tensors | tables)
    entries = tuple(
        LineEntry(
            dtype=dtype_name(line.dtype),  # type: ignore[arg-type]
            numel=line.numel,
            boxes=stored[f"{key}/boxes"],
            bodies=tuple(
                BodyEntry(
                    **stored[f"{key}/{number:06d}"].model_dump(),
                    begin=bucket.span.begin,
                    end=bucket.span.end,
                    count=bucket.num_sent,
                    encoding=encoding,
                )
                for number, (bucket, encoding, _) in enumerate(line.bodies)
            ),
        )
        for key, line in zip(keys, lines, strict=True)
    )
    return PackedFile(file=file, lines=entries, chunks=chunks)


def pack_tensors(name: str, tensors: Mapping[str, torch.Tensor]) -> PackedFile:
    """A file of whole tensors, which are not copied.

    They are on the CPU, contiguous, and must not change before the file is written.
    """
    file, stored, chunks = _laid_out(name, tensors)
    entries = tuple(
        TensorEntry(
            **one.model_dump(),
            dtype=dtype_name(tensors[key].dtype),  # type: ignore[arg-type]
            shape=tuple(tensors[key].shape),
        )
        for key, one in stored.items()
    )
    return PackedFile(file=file, tensors=entries, chunks=chunks)


def _laid_out(
    name: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[FileEntry, dict[str, Stored], tuple[Any, ...]]:
    """The file, where each tensor lies in it, and its bytes."""
    # Wide dtypes first, so that every tensor of a mapped file is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    chunks = [as_bytes(tensor).numpy().data for _, tensor in ordered]
    stored, offset = dict[str, Stored](), len(head)
    for (key, tensor), chunk in zip(ordered, chunks, strict=True):
        stored[key] = Stored(file=name, key=key, offset=offset, size=tensor.nbytes, xxh3=checksum([chunk]))
        offset += tensor.nbytes
    file = FileEntry(name=name, size=offset, xxh3=checksum([head, *chunks]))
    return file, stored, (head, *chunks)
