"""Room in a folder: what is stuck stops nothing else, and what is short is named before it is missed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from awex_delta.folder.chain import Catalogue
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.manifest import Manifest
from awex_delta.folder.publish import Job
from tests.ranks.disk import Engine, Trainers, files_below, publisher, recorded_jobs

Build = Callable[..., Any]


def stick(monkeypatch: pytest.MonkeyPatch, call: str, is_stuck: Callable[[str], bool]) -> list[str]:
    """Let a call fail for some paths, as on a network file system where they are held; what was tried."""
    real, tried = getattr(os, call), list[str]()

    def busy(path: Any, *args: Any, **options: Any) -> Any:
        if is_stuck(os.fspath(path)):
            tried.append(os.fspath(path))
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, busy)
    return tried


def whole(folder: Folder) -> list[int]:
    """Versions that are there; each has its manifest and every file that it names."""
    for version in folder.versions():
        manifest = Catalogue(folder).get(version)
        assert isinstance(manifest, Manifest), (version, manifest)
        assert {file.name for file in manifest.files} < set(folder.names(version_name(version)))
    return folder.versions()


def test_one_stuck_file_keeps_nothing_but_itself_and_is_tried_again(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = build(Trainers, str(tmp_path), num_trainers=1, disk_kind="full", keep_anchors=1)
    folder, engine = Folder(str(tmp_path)), build(Engine, trainers)
    with monkeypatch.context() as patch:
        tried = stick(patch, "unlink", lambda path: "weight_v000000" in path and "model-" in path)
        for version in range(12):
            trainers.write(version)
            assert whole(folder) == [version]
            assert engine.read() == version
    assert trainers.kinds == "F" * 12
    assert len(tried) == 11  # by each version after it
    assert caplog.text.count("a process holds it open: call again once that one has ended") == 11
    (stuck,) = [name for name in files_below(tmp_path) if name.startswith("trash/")]
    assert stuck.endswith("/model-00001-of-00001.safetensors")
    trainers.write(12)
    assert not [name for name in files_below(tmp_path) if name.startswith("trash/")]


def test_a_version_that_cannot_be_moved_away_stays_whole_until_it_can(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = build(Trainers, str(tmp_path), num_trainers=1, disk_kind="full", keep_anchors=1)
    folder, engine = Folder(str(tmp_path)), build(Engine, trainers)
    with monkeypatch.context() as patch:
        tried = stick(patch, "replace", lambda path: path.endswith("weight_v000001"))
        for version in range(5):
            trainers.write(version)
            assert whole(folder) == sorted({1, version} if version else {0})
    assert len(tried) == 3
    assert engine.read(1) == 1  # nobody finds a part of it
    assert engine.holds(trainers.history[1])
    trainers.write(5)
    assert whole(folder) == [5]


def test_one_stuck_object_of_a_store_keeps_nothing_but_itself(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = build(
        Trainers, f"memory://{uuid.uuid4().hex}", num_trainers=1, disk_kind="full", keep_anchors=1
    )
    real = MemoryFileSystem.rm_file

    def busy(fs: MemoryFileSystem, path: str) -> None:
        if path.endswith("weight_v000000/model-00001-of-00001.safetensors"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(fs, path)

    folder = Folder(trainers.url)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm_file", busy)
        trainers.write(*range(12))
        assert folder.versions() == [0, 11]
        assert folder.names(version_name(0)) == ["model-00001-of-00001.safetensors"]
    trainers.write(12)
    assert folder.versions() == [12]


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Versions F0 D1 F2."""
    return recorded_jobs(3)[1]


def test_a_lease_that_comes_while_versions_go_gives_them_back(jobs: list[Job], tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))

    def meanwhile(step: str) -> None:
        if step == "retire weight_v000001":
            folder.lease("late", 1, 60.0)

    made = publisher(tmp_path, meanwhile)
    assert [made.publish(job) for job in jobs] == ["", "", ""]
    assert whole(folder) == [1, 2]


