"""Completions from real engines, behind one small interface.

`RolloutEngine` is what the training needs. Three engines stand beside this module: `rollouts_transformers`,
`rollouts_vllm` and `rollouts_sglang`. Engines that the trainer starts live in processes of their own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from awex_delta import DeltaSettings, Rendezvous
from awex_delta.settings.allocation import ENGINE_BACKENDS, Parallelism, parse_allocation
from examples.gsm8k_grpo.settings import Settings

Tokens = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to sample: `num_samples` completions of each prompt, at temperature 1, until `end`."""

    prompts: Sequence[Tokens]
    num_samples: int
    max_new_tokens: int
    end: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which replica this is, and where its ranks stand among all engine ranks."""

    replica: int
    layout: Parallelism
    first_rank: int
    rendezvous: Rendezvous
    settings: DeltaSettings

    @property
    def name(self) -> str:
        """Name of the engine, another one for each replica."""
        return f"engine-{self.replica}"


class RolloutEngine(Protocol):
    """One replica of an inference engine."""

    def connect(self) -> None:
        """Meet the trainers, who call `connect` meanwhile."""

    def update_weights(self, version: int) -> None:
        """Take the engine to `version`, while the trainers call `update_weights` with the same."""

    def sample(self, request: Request) -> list[Tokens]:
        """Completions, those of the first prompt first; each ends in `end` unless it was too long."""

    def close(self) -> None:
        """Leave."""


class Rollouts:
    """All replicas; prompts are dealt out to them in turn."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = engines
        self._threads = ThreadPoolExecutor(len(engines))

    def connect(self) -> None:
        """`RolloutEngine.connect` of all at once."""
        self._all(lambda _, engine: engine.connect())

    def update_weights(self, version: int) -> None:
        """`RolloutEngine.update_weights` of all at once."""
        self._all(lambda _, engine: engine.update_weights(version))

    def sample(self, request: Request) -> list[list[Tokens]]:
        """By prompt, its completions."""
        count = len(self._engines)

        def ask(replica: int, engine: RolloutEngine) -> list[Tokens]:
            share = request.prompts[replica::count]
            return engine.sample(
                Request(
                    prompts=share,
                    num_samples=request.num_samples,
                    max_new_tokens=request.max_new_tokens,
                    end=request.end,
                    seed=request.seed * count + replica,
                )
            )

        answers = self._all(ask)
        n = request.num_samples
        return [
            answers[at % count][at // count * n : (at // count + 1) * n] for at in range(len(request.prompts))
        ]

    def close(self) -> None:
        """`RolloutEngine.close` of all."""
        self._all(lambda _, engine: engine.close())
        self._threads.shutdown()

    def _all(self, call: Callable[[int, RolloutEngine], Any]) -> list[Any]:
        return list(self._threads.map(call, range(len(self._engines)), self._engines))


def start_rollouts(settings: Settings, rendezvous: Rendezvous, delta: DeltaSettings) -> Rollouts:
    """Start or reach the engines that `rollout.backend` names."""
    allocation = parse_allocation(settings.rollout.backend, backends=ENGINE_BACKENDS)
    layout = allocation.layout
    ranks = layout.tensor * layout.pipeline
    places = [
        Place(
            replica=replica,
            layout=layout,
            first_rank=replica * ranks,
            rendezvous=rendezvous,
            settings=delta,
        )
        for replica in range(layout.data)
    ]
    module = importlib.import_module(f"examples.gsm8k_grpo.rollouts_{allocation.backend}")
    return Rollouts([module.start(settings, place) for place in places])


class EngineProcess:
    """A `RolloutEngine` in a process of its own, which `build` makes there."""

    def __init__(
        self, build: Callable[[Settings, Place], RolloutEngine], settings: Settings, place: Place
    ) -> None:
        """Start it, and return at once; the first call waits until it is built."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: an engine may start workers of its own.
        self._process = context.Process(target=_serve, args=(theirs, build, settings, place))
        self._process.start()
        theirs.close()

    def connect(self) -> None:
        """See `RolloutEngine.connect`."""
        self._ask("connect")

    def update_weights(self, version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self._ask("update_weights", version)

    def sample(self, request: Request) -> list[Tokens]:
        """See `RolloutEngine.sample`."""
        answer: list[Tokens] = self._ask("sample", request)
        return answer

    def close(self) -> None:
        """End the process, by its own will or without."""
        self._connection.close()
        self._process.join(20)
        self._process.kill()
        self._process.join()

    def _ask(self, action: str, *args: Any) -> Any:
        self._connection.send((action, args))
        try:
            worked, value = self._connection.recv()
        except EOFError:
            raise RuntimeError("the engine's process died; its output says why") from None
        if not worked:
            raise RuntimeError(f"the engine failed in {action}:\n{value}")
        return value


def _serve(
    connection: Connection,
    build: Callable[[Settings, Place], RolloutEngine],
    settings: Settings,
    place: Place,
) -> None:
    engine = build(settings, place)
    while True:
        try:
            action, args = connection.recv()
        except EOFError:
            engine.close()
            return
        try:
            connection.send((True, getattr(engine, action)(*args)))
        except Exception:  # noqa: BLE001 - raised again where the call was made
            connection.send((False, traceback.format_exc()))
