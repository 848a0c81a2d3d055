"""Reading one version: fetched and checked completely, then written into live tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from awex_delta.engines.view import EngineTensor
from awex_delta.errors import CorruptFrameError, LayoutError
from awex_delta.folder.folder import Folder, version_name
from awex_delta.folder.manifest import WHOLE, Manifest, TensorEntry, checksum
from awex_delta.lines.geometry import Box, select
from awex_delta.lines.storages import gather_from, read_range, scatter_into
from awex_delta.plan.describe import WIRE_DTYPES, dtype_name
from awex_delta.protocol.verdict import Kind
from awex_delta.wire.codec import Context, RegionChange, settle
from awex_delta.wire.registry import CODECS, codec_named

_MAX_READ_BYTES = 1 << 26
"""Neighbours in a file are read together up to this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What one stored box means for one live tensor. box: their common part, in the whole HF tensor."""

    entry: TensorEntry
    part: EngineTensor
    box: Box

    @property
    def target(self) -> torch.Tensor:
        """The common part of the live tensor, a view."""
        start = tuple(a - o for a, o in zip(self.box.start, self.part.global_offset, strict=True))
        return self.part.view[Box(start=start, shape=self.box.shape).slices]

    @property
    def source(self) -> Box:
        """The common part in the stored box."""
        start = tuple(a - o for a, o in zip(self.box.start, self.entry.start, strict=True))
        return Box(start=start, shape=self.box.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Values for one overlap, checked and on the CPU. index: None where all values are there."""

    overlap: Overlap
    value: torch.Tensor
    index: torch.Tensor | None


def find_overlaps(manifest: Manifest, parts: Sequence[EngineTensor]) -> list[Overlap]:
    """Which stored boxes the live tensors need.

    Args:
        manifest: of the version.
        parts: one rank's live tensors, or its parts of them.

    Raises:
        LayoutError: a tensor has another name, shape or dtype on the two sides, or a full version leaves
            a part of a live tensor out.
    """
    boxes: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        boxes[entry.name].append(entry)
    live = [part for part in parts if part.tied_to is None]
    if manifest.kind is Kind.FULL:
        _check_names(manifest, live)
    found: list[Overlap] = []
    for part in live:
        entries = boxes.get(part.name) or boxes.get(manifest.tied.get(part.name, ""), [])
        for entry in entries:
            _check_layout(entry, part)
        overlaps = [o for entry in entries if (o := _overlap(entry, part)) is not None]
        if manifest.kind is Kind.FULL and sum(o.box.numel for o in overlaps) != part.view.numel():
            raise LayoutError(f"{part.name}: {manifest.label} holds only a part of what the engine serves")
        found += overlaps
    return found


def _check_names(manifest: Manifest, live: Sequence[EngineTensor]) -> None:
    names = {entry.name for entry in manifest.tensors}
    served = {part.name for part in live}
    absent = sorted(name for name in served - names if manifest.tied.get(name) not in names)
    if absent:
        raise LayoutError(f"{manifest.label} does not hold {absent[:6]}, which the engine serves")


def _check_layout(entry: TensorEntry, part: EngineTensor) -> None:
    if entry.shape != part.global_shape or entry.dtype != dtype_name(part.view.dtype):
        raise LayoutError(
            f"{part.name}: the folder holds {entry.dtype} {list(entry.shape)}, the engine serves "
            f"{dtype_name(part.view.dtype)} {list(part.global_shape)}"
        )


def _overlap(entry: TensorEntry, part: EngineTensor) -> Overlap | None:
    start = tuple(map(max, entry.start, part.global_offset))
    ends = [
        min(a + n, o + m)
        for a, n, o, m in zip(entry.start, entry.extent, part.global_offset, part.view.shape, strict=True)
    ]
    shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    if any(size <= 0 for size in shape):
        return None
    return Overlap(entry=entry, part=part, box=Box(start=start, shape=shape))


