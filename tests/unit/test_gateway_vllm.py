"""What a vLLM side says of its readiness when calls of vLLM fail, without any vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from awex_delta.engines.vllm.driver import VllmDriver
from awex_delta.gateway import engine_router
from tests.unit.test_vllm_driver import FakeControl

TOKEN = "-".join(["a", "token", "of", "a", "vllm", "side"])
CONFIG = {
    "train": {"backend": "megatron:d1", "enable_delta_weight_update": True},
    "rollout": {"backend": "vllm:d1"},
}
MEETING = {"host": "127.0.0.1", "port": 1, "name": "a", "num_engine_ranks": 1, "num_trainer_ranks": 1}


class Side:
    """An engine's router over a `FakeControl`, and a client of it."""

    def __init__(self, client: TestClient, control: FakeControl, driver: VllmDriver) -> None:
        self.client, self.control, self.driver = client, control, driver
        self._attempt = 0

    def connect(self, life: str) -> int:
        joining = {"config": CONFIG, "meeting": MEETING, "first_rank": 0, "engine": "e"}
        return self._post("connect", life, **joining)

    def update(self, life: str, version: int) -> int:
        self._attempt += 1
        return self._post("update_weights", life, version=version, attempt=self._attempt)

    def disconnect(self, life: str) -> int:
        return self._post("disconnect", life)

    def held(self) -> tuple[bool, int | None, str]:
        """Whether it is ready, with what, and why not."""
        held = self.client.get("/state").json()["pairs"]["a"]
        return held["ready"], held["version"], held["why"]

    def _post(self, verb: str, life: str, **more: Any) -> int:
        body = {"pair": "a", "connection": life * 32, **more}
        return self.client.post(f"/{verb}", json=body).status_code


@pytest.fixture
def side() -> Iterator[Side]:
    control = FakeControl()
    driver = VllmDriver(control)
    app = FastAPI()
    app.include_router(engine_router(driver, token=TOKEN, num_ranks=1))
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield Side(client, control, driver)


def test_an_engine_whose_requests_were_not_let_go_on_is_not_ready(side: Side) -> None:
    assert (side.connect("a"), side.update("a", 1)) == (200, 200)
    assert side.held() == (True, 1, "")
    side.control.deaf = True
    assert side.update("a", 2) == 502, "version 2 is committed, but nobody is served"
    ready, version, why = side.held()
    assert (ready, version) == (False, None)
    assert "requests stand still" in why
    side.control.deaf = False
    assert side.update("a", 3) == 200
    assert side.held() == (True, 3, "")


def test_requests_that_somebody_lets_go_on_after_a_failed_update_do_not_make_an_engine_ready(
    side: Side,
) -> None:
    assert (side.connect("a"), side.update("a", 1)) == (200, 200)
    side.control.fails = "update"
    assert side.update("a", 2) == 502
    side.control.fails = ""
    side.driver.resume()
    ready, version, why = side.held()
    assert (ready, version) == (False, None), "its workers may hold a mixture"
    assert "requests go on with the weights it left" in why
    assert side.update("a", 2) == 200
    assert side.held() == (True, 2, "")


def test_an_engine_that_a_failed_reconnect_left_standing_still_is_not_ready(side: Side) -> None:
    assert (side.connect("a"), side.update("a", 1), side.disconnect("a")) == (200, 200, 200)
    assert side.held() == (True, 1, ""), "what it held as it left stays ready"
    side.control.fails = "resume"
    assert side.connect("b") == 502
    ready, version, why = side.held()
    assert (ready, version) == (False, None)
    assert "requests stand still" in why