def set_room(monkeypatch: pytest.MonkeyPatch, *free: int, total: int = 1 << 40) -> None:
    """Let a file system have so many bytes left, one after the other each time that it is asked."""
    rooms = iter(free)
    found = lambda _: SimpleNamespace(f_bavail=next(rooms), f_frsize=1, f_blocks=total)  # noqa: E731
    monkeypatch.setattr(os, "statvfs", found)


def test_what_does_not_fit_is_refused_before_it_is_written(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    made = publisher(tmp_path, steps.append)
    size = jobs[0].packed.file.size  # type: ignore[union-attr]
    set_room(monkeypatch, size - 1)
    said = made.publish(jobs[0])
    assert f"{tmp_path} cannot be written (it has {size} bytes, and {size - 1} are free)" in said
    assert "free some room there, or lower weight_update_keep_anchors" in said
    assert steps == []
    assert files_below(tmp_path) == []
    set_room(monkeypatch, size, 0)
    assert made.publish(jobs[0]) == ""
    set_room(monkeypatch, 0, 0, total=0)  # some file systems do not tell
    assert made.publish(jobs[0]) == ""


def test_it_is_said_once_the_next_full_version_will_not_fit(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = jobs[0].packed.file.size  # type: ignore[union-attr]
    set_room(monkeypatch, size, size)
    with caplog.at_level(logging.WARNING):
        assert publisher(tmp_path / "wide").publish(jobs[0]) == ""
        assert caplog.text == ""
        set_room(monkeypatch, size, size - 1)
        assert publisher(tmp_path / "tight").publish(jobs[0]) == ""
    assert f"{tmp_path / 'tight'} has {size - 1} bytes left, and a full version takes {size}" in caplog.text


def test_a_version_that_failed_leaves_no_files_on_any_rank(build: Build, tmp_path: Path) -> None:
    def fail(step: str) -> None:
        if step.startswith("write weight_v000002/") and "-00002-of-" in step:
            raise OSError(errno.EIO, "injected")

    trainers = build(Trainers, str(tmp_path), on_step=fail, anchor_interval=1)
    trainers.write(0, 1)
    trainers.begin(2)
    trainers.threads.run(lambda rank: trainers.writers[rank]._finish())
    assert Folder(str(tmp_path)).versions() == [0, 1]
    assert not [name for name in files_below(tmp_path) if "weight_v000002" in name]
    trainers.begin(3)  # says what went wrong
    trainers.write(3)
    assert Folder(str(tmp_path)).versions() == [0, 1, 3]


def test_what_an_earlier_life_left_beyond_a_full_version_goes(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0, 1, 2, 3)
    trainers.write(1)
    assert Folder(str(tmp_path)).versions() == [0, 1]
    assert {name.split("/")[0] for name in files_below(tmp_path)} == {
        version_name(0),
        version_name(1),
        "writer.json",
    }
    assert INDEX in Folder(str(tmp_path)).names(version_name(1))


def test_a_lease_that_cannot_be_read_keeps_nothing(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = build(Trainers, str(tmp_path), num_trainers=1, disk_kind="full", keep_anchors=1)
    folder = Folder(str(tmp_path))
    folder.lease("secret", 0, 60.0)
    stick(monkeypatch, "open", lambda path: path.endswith("secret.json"))
    trainers.write(0, 1, 2)
    assert folder.versions() == [2]
    assert "leases/secret.json cannot be read" in caplog.text


def test_a_manifest_that_cannot_be_read_is_a_broken_link_and_no_more(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=1)
    trainers.write(0, 1, 2, 3)
    assert trainers.kinds == "FDFD"
    stick(monkeypatch, "open", lambda path: path.endswith(f"{version_name(3)}/{INDEX}"))
    engine = build(Engine, trainers)
    assert engine.read() == 2
    assert engine.holds(trainers.history[2])
    (error,) = engine.try_read(3)
    assert f"{version_name(3)}/{INDEX} cannot be read" in str(error)
    assert "a process holds it open" in str(error)


def test_a_folder_that_goes_away_while_it_is_written_is_named(jobs: list[Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = publisher(run, lambda step: shutil.rmtree(run) if step.startswith("rename") else None)
    said = made.publish(jobs[0])
    assert f"{run}/weight_v000000/model-00001-of-00001.safetensors cannot be written (No such file" in said
    assert "call again" in said
