"""One folder of versions behind any fsspec URL: whole files appear at once, or not at all."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import fsspec
from fsspec.implementations.cached import CachingFileSystem
from fsspec.spec import AbstractBufferedFile
from pydantic import BaseModel, ConfigDict, ValidationError

from awex_delta import disk
from awex_delta.errors import ConfigError, DiskError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
"""The file that makes a version exist: its manifest, which HF loaders read as a checkpoint's index."""

Step = Callable[[str], None]
"""Called as a step of writing begins, such as `rename FILE`."""

_LEASES, _TRASH = "leases", "trash"
_WITHDRAWN = "withdrawn.json"  # the manifest of a version that is about to go
_VERSION = re.compile(r"weight_v(\d{6,})")
# These show an object when its upload is complete; the others show what was written so far.
_WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"})


def version_name(version: int) -> str:
    """The folder of a version: `weight_v000123`."""
    return f"weight_v{version:06d}"


def ignore_step(_: str) -> None:
    """A `Step` that does nothing."""


class Folder:
    """Files below one URL, of which paths are relative to it.

    Every method may raise DiskError, which names the path and the remedy, and FileNotFoundError.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Find the filesystem; nothing is read or written.

        Args:
            url: a local path or any URL that fsspec knows.
            options: fsspec's options of that filesystem, such as an endpoint or credentials.

        Raises:
            ConfigError: the URL is empty or goes through a cache, or its kind of filesystem is unknown or not
                installed.
        """
        if not url:
            raise ConfigError("weight_update_disk_url='': give a folder that trainer and engines reach")
        _refuse_caches(url)
        try:
            fs, root = fsspec.core.url_to_fs(url, **(options or {}))
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"weight_update_disk_url={url!r} cannot be opened: {error}. Remedy: give a path, or the URL "
                "of a filesystem that fsspec knows and has the package for"
            ) from error
        self.url = url
        self._root = root.rstrip("/")
        kinds = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._renames = not kinds & _WHOLE_OBJECTS
        self._files: _Files = disk if "file" in kinds else _Store(fs, url, discards=not self._renames)

    def put(self, name: str, chunks: Iterable[Any], step: Step = ignore_step) -> None:
        """Write a file that readers see whole or not at all; an older one of that name is replaced.

        chunks are buffers of bytes, one after the other; `step` hears of `write`, `sync` and `rename`.
        """
        final = self._path(name)
        written = f"{final}.{uuid.uuid4().hex}.tmp" if self._renames else final
        step(f"write {name}")
        try:
            self._files.write(written, chunks, lambda: step(f"sync {name}"))
            step(f"rename {name}")
            if self._renames:
                self._files.rename(written, final)
        except BaseException as error:
            if self._renames:  # nothing takes room that may be short
                with suppress(OSError):
                    self._files.remove(written)
            if isinstance(error, FileNotFoundError):  # somebody removes the folder
                raise disk.refusal(final, "written", error) from error
            raise

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file, or all. Raises FileNotFoundError where there is none."""
        return self._files.read(self._path(name), start, stop)

    def versions(self) -> list[int]:
        """Versions that have a folder, ascending. Those without an `INDEX` do not exist yet, or any more."""
        matches = (_VERSION.fullmatch(name) for name in self.names(""))
        return sorted(int(match[1]) for match in matches if match)

    def exists(self) -> bool:
        """Whether anything is at the URL; of an object store's folder, whether any object is in it."""
        return self._files.exists(self._path(""))

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none where there is no such folder."""
        return self._files.names(self._path(folder))

    def free_bytes(self) -> int | None:
        """Room that is left; None where nobody can tell, as of an object store."""
        return self._files.free_bytes(self._path(""))

    def rename(self, old: str, new: str) -> None:
        """Give a file another name."""
        self._files.rename(self._path(old), self._path(new))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._files.remove(self._path(name))

    def withdraw(self, version: int) -> None:
        """Make a version one that does not exist, until `restore` or `discard`; its files stay."""
        with suppress(FileNotFoundError):  # a writer died before it had a manifest
            self.rename(f"{version_name(version)}/{INDEX}", f"{version_name(version)}/{_WITHDRAWN}")

    def restore(self, version: int) -> None:
        """Undo `withdraw`."""
        with suppress(FileNotFoundError):
            self.rename(f"{version_name(version)}/{_WITHDRAWN}", f"{version_name(version)}/{INDEX}")

    def discard(self, version: int) -> None:
        """Remove a version that was withdrawn, or had no manifest. One that is stuck is restored."""
        folder = version_name(version)
        if self._files is not disk:  # nowhere else is a folder moved at once
            self._files.remove_folder(self._path(folder))
            return
        gone = self._path(f"{_TRASH}/{folder}.{uuid.uuid4().hex[:8]}")
        try:
            disk.make_folder(self._path(_TRASH))
            disk.rename(self._path(folder), gone)
        except FileNotFoundError:
            return  # nothing was written
        except DiskError:
            self.restore(version)
            raise
        disk.remove_folder(gone)

    def empty_trash(self) -> None:
        """Try once more to remove what was stuck, and say what still is."""
        for name in self.names(_TRASH) if self._files is disk else ():
            with told():
                disk.remove_folder(self._path(f"{_TRASH}/{name}"))

    def lease(self, holder: str, oldest: int, seconds: float) -> None:
        """Keep every version from `oldest` on for the next `seconds`."""
        lease = _Lease(oldest=oldest, until=time.time() + seconds)
        self.put(f"{_LEASES}/{holder}.json", [lease.model_dump_json().encode()])

    def release(self, holder: str) -> None:
        """End a lease."""
        self.remove(f"{_LEASES}/{holder}.json")

    def oldest_leased(self) -> int | None:
        """The oldest version that somebody may be reading; None when nobody is. Drops leases that ran out."""
        held: list[int] = []
        for name in self.names(_LEASES):
            if not name.endswith(".json"):
                continue
            # One that cannot be read keeps nothing: its reader notices, and works around what goes.
            with told(), suppress(FileNotFoundError, ValidationError):
                lease = _Lease.model_validate_json(self.read(f"{_LEASES}/{name}"))
                if lease.until > time.time():
                    held.append(lease.oldest)
                else:
                    self.remove(f"{_LEASES}/{name}")
        return min(held, default=None)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/") or "/"


class _Lease(BaseModel):
    """Somebody reads versions from `oldest` on. until: seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    oldest: int
    until: float


