"""Reading one version: fetched and checked completely, then written into live tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from awex_delta.engines.view import EngineTensor
from awex_delta.errors import CorruptFrameError, LayoutError
from awex_delta.folder.folder import Folder, version_name
from awex_delta.folder.live import Live, LiveLine, Table
from awex_delta.folder.manifest import WHOLE, BodyEntry, LineEntry, Manifest, Stored, TensorEntry, checksum
from awex_delta.folder.pack import unpack_boxes
from awex_delta.lines.boxes import BoxMap
from awex_delta.lines.changes import Changes
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.wire.codec import settle
from awex_delta.wire.registry import CODECS, codec_named
from awex_delta.wire.spans import Span

_MAX_READ_BYTES = 1 << 26
"""Neighbours in a file are read together up to this size."""

_PIECE = 1 << 21  # elements that are written or read back at a time

Piece = tuple[torch.dtype, torch.Tensor, torch.Tensor]
"""Some elements: their dtype, ascending positions in the live line of it, int64 [k], and values [k]."""

Entry = TypeVar("Entry", bound=Stored)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """What one body says. pos: in the live line; None if all values of a span are there, from `start` on."""

    table: Table
    live: LiveLine
    value: torch.Tensor
    pos: torch.Tensor | None = None
    start: int = 0

    def pieces(self) -> Iterator[Piece]:
        """Everything that the live line holds, some million elements at a time."""
        for first in range(0, self.value.numel(), _PIECE):
            value = self.value[first : first + _PIECE]
            if self.pos is None:
                start = self.start + first
                span = torch.arange(start, start + value.numel(), device="cpu")
                pos, pick = _there(self.table, self.live, span)
                yield self.live.dtype, pos, value.index_select(0, pick)
            else:
                yield self.live.dtype, self.pos[first : first + _PIECE], value


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a version says of some live tensors: checked, on the CPU, every value known.

    wholes: live tensors, and their new values in the same shape.
    bodies: of a delta.
    """

    wholes: list[tuple[EngineTensor, torch.Tensor]] = field(default_factory=list)
    bodies: list[_Body] = field(default_factory=list)

    def pieces(self) -> Iterator[Piece]:
        """The elements of a delta."""
        return (piece for body in self.bodies for piece in body.pieces())


