"""What goes wrong around a folder: nothing half-written is read, nothing half-read is served."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from awex_delta.engines.view import EngineTensor
from awex_delta.errors import ChainError, UpdateAborted, UpdateError, VerificationError
from awex_delta.folder.chain import Catalogue
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.manifest import Manifest, dump_manifest
from awex_delta.folder.pull import LocalCheckpoint
from awex_delta.protocol.verdict import Reason
from awex_delta.testing.ranks import results
from awex_delta.wire.digest import digest
from tests.ranks.conftest import DOWN, NORM
from tests.ranks.disk import Engine, Trainers, delta_file, files_below, flip, model_file

Build = Callable[..., Any]


class FullDisk(MemoryFileSystem):  # type: ignore[misc]
    """Memory with a room that can be used up: a write beyond it raises ENOSPC after half of its bytes."""

    protocol = "fulldisk"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    room: int | None = None

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "wb":
            write = file.write

            def limited(data: bytes) -> int:
                if FullDisk.room is not None and len(data) > FullDisk.room:
                    write(bytes(data)[: len(data) // 2])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(write(data))

            file.write = limited
        return file


@pytest.fixture
def full_disk() -> Iterator[str]:
    """A URL on a disk that `FullDisk.room` can fill."""
    fsspec.register_implementation("fulldisk", FullDisk, clobber=True)
    FullDisk.room = None
    FullDisk.store.clear()
    yield "fulldisk://run"
    FullDisk.room = None


def test_a_full_disk_fails_the_version_on_all_ranks_and_the_next_one_is_full(
    build: Build, full_disk: str
) -> None:
    trainers = build(Trainers, full_disk)
    engine = build(Engine, trainers, num_ranks=2)
    trainers.write(0)
    assert engine.read() == 0
    FullDisk.room = 8
    results(trainers.begin(1))
    trainers.threads.run(lambda rank: trainers.writers[rank]._finish())
    assert Catalogue(Folder(full_disk)).get(1) is None
    assert [p for p in list(FullDisk.store) if "v000001" in p] == []  # nothing takes room that is short
    assert engine.read() == 0
    FullDisk.room = None
    failed = trainers.begin(2)
    for error in failed:
        assert isinstance(error, UpdateAborted)
        assert "version 1 was not written" in str(error)
        assert "cannot be written (No space left on device): free some room there" in str(error)
    stats = trainers.write(3)
    assert stats[0].verdict.reason is Reason.PREVIOUS_ABORTED
    assert engine.read() == 3
    assert engine.holds(trainers.history[3])


def test_waiting_tells_what_went_wrong_once(build: Build, full_disk: str) -> None:
    trainers = build(Trainers, full_disk)
    FullDisk.room = 256  # for a sign of life, and no more
    results(trainers.begin(0))
    errors = trainers.threads.run(lambda rank: trainers.writers[rank].wait())
    assert all(isinstance(error, UpdateAborted) for error in errors)
    FullDisk.room = None
    trainers.write(0)  # all ranks know already: nothing is in the way
    assert trainers.kinds == "F"


@pytest.mark.parametrize("phase", ["detect", "prepare", "encode"])
def test_a_rank_that_fails_while_packing_fails_all_and_the_next_version_is_full(
    build: Build, tmp_path: Path, phase: str
) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=1)
    trainers.write(0, 1)
    version = 2
    if phase != "prepare":
        trainers.write(2)  # an anchor; the next one is a delta
        version = 3
    trainers.faults[1].fail(phase)
    outcome = trainers.begin(version)
    if phase == "detect":  # a doubt, not a failure
        assert [one.verdict.reason for one in results(outcome)] == [Reason.DETECTION_FAILED] * 2
        trainers.threads.run(lambda rank: trainers.writers[rank].wait())
    else:
        assert all(isinstance(one, UpdateAborted) and "seat 1" in str(one) for one in outcome)
        assert trainers.write(version)[0].verdict.reason is Reason.PREVIOUS_ABORTED
    engine = build(Engine, trainers)
    assert engine.read() == version
    assert engine.holds(trainers.history[version])


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_trainer_that_cannot_note_the_commit_fails_all_and_the_next_version_is_full(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_delta: bool
) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=0)
    version = trainers.write(0)[0].version + 1 if is_delta else 0

    def fail() -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(trainers.views[1], "committed", fail)
        outcome = trainers.begin(version)
    assert all(isinstance(one, UpdateAborted) and "MemoryError: no room" in str(one) for one in outcome)
    assert trainers.write(version)[0].verdict.kind.value == "full"
    engine = build(Engine, trainers)
    assert engine.read() == version
    assert engine.holds(trainers.history[version])


def write_chain(build: Build, tmp_path: Path) -> Trainers:
    """Versions F0 D1 D2 F3 D4 in a folder."""
    trainers: Trainers = build(
        Trainers, str(tmp_path), anchor_interval=2, extra_files={"config.json": b'{"model_type": "x"}'}
    )
    trainers.write(0, 1, 2, 3, 4)
    assert trainers.kinds == "FDDFD"
    return trainers


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: flip(f, delta_file(1), -3), id="a changed weight"),
        pytest.param(lambda f: flip(f, f"{version_name(1)}/{INDEX}", 700), id="its manifest"),
        pytest.param(lambda f: f.remove(f"{version_name(1)}/{INDEX}"), id="no manifest"),
        pytest.param(lambda f: f.remove(delta_file(1)), id="no file"),
        pytest.param(lambda f: f.put(delta_file(1), [f.read(delta_file(1))[:-9]]), id="a file cut short"),
        pytest.param(lambda f: f.put(delta_file(1), [b""]), id="an empty file"),
        pytest.param(lambda f: f.put(f"{version_name(1)}/{INDEX}", [b"{}"]), id="another index"),
        pytest.param(lambda f: f.discard(1), id="no folder"),
    ],
)
def test_a_broken_link_is_named_and_the_next_anchor_taken(
    build: Build, tmp_path: Path, damage: Callable[[Folder], None]
) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers, num_ranks=2)
    assert engine.read(0) == 0
    damage(Folder(str(tmp_path)))
    for error in engine.try_read(2):
        assert isinstance(error, ChainError)
        assert "version 1" in str(error)
    assert engine.holds(trainers.history[0])
    assert all(reader.ready and reader.version == 0 for reader in engine.readers)
    assert engine.read() == 4
    assert engine.holds(trainers.history[4])


def test_a_damaged_anchor_leaves_the_newest_version_that_can_be_reached(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = write_chain(build, tmp_path)
    flip(Folder(str(tmp_path)), model_file(3), -1)
    engine = build(Engine, trainers)
    with caplog.at_level(logging.WARNING):
        assert engine.read() == 2
    assert "is damaged" in caplog.text
    assert engine.holds(trainers.history[2])
    assert engine.read() == 2  # and stays there, served, until the next anchor
    trainers.write(5, 6)
    assert engine.read() == 6
    assert engine.holds(trainers.history[6])


@pytest.mark.parametrize("field", ["run_id", "base_id"])
def test_a_link_of_another_run_or_another_write_is_not_followed(
    build: Build, tmp_path: Path, field: str
) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers)
    engine.read(1)
    folder = Folder(str(tmp_path))
    foreign = build(Trainers, f"memory://{uuid.uuid4().hex}", anchor_interval=2, seed=3)
    foreign.write(0, 1, 2)
    if field == "run_id":  # a whole version of another run, in this one's place
        other = Folder(foreign.url)
        for name in other.names(version_name(2)):
            folder.put(f"{version_name(2)}/{name}", [other.read(f"{version_name(2)}/{name}")])
    else:  # the same run wrote its version 1 once more
        manifest = Catalogue(folder).get(1)
        assert isinstance(manifest, Manifest)
        again = manifest.model_copy(update={"id": "another"})
        folder.put(f"{version_name(1)}/{INDEX}", [dump_manifest(again)])
    (error,) = engine.try_read(2)
    assert isinstance(error, ChainError)
    assert "builds on another version 1 than the one that is there" in str(error)
    assert engine.reader.ready
    assert engine.holds(trainers.history[1])
    assert engine.read() == 4
    assert engine.holds(trainers.history[4])


def test_a_folder_that_goes_away_under_a_reader(build: Build, tmp_path: Path) -> None:
    trainers = write_chain(build, tmp_path / "run")
    engine = build(Engine, trainers, num_ranks=2)
    engine.read(1)
    trainers.writers[0]._claim._rest()  # no sign of life may appear in a folder while it is removed
    engine.faults[0]._actions["stage"] = lambda: shutil.rmtree(tmp_path / "run" / version_name(3))
    assert engine.read() == 2  # the way through version 3 is gone
    assert engine.holds(trainers.history[2])
    engine.faults[0]._actions["stage"] = lambda: shutil.rmtree(tmp_path / "run")
    trainers.write(5, 6)
    assert engine.read() == 2
    assert engine.holds(trainers.history[2])
    for error in engine.try_read(6):
        assert isinstance(error, ChainError)
        assert f"there is no version in {tmp_path}" in str(error)
    assert all(reader.ready and reader.version == 2 for reader in engine.readers)


def test_a_rank_that_cannot_stage_stops_all_before_the_first_write(build: Build, tmp_path: Path) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers, num_ranks=2)
    engine.read(0)
    engine.faults[1].fail("stage")
    for error in engine.try_read(1):
        assert isinstance(error, UpdateAborted)
        assert "rank 1" in str(error)
    assert engine.holds(trainers.history[0])
    assert all(reader.ready for reader in engine.readers)
    assert engine.read(1) == 1
    assert engine.holds(trainers.history[1])


def test_a_rank_that_fails_while_writing_is_dirty_and_nothing_is_served_until_all_hold_one_version(
    build: Build, tmp_path: Path
) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers, num_ranks=2)
    engine.read(0)
    engine.faults[1].fail("apply")
    for error in engine.try_read(1):
        assert isinstance(error, UpdateAborted)
    assert [reader.dirty for reader in engine.readers] == [False, True]
    assert not any(reader.ready for reader in engine.readers)
    assert [view.published for view in engine.views] == [[0], [0]]
    assert engine.read(2) == 2  # rank 0 goes on from 1, rank 1 begins at the anchor
    assert engine.holds(trainers.history[2])


def test_a_rank_that_stops_midway_leaves_a_mixture_that_is_not_served(build: Build, tmp_path: Path) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers, num_ranks=2)
    engine.read(0)
    calls = iter(range(9))

    def at_the_second_link() -> None:
        if next(calls):
            raise ValueError("injected at the second link")
        engine.faults[1]._actions["stage"] = at_the_second_link

    engine.faults[1]._actions["stage"] = at_the_second_link
    for error in engine.try_read(2):
        assert isinstance(error, UpdateAborted)
    assert [reader.version for reader in engine.readers] == [2, 1]
    assert not any(reader.ready for reader in engine.readers)
    assert engine.read(2) == 2
    assert engine.holds(trainers.history[2])


def test_weights_that_were_lost_are_read_from_an_anchor(build: Build, tmp_path: Path) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers)
    engine.read()
    for tensor in engine.views[0].tensors_by_name.values():
        tensor.zero_()
    engine.reader.invalidate()
    assert not engine.reader.ready
    assert engine.read() == 4
    assert engine.holds(trainers.history[4])


def test_a_version_is_not_ready_where_publishing_it_failed(build: Build, tmp_path: Path) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers)
    engine.read(0)
    commit = engine.views[0].committed
    engine.views[0].committed = lambda version: 1 // 0
    (error,) = engine.try_read(1)
    assert isinstance(error, UpdateError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "could not publish" in str(error)
    assert "ZeroDivisionError: " in str(error)
    assert not engine.reader.ready
    engine.views[0].committed = commit
    assert engine.read(1) == 1


def test_an_engine_that_moves_while_it_is_asked_for_what_it_holds_is_not_ready(
    build: Build, tmp_path: Path
) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers)
    engine.read(1)
    tensors, (view,) = engine.views[0].tensors, engine.views
    looks: list[int] = []

    def moving() -> Sequence[EngineTensor]:
        looks.append(1)
        if len(looks) == 2:  # the first sees that nothing moved, and nothing is to be written
            view.tensors_by_name[DOWN] = torch.zeros_like(view.tensors_by_name[DOWN])
        asked: Sequence[EngineTensor] = tensors()
        return asked

    view.tensors = moving
    (error,) = engine.try_read(1)
    assert isinstance(error, UpdateAborted)
    assert DOWN in str(error)
    assert not engine.reader.ready
    assert engine.read(1) == 1
    assert engine.holds(trainers.history[1])


@pytest.mark.parametrize("verify", ["touched", "full"])
def test_a_base_that_is_not_what_it_should_be_is_found_before_it_is_served(
    build: Build, tmp_path: Path, verify: str
) -> None:
    trainers = build(Trainers, str(tmp_path), verify=verify, encoding="ulp")
    engine = build(Engine, trainers, num_ranks=2)
    trainers.write(0)
    engine.read()
    trainers.write(1)
    changed = (trainers.history[0][DOWN] != trainers.history[1][DOWN]).nonzero()
    row, column = changed[-1].tolist() if verify == "touched" else unchanged(trainers).tolist()
    part = engine.views[column // 12].tensors_by_name[DOWN]  # cut by columns, twelve on each rank
    part.view(torch.int16)[row, column % 12] ^= 1
    for error in engine.try_read():
        assert isinstance(error, VerificationError)
        assert f"{DOWN} after version 1" in str(error)
    assert not any(reader.ready for reader in engine.readers)
    assert [view.published for view in engine.views] == [[0], [0]]
    assert engine.read() == 1  # from the full version on
    assert engine.holds(trainers.history[1])
    stats = results(engine.try_read())
    assert [one.verified for one in stats] == [verify] * 2


def unchanged(trainers: Trainers) -> torch.Tensor:
    """A place in a weight that version 1 does not touch."""
    manifest = Catalogue(Folder(trainers.url)).get(1)
    assert isinstance(manifest, Manifest)
    assert manifest.scope == "full"
    return (trainers.history[0][DOWN] == trainers.history[1][DOWN]).nonzero()[0]


def test_a_write_that_an_engine_drops_is_found(build: Build, tmp_path: Path) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers, num_ranks=2)
    engine.read(0)
    norm = engine.views[1].tensors_by_name[NORM]
    engine.views[1].synchronize = norm.zero_
    for error in engine.try_read(3):
        assert isinstance(error, VerificationError)
        assert NORM in str(error)
    assert not any(reader.ready for reader in engine.readers)


def test_without_verification_nothing_is_read_back(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), verify="off")
    trainers.write(0, 1)
    engine = build(Engine, trainers)
    (stats,) = results(engine.try_read())
    assert stats.verified == "off"
    manifest = Catalogue(Folder(trainers.url)).get(1)
    assert isinstance(manifest, Manifest)
    assert (manifest.scope, manifest.digest) == ("off", {})


def test_the_digest_in_a_manifest_is_that_of_the_whole_tensors(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), verify="full")
    trainers.write(0, 1)
    for version in (0, 1):
        manifest = Catalogue(Folder(trainers.url)).get(version)
        assert isinstance(manifest, Manifest)
        weights = trainers.history[version]
        assert manifest.digest == {name: f"{digest(weights[name], name):016x}" for name in sorted(weights)}


def test_old_versions_go_and_those_that_are_read_stay(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=1, keep_anchors=2)
    folder = Folder(str(tmp_path))
    trainers.write(0, 1, 2, 3)
    assert folder.versions() == [0, 1, 2, 3]
    folder.lease("slow", 1, 60.0)
    trainers.write(4, 5)
    assert folder.versions() == [1, 2, 3, 4, 5]
    folder.lease("slow", 3, 60.0)  # it read on
    trainers.write(6)
    assert folder.versions() == [3, 4, 5, 6]
    folder.release("slow")
    trainers.write(7)
    assert folder.versions() == [4, 5, 6, 7]
    assert trainers.kinds == "FDFDFDFD"
    engine = build(Engine, trainers)
    assert engine.read() == 7
    assert engine.holds(trainers.history[7])


def test_a_reader_holds_a_lease_while_it_reads_and_none_afterwards(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=1, keep_anchors=1)
    trainers.write(0, 1)
    engine = build(Engine, trainers)
    folder = Folder(str(tmp_path))
    seen: list[int | None] = []

    def overtaken() -> None:
        seen.append(folder.oldest_leased())
        trainers.write(2, 3, 4)  # the writer would remove 0 and 1 now

    engine.faults[0]._actions["stage"] = overtaken
    assert engine.read(1) == 1
    assert seen == [0]
    assert engine.holds(trainers.history[1])
    assert folder.oldest_leased() is None
    trainers.write(5)
    assert folder.versions() == [4, 5]


def test_the_lease_of_a_dead_reader_ends(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=1, keep_anchors=1)
    folder = Folder(str(tmp_path))
    trainers.write(0)
    folder.lease("dead", 0, 0.05)
    folder.put("leases/odd.json", [b"not a lease"])
    time.sleep(0.06)
    trainers.write(1, 2)
    assert folder.versions() == [2]
    assert folder.names("leases") == ["odd.json"]


def test_a_folder_that_one_may_only_read_is_read_without_a_lease(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = write_chain(build, tmp_path)
    engine = build(Engine, trainers)

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(engine.reader._folder, "lease", refuse)
    with caplog.at_level(logging.WARNING):
        assert engine.read() == 4
    assert "no lease" in caplog.text
    assert engine.holds(trainers.history[4])


def test_leftovers_of_a_writer_that_died_are_removed(build: Build, tmp_path: Path) -> None:
    dead = tmp_path / version_name(1)
    dead.mkdir(parents=True)
    (dead / "delta-00001-of-00007.safetensors").write_bytes(b"old")
    (dead / "model-00001-of-00002.safetensors.0123.tmp").write_bytes(b"old")
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0, 1)
    assert files_below(dead) == [
        "delta-00001-of-00002.safetensors",
        "delta-00002-of-00002.safetensors",
        INDEX,
    ]


def test_a_manifest_says_nothing_that_its_checksum_does_not_cover(build: Build, tmp_path: Path) -> None:
    write_chain(build, tmp_path)
    folder = Folder(str(tmp_path))
    name = f"{version_name(4)}/{INDEX}"
    index = json.loads(folder.read(name))
    changed = 0
    for path in (["metadata", "awex_delta", "version"], ["weight_map", next(iter(index["weight_map"]))]):
        broken = json.loads(folder.read(name))
        spot: Any = broken
        for key in path[:-1]:
            spot = spot[key]
        spot[path[-1]] = 3 if path[-1] == "version" else "elsewhere.safetensors"
        folder.put(name, [json.dumps(broken).encode()])
        assert "damaged" in str(Catalogue(folder).get(4))
        folder.put(name, [json.dumps(index).encode()])
        changed += 1
    assert changed == 2


def set_format(folder: Folder, version: int, number: int) -> None:
    """Make a manifest one of another format, with a checksum that is right."""
    name = f"{version_name(version)}/{INDEX}"
    index = json.loads(folder.read(name))
    body = index["metadata"]["awex_delta"]
    body["format"] = number
    del body["xxh3"]
    body["xxh3"] = xxhash.xxh3_64(json.dumps(body, sort_keys=True).encode()).hexdigest()
    folder.put(name, [json.dumps(index).encode()])


def test_a_folder_of_another_format_is_refused_with_its_path_and_the_remedy(
    build: Build, tmp_path: Path
) -> None:
    trainers = build(Trainers, str(tmp_path / "run"), anchor_interval=5)
    trainers.write(0, 1)
    engine = build(Engine, trainers, num_ranks=2)
    assert engine.read(0) == 0
    before = files_below(tmp_path / "run" / version_name(0))
    for version in (0, 1):
        set_format(Folder(trainers.url), version, 1)
    said = (
        f"{tmp_path / 'run'}/weight_v00000[01] has format 1, and this release reads and writes format 2: "
        "write to a new folder, or read it with the release that wrote it"
    )
    assert engine.read() == 0  # what it holds stays served
    late = build(Engine, trainers)
    (error,) = late.try_read()
    with pytest.raises(ChainError, match=said):
        raise error
    assert not any(tensor.any() for tensor in late.views[0].tensors_by_name.values())
    with pytest.raises(ChainError, match=said):
        LocalCheckpoint(tmp_path / "local", Folder(trainers.url)).pull()
    trainers.close()
    again = build(Trainers, str(tmp_path / "run"))
    for _ in range(2):
        for error in again.begin(2):
            with pytest.raises(UpdateAborted, match=said):
                raise error
    assert files_below(tmp_path / "run" / version_name(0)) == before
    shutil.rmtree(tmp_path / "run")
    again.write(3)
    assert late.read() == 3


def test_a_follower_reads_tables_once(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), anchor_interval=5)
    engine = build(Engine, trainers)
    trainers.write(0)
    assert engine.read() == 0
    for version in (1, 2):
        trainers.write(version)
        (stats,) = results(engine.try_read())
        manifest = Catalogue(Folder(trainers.url)).get(version)
        assert isinstance(manifest, Manifest)
        bodies = sum(body.size for line in manifest.lines for body in line.bodies)
        tables = sum(line.boxes.size for line in manifest.lines)
        assert stats.wire_bytes == bodies + (tables if version == 1 else 0)
        assert engine.holds(trainers.history[version])