def stage(
    folder: Folder,
    manifest: Manifest,
    parts: Sequence[EngineTensor],
    *,
    workers: int,
    skip: Collection[str] = (),
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> list[Staged]:
    """Fetch, check and unpack what `parts` need of a version. Nothing is written.

    Args:
        folder: where it is.
        manifest: of the version.
        parts: live tensors that hold exactly its base, where it is a delta.
        workers: reads at once.
        skip: names of parts that hold what a full version would write.
        on_read: called with the bytes of every finished read, by the calling thread.

    Returns:
        Values for every overlap: of a full version as much memory as `parts` have.

    Raises:
        LayoutError: the version does not fit the tensors.
        ConfigError: this machine lacks what the encoding needs.
        CorruptFrameError: bytes are damaged.
        OSError: a file is gone, or cannot be read.
    """
    wanted: dict[TensorEntry, list[Overlap]] = defaultdict(list)
    for overlap in find_overlaps(manifest, parts):
        if overlap.part.name not in skip:
            wanted[overlap.entry].append(overlap)

    def read(run: Sequence[TensorEntry]) -> tuple[int, list[Staged]]:
        staged = [
            _unpack(entry, body, overlap)
            for entry, body in _read_run(folder, manifest, run)
            for overlap in wanted[entry]
        ]
        return sum(entry.size for entry in run), staged

    found: list[Staged] = []
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for num_bytes, staged in pool.map(read, runs(list(wanted))):
            found += staged
            on_read(num_bytes)
    return found


def runs(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Entries that lie beside each other in a file, to be read at once."""
    found: list[list[TensorEntry]] = []
    for entry in sorted(entries, key=lambda one: (one.file, one.offset)):
        last = found[-1] if found else []
        if (
            last
            and last[-1].file == entry.file
            and last[-1].offset + last[-1].size == entry.offset
            and entry.offset + entry.size - last[0].offset <= _MAX_READ_BYTES
        ):
            last.append(entry)
        else:
            found.append([entry])
    return found


def _read_run(
    folder: Folder, manifest: Manifest, run: Sequence[TensorEntry]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The checked bytes of neighbours, uint8 [n] each, beginning at the start of a storage."""
    start, stop = run[0].offset, run[-1].offset + run[-1].size
    name = f"{version_name(manifest.version)}/{run[0].file}"
    blob = memoryview(folder.read(name, start, stop))
    for entry in run:
        body = blob[entry.offset - start : entry.offset - start + entry.size]
        if len(body) != entry.size or checksum([body]) != entry.xxh3:
            raise CorruptFrameError(f"{entry.name} of {manifest.label} is damaged: {name} at {entry.offset}")
        # A copy of its own: it begins where any dtype may begin, and does not keep its neighbours.
        copied = bytearray(body) or bytearray(1)
        yield entry, torch.frombuffer(copied, dtype=torch.uint8)[: entry.size]


def _unpack(entry: TensorEntry, body: torch.Tensor, overlap: Overlap) -> Staged:
    dtype = WIRE_DTYPES[entry.dtype]
    if entry.encoding == WHOLE:
        value = body.view(dtype).view(entry.extent)[overlap.source.slices]
        return Staged(overlap=overlap, value=value, index=None)
    if entry.encoding not in CODECS:
        raise CorruptFrameError(f"{entry.name} is packed as {entry.encoding!r}, which is not known here")
    codec = codec_named(entry.encoding)
    contexts = [_context(entry, overlap)] if codec.needs_context else []
    (change,) = codec.decode(body, [entry.count], [entry.numel], dtype, contexts)
    change = _cut(change, entry, overlap.source)
    index = change.index if change.index is not None else torch.arange(change.numel)
    if change.code is not None and index.numel():
        target = overlap.target
        old = gather_from(target, index.to(target.device)).cpu()
        change = settle(change, old)
    return Staged(overlap=overlap, value=change.value, index=index)


def _context(entry: TensorEntry, overlap: Overlap) -> Context:
    """What the live weights say of a stored box, of which they hold all."""
    if overlap.source.shape != entry.extent:
        raise LayoutError(
            f"{entry.name} is packed as {entry.encoding!r}, which takes all of its weights to read, and this "
            "rank holds a part of them: set weight_update_delta_encoding: ulp_zstd on the trainer"
        )
    return Context(owned=entry.owned, read=partial(read_range, overlap.target))


def _cut(change: RegionChange, entry: TensorEntry, box: Box) -> RegionChange:
    """The part of a change that lies in a box of its region."""
    if change.index is None or box.shape == entry.extent:
        return change
    cut = select(change.index, entry.extent, box)
    code = None if change.code is None else change.code[cut.pick]
    return replace(change, numel=box.numel, index=cut.inner, value=change.value[cut.pick], code=code)


def write(staged: Sequence[Staged]) -> int:
    """Write what was staged into the live tensors, in place. Returns the elements written."""
    written = 0
    for one in staged:
        target = one.overlap.target
        value = one.value.to(target.device)
        if one.index is None:
            target.copy_(value)
        else:
            scatter_into(target, one.index.to(target.device), value)
        written += value.numel()
    return written


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> list[EngineTensor]:
    """Plain whole tensors as what a version is written into."""
    return [
        EngineTensor(
            name=name, view=tensor, global_shape=tuple(tensor.shape), global_offset=(0,) * tensor.dim()
        )
        for name, tensor in tensors.items()
    ]