def stage(
    folder: Folder,
    manifest: Manifest,
    live: Live,
    *,
    workers: int,
    skip: Collection[str] = (),
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> Staged:
    """Fetch, check and unpack what live tensors need of a version. Nothing is written.

    Args:
        live: tensors that hold exactly the version's base, if it is a delta.
        workers: reads at once.
        skip: names of tensors that hold what a full version would write.
        on_read: called with the bytes of every finished read, by the calling thread.

    Returns:
        Every value: of a full version as much memory as the tensors have.

    Raises:
        LayoutError: it takes all weights to read it, and there is a part of them.
        ConfigError: this machine lacks what the encoding needs.
        CorruptFrameError: bytes are damaged.
        OSError: a file is gone, or cannot be read.
    """
    with ThreadPoolExecutor(max_workers=workers) as pool:

        def each(entries: Sequence[Entry], use: Callable[[Entry, torch.Tensor], Value]) -> Iterator[Value]:
            def read(run: Sequence[Entry]) -> tuple[int, list[Value]]:
                found = [use(entry, body) for entry, body in _read_run(folder, manifest, run)]
                return sum(entry.size for entry in run), found

            for num_bytes, values in pool.map(read, runs(entries)):
                on_read(num_bytes)
                yield from values

        wanted = _wanted_tensors(live, skip)
        tensors = [entry for entry in manifest.tensors if entry.name in wanted]
        wholes = [pair for pairs in each(tensors, partial(_parts_of, wanted)) for pair in pairs]
        lines = {line.boxes: line for line in manifest.lines if WIRE_DTYPES[line.dtype] in live.lines}
        unknown = [boxes for boxes in lines if boxes.xxh3 not in live.tables]
        live.tables |= each(unknown, lambda boxes, blob: (boxes.xxh3, _table(lines[boxes], blob, live)))
        owners = {body: line for line in lines.values() for body in _touching(line, live)}
        bodies = each(list(owners), lambda body, blob: _unpacked(owners[body], body, blob, live))
        return Staged(wholes=wholes, bodies=list(bodies))


def _wanted_tensors(live: Live, skip: Collection[str]) -> dict[str, list[EngineTensor]]:
    """The live tensors by the name that a full version has for them."""
    wanted: dict[str, list[EngineTensor]] = defaultdict(list)
    for part in live.parts:
        if part.name not in skip and part.view.numel():
            wanted[live.stored_names[part.name]].append(part)
    return wanted


def _parts_of(
    wanted: Mapping[str, Sequence[EngineTensor]], entry: TensorEntry, body: torch.Tensor
) -> list[tuple[EngineTensor, torch.Tensor]]:
    """What a stored tensor is for each live one."""
    whole = body.view(WIRE_DTYPES[entry.dtype]).view(entry.shape)

    def cut(part: EngineTensor) -> torch.Tensor:
        begins = zip(part.global_offset, part.view.shape, strict=True)
        return whole[tuple(slice(a, a + n) for a, n in begins)]

    return [(part, cut(part)) for part in wanted[entry.name]]


def _table(line: LineEntry, blob: torch.Tensor, live: Live) -> Table:
    boxes = unpack_boxes(blob.numpy().tobytes(), line.numel, live.space.line.numel)
    return Table(boxes, BoxMap(boxes))


def _touching(line: LineEntry, live: Live) -> list[BodyEntry]:
    """The bodies of a line that may hold something of the live tensors."""
    boxes = live.tables[line.boxes.xxh3].boxes
    here = live.lines[WIRE_DTYPES[line.dtype]].touches(boxes.target, boxes.target_ends)
    touched = boxes.take(here.nonzero().view(-1))
    begun = torch.searchsorted(
        touched.source, torch.tensor([body.end for body in line.bodies], dtype=torch.int64, device="cpu")
    )
    over = torch.searchsorted(
        touched.source + touched.numels,
        torch.tensor([body.begin for body in line.bodies], dtype=torch.int64, device="cpu"),
        right=True,
    )
    return [body for body, keep in zip(line.bodies, (begun > over).tolist(), strict=True) if keep]


def runs(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that lie beside each other in a file, to be read at once."""
    found: list[list[Entry]] = []
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
    folder: Folder, manifest: Manifest, run: Sequence[Entry]
) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The checked bytes of neighbours, uint8 [n] each, beginning at the start of a storage."""
    start, stop = run[0].offset, run[-1].offset + run[-1].size
    name = f"{version_name(manifest.version)}/{run[0].file}"
    blob = memoryview(folder.read(name, start, stop))
    for entry in run:
        body = blob[entry.offset - start : entry.offset - start + entry.size]
        if len(body) != entry.size or checksum([body]) != entry.xxh3:
            raise CorruptFrameError(f"{entry.key} of {manifest.label} is damaged: {name} at {entry.offset}")
        # A copy of its own: it begins where any dtype may begin, and does not keep its neighbours.
        copied = bytearray(body) or bytearray(1)
        yield entry, torch.frombuffer(copied, dtype=torch.uint8)[: entry.size]


def _unpacked(line: LineEntry, entry: BodyEntry, body: torch.Tensor, live: Live) -> _Body:
    """What a body says of the live tensors."""
    dtype, table = WIRE_DTYPES[line.dtype], live.tables[line.boxes.xxh3]
    here = live.lines[dtype]
    if entry.encoding == WHOLE:
        return _Body(table=table, live=here, value=body.view(dtype), start=entry.begin)
    if entry.encoding not in CODECS:
        raise CorruptFrameError(f"{entry.key} is packed as {entry.encoding!r}, which is not known here")
    codec = codec_named(entry.encoding)
    read = partial(_read_back, table, here, entry) if codec.needs_context else None
    changes = codec.decode(body, entry.count, Span(entry.begin, entry.end), dtype, read=read)
    pos, pick = _there(table, here, changes.pos)
    value = torch.empty(0, dtype=dtype, device="cpu") if changes.value is None else changes.value[pick]
    code = None if changes.code is None else changes.code[pick]
    changes = settle(Changes(pos=pos, code=code, value=value), partial(_gathered, here))
    return _Body(table=table, live=here, value=value, pos=changes.pos)


def _there(table: Table, live: LiveLine, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From positions in a writer's line to those in the live line, and which of them they are."""
    canonical, pick = table.map.map(pos)
    there, inner = live.map.map(canonical)
    return there, pick[inner]


def _gathered(live: LiveLine, pos: torch.Tensor) -> torch.Tensor:
    return live.storages.gather(pos.to(live.storages.device), live.dtype).to(pos.device)


def _read_back(table: Table, live: LiveLine, entry: BodyEntry, start: int, stop: int) -> torch.Tensor:
    """The live values of some elements of a writer's line, all of which must be here."""
    there, pick = _there(table, live, torch.arange(start, stop, device="cpu"))
    held = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    held[pick] = True
    if not bool(held.all()):
        raise LayoutError(
            f"{entry.key} is packed as {entry.encoding!r}, which takes all of its weights to read, and this "
            "rank holds a part of them: set weight_update_delta_encoding: ulp_zstd on the trainer"
        )
    values = torch.empty(stop - start, dtype=live.dtype, device="cpu")
    values[pick] = _gathered(live, there)
    return values


def write(live: Live, staged: Staged) -> int:
    """Write what was staged into the live tensors, in place. Returns the elements written."""
    for part, value in staged.wholes:
        part.view.copy_(value)
    return sum(value.numel() for _, value in staged.wholes) + write_pieces(live, staged.pieces())


def write_pieces(live: Live, pieces: Iterable[Piece]) -> int:
    """Write some elements of live tensors, in place. Returns how many."""
    written = 0
    for dtype, pos, value in pieces:
        storages = live.lines[dtype].storages
        storages.scatter(pos.to(storages.device), value.to(storages.device))
        written += value.numel()
    return written


def within(pieces: Iterable[Piece], live: Live, begins: Mapping[torch.dtype, int]) -> Iterator[Piece]:
    """What pieces say of some of many tensors. The positions of `pieces` are in the lines of the many.

    begins: by dtype, how many elements lie before the tensors of `live`; 0 if it is not named.
    """
    for dtype, pos, value in pieces:
        if dtype in live.lines:
            begin = begins.get(dtype, 0)
            edges = torch.tensor(
                [begin, begin + live.lines[dtype].line.numel], dtype=torch.int64, device="cpu"
            )
            first, last = torch.searchsorted(pos, edges).tolist()
            yield dtype, pos[first:last] - begin, value[first:last]
