"""The manifest of one version: what its files hold, and how one can tell that they are whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from awex_delta.errors import UNREADABLE, CorruptFrameError, StaleFrameError
from awex_delta.lines.space import Space
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.protocol.verdict import Kind

FORMAT: Literal[2] = 2
WHOLE = "whole"
"""The encoding of a span that is stored as its values."""

_SECTION = "awex_delta"
_MAX_NUMEL = 1 << 48  # with more, sums of positions might not fit int64


class ForeignFormatError(StaleFrameError):
    """A manifest of another release."""


Count = Annotated[int, Field(ge=0, lt=2**63)]
Sizes = tuple[Count, ...]
Dtype = Literal["bfloat16", "float32", "float16"]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FileName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
]  # never a path that leads elsewhere


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Entry):
    """One file of a version. xxh3: of all its bytes."""

    name: FileName
    size: Count
    xxh3: Checksum


class Stored(_Entry):
    """Bytes [offset, offset + size) of a file. key: what the safetensors file calls them; xxh3: of them."""

    file: FileName
    key: str
    offset: Count
    size: Count
    xxh3: Checksum


class TensorEntry(Stored):
    """One HF tensor of a full version, whole, under its own name."""

    dtype: Dtype
    shape: Sizes

    @property
    def name(self) -> str:
        """HF name."""
        return self.key

    @model_validator(mode="after")
    def _check_size(self) -> TensorEntry:
        if self.size != math.prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize:
            raise ValueError("a tensor has another size than its values")
        return self


class BodyEntry(Stored):
    """What changed in one span of a line.

    begin, end: the span.
    count: elements that are stored.
    encoding: how, a name of `wire.registry`, or `whole` for all values of the span.
    """

    begin: Count
    end: Count
    count: Count
    encoding: str


class LineEntry(_Entry):
    """What one writer stores of a delta in one dtype: some elements of its line.

    numel: elements of the line.
    boxes: from the line to the canonical line of the folder, packed by `pack.pack_boxes`.
    bodies: spans of the line with changes, in its order.
    """

    dtype: Dtype
    numel: Count
    boxes: Stored
    bodies: tuple[BodyEntry, ...]

    @model_validator(mode="after")
    def _check_spans(self) -> LineEntry:
        width, stop = WIRE_DTYPES[self.dtype].itemsize, 0
        for body in self.bodies:
            numel = body.end - body.begin
            if not stop <= body.begin < body.end <= self.numel or not 0 < body.count <= numel:
                raise ValueError("a span is empty, out of order or beyond its line")
            if body.encoding == WHOLE and (body.count != numel or body.size != numel * width):
                raise ValueError("the values of a span have another size than the span")
            stop = body.end
        return self


class HfSpace(_Entry):
    """The canonical line of a folder: HF tensors in the order of their names, as columns of one length."""

    names: tuple[str, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    shapes: tuple[Sizes, ...] = ()

    @cached_property
    def line(self) -> Space:
        """Where each tensor begins."""
        return Space.of(zip(self.names, map(math.prod, self.shapes), strict=True))

    @cached_property
    def places(self) -> dict[str, int]:
        """Number of each tensor by its name."""
        return {name: place for place, name in enumerate(self.names)}

    @model_validator(mode="after")
    def _check_columns(self) -> HfSpace:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes have different lengths")
        if sorted(set(self.names)) != list(self.names):
            raise ValueError("names are out of order, or stand twice")
        if sum(map(math.prod, self.shapes)) > _MAX_NUMEL:
            raise ValueError("the line has more than 2^48 elements")
        return self


class Manifest(_Entry):
    """What one version is.

    id: of this very write; a version that is written again has another one.
    base_version, base_id: what a delta builds on.
    reason: name of the `Reason` why the version is full; NONE for a delta.
    changed, owned: elements that the trainers found changed, of those that they own.
    tied: HF names that are stored under another name.
    tensors: of a full version.
    space, lines: of a delta, all HF tensors and what writers store of them.
    digest: by HF name, 64-bit content digest of what an engine holds afterwards (`content`), of all
        elements or of those that the version writes (scope); empty where none was taken.
    """

    format: Literal[2] = FORMAT
    id: str
    run_id: str
    version: Count
    kind: Kind
    base_version: Count | None = None
    base_id: str | None = None
    reason: str = ""
    changed: Count = 0
    owned: Count = 0
    created: float = 0.0
    tied: dict[str, str] = {}
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...] = ()
    space: HfSpace = HfSpace()
    lines: tuple[LineEntry, ...] = ()
    scope: Literal["off", "touched", "full"] = "off"
    digest: dict[str, Checksum] = {}

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files)

    @property
    def extra_files(self) -> tuple[FileEntry, ...]:
        """Files that hold no tensors, such as config.json."""
        with_tensors = {one.file for one in self.stored}
        return tuple(file for file in self.files if file.name not in with_tensors)

    @cached_property
    def hf(self) -> HfSpace:
        """All HF tensors."""
        if self.kind is Kind.DELTA:
            return self.space
        entries = sorted(self.tensors, key=lambda entry: entry.name)
        return HfSpace(
            names=tuple(entry.name for entry in entries),
            dtypes=tuple(entry.dtype for entry in entries),
            shapes=tuple(entry.shape for entry in entries),
        )

    @property
    def stored(self) -> tuple[Stored, ...]:
        """Everything that lies in its files."""
        return (*self.tensors, *(one for line in self.lines for one in (line.boxes, *line.bodies)))

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"version {self.version} ({self.kind}) of run {self.run_id[:8]}"

    @model_validator(mode="after")
    def _check_links(self) -> Manifest:
        if (self.kind is Kind.DELTA) != (self.base_version is not None and self.base_id is not None):
            raise ValueError("a delta names its base, and a full version has none")
        sizes = {file.name: file.size for file in self.files}
        if any(one.offset + one.size > sizes.get(one.file, -1) for one in self.stored):
            raise ValueError("a tensor lies outside its file")
        if self.kind is Kind.FULL:
            _ = self.hf  # its names stand once
        return self


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as the index of a sharded HF checkpoint, with a checksum over itself."""
    body = manifest.model_dump(mode="json")
    total = sum(one.size for one in manifest.stored)
    index = {
        "metadata": {"total_size": total, _SECTION: {**body, "xxh3": _checksum(body)}},
        "weight_map": {one.key: one.file for one in manifest.stored},
    }
    return json.dumps(index).encode()


