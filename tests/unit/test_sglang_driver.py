"""How an SGLang engine is driven, without any SGLang: what it is sent, and when its version is published."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import requests
import torch

from awex_delta.engines.sglang.driver import EngineControl, HttpControl, SglangDriver
from awex_delta.engines.sglang.loader import LOAD_FORMAT
from awex_delta.errors import UpdateError
from awex_delta.protocol.rendezvous import Joining, Rendezvous
from awex_delta.settings.agreed import DeltaSettings

JOINING = Joining(
    rendezvous=Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=4000),
    settings=DeltaSettings(),
    engine="a",
)


@dataclass
class VersionRequest:
    """Stands in for SGLang's request of the same fields."""

    new_version: str
    abort_all_requests: bool = True


class FakeEngine:
    """The calls of `sglang.Engine` that the driver makes."""

    def __init__(self, answer: Any = (True, "Success"), refuses: str = "", busy: int = 0) -> None:
        self.calls: list[Any] = []
        self.busy = busy
        self.answer = answer
        self.refuses = refuses
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self

    def begin_weight_update(self, selector: str) -> tuple[bool, str]:
        self.calls.append(("begin", selector))
        return self.refuses != "begin", "a session is already open"

    def end_weight_update(self) -> tuple[bool, str]:
        self.calls.append("end")
        return self.refuses != "end", "no session is open"

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], *, load_format: str, flush_cache: bool
    ) -> Any:
        assert load_format == LOAD_FORMAT
        asked = json.loads(bytes(named_tensors[0][1].tolist()))
        self.calls.append((asked["action"], asked["version"], flush_cache))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def flush_cache(self, timeout_s: float | None = None) -> SimpleNamespace:
        self.calls.append(("flush", timeout_s))
        self.busy -= 1
        return SimpleNamespace(success=self.busy < 0)

    async def update_weight_version(self, request: VersionRequest) -> None:
        self.calls.append(("version", request.new_version, request.abort_all_requests))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("sglang.srt.managers.io_struct")
    module.UpdateWeightVersionReqInput = VersionRequest
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("stand_in")
def test_the_version_is_published_only_when_the_trainer_has_committed() -> None:
    engine = FakeEngine()
    driver = SglangDriver(EngineControl(engine), JOINING)
    driver.connect()
    driver.update_weights(7)
    assert (driver.version, driver.in_doubt) == (None, True), "any return of SGLang counts as success"
    assert engine.calls == [
        *(("begin", "target"), ("connect", -1, False), "end"),
        *(("flush", 0.0), ("begin", "target"), ("update", 7, True), "end"),
    ]
    driver.publish(7)
    assert (driver.version, driver.in_doubt) == (7, False)
    assert engine.calls[-1] == ("version", "7", False)
    driver.disconnect()
    assert engine.calls[-2] == ("disconnect", -1, False)
    engine.loop.close()


@pytest.mark.parametrize("answer", [(False, "Flush cache failed"), (None, ""), RuntimeError("dead")])
def test_a_refusal_is_an_error_and_leaves_the_engine_in_doubt(answer: Any) -> None:
    engine = FakeEngine(answer)
    driver = SglangDriver(EngineControl(engine), JOINING)
    with pytest.raises((UpdateError, RuntimeError), match=r"SGLang refused the update: |dead"):
        driver.update_weights(1)
    assert driver.in_doubt
    assert engine.calls[-1] == "end", "the session of the update was left open"
    engine.loop.close()


@pytest.mark.parametrize(
    ("refuses", "said", "calls"),
    [
        ("begin", "a session is already open", [("flush", 0.0), ("begin", "target"), "end"]),
        ("end", "no session is open", [("flush", 0.0), ("begin", "target"), ("update", 1, True), "end"]),
    ],
)
def test_a_session_that_sglang_does_not_begin_or_end_is_an_error(
    refuses: str, said: str, calls: list[Any]
) -> None:
    engine = FakeEngine(refuses=refuses)
    driver = SglangDriver(EngineControl(engine), JOINING)
    with pytest.raises(UpdateError, match=f"SGLang refused the update: {said}"):
        driver.update_weights(1)
    assert (driver.in_doubt, driver.version, engine.calls) == (True, None, calls)
    engine.loop.close()


@pytest.mark.parametrize(("busy", "asked"), [(0, [0.0]), (1, [0.0, 10.0]), (9, [0.0, 10.0])])
def test_requests_that_just_ended_are_waited_for(busy: int, asked: list[float]) -> None:
    """SGLang counts them as running for a moment, and would keep what the old weights cached."""
    engine = FakeEngine(busy=busy)
    SglangDriver(EngineControl(engine), JOINING).update_weights(3)  # the answer tells who still runs
    flushes = [("flush", seconds) for seconds in asked]
    assert engine.calls == [*flushes, ("begin", "target"), ("update", 3, True), "end"]
    engine.loop.close()


@pytest.mark.parametrize(("busy", "asked"), [(0, [0.0]), (1, [0.0, 10.0])])
def test_the_client_of_a_server_waits_for_them_too(
    monkeypatch: pytest.MonkeyPatch, busy: int, asked: list[float]
) -> None:
    calls: list[tuple[str, Any]] = []

    def post(_: requests.Session, url: str, params: Any = None, **__: Any) -> SimpleNamespace:
        route = url.removeprefix("http://s:1/")
        calls.append((route, params or {}))
        refused = route == "flush_cache" and len(calls) <= busy
        return SimpleNamespace(ok=not refused, json=lambda: {"success": True, "message": ""})

    monkeypatch.setattr(requests.Session, "post", post)
    SglangDriver(HttpControl("http://s:1/", 2), JOINING).update_weights(3)
    flushes = [("flush_cache", {"timeout": seconds}) for seconds in asked]
    routes = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
    assert calls == [*flushes, *((route, {}) for route in routes)]
