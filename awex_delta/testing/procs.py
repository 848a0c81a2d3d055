"""Run a function on several ranks, each a process of its own, and hear of every failure."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What ranks usually need takes seconds to import. Their common parent does it once; what it cannot
# import it leaves out.
_PRELOAD = (
    __name__,
    "awex_delta.testing.tiny_models",
    "awex_delta.trainers.megatron",
    "awex_delta.protocol.sender",
    "awex_delta.protocol.receiver",
    "awex_delta.engines.fused",
    "awex_delta.engines.transformers",
)

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
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call `function(Rank, *args)` in `world_size` processes.

    Args:
        function: importable by name; its result must pickle.
        world_size: number of processes.
        args: further arguments, the same for all.
        timeout_seconds: of the whole call; processes that still run then are killed.

    Returns:
        The results in rank order.

    Raises:
        RanksFailed: a rank raised, died without a word, or did not finish in time.

    Collective: no; `function` may make process groups with `Rank.init_gloo`.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            me = Rank(rank=rank, world_size=world_size, folder=Path(folder))
            process: BaseProcess = context.Process(
                target=_run_one, args=(send, function, me, args), daemon=True
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def fork_server() -> ForkServerContext:
    """Starts processes that have imported what ranks need. There is one server a process, whoever asks first.

    Collective: no.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


def _run_one(send: Connection, function: Callable[..., Any], me: Rank, args: tuple[Any, ...]) -> None:
    # One thread a rank: the ranks already share the cores.
    torch.set_num_threads(1)
    try:
        answer = (True, function(me, *args))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it for this rank
        answer = (False, traceback.format_exc())
    # Pickled here, tensors travel by value. Sent as objects, they would be shared memory of a process
    # that has ended before it is read.
    send.send_bytes(pickle.dumps(answer))


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.update(dict.fromkeys(open_pipes.values(), f"did not finish in {timeout_seconds} s"))
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                worked, value = pickle.loads(pipes[rank].recv_bytes())  # noqa: S301 - our own child
            except (EOFError, OSError):  # OSError: in the middle of its answer
                worked, value = False, "the process died"
            if worked:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
    if failures:
        raise RanksFailed("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(pipes))]
