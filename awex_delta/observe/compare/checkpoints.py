"""A HF checkpoint, read tensor by tensor, and a tensor in pieces: it is never in memory as a whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from awex_delta import disk
from awex_delta.errors import ConfigError, DiskError
from awex_delta.wire.digest import MODULUS, as_unsigned, salt_of, sum_whole

PIECE_BYTES = 16 << 20
"""Of a tensor, this much is in memory at a time, or one row."""

_INDEX = "model.safetensors.index.json"
_LM_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one side calls a tensor's dtype (as torch, without the prefix) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoint:
    """A HF checkpoint: a folder of safetensors, sharded or not, or one safetensors file.

    entries: by HF name.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers; no weight yet. Raises ConfigError for files that are missing or damaged."""
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._handles: dict[str, Any] = {}
        _refuse_delta(path)
        files = _files_of(path)
        self._folder = None if files == [path] else path
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file} cannot be read as safetensors: {error}; copy it again") from error
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                if name in self.entries:
                    raise ConfigError(
                        f"{name} stands in two files of {path}: remove the file that is left over"
                    )
                part = handle.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise ConfigError(f"{name} in {file} is {part.get_dtype()}, which cannot be compared")
                self.entries[name] = Entry(
                    dtype=str(dtype).removeprefix("torch."), shape=tuple(part.get_shape())
                )
                self._handles[name] = handle
        if self._folder is not None:
            _check_index(path, self.entries)

    def find(self, name: str) -> str | None:
        """The own name of a tensor that may be tied here; None where it is not there."""
        if name in self.entries:
            return name
        tied = name == _LM_HEAD and (self._folder is None or _says_tied(self._folder))
        return next((one for one in _EMBEDDINGS if tied and one in self.entries), None)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The elements of a tensor in order, flat, a piece at a time."""
        entry = self.entries[name]
        if not entry.numel:
            return
        if not entry.shape:
            yield self._handles[name].get_tensor(name).view(1)
            return
        part = self._handles[name].get_slice(name)
        row_bytes = entry.numel // entry.shape[0] * getattr(torch, entry.dtype).itemsize
        rows = max(1, PIECE_BYTES // row_bytes)
        for start in range(0, entry.shape[0], rows):
            yield part[start : min(start + rows, entry.shape[0])].reshape(-1)

    def digest(self, name: str, *, salted_as: str | None = None) -> int:
        """The digest of a tensor, as `awex_delta.wire.digest.digest` takes it of the whole.

        salted_as: the name that the other side hashed it under, where that is another one.
        """
        total, start = 0, 0
        for piece in self.pieces(name):
            total += as_unsigned(sum_whole(piece, salt_of(salted_as or name), start=start))
            start += piece.numel()
        return total % MODULUS


def _files_of(path: Path) -> list[Path]:
    if path.suffix == ".safetensors" and not path.is_dir():
        return [path]
    try:
        files = [path / name for name in disk.names(path) if name.endswith(".safetensors")]
    except DiskError as error:
        raise ConfigError(str(error)) from error
    if not files:
        what = "holds no safetensors" if disk.exists(path) else "does not exist"
        raise ConfigError(f"{str(path)!r} {what}; give the folder of a HF checkpoint, or a .safetensors file")
    return files


def _refuse_delta(path: Path) -> None:
    """Refuse a version of a folder that holds changes, not weights: its files are no checkpoint."""
    metadata = _read_json(path / _INDEX).get("metadata") if path.is_dir() else None
    manifest = metadata.get("awex_delta") if isinstance(metadata, dict) else None
    if isinstance(manifest, dict) and manifest.get("kind") == "delta":
        version = manifest.get("version")
        raise ConfigError(
            f"{str(path)!r} is version {version} of a folder, a delta on version "
            f"{manifest.get('base_version')}: it holds changes, not weights. Remedy: make a whole checkpoint "
            f"of it by awex-delta pull {path.parent} CHECKPOINT --version {version}, and compare that"
        )


def _check_index(path: Path, found: Mapping[str, Entry]) -> None:
    """What the index promises is there: a shard that is missing is no missing tensor."""
    promised = _read_json(path / _INDEX).get("weight_map", {})
    if not isinstance(promised, dict):
        raise ConfigError(f"{path / _INDEX}: its weight_map is no mapping; copy it again")
    lost = sorted(set(promised) - set(found))
    if lost:
        raise ConfigError(
            f"{path}: {len(lost)} tensors of its index are in none of its files, {lost[0]} among them; "
            f"copy {promised[lost[0]]} again"
        )


def _says_tied(path: Path) -> bool:
    """True where the checkpoint's config says that lm_head is the embedding; also where it has no config."""
    return bool(_read_json(path / "config.json").get("tie_word_embeddings", True))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(disk.read(path))
    except FileNotFoundError:
        return {}
    except DiskError as error:
        raise ConfigError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; copy it again") from error
    return data if isinstance(data, dict) else {}
