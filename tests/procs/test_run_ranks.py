"""The process runner: results in order, and every failure heard."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from awex_delta.testing.procs import Rank, RanksFailed, run_ranks


def gather_ranks(me: Rank, offset: int) -> torch.Tensor:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    mine = torch.tensor([me.rank + offset])
    parts = [torch.empty_like(mine) for _ in range(me.world_size)]
    dist.all_gather(parts, mine)
    return torch.cat(parts) * 10 + me.rank


def fail(me: Rank, how: str) -> str:
    if me.rank == 1 and how == "raise":
        raise KeyError("what went wrong")
    if me.rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 1 and how == "hang":
        threading.Event().wait()
    return "fine"


def test_results_come_in_rank_order() -> None:
    results = run_ranks(gather_ranks, 3, 5)
    assert [tensor.tolist() for tensor in results] == [[50, 60, 70], [51, 61, 71], [52, 62, 72]]


@pytest.mark.parametrize(
    ("how", "words"), [("raise", "KeyError: 'what went wrong'"), ("die", "died"), ("hang", "not finish in 2")]
)
def test_a_rank_that_fails_is_named_and_none_is_left_behind(how: str, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fail, 3, how, timeout_seconds=2.0 if how == "hang" else 60.0)
    assert str(failure.value).startswith("rank 1: ")
    assert words in str(failure.value)
    assert "rank 0" not in str(failure.value)
    assert time.monotonic() - begin < 30
