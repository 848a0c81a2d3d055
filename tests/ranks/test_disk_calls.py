"""File systems that refuse a call: every error at every call, while versions are written, read and pulled."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.errors import DiskError, UpdateError
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.publish import Job
from awex_delta.folder.pull import LocalCheckpoint
from awex_delta.folder.reader import DiskReader
from awex_delta.testing.dict_engine import DictEngine
from tests.ranks.conftest import BIAS
from tests.ranks.disk import ENGINE_SHAPES, SETTINGS, Trainers, Weights, publisher, recorded_jobs

OS_CALLS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir", "listdir", "statvfs", "lstat")
CALLS: dict[str, Any] = dict.fromkeys(OS_CALLS, os) | {"flock": fcntl, "memmap": np}
"""Each call, and the module that has it."""

REMEDIES = {
    errno.ENOSYS: "another one",
    errno.EINVAL: "another one",
    errno.ENOTSUP: "another one",
    errno.ENOLCK: "another path",
    errno.ESTALE: "mount the file system anew",
    errno.EBUSY: "a process holds it",
    errno.EDQUOT: "quota",
    errno.ENOSPC: "free some room",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "give this user the right",
}
"""By error, words of the remedy that the user has to find."""

LACKING = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
HARMLESS = {("fsync", code) for code in LACKING} | {("statvfs", code) for code in REMEDIES}
NEEDED = ("open", "write", "replace", "mkdir", "listdir")
"""Calls without which no version can be written."""


@dataclass(kw_only=True)
class Fault:
    """One call that fails. at: which time, from 0; None for every time. count: how often it was made."""

    call: str
    code: int
    at: int | None = None
    count: int = 0


@contextmanager
def injected(fault: Fault, below: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a call fail for files below a path."""
    real: Callable[..., Any] = getattr(CALLS[fault.call], fault.call)

    def fails(target: Any, *args: Any, **options: Any) -> Any:
        number = getattr(target, "fileno", lambda: target)()
        where = Path(f"/proc/self/fd/{number}").readlink() if isinstance(number, int) else Path(target)
        if where.is_relative_to(below):
            fault.count += 1
            if fault.at in (None, fault.count - 1):
                raise OSError(fault.code, os.strerror(fault.code), str(where))
        return real(target, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CALLS[fault.call], fault.call, fails)
        yield


class World:
    """A folder with versions F0 D1, an engine and a local checkpoint that hold the newer one."""

    def __init__(self, path: Path, trainers: Trainers, jobs: list[Job]) -> None:
        self.path, self.history, self.jobs = path, trainers.history, jobs
        self.publisher = publisher(path / "source")
        for version in (0, 1):
            assert self.publisher.publish(jobs[version]) == ""
        self.engine = DictEngine(ENGINE_SHAPES, dtypes={BIAS: torch.float32})
        settings = replace(SETTINGS, disk_url=str(path / "source"))
        self.reader = DiskReader(self.engine, settings)
        assert self.reader.update_weights().version == 1
        self.local = LocalCheckpoint(path / "local", Folder(str(path / "source")))
        assert self.local.pull().version == 1

    def explained(self, text: str, code: int) -> None:
        """An error names the path and what to do."""
        assert str(self.path) in text, text
        assert REMEDIES[code] in text or "this file system has no locks" in text, text

    def follow(self, fault: Fault) -> list[int | str]:
        """Write version 2, read, pull, inspect and verify; by each, the version reached or what it said."""
        outcomes: list[int | str] = [self.publisher.publish(self.jobs[2]) or 2]
        for reach in (self.reader.update_weights, self.local.pull):
            try:
                outcomes.append(reach().version)
            except (DiskError, UpdateError) as error:
                outcomes.append(str(error))
        commands = [["inspect", str(self.path / "source")]]
        if (self.path / "local" / INDEX).exists():
            commands.append(["verify", str(self.path / "local"), str(self.path / "local")])
        for command in commands:
            result = CliRunner().invoke(app, command)
            assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
            assert result.exit_code in (0, 1, 2)
            # What stays of a chain that is going away is not whole: inspect may say so.
            said = result.exit_code and "builds on version 0, which does not exist" not in result.output
            outcomes.append(result.output if said else 0)
        for outcome in outcomes:
            if isinstance(outcome, str):
                self.explained(" ".join(outcome.split()), fault.code)
        return outcomes

    def check(self) -> None:
        """What is held is held exactly, whatever went wrong."""
        if self.reader.ready:
            assert same(self.engine.tensors_by_name, self.history[self.reader.version or 0])
        marker = self.local.marker()
        if marker is not None:
            assert same(loaded(self.path / "local"), self.history[marker.version])
        existing = [v for v in Folder(str(self.path / "source")).versions() if self.exists(v)]
        assert {1, 2} & set(existing)  # nothing is lost

    def exists(self, version: int) -> bool:
        """Whether a version has its manifest; where it has one, it has its files."""
        folder = self.path / "source" / version_name(version)
        if not (folder / INDEX).exists():
            return False
        assert [file for file in folder.iterdir() if file.suffix == ".safetensors"]
        return True

    def repair(self) -> None:
        """With the fault gone, the next version comes everywhere, and all else goes."""
        for lease in (self.path / "source").glob("leases/*.json"):
            lease.unlink()  # one that its reader could not remove would end by itself, later
        assert self.publisher.publish(self.jobs[4]) == ""
        assert self.reader.update_weights().version == 4
        assert self.local.pull().version == 4
        assert same(self.engine.tensors_by_name, self.history[4])
        assert same(loaded(self.path / "local"), self.history[4])
        left = {file.parts[0] for file in below(self.path / "source")}
        assert left == {version_name(4)}, left
        assert len(below(self.path / "local")) == 3, below(self.path / "local")  # shard, index, lock


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def loaded(path: Path) -> Weights:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def below(path: Path) -> list[Path]:
    return [file.relative_to(path) for file in path.rglob("*") if file.is_file()]


@pytest.fixture(scope="module")
def recorded() -> tuple[Trainers, list[Job]]:
    """Versions F0 D1 F2 D3 F4 of a trainer."""
    return recorded_jobs(5)


@pytest.fixture
def world(
    recorded: tuple[Trainers, list[Job]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], World]:
    """Make worlds, one after the other."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test here turns the machine off
    numbers = iter(range(1 << 20))
    return lambda: World(tmp_path / f"world-{next(numbers)}", *recorded)


def survive(made: World, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """With a fault, go on in a world; then repair it."""
    with injected(fault, made.path, monkeypatch):
        outcomes = made.follow(fault)
    made.check()
    made.repair()
    return outcomes


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_always_fails_is_harmless_or_named(
    world: Callable[[], World], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for code in REMEDIES:
        fault = Fault(call=call, code=code)
        outcomes = survive(world(), fault, monkeypatch)
        assert fault.count
        if (call, code) in HARMLESS:
            assert outcomes == [2, 2, 2, 0, 0]
        elif call in NEEDED:
            assert isinstance(outcomes[0], str)


@pytest.mark.all
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_once_is_harmless_or_named(
    world: Callable[[], World], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    counting = Fault(call=call, code=0, at=-1)
    assert survive(world(), counting, monkeypatch) == [2, 2, 2, 0, 0]
    for at in range(counting.count):  # each place with one error, each error at some place
        survive(world(), Fault(call=call, code=list(REMEDIES)[at % len(REMEDIES)], at=at), monkeypatch)
