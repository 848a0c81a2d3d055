"""Real processes, killed between updates and inside them: the others say who is gone, and all recovers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from awex_delta.errors import AwexDeltaError
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.fleet import fork_server
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
    "model.norm.weight": (8,),
}
CUT = {"model.embed_tokens.weight": 0, "model.layers.0.mlp.down_proj.weight": 1}
SETTINGS = DeltaSettings(anchor_interval=0, timeout_seconds=30.0, connect_timeout_seconds=30.0)
"""Patient: a death is heard at once, so that no test waits for any of this."""
ENGINE, TRAINER = 1, 3
"""Seats of the second engine rank and of the second trainer rank; there are two of each."""
NAMES = {ENGINE: "engine rank 1", TRAINER: "trainer rank 1"}
START_SECONDS = 120.0
"""Until a process has imported what it needs, on a busy machine."""

pytestmark = pytest.mark.timeout(300)

Answer = UpdateStats | AwexDeltaError | RuntimeError


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def meeting(port: int) -> Rendezvous:
    return Rendezvous(num_engine_ranks=2, num_trainer_ranks=2, port=port)


def _serve_store(pipe: Connection) -> None:
    store = host_store()
    pipe.send(store.port)
    pipe.recv()


def _serve(pipe: Connection, seat: int, port: int, num_steps: int, settings: DeltaSettings) -> None:
    """One rank: does what the pipe says, and answers. A trainer repeats the steps of its former life."""
    torch.set_num_threads(1)
    meet = meeting(port)
    die_at: list[str] = []

    def on_phase(phase: str) -> None:
        if phase in die_at:
            _die()

    end: Sender | Receiver
    if seat < 2:
        engine = DictEngine(SHAPES, cut=CUT, rank=seat, num_ranks=2)
        end = Receiver(engine, meet, seat, "e", settings, on_phase=on_phase)
        weights = engine.tensors_by_name
    else:
        trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, dp_rank=seat - 2, dp_size=2, settings=settings)
        end = Sender(trainer, meet, seat - 2, settings, on_phase=on_phase)
        weights = {info.param: trainer.tensor(info.key) for info in trainer.weights()}
        for _ in range(num_steps):
            trainer.train_step()
    pipe.send("ready")
    while True:
        command, value = pipe.recv()
        if command == "step":
            trainer.train_step()
            pipe.send(None)
        elif command == "bits":
            pipe.send({n: w.contiguous().view(torch.int16).numpy().copy() for n, w in weights.items()})
        elif command == "die":
            die_at.append(value)
        else:
            try:
                pipe.send(end.update_weights(value))
            except (AwexDeltaError, RuntimeError) as error:
                pipe.send(error)


def halt(pid: int, stop: signal.Signals, *, seconds: float = 60.0) -> None:
    """Send a signal, and wait until no thread of the process runs: the kernel stops them one by one."""
    os.kill(pid, stop)
    deadline = time.monotonic() + seconds
    while any(state not in {"T", "Z", "X"} for state in thread_states(pid)):
        assert time.monotonic() < deadline, "the process runs on"
        time.sleep(0.01)


def thread_states(pid: int) -> list[str]:
    """State letter of every thread, as the kernel tells it; none for a process that is gone."""
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            states.append(task.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0])
    return states


@dataclass
class Life:
    """One process and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def ask(self, command: str, value: object = None, *, seconds: float = 60.0) -> Any:
        self.pipe.send((command, value))
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        assert self.pipe.poll(seconds), "no answer in time"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Fleet:
    """Two engine ranks of one engine, two trainer ranks, and the store in a process of its own."""

    def __init__(self, settings: DeltaSettings = SETTINGS) -> None:
        self.settings = settings
        self.context = fork_server()
        self.store = self.start(_serve_store)
        self.port: int = self.store.answer(START_SECONDS)
        self.num_steps = 0
        self.lives = [self.start(_serve, seat, self.port, 0, settings) for seat in range(4)]
        for life in self.lives:
            assert life.answer(START_SECONDS) == "ready"

    def start(self, function: Callable[..., None], *args: object) -> Life:
        ours, theirs = self.context.Pipe()
        process: BaseProcess = self.context.Process(target=function, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        return Life(process, ours)

    def restart(self, seat: int) -> None:
        self.lives[seat].kill()
        num_steps = self.num_steps if seat >= 2 else 0
        self.lives[seat] = self.start(_serve, seat, self.port, num_steps, self.settings)
        assert self.lives[seat].answer(START_SECONDS) == "ready"

    def step(self) -> None:
        self.num_steps += 1
        for life in self.lives[2:]:
            life.ask("step")

    def update(self, version: int, *, gone: int | None = None) -> dict[int, Answer]:
        for seat, life in enumerate(self.lives):
            if seat != gone or life.process.is_alive():
                life.pipe.send(("update", version))
        return {seat: life.answer(60) for seat, life in enumerate(self.lives) if seat != gone}

    def check_commit(self, version: int, kind: Kind) -> UpdateStats:
        """One step, one update that must succeed, and the bits of every engine rank."""
        self.step()
        answers = self.update(version)
        assert all(isinstance(one, UpdateStats) for one in answers.values()), answers
        stats = [one for one in answers.values() if isinstance(one, UpdateStats)]
        assert {one.verdict.kind for one in stats} == {kind}, stats[0].verdict
        truth = self.lives[2].ask("bits")
        for seat in range(2):
            for name, bits in self.lives[seat].ask("bits").items():
                whole = torch.from_numpy(truth[name])
                part = whole.chunk(2, CUT[name])[seat] if name in CUT else whole
                assert torch.equal(torch.from_numpy(bits), part), (version, seat, name)
        return stats[0]

    def close(self) -> None:
        for life in [*self.lives, self.store]:
            life.kill()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("seat", "phase", "version"),
    [
        (ENGINE, "", 2),
        (TRAINER, "", 2),
        (ENGINE, "stage", 2),
        (ENGINE, "apply", 2),
        (TRAINER, "encode", 2),
        (ENGINE, "prepare", 7),
        (TRAINER, "prepare", 7),
    ],
)
def test_a_killed_rank_is_named_and_the_next_update_is_full_and_exact(
    fleet: Fleet, seat: int, phase: str, version: int
) -> None:
    fleet.check_commit(0, Kind.FULL)
    fleet.check_commit(1, Kind.DELTA)
    fleet.step()
    if phase:  # it dies as this phase of the update begins
        fleet.lives[seat].pipe.send(("die", phase))
    else:
        fleet.lives[seat].kill()
    begin = time.monotonic()
    answers = fleet.update(version, gone=seat)
    assert time.monotonic() - begin < SETTINGS.timeout_seconds, "nobody waits for who is gone"
    for error in answers.values():
        assert isinstance(error, AwexDeltaError), answers
        assert re.search(r"in phase '.+'", str(error)), str(error)
    assert any(NAMES[seat] in str(error) for error in answers.values()), answers
    fleet.restart(seat)
    stats = fleet.check_commit(version, Kind.FULL)
    assert stats.verdict.reason in (Reason.PREVIOUS_ABORTED, Reason.FIRST_SYNC)
    fleet.check_commit(version + 1, Kind.DELTA)