@contextmanager
def told() -> Iterator[None]:
    """Warn of what cannot be done, and go on."""
    try:
        yield
    except DiskError as error:
        logger.warning("%s", error)


class _Files(Protocol):
    """What `awex_delta.disk` does for files of this machine, and `_Store` for those of a store."""

    def write(self, path: str, chunks: Iterable[Any], on_sync: Callable[[], None]) -> None: ...
    def read(self, path: str, start: int | None, stop: int | None) -> bytes: ...
    def names(self, path: str) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_folder(self, path: str) -> None: ...
    def free_bytes(self, path: str) -> int | None: ...


class _Store:
    """Files behind fsspec. Whatever error of its own a store's library raises arrives as a DiskError."""

    def __init__(self, fs: Any, url: str, *, discards: bool) -> None:
        """discards: an upload that was not completed leaves nothing, if it is not completed after all."""
        self._fs, self._url, self._discards = fs, url, discards

    def write(self, path: str, chunks: Iterable[Any], on_sync: Callable[[], None]) -> None:
        with self._calling("written", path):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb")
        try:
            for chunk in chunks:
                with self._calling("written", path):
                    file.write(chunk)
            on_sync()
            with self._calling("written", path):
                file.close()
        except BaseException:
            if self._discards and isinstance(file, AbstractBufferedFile):
                file.discard()
                file.closed = True  # closing would complete the upload
            else:
                with suppress(OSError), self._calling("written", path):
                    file.close()
            raise

    def read(self, path: str, start: int | None, stop: int | None) -> bytes:
        with self._calling("read", path):
            return bytes(self._fs.cat_file(path, start=start, end=stop))

    def names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError), self._calling("listed", path):
            found = self._fs.ls(path, detail=False)
            return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)
        return []

    def exists(self, path: str) -> bool:
        with self._calling("looked at", path):
            return bool(self._fs.exists(path))

    def rename(self, old: str, new: str) -> None:
        with self._calling("renamed", old):
            self._fs.mv(old, new)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._calling("removed", path):
            self._fs.rm_file(path)

    def remove_folder(self, path: str) -> None:
        disk.remove_each(self.remove, [f"{path}/{name}" for name in self.names(path)])
        with suppress(FileNotFoundError), self._calling("removed", path):
            self._fs.rm(path, recursive=True)  # the folder itself, if the store has any

    def free_bytes(self, path: str) -> None:
        """Nobody can tell."""

    @contextmanager
    def _calling(self, done: str, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, DiskError):
            raise
        except Exception as error:
            raise disk.refusal(f"{self._url}: {path}", done, error) from error


def _refuse_caches(url: str) -> None:
    """Refuse a URL such as `simplecache::s3://…`: what another run wrote at a path would be read for ever."""
    for kind in filter(_is_cache, re.findall(r"(?:^|::)([^:/]+)(?=::|://)", url)):
        raise ConfigError(
            f"weight_update_disk_url={url!r} reads through the cache {kind!r}, which keeps files that were "
            "written again since: give the URL behind it"
        )


def _is_cache(kind: str) -> bool:
    try:
        return issubclass(fsspec.get_filesystem_class(kind), CachingFileSystem)
    except (ValueError, ImportError):
        return False
