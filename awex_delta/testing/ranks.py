"""Ranks as threads of one process, each with real Gloo groups of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

Result = TypeVar("Result")


class RanksFailed(AssertionError):
    """One or more thread ranks raised; carries every rank's exception, not only the first."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        lines = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items())]
        super().__init__("\n".join(lines))


def isolate_threads() -> None:
    """Let every thread of this process keep its own registry of process groups, as a process would.

    Stays in force for the life of the process; harmless where only one thread uses torch.distributed.
    """
    module: Any = c10d  # torch's own thread tests replace its world the same way
    if not isinstance(module._world, ThreadLocalWorld):
        module._world = ThreadLocalWorld()
        bindings: Any = torch._C._distributed_c10d
        bindings._set_thread_isolation_mode(True)


class ThreadRanks:
    """One long-lived daemon thread a rank: process groups belong to the thread that made them."""

    def __init__(self, num_ranks: int) -> None:
        """Start the threads; they end with the process, or at `close`."""
        isolate_threads()
        self._work: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        for _ in range(num_ranks):
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(jobs,), daemon=True).start()
            self._work.append(jobs)

    def run(
        self, function: Callable[[int], Result], *, timeout_seconds: float = 30.0
    ) -> list[Result | BaseException]:
        """Run `function(rank)` on every rank's thread, all at once: by rank, its result or its exception.

        Raises TimeoutError, which names the ranks, if one was still running after `timeout_seconds`.
        """
        outcome: queue.SimpleQueue[tuple[int, Result | BaseException]] = queue.SimpleQueue()

        def run(rank: int) -> None:
            try:
                outcome.put((rank, function(rank)))
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                outcome.put((rank, error))

        for rank, jobs in enumerate(self._work):
            jobs.put(lambda rank=rank: run(rank))  # type: ignore[misc]
        done: dict[int, Result | BaseException] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(done) < len(self._work):
            try:
                rank, result = outcome.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                hung = sorted(set(range(len(self._work))) - done.keys())
                raise TimeoutError(f"ranks {hung} still run after {timeout_seconds:g} s") from None
            done[rank] = result
        return [done[rank] for rank in range(len(self._work))]

    def close(self) -> None:
        """Let the threads end once they are idle."""
        for jobs in self._work:
            jobs.put(None)


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job()


def results(outcome: list[Result | BaseException]) -> list[Result]:
    """The results of `ThreadRanks.run` where every rank must have succeeded. Raises RanksFailed."""
    errors = {rank: one for rank, one in enumerate(outcome) if isinstance(one, BaseException)}
    if errors:
        raise RanksFailed(errors)
    return [one for one in outcome if not isinstance(one, BaseException)]
