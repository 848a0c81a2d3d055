"""A writer, and a pull, killed by SIGKILL as each step of their work begins."""

from __future__ import annotations

import json
import os
import re
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from awex_delta.folder.chain import Catalogue
from awex_delta.folder.folder import INDEX, Folder, Step, ignore_step, version_name
from awex_delta.folder.manifest import Manifest
from awex_delta.folder.publish import Job, Publisher
from awex_delta.folder.pull import LocalCheckpoint
from tests.ranks.disk import Engine, Trainers, Weights, files_below, publisher, recorded_jobs

pytestmark = pytest.mark.timeout(180)

VERSIONS = 5
FIRST_KILLED = 3


@pytest.fixture(scope="module")
def recorded() -> tuple[Trainers, list[Job]]:
    """What a trainer would have written as versions F0 D1 F2 D3 F4, and its weights at each."""
    return recorded_jobs(VERSIONS)


def run_and_die(work: Callable[[], object]) -> None:
    """Run `work` in a child that kills itself; the child must not come to its end."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # makes a pool of its own; several threads at once would each try to
            work()
        finally:
            traceback.print_exc()  # in a test that fails, the cause
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def killer(fatal: int) -> Step:
    """A step that kills the process as step number `fatal` begins."""
    count = iter(range(1 << 20))

    def step(_: str) -> None:
        if next(count) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def steps_of(work: Callable[[Step], object]) -> list[str]:
    """The names of the steps that a whole run takes."""
    names: list[str] = []
    work(names.append)
    return names


def written_by(path: Path, jobs: list[Job], step: Step = ignore_step) -> Publisher:
    """A folder with the versions before those that are killed."""
    made = publisher(path, step)
    for job in jobs[:FIRST_KILLED]:
        assert made.publish(replace(job, packed=job.packed)) == ""
    return made


@pytest.mark.parametrize("version", [FIRST_KILLED, FIRST_KILLED + 1])
def test_a_writer_killed_at_any_step_leaves_whole_versions_alone(
    recorded: tuple[Trainers, list[Job]], tmp_path: Path, version: int
) -> None:
    trainers, jobs = recorded

    def write(path: Path, step: Step) -> None:
        made = written_by(path, jobs)
        for job in jobs[FIRST_KILLED:version]:
            assert made.publish(job) == ""
        made._step = step
        assert made.publish(jobs[version]) == ""

    names = steps_of(lambda step: write(tmp_path / "whole", step))
    kinds = [name.split()[0] for name in names]
    assert kinds[:3] == ["write", "sync", "rename"]
    assert kinds.count("rename") == 2  # its file, its manifest
    assert ("retire" in kinds) is (version == FIRST_KILLED + 1)
    for fatal, name in enumerate(names):
        path = tmp_path / f"killed-{fatal}"
        run_and_die(lambda path=path, fatal=fatal: write(path, killer(fatal)))  # type: ignore[misc]
        exists = Catalogue(Folder(str(path))).get(version)
        assert isinstance(exists, Manifest) is (
            fatal > names.index(f"rename {version_name(version)}/{INDEX}")
        ), name
        engine = Engine(trainers, disk_url=str(path))
        held = engine.read()
        assert held == (version if exists else version - 1), name
        assert engine.holds(trainers.history[held]), name
        # A trainer that starts again writes a full version over what is there.
        again = publisher(path)
        assert again.publish(jobs[4]) == ""
        assert engine.read() == 4
        assert engine.holds(trainers.history[4])
        assert not [file for file in files_below(path) if file.endswith(".tmp") and "000004" in file]
        engine.close()


def loads_as(path: Path, history: dict[int, Weights]) -> list[int]:
    """The versions whose bits the checkpoint has, as an HF loader would read it."""
    index = json.loads((path / INDEX).read_text())
    shards = {name: load_file(path / name) for name in sorted(set(index["weight_map"].values()))}
    loaded = {name: shards[file][name] for name, file in index["weight_map"].items()}
    return [
        version
        for version, weights in history.items()
        if loaded.keys() == weights.keys() and all(torch.equal(loaded[n], weights[n]) for n in weights)
    ]


def test_a_first_pull_killed_at_any_step_leaves_nothing_or_one_version(
    recorded: tuple[Trainers, list[Job]], tmp_path: Path
) -> None:
    trainers, jobs = recorded
    source = tmp_path / "source"
    written_by(source, jobs)

    def pull(path: Path, step: Step) -> Any:
        return LocalCheckpoint(path, Folder(str(source)), on_step=step).pull()

    names = steps_of(lambda step: pull(tmp_path / "whole", step))
    for fatal, name in enumerate(names):
        path = tmp_path / f"killed-{fatal}"
        run_and_die(lambda path=path, fatal=fatal: pull(path, killer(fatal)))  # type: ignore[misc]
        assert (path / INDEX).exists() is (fatal > names.index(f"rename {INDEX}")), name
        assert pull(path, ignore_step).version == 2
        assert loads_as(path, trainers.history) == [2]
        assert len(files_below(path)) == 3  # one shard, the index, the lock


def test_a_pull_killed_at_any_step_leaves_one_version_or_none(tmp_path: Path) -> None:
    trainers = Trainers(str(tmp_path / "source"), num_trainers=2)
    trainers.write(0, 1)
    trainers.close()  # before any fork

    def pull(path: Path, step: Step, version: int | None = None) -> Any:
        return LocalCheckpoint(path, Folder(trainers.url), on_step=step).pull(version)

    pull(tmp_path / "whole", ignore_step, 0)
    names = steps_of(lambda step: pull(tmp_path / "whole", step))
    kinds = {name.split()[0] for name in names}
    assert kinds == {"write", "sync", "rename", "withdraw", "patch", "flush", "forget"}
    seen = []
    for fatal, name in enumerate(names):
        path = tmp_path / f"killed-{fatal}"
        pull(path, ignore_step, 0)
        run_and_die(lambda path=path, fatal=fatal: pull(path, killer(fatal)))  # type: ignore[misc]
        visible = {part: file for file in path.glob("*.safetensors") for part in load_file(file).items()}
        of = [v for v, w in trainers.history.items() if all(torch.equal(t, w[n]) for n, t in visible)]
        assert of, f"what loaders find is a mixture: {name}"
        seen.append("".join(map(str, loads_as(path, trainers.history))) if (path / INDEX).exists() else "-")
        assert pull(path, ignore_step).version == 1
        assert loads_as(path, trainers.history) == [1]
        assert len(files_below(path)) == 4  # two shards, the index, the lock
    assert re.fullmatch("0+-+1+", "".join(seen))
