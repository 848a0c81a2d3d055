"""One folder of versions behind any fsspec URL: whole files appear at once, or not at all."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from awex_delta.errors import UNREADABLE, ConfigError

INDEX = "model.safetensors.index.json"
"""The file that makes a version exist: its manifest, which HF loaders read as a checkpoint's index."""

Step = Callable[[str], None]
"""Called as a step of writing begins, such as `rename FILE`."""

_LEASES = "leases"
_PIECE_BYTES = 1 << 26
_VERSION = re.compile(r"weight_v(\d{6,})")
# These show an object when its upload is complete; the others show what was written so far.
_WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"})


def version_name(version: int) -> str:
    """The folder of a version: `weight_v000123`."""
    return f"weight_v{version:06d}"


def ignore_step(_: str) -> None:
    """A `Step` that does nothing."""


class Folder:
    """Files below one URL. Paths are relative to it; every method may raise OSError.

    Whatever error of its own a store's library raises, such as that of a connection, arrives as an OSError.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Find the filesystem; nothing is read or written.

        Args:
            url: a local path or any URL that fsspec knows.
            options: fsspec's options of that filesystem, such as an endpoint or credentials.

        Raises:
            ConfigError: the URL is empty, or its kind of filesystem is unknown or not installed.
        """
        if not url:
            raise ConfigError("weight_update_disk_url='': give a folder that trainer and engines reach")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **(options or {}))
        except (ValueError, ImportError) as error:
            raise ConfigError(f"weight_update_disk_url={url!r} cannot be opened: {error}") from error
        self.url = url
        kind = self._fs.protocol
        kinds = {kind} if isinstance(kind, str) else set(kind)
        self._local = "file" in kinds
        self._renames = not kinds & _WHOLE_OBJECTS

    def put(self, name: str, chunks: Iterable[Any], step: Step = ignore_step) -> None:
        """Write a file that readers see whole or not at all; an older one of that name is replaced.

        chunks are buffers of bytes, one after the other; `step` hears of `write`, `sync` and `rename`.
        """
        final = self._path(name)
        with self._reaching():
            self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        written = f"{final}.{uuid.uuid4().hex}.tmp" if self._renames else final
        step(f"write {name}")
        with self._reaching():
            file = self._fs.open(written, "wb")
        try:
            for chunk in chunks:
                with self._reaching():
                    file.write(chunk)
            step(f"sync {name}")
            with self._reaching():
                if self._local:
                    file.flush()
                    os.fsync(file.fileno())
                file.close()
        except BaseException:
            self._discard(file, written)
            raise
        step(f"rename {name}")
        if self._renames:
            with self._reaching():
                self._fs.mv(written, final)
            self._sync_folder(final)
            if "/" in name:
                self._sync_folder(final.rpartition("/")[0])  # which may be new

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file, or all. Raises FileNotFoundError where there is none."""
        with self._reaching():
            return bytes(self._fs.cat_file(self._path(name), start=start, end=stop))

    def read_file(self, name: str, size: int) -> Iterator[bytes]:
        """All bytes of a file of a known size, piece by piece."""
        for start in range(0, size, _PIECE_BYTES):
            yield self.read(name, start, min(start + _PIECE_BYTES, size))

    def versions(self) -> list[int]:
        """Versions that have a folder, ascending. Those without an `INDEX` do not exist yet, or any more."""
        matches = (_VERSION.fullmatch(name) for name in self.names(""))
        return sorted(int(match[1]) for match in matches if match)

    def exists(self) -> bool:
        """Whether anything is at the URL; of an object store's folder, whether any object is in it."""
        with self._reaching():
            return bool(self._fs.exists(self._root))

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none where there is no such folder."""
        self._fs.invalidate_cache()
        try:
            with self._reaching():
                paths = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name."""
        with self._reaching():
            self._fs.mv(self._path(old), self._path(new))
        self._sync_folder(self._path(new))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._reaching():
            self._fs.rm_file(self._path(name))

    def remove_version(self, version: int) -> None:
        """Withdraw a version, its manifest first, so that it never exists in part."""
        folder = version_name(version)
        self.remove(f"{folder}/{INDEX}")
        with suppress(FileNotFoundError), self._reaching():
            self._fs.rm(self._path(folder), recursive=True)

    def lease(self, holder: str, oldest: int, seconds: float) -> None:
        """Keep every version from `oldest` on for the next `seconds`."""
        text = json.dumps({"oldest": oldest, "until": time.time() + seconds})
        self.put(f"{_LEASES}/{holder}.json", [text.encode()])

    def release(self, holder: str) -> None:
        """End a lease."""
        self.remove(f"{_LEASES}/{holder}.json")

    def oldest_leased(self) -> int | None:
        """The oldest version that somebody may be reading; None when nobody is. Drops leases that ran out."""
        held: list[int] = []
        for name in self.names(_LEASES):
            if not name.endswith(".json"):
                continue
            try:
                lease = json.loads(self.read(f"{_LEASES}/{name}"))
                oldest, until = int(lease["oldest"]), float(lease["until"])
            except (FileNotFoundError, *UNREADABLE):
                continue  # ended just now, or never a lease
            if until > time.time():
                held.append(oldest)
            else:
                self.remove(f"{_LEASES}/{name}")
        return min(held, default=None)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") or "/"

    def _discard(self, file: Any, written: str) -> None:
        """Leave nothing of a file that could not be written to its end."""
        if isinstance(file, AbstractBufferedFile) and not self._renames:
            file.discard()
            file.closed = True  # closing would complete the upload
            return
        with suppress(OSError), self._reaching():
            file.close()
        with suppress(OSError), self._reaching():
            self._fs.rm_file(written)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _sync_folder(self, path: str) -> None:
        """A rename is on disk once its folder is."""
        if not self._local:
            return
        descriptor = os.open(path.rpartition("/")[0], os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
