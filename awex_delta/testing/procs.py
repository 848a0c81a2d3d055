"""Run a function on several ranks, each a process of its own, and hear of every failure."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from awex_delta.testing.fleet import POOL, end_all, gather

_LAST_WORDS_SECONDS = 30.0
"""How long ranks that wait for one that failed get to say what they saw, on a busy machine, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Who a process is among those of one `run_ranks`, and a folder that they share."""

    rank: int
    world_size: int
    folder: Path

    def init_gloo(
        self, *, rank: int, world_size: int, name: str = "world", timeout_seconds: float = 60
    ) -> None:
        """Make the default process group, of all ranks or of some that call with the same `name`.

        Collective: over the ranks that join.
        """
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/{name}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not finish; the message holds every rank's own words."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Call `function(Rank, *args)` in `world_size` processes, which are kept for the next call.

    Each finds one torch thread, the seeds and the environment of a new process, and no process group. The
    function is importable by name, and its result pickles. Results come in rank order.

    Raises:
        RanksFailed: a rank raised, died without a word, or did not finish in time. All ranks are then killed.
    """
    members = POOL.take(world_size)
    kept = False
    # What is tidied up last may still look into the folder.
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, member in enumerate(members):
                member.send(function, Rank(rank=rank, world_size=world_size, folder=Path(folder)), *args)
            named = {f"rank {rank}": member.connection for rank, member in enumerate(members)}
            answers = gather(named, timeout_seconds, last_words_seconds=_LAST_WORDS_SECONDS)
            words = [
                f"{name}: {answer.trace}" + (f"\n{member.last_words()}" if answer.lost else "")
                for member, (name, answer) in zip(members, answers.items(), strict=True)
                if answer.failure
            ]
            if words:
                raise RanksFailed("\n".join(word.rstrip("\n") for word in words))
            kept = True
            return [answer.value for answer in answers.values()]
        finally:
            if kept:
                POOL.give_back(members)
            else:
                end_all(members)