def parse_manifest(text: bytes, version: int, path: str) -> Manifest:
    """Read back the manifest of the version whose folder is `path`, which only messages name.

    Raises:
        CorruptFrameError: it is damaged, or no manifest of this package.
        ForeignFormatError: another release wrote it.
        StaleFrameError: it belongs to another version.
    """
    try:
        index = json.loads(text)
        body = dict(index["metadata"][_SECTION])
        checksum = body.pop("xxh3")
        weight_map = index["weight_map"]
    except UNREADABLE as error:
        raise CorruptFrameError(f"the manifest of version {version} cannot be read: {error!r}") from error
    if _checksum(body) != checksum:
        raise CorruptFrameError(f"the manifest of version {version} is damaged: its checksum differs")
    if body.get("format") != FORMAT:
        raise ForeignFormatError(
            f"{path} has format {body.get('format')!r}, and this release reads and writes format {FORMAT}: "
            "write to a new folder, or read it with the release that wrote it"
        )
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        what = error.errors(include_url=False, include_context=False)[0]
        raise CorruptFrameError(f"the manifest of version {version}: {what['loc']}: {what['msg']}") from error
    if weight_map != {one.key: one.file for one in manifest.stored}:
        raise CorruptFrameError(f"the manifest of version {version} is damaged: its weight_map differs")
    if manifest.version != version:
        raise StaleFrameError(f"the folder of version {version} holds version {manifest.version}")
    return manifest


def checksum(chunks: Iterable[Any]) -> str:
    """xxh3 over buffers of bytes, one after the other, as 16 hexadecimal digits."""
    state = xxhash.xxh3_64()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def _checksum(body: dict[str, Any]) -> str:
    return checksum([json.dumps(body, sort_keys=True).encode()])
