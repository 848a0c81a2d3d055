"""Every call to a file system that updates through a folder, `pull`, `inspect` and `verify` make.

An error of the system is harmless where `HARMLESS` says so. Otherwise it is a `DiskError` that names the path
and the remedy. A file that is not there stays a FileNotFoundError, since files of a folder come and go.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from awex_delta.errors import DiskError

logger = logging.getLogger(__name__)

_LACKING = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})

HARMLESS: Mapping[str, frozenset[int]] = {
    # What is not synced can be lost if the machine dies, but checksums find that.
    "synced": _LACKING,
    "synced as a folder": _LACKING | {errno.EACCES, errno.EPERM},  # CIFS and vboxsf sync no folder
    "measured": frozenset(errno.errorcode),  # then nobody knows how much room there is
}
"""By what is done to a path: errors after which all goes on."""

_RIGHTS = "give this user the right to do that, or give another path"
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free some room there, or lower weight_update_keep_anchors",
    errno.EDQUOT: "the quota is used up: remove files there, or ask for a larger one",
    errno.EROFS: "it is mounted read-only: mount it for writing, or give another path",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ESTALE: "another machine replaced it: call again; if it stays, mount the file system anew",
    errno.EBUSY: "a process holds it open: call again once that one has ended",
    errno.ENOTDIR: "give the path of a folder",
    errno.EEXIST: "give the path of a folder",
}
_NO_LOCKS = "this file system has no locks: give a path on a disk of this machine"
_NO_CALL = "this file system cannot do that: give a path on another one"


def refusal(path: str | Path, done: str, error: Exception) -> DiskError:
    """The error of a path to which something could not be done, with the remedy."""
    code = error.errno or 0 if isinstance(error, OSError) else 0
    cause = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    otherwise = _NO_CALL if code in _LACKING else "call again; if that does not help, give another path"
    remedy = _REMEDIES.get(code, otherwise)
    if done == "locked" and code in _LACKING | {errno.ENOLCK}:
        remedy = _NO_LOCKS
    return DiskError(code or None, f"{path} cannot be {done} ({cause}): {remedy}")


@contextmanager
def calling(done: str, path: str | Path) -> Iterator[None]:
    """Call the system. Raises FileNotFoundError as it is, and DiskError for what is not harmless."""
    try:
        yield
    except (FileNotFoundError, BlockingIOError, DiskError):
        raise
    except OSError as error:
        if error.errno not in HARMLESS.get(done, ()):
            raise refusal(path, done, error) from error
        logger.debug("%s cannot be %s (%s), which is harmless", path, done, error.strerror)


def exists(path: str | Path) -> bool:
    """Whether anything is there that this process can see."""
    return os.path.lexists(path)


def make_folder(path: str | Path) -> None:
    """Make a folder and those above it, as far as they are missing."""
    if not exists(path):
        with calling("made", path):
            Path(path).mkdir(parents=True, exist_ok=True)
        sync_folder(Path(path).parent)


def write(path: str | Path, chunks: Iterable[Any], on_sync: Callable[[], None] = lambda: None) -> None:
    """Write buffers of bytes into a new file, and sync it. `on_sync` is called before that."""
    make_folder(Path(path).parent)
    with calling("opened", path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                with calling("written", path):
                    rest = rest[os.write(file, rest) :]
        on_sync()
        with calling("synced", path):
            os.fsync(file)
    finally:
        with calling("written", path):  # some network file systems say only now that there is no room
            os.close(file)


def read(path: str | Path, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes [start, stop) of a file, or all. Raises FileNotFoundError if there is none."""
    with calling("read", path), os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
        file.seek(start or 0)
        return file.read() if stop is None else file.read(stop - (start or 0))
    raise AssertionError  # nothing about reading is harmless


def names(path: str | Path) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    with suppress(FileNotFoundError), calling("listed", path):
        return sorted(inner.name for inner in Path(path).iterdir())
    return []


def rename(old: str | Path, new: str | Path) -> None:
    """Give a file or a folder another name, on the disk when this returns."""
    with calling("renamed", old):
        Path(old).replace(new)
    sync_folder(Path(new).parent)


def remove(path: str | Path) -> None:
    """Remove a file, if it is there."""
    with suppress(FileNotFoundError), calling("removed", path):
        Path(path).unlink()


def remove_each(remove: Callable[[str], None], paths: Iterable[str]) -> None:
    """Remove some files. What is stuck keeps nothing else; raises what came first."""
    failed = []
    for path in paths:
        try:
            remove(path)
        except DiskError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def remove_folder(path: str | Path) -> None:
    """Remove a folder and the files in it, as `remove_each` does."""
    remove_each(remove, [f"{path}/{name}" for name in names(path)])
    with suppress(FileNotFoundError), calling("removed", path):
        Path(path).rmdir()


def sync_folder(path: str | Path) -> None:
    """What was renamed in a folder, or made there, is on the disk once the folder is."""
    with calling("synced as a folder", path):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def free_bytes(path: str | Path) -> int | None:
    """Room for this user on the file system of a path that need not exist; None if it cannot be told."""
    there = next((one for one in (Path(path), *Path(path).parents) if exists(one)), path)
    with suppress(FileNotFoundError), calling("measured", path):
        found = os.statvfs(there)
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None


def is_shared(path: str | Path) -> bool:
    """Whether a file has a second name, or is a link. Raises FileNotFoundError if there is none."""
    with calling("looked at", path):
        found = os.lstat(path)
        return stat.S_ISLNK(found.st_mode) or found.st_nlink > 1
    raise AssertionError  # nothing about that is harmless


def mapped(path: str | Path) -> np.memmap[Any, Any]:
    """Memory, uint8 [n], that *is* a file, for writing. Raises FileNotFoundError if there is none."""
    with calling("mapped for writing", path):
        return np.memmap(path, dtype=np.uint8, mode="r+")
    raise AssertionError  # nothing about mapping is harmless


def flush(memory: np.memmap[Any, Any], path: str | Path) -> None:
    """Wait until what was stored in `mapped` memory is on the disk."""
    with calling("synced", path):
        memory.flush()


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Hold the lock that is a file. False if another process has it; a process that dies lets go."""
    with calling("opened", path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        try:
            with calling("locked", path):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)
