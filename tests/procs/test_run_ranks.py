"""The process runner: results in order, and every failure heard."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from multiprocessing.connection import Pipe

import pytest
import torch
import torch.distributed as dist

from awex_delta.testing.procs import Rank, RanksFailed, _collect, run_ranks

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


def test_only_ranks_that_did_not_answer_are_late() -> None:
    pipes = [Pipe(duplex=False) for _ in range(3)]
    for rank in (0, 2):
        pipes[rank][1].send_bytes(pickle.dumps((True, rank)))
    try:
        with pytest.raises(RanksFailed) as failure:
            _collect([receive for receive, _ in pipes], 0.2)
    finally:
        for receive, send in pipes:
            receive.close()
            send.close()
    assert str(failure.value) == "rank 1: did not finish in 0.2 s"


def test_a_rank_that_dies_while_it_answers_is_named() -> None:
    receive, send = Pipe(duplex=False)
    with receive:
        os.write(send.fileno(), (100).to_bytes(4, "big") + b"the first bytes of an answer")
        send.close()
        with pytest.raises(RanksFailed, match="rank 0: the process died"):
            _collect([receive], 30.0)