def test_a_rank_killed_between_updates_comes_back_before_the_next(fleet: Fleet) -> None:
    fleet.check_commit(0, Kind.FULL)
    store = meeting(fleet.port).open_store(timedelta(seconds=30))
    epoch = int(store.get("epoch"))
    fleet.restart(ENGINE)
    fleet.lives[ENGINE].pipe.send(("update", 1))  # it arrives first
    arrived, deadline = [f"{epoch + 1}/seat/{ENGINE}"], time.monotonic() + 60
    while not store.check(arrived):
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.01)
    fleet.step()
    for seat in (0, 2, 3):
        fleet.lives[seat].pipe.send(("update", 1))
    answers = [life.answer(60) for life in fleet.lives]
    assert all(isinstance(one, UpdateStats) for one in answers), answers
    assert answers[0].verdict.reason is Reason.ENGINE_STALE
    fleet.check_commit(2, Kind.DELTA)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_gone_is_said_in_time(stop: signal.Signals) -> None:
    patience = 10.0
    fleet = Fleet(replace(SETTINGS, connect_timeout_seconds=patience))
    try:
        fleet.check_commit(0, Kind.FULL)
        fleet.step()
        pid = fleet.store.process.pid
        assert pid is not None
        halt(pid, stop)
        begin = time.monotonic()
        answers = fleet.update(1)
        assert time.monotonic() - begin < 2 * patience, "each rank waits once"
        for error in answers.values():
            assert isinstance(error, AwexDeltaError), repr(error)
            assert f"127.0.0.1:{fleet.port}" in str(error)
    finally:
        fleet.close()
