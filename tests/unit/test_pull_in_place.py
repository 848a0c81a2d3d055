"""`pull` into the shards that are there: which bytes it writes, and what a loader may find at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from errno import EACCES, ENODEV
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from awex_delta.errors import ChainError, UpdateError
from awex_delta.folder.chain import Catalogue
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.manifest import Manifest
from awex_delta.folder.patch import HIDDEN, JOURNAL
from awex_delta.folder.pull import LocalCheckpoint, Pulled
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.ranks import results
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.ranks.conftest import EMBED
from tests.ranks.disk import Trainers, files_below, flip

pytestmark = pytest.mark.timeout(30)


class StopError(Exception):
    """The end of a pull that a test cuts short."""


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    """Two ranks that have written versions 0 and 1: a full one and a delta."""
    made = Trainers(str(tmp_path / "source"), anchor_interval=1)
    made.write(0, 1)
    yield made
    made.close()


def pull(
    path: Path, trainers: Trainers, version: int | None = None, on_step: Callable[[str], None] | None = None
) -> Pulled:
    """Bring a checkpoint to a version."""
    step = on_step or (lambda name: None)
    return LocalCheckpoint(path, Folder(trainers.url), on_step=step).pull(version)


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the shards that a loader finds."""
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def holds(path: Path, weights: dict[str, torch.Tensor]) -> bool:
    """True where a checkpoint has an index, and exactly these bits."""
    found = weights_in(path)
    return (
        (path / INDEX).exists()
        and found.keys() == weights.keys()
        and all(torch.equal(found[name], weights[name]) for name in weights)
    )


def shards(path: Path) -> dict[str, tuple[int, bytes]]:
    """By name, the inode and the bytes of each shard."""
    return {file.name: (file.stat().st_ino, file.read_bytes()) for file in path.glob("*.safetensors")}


def overwrite(file: Path, content: bytearray) -> None:
    """Replace the bytes of a file that is mapped."""
    with file.open("r+b") as stream:
        stream.write(content)


def stop_at(prefix: str, before: Callable[[], None] = lambda: None) -> Callable[[str], None]:
    """Break off as a step begins, after doing something."""

    def step(name: str) -> None:
        if name.startswith(prefix):
            before()
            raise StopError

    return step


