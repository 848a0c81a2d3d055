"""The manifest of one version: what its files hold, and how one can tell that they are whole."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from awex_delta.errors import CorruptFrameError, StaleFrameError
from awex_delta.plan.describe import WIRE_DTYPES
from awex_delta.protocol.verdict import Kind

FORMAT: Literal[1] = 1
WHOLE = "whole"
"""The encoding of a region that is stored as its values."""

_SECTION = "awex_delta"

Count = Annotated[int, Field(ge=0)]
Sizes = tuple[Count, ...]
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


class TensorEntry(_Entry):
    """One box of one HF tensor, as bytes [offset, offset + size) of a file.

    name, dtype, shape: the HF tensor.
    start, extent: the box.
    encoding: `whole`, or how the changed elements of the box are packed.
    count: elements that are stored.
    owned: half-open ranges of positions in the box that its writer owned, for encodings that use them.
    key: what the safetensors file calls it.
    xxh3: of these bytes.
    """

    name: str
    dtype: Literal["bfloat16", "float32", "float16"]
    shape: Sizes
    start: Sizes
    extent: Sizes
    encoding: str
    count: Count
    owned: tuple[tuple[Count, Count], ...] = ()
    file: FileName
    key: str
    offset: Count
    size: Count
    xxh3: Checksum

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.extent)

    @model_validator(mode="after")
    def _check_box(self) -> TensorEntry:
        if not len(self.shape) == len(self.start) == len(self.extent):
            raise ValueError("shape, start and extent have different lengths")
        ends = [a + n for a, n in zip(self.start, self.extent, strict=True)]
        if any(end > size for end, size in zip(ends, self.shape, strict=True)) or self.count > self.numel:
            raise ValueError("the box lies outside its tensor, or holds less than it counts")
        edges = [edge for span in self.owned for edge in span]
        if edges != sorted(edges) or max(edges, default=0) > self.numel:
            raise ValueError("the owned ranges lie outside the box, or out of order")
        width = WIRE_DTYPES[self.dtype].itemsize
        if self.encoding == WHOLE and (self.count != self.numel or self.size != self.numel * width):
            raise ValueError("a whole box has another size than its values")
        return self


class Manifest(_Entry):
    """What one version is.

    id: of this very write; a version that is written again has another one.
    base_version, base_id: what a delta builds on.
    reason: name of the `Reason` why the version is full; NONE for a delta.
    changed, owned: elements that the trainers found changed, of those that they own.
    tied: HF names that are stored under another name.
    digest: by HF name, 64-bit content digest of what an engine holds afterwards (`content`), of all
        elements or of those that the version writes (scope); empty where none was taken.
    """

    format: Literal[1] = FORMAT
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
    tensors: tuple[TensorEntry, ...]
    scope: Literal["off", "touched", "full"] = "off"
    digest: dict[str, Checksum] = {}

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files)

    @property
    def extra_files(self) -> tuple[FileEntry, ...]:
        """Files that hold no tensors, such as config.json."""
        with_tensors = {entry.file for entry in self.tensors}
        return tuple(file for file in self.files if file.name not in with_tensors)

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"version {self.version} ({self.kind}) of run {self.run_id[:8]}"

    @model_validator(mode="after")
    def _check_links(self) -> Manifest:
        if (self.kind is Kind.DELTA) != (self.base_version is not None and self.base_id is not None):
            raise ValueError("a delta names its base, and a full version has none")
        sizes = {file.name: file.size for file in self.files}
        if any(entry.offset + entry.size > sizes.get(entry.file, -1) for entry in self.tensors):
            raise ValueError("a tensor lies outside its file")
        return self


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as the index of a sharded HF checkpoint, with a checksum over itself."""
    body = manifest.model_dump(mode="json")
    total = sum(entry.size for entry in manifest.tensors)
    index = {
        "metadata": {"total_size": total, _SECTION: {**body, "xxh3": _checksum(body)}},
        "weight_map": {entry.key: entry.file for entry in manifest.tensors},
    }
    return json.dumps(index, indent=1).encode()


def parse_manifest(text: bytes, version: int) -> Manifest:
    """Read a manifest back.

    Args:
        text: the file.
        version: the version whose folder it lies in.

    Raises:
        CorruptFrameError: it is damaged, or no manifest of this package.
        StaleFrameError: it belongs to another version.
    """
    try:
        index = json.loads(text)
        body = dict(index["metadata"][_SECTION])
        checksum = body.pop("xxh3")
        weight_map = index["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFrameError(f"the manifest of version {version} cannot be read: {error!r}") from error
    if _checksum(body) != checksum:
        raise CorruptFrameError(f"the manifest of version {version} is damaged: its checksum differs")
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        what = error.errors(include_url=False, include_context=False)[0]
        raise CorruptFrameError(f"the manifest of version {version}: {what['loc']}: {what['msg']}") from error
    if weight_map != {entry.key: entry.file for entry in manifest.tensors}:
        raise CorruptFrameError(f"the manifest of version {version} is damaged: its weight_map differs")
    if manifest.version != version:
        raise StaleFrameError(f"the folder of version {version} holds version {manifest.version}")
    return manifest


def checksum(chunks: Sequence[Any]) -> str:
    """xxh3 over buffers of bytes, one after the other, as 16 hexadecimal digits."""
    state = xxhash.xxh3_64()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def _checksum(body: dict[str, Any]) -> str:
    return checksum([json.dumps(body, sort_keys=True).encode()])
