"""Fleets of processes: results in order, every failure heard, and a process that is used again is as new."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from awex_delta.errors import UpdateAborted
from awex_delta.testing.fleet import Actions, Answer, Fleet, FleetError, gather
from awex_delta.testing.procs import Rank, RanksFailed, run_ranks

pytestmark = pytest.mark.timeout(180)


def gather_ranks(me: Rank, offset: int) -> torch.Tensor:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    mine = torch.tensor([me.rank + offset])
    parts = [torch.empty_like(mine) for _ in range(me.world_size)]
    dist.all_gather(parts, mine)
    return torch.cat(parts) * 10 + me.rank


def fail(me: Rank, how: str) -> str:
    if me.rank != 1:
        (me.folder / f"done-{me.rank}").touch()
        return "fine"
    if how == "hang":
        threading.Event().wait()
    # Who fails ends the others' time: on a busy machine they may not have begun yet.
    while len([*me.folder.glob("done-*")]) < me.world_size - 1:
        time.sleep(0.01)
    if how == "raise":
        raise KeyError("what went wrong")
    os.kill(os.getpid(), signal.SIGKILL)
    return "never said"


def test_results_come_in_rank_order() -> None:
    results = run_ranks(gather_ranks, 3, 5)
    assert [tensor.tolist() for tensor in results] == [[50, 60, 70], [51, 61, 71], [52, 62, 72]]


@pytest.mark.parametrize(("how", "words"), [("raise", "KeyError: 'what went wrong'"), ("die", "died")])
def test_a_rank_that_fails_is_named_and_none_is_left_behind(how: str, words: str) -> None:
    before, begin = multiprocessing.active_children(), time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fail, 3, how, timeout_seconds=120.0)
    assert time.monotonic() - begin < 110, "nobody waits for who is gone"
    assert str(failure.value).startswith("rank 1: ")
    assert words in str(failure.value)
    assert "rank 0" not in str(failure.value)
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_rank_that_hangs_is_named_and_killed() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(RanksFailed, match="rank 1: did not finish in 2"):
        run_ranks(fail, 3, "hang", timeout_seconds=2.0)
    assert set(multiprocessing.active_children()) <= set(before)


def remember(me: Rank, noise: str) -> dict[str, object]:
    """What a job finds in its process; afterwards it leaves behind what it can."""
    found: dict[str, object] = {
        "pid": os.getpid(),
        "drawn": (torch.rand(2).tolist(), np.random.rand(2).tolist()),
        "noise": os.environ.get("DTE_NOISE"),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "group": dist.is_initialized(),
        "folder": Path.cwd(),
    }
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    dist.barrier()
    os.environ["DTE_NOISE"] = noise
    os.chdir(me.folder)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(3)
    return found


def linger(_: Rank) -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def spoil(me: Rank) -> None:
    print(f"the last words of {me.rank}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def pids(_: Rank) -> int:
    return os.getpid()


def test_a_process_is_used_again_and_every_job_finds_it_as_new() -> None:
    first = run_ranks(remember, 2, "first")
    second = run_ranks(remember, 2, "second")
    assert {found["pid"] for found in first} == {found["pid"] for found in second}
    for found in (*first, *second):
        assert found["drawn"] == first[0]["drawn"]
        assert (found["noise"], found["threads"], found["group"]) == (None, 1, False)
        assert (found["dtype"], found["folder"]) == (torch.float32, Path.cwd())


def test_a_process_in_which_a_thread_goes_on_is_not_used_again() -> None:
    (before,) = run_ranks(linger, 1)
    assert before not in run_ranks(pids, 2)


def test_after_a_failure_other_processes_work() -> None:
    before = set(run_ranks(pids, 2))
    with pytest.raises(RanksFailed, match="rank 0: the process died\nthe last words of 0\nrank 1: "):
        run_ranks(spoil, 2)
    assert not before & set(run_ranks(pids, 2))


def test_only_ranks_that_did_not_answer_are_late() -> None:
    pipes = {f"rank {rank}": Pipe(duplex=False) for rank in range(3)}
    for name in ("rank 0", "rank 2"):
        pipes[name][1].send_bytes(pickle.dumps(Answer(value=name)))
    try:
        answers = gather({name: receive for name, (receive, _) in pipes.items()}, 0.2)
    finally:
        for receive, send in pipes.values():
            receive.close()
            send.close()
    assert {name: answer.value for name, answer in answers.items() if not answer.failure} == {
        "rank 0": "rank 0",
        "rank 2": "rank 2",
    }
    assert (answers["rank 1"].failure, answers["rank 1"].lost) == ("did not finish in 0.2 s", True)


@pytest.mark.parametrize("moment", ["before it is asked", "while it answers"])
def test_a_process_that_dies_is_lost_whenever_it_dies(moment: str) -> None:
    receive, send = Pipe(duplex=False)
    with receive:
        if moment == "while it answers":
            os.write(send.fileno(), (100).to_bytes(4, "big") + b"the first bytes of an answer")
        send.close()
        answers = gather({"engine-1": receive}, 30.0)
    assert (answers["engine-1"].failure, answers["engine-1"].lost) == ("the process died", True)


# --- fleets -------------------------------------------------------------------------------------------------


def counter(start: int) -> Actions:
    """A member that counts, and fails as it is told."""
    held = [start]

    def add(number: int) -> int:
        held[0] += number
        return held[0]

    def abort() -> None:
        raise UpdateAborted("given up")

    def stumble() -> None:
        raise KeyError("nobody foresaw it")

    def die() -> None:
        print("a word before the end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep() -> None:
        threading.Event().wait()

    return {"add": add, "abort": abort, "stumble": stumble, "die": die, "sleep": sleep}


def test_members_keep_what_they_hold_from_call_to_call() -> None:
    with Fleet() as fleet:
        fleet.start({"a": 1, "b": 10}, counter)
        fleet.ask(["a"], "add", timeout_seconds=30, number=1)
        answers = fleet.ask(["b", "a"], "add", timeout_seconds=30, number=1)
        assert [(name, answer.value) for name, answer in answers.items()] == [("b", 11), ("a", 3)]
        aborted = fleet.ask(["a"], "abort", timeout_seconds=30)["a"]
        assert (aborted.failure, aborted.foreseen) == ("UpdateAborted: given up", True)
        assert fleet.ask(["a"], "add", timeout_seconds=30, number=0)["a"].value == 3


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("die", "process b died\na word before the end"),
        ("stumble", "process b failed:\n.*nobody foresaw it"),
        ("sleep", "process b did not finish in 1 s"),
    ],
)
def test_a_member_that_cannot_go_on_is_named_and_none_is_left(action: str, said: str) -> None:
    before = multiprocessing.active_children()

    def work() -> None:
        with Fleet() as fleet:
            fleet.start({"a": 1, "b": 2}, counter)
            fleet.ask(["b"], action, timeout_seconds=1.0 if action == "sleep" else 30.0)

    with pytest.raises(FleetError, match=re.compile(said, re.DOTALL)):
        work()
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_death_that_is_expected_is_an_answer_and_another_member_takes_the_place() -> None:
    with Fleet() as fleet:
        fleet.start({"a": 1, "b": 2}, counter)
        died = fleet.ask(["b"], "die", timeout_seconds=30, doomed="b")["b"]
        assert died.failure == "the process died"
        fleet.end("b")
        fleet.start({"b": 5}, counter)
        assert fleet.ask(["b"], "add", timeout_seconds=30, number=1)["b"].value == 6
