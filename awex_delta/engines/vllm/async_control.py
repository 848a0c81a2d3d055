"""An `AsyncLLM` as a deployment that `VllmDriver` can drive: its coroutines, awaited from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from awex_delta.engines.vllm.driver import VllmControl


@dataclass(frozen=True, slots=True, kw_only=True)
class _Info:
    """What vLLM reads of a request of its weight transfer."""

    init_info: Mapping[str, Any] | None = None
    update_info: Mapping[str, Any] | None = None


class AsyncControl(VllmControl):
    """A `VllmControl` over an `AsyncLLM` object in this process.

    Call it from any thread but that of `loop`, to which `llm` belongs: it would wait for itself. Make `llm`
    with `weight_transfer_config={"backend": "awex_delta"}`. An update must take less than `timeout_seconds`.
    """

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop, *, timeout_seconds: float = 3600.0) -> None:
        self._llm = llm
        self._loop = loop
        self._timeout_seconds = timeout_seconds

    def pause(self, mode: str) -> None:
        # The caches stay: they are dropped after the commit.
        self._wait(self._llm.pause_generation(mode=mode, clear_cache=False))

    def resume(self) -> None:
        self._wait(self._llm.resume_generation())

    def paused(self) -> bool:
        return bool(self._wait(self._llm.is_paused()))

    def init(self, info: Mapping[str, Any]) -> None:
        self._wait(self._llm.init_weight_transfer_engine(_Info(init_info=dict(info))))

    def start(self) -> None:
        self._wait(self._llm.start_weight_update())

    def update(self, info: Mapping[str, Any]) -> None:
        self._wait(self._llm.update_weights(_Info(update_info=dict(info))))

    def finish(self, version: str) -> None:
        self._wait(self._llm.finish_weight_update(weight_version=version))

    def reset_prefix_cache(self, *, running: bool) -> bool:
        answer = self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
        return bool(self._wait(answer))

    def leave(self) -> None:
        self._wait(self._llm.shutdown_weight_transfer_engine())

    def _wait(self, answer: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result(self._timeout_seconds)