def test_only_bytes_of_changed_elements_are_written(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    first = pull(path, trainers, 0)
    assert not first.in_place
    before = shards(path)
    done = pull(path, trainers, 1)
    after = shards(path)
    assert done.in_place
    assert done.problems == ()
    assert holds(path, trainers.history[1])
    assert {name: inode for name, (inode, _) in after.items()} == {
        n: inode for n, (inode, _) in before.items()
    }
    old, new = trainers.history[0], trainers.history[1]
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    width = {n: t.element_size() for n, t in new.items()}
    changed = {n: int((old[n].view(bits[t.dtype]) != t.view(bits[t.dtype])).sum()) for n, t in new.items()}
    differ = sum(
        int((np.frombuffer(before[n][1], np.uint8) != np.frombuffer(after[n][1], np.uint8)).sum())
        for n in after
    )
    assert 0 < differ <= sum(changed[n] * width[n] for n in changed)
    assert files_below(path / JOURNAL) == ["lock"]
    assert done.bytes_written > sum(changed[n] * width[n] for n in changed)  # and the journal


def test_an_anchor_is_followed_in_place(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers)
    inodes = {name: inode for name, (inode, _) in shards(path).items()}
    trainers.write(2, 3)
    assert trainers.kinds == "FDFD"
    done = pull(path, trainers)
    assert [link.version for link in done.links] == [2, 3]
    assert done.in_place
    assert {name: inode for name, (inode, _) in shards(path).items()} == inodes
    assert holds(path, trainers.history[3])
    assert pull(path, trainers, 2).in_place  # and back
    assert holds(path, trainers.history[2])


def test_an_anchor_that_is_there_already_is_not_read(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers)
    before = shards(path)
    results(trainers.threads.run(lambda rank: trainers.writers[rank].update_weights(5)))  # without a step
    results(trainers.threads.run(lambda rank: trainers.writers[rank].wait()))
    done = pull(path, trainers)
    assert (done.version, done.bytes_read, done.in_place) == (5, 0, True)
    assert [link.kind for link in done.links] == [Kind.FULL]
    assert shards(path) == before
    assert holds(path, trainers.history[1])


@pytest.mark.parametrize("seed", range(4))
def test_stores_that_were_lost_or_torn_are_done_again(trainers: Trainers, tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "local", np.random.default_rng(seed)
    pull(path, trainers, 0)
    before = {name: content for name, (_, content) in shards(path).items()}

    def tear() -> None:
        for name, content in before.items():
            file = path / (name + HIDDEN)
            now = bytearray(file.read_bytes())
            for place in (i for i, byte in enumerate(content) if byte != now[i]):
                now[place] = (content[place], now[place], int(draw.integers(256)))[draw.integers(3)]
            overwrite(file, now)

    with pytest.raises(StopError):
        pull(path, trainers, on_step=stop_at("flush", tear))
    assert not (path / INDEX).exists()
    assert not weights_in(path)  # no loader finds anything
    Folder(trainers.url).discard(1)  # what is missing is here, and nothing else is needed
    done = pull(path, trainers)
    assert (done.version, done.links) == (1, ())
    assert holds(path, trainers.history[1])


def test_a_journal_that_was_not_committed_is_dropped(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers, 0)
    with pytest.raises(StopError):
        pull(path, trainers, on_step=stop_at("withdraw"))
    (path / JOURNAL / "next" / "commit.json").unlink()  # as if it had never got its name
    assert holds(path, trainers.history[0])
    assert [link.version for link in pull(path, trainers).links] == [1]
    assert holds(path, trainers.history[1])
    assert files_below(path / JOURNAL) == ["lock"]


def test_a_version_that_turns_out_damaged_at_the_second_shard_leaves_nothing_in_the_journal(
    tmp_path: Path,
) -> None:
    trainers = Trainers(str(tmp_path / "source"), anchor_interval=1)
    trainers.write(0, 1, 2)
    assert trainers.kinds == "FDF"
    path, source = tmp_path / "local", Folder(trainers.url)
    pull(path, trainers, 0)
    last = load_file(max(path.glob("*.safetensors")))
    manifest = Catalogue(source).get(2)
    assert isinstance(manifest, Manifest)
    entry = next(entry for entry in manifest.tensors if entry.name in last)
    flip(source, f"{version_name(2)}/{entry.file}", entry.offset)
    done = pull(path, trainers)
    assert f"{entry.name} of version 2" in done.problems[0]
    assert (done.version, done.in_place) == (1, True)
    assert holds(path, trainers.history[1])
    assert files_below(path / JOURNAL) == ["lock"]
    trainers.close()


def test_a_damaged_journal_never_makes_a_checkpoint(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers, 0)
    with pytest.raises(StopError):
        pull(path, trainers, on_step=stop_at("patch"))
    changes = next(name for name in files_below(path / JOURNAL) if name.endswith(".safetensors"))
    flip(Folder(str(path / JOURNAL)), changes, -1)
    empty = Folder(str(tmp_path / "empty"))
    with pytest.raises(ChainError, match="cannot be made in place"):
        LocalCheckpoint(path, empty).pull()
    assert not (path / INDEX).exists()
    done = pull(path, trainers)
    assert not done.in_place
    assert holds(path, trainers.history[1])
    assert not list(path.glob(f"*{HIDDEN}"))


def test_what_else_changed_in_a_shard_is_found_before_it_counts(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers, 0)
    before = {name: content for name, (_, content) in shards(path).items()}

    def damage(step: str) -> None:
        name = step.removeprefix("flush ")
        if name in before:
            file = path / (name + HIDDEN)
            now = bytearray(file.read_bytes())
            kept = max(i for i, (old, new) in enumerate(zip(before[name], now, strict=True)) if old == new)
            now[kept] ^= 1
            overwrite(file, now)

    done = pull(path, trainers, on_step=damage)
    assert not done.in_place
    assert "is not what was written there" in done.problems[0]
    assert holds(path, trainers.history[1])


def test_a_shard_with_a_second_name_is_left_alone(trainers: Trainers, tmp_path: Path) -> None:
    path, other = tmp_path / "local", tmp_path / "other"
    pull(path, trainers, 0)
    other.mkdir()
    for file in path.glob("*.safetensors"):
        os.link(file, other / file.name)
    done = pull(path, trainers)
    assert not done.in_place
    assert "is shared with another checkpoint by a link: whole shards are written" in done.problems[0]
    assert holds(path, trainers.history[1])
    (other / INDEX).touch()
    assert holds(other, trainers.history[0])
    assert pull(path, trainers, 0).in_place  # the new shards have one name


@pytest.mark.parametrize("errno", [EACCES, ENODEV])  # read-only; a filesystem that maps nothing for writing
def test_a_shard_that_cannot_be_written_is_left_alone(
    trainers: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno: int
) -> None:
    path = tmp_path / "local"
    pull(path, trainers, 0)
    before = shards(path)

    def refuse(filename: Path, mode: str, **_: object) -> None:
        assert filename.exists()
        assert mode == "r+"
        raise OSError(errno, os.strerror(errno), str(filename))

    monkeypatch.setattr(np, "memmap", refuse)
    done = pull(path, trainers)
    assert not done.in_place
    assert f"cannot be written in place ({os.strerror(errno)}): whole shards are written" in done.problems[0]
    assert holds(path, trainers.history[1])
    assert not before.keys() & shards(path).keys()


def test_the_journal_is_on_the_disk_with_its_folders_before_anything_changes(
    trainers: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "local"
    pull(path, trainers, 0)
    synced: set[int] = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def look() -> None:
        room = path / JOURNAL / "next"
        for place in (*room.iterdir(), room, room.parent):
            assert place.stat().st_ino in synced, place

    monkeypatch.setattr(os, "fsync", note)
    with pytest.raises(StopError):
        pull(path, trainers, on_step=stop_at("withdraw", look))


def test_another_layout_gets_new_shards(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers)
    view = TorchAdamWTrainer.create({EMBED: (16, 8)}, settings=trainers.settings)
    other = Trainers(str(tmp_path / "smaller"), views=[view])
    other.write(5)
    done = pull(path, other)
    assert not done.in_place
    assert "has other tensors than the checkpoint: whole shards are written" in done.problems[0]
    assert holds(path, other.history[5])
    other.close()


def test_two_pulls_at_once_are_refused(trainers: Trainers, tmp_path: Path) -> None:
    path = tmp_path / "local"
    pull(path, trainers, 0)
    refused: list[BaseException] = []

    def meet(name: str) -> None:
        if name.startswith("flush") and not refused:
            with pytest.raises(UpdateError, match=f"another pull changes {path}") as caught:
                pull(path, trainers)
            refused.append(caught.value)

    assert pull(path, trainers, on_step=meet).in_place
    assert refused
    assert holds(path, trainers.history[1])
