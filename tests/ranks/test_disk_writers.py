"""Two trainings and one folder: the one that may write, the one that may not, and the one that died."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awex_delta.errors import UpdateAborted
from awex_delta.folder.claim import Claim
from awex_delta.folder.folder import Folder
from tests.ranks.disk import Engine, Trainers

Build = Callable[..., Any]
SIGN = "writer.json"


PATIENCE = 6.0
"""Seconds without a sign of life after which one of two writers here takes the other one for dead."""


def refusal(outcome: list[Any]) -> str:
    """What every rank says alike of a version that could not be written."""
    assert all(isinstance(one, UpdateAborted) for one in outcome), outcome
    assert len({str(one) for one in outcome}) == 1
    return str(outcome[0])


def test_a_second_training_is_refused_while_the_first_one_lives(build: Build, tmp_path: Path) -> None:
    first = build(Trainers, str(tmp_path), timeout_seconds=3 * PATIENCE)
    first.write(0, 1)
    twin = build(Trainers, str(tmp_path), seed=7, timeout_seconds=3 * PATIENCE)
    for _ in range(2):  # and again
        text = refusal(twin.begin(1))
        assert f"run {first.writers[0].run_id} writes to {tmp_path} and is alive" in text
        assert "give it another weight_update_disk_url" in text
    engine = build(Engine, first)
    assert engine.read() == 1
    assert engine.holds(first.history[1])
    first.write(2)
    assert first.kinds == "FDD"
    first.close()
    start = time.monotonic()
    twin.write(1)  # the folder was given back, so nobody waits
    assert time.monotonic() - start < PATIENCE
    assert engine.read() == 1
    assert engine.holds(twin.history[1])


def die(trainers: Trainers) -> None:
    """What a kill leaves: no sign of life any more, and nothing given back."""
    trainers.writers[0]._claim._rest()


def test_the_folder_of_a_dead_training_is_taken_over_and_one_that_comes_back_is_told(
    build: Build, tmp_path: Path
) -> None:
    dead = build(Trainers, str(tmp_path), timeout_seconds=3 * PATIENCE)
    dead.write(0, 1, 2)
    die(dead)
    again = build(Trainers, str(tmp_path), seed=7, timeout_seconds=3 * PATIENCE)
    again.write(1, 2)
    assert again.kinds == "FD"
    text = refusal(dead.begin(3))
    assert (
        f"run {again.writers[0].run_id} took {tmp_path} over from this run {dead.writers[0].run_id}" in text
    )
    assert "is alive" in refusal(dead.begin(4))
    again.write(3)
    engine = build(Engine, again)
    assert engine.read() == 3
    assert engine.holds(again.history[3])
    again.close()
    dead.write(5)  # nobody is there any more
    assert dead.kinds == "FDDF"


def test_a_folder_that_is_lost_while_a_version_is_written_keeps_what_it_holds(
    build: Build, tmp_path: Path
) -> None:
    folder = Folder(str(tmp_path))

    def lose(step: str) -> None:
        if "weight_v000005/model-" in step:
            trainers.writers[0]._claim._rest()  # no sign of its own may come after the other one's
            sign = {"run_id": "f" * 32, "beat": "x", "seconds": 0.3}
            folder.put(SIGN, [json.dumps(sign).encode()])

    trainers = build(Trainers, str(tmp_path), num_trainers=1, on_step=lose)
    trainers.write(0, 1, 2)
    trainers.begin(5)
    with pytest.raises(UpdateAborted, match=f"run {'f' * 32} took {tmp_path} over from this run"):
        trainers.writers[0].wait()
    engine = build(Engine, trainers)
    assert engine.read() == 2
    assert engine.holds(trainers.history[2])


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"run_id": "a"}', b'{"run_id": "a", "beat": "b", "seconds": "?"}']
)
def test_what_is_no_sign_of_a_writer_holds_nobody_up(tmp_path: Path, text: bytes) -> None:
    folder = Folder(str(tmp_path))
    folder.put(SIGN, [text])
    claim = Claim(folder, 0.4)
    assert claim.take("a") == ""
    beats = {json.loads(folder.read(SIGN))["beat"]}
    folder.remove(SIGN)  # somebody empties the folder: the next sign comes all the same
    until = time.monotonic() + 10
    while len(beats) < 3 and time.monotonic() < until:
        time.sleep(0.02)
        if SIGN in folder.names(""):
            beats.add(json.loads(folder.read(SIGN))["beat"])
    assert len(beats) == 3
    claim.release()
    claim.release()
    assert folder.names("") == []


def test_a_killed_process_is_waited_for_as_long_as_it_asked(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            Claim(Folder(str(tmp_path)), 1.0).take("killed")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    claim = Claim(Folder(str(tmp_path)), 1.0)
    start = time.monotonic()
    assert claim.take("next") == ""
    assert time.monotonic() - start >= 1.0
    claim.release()
