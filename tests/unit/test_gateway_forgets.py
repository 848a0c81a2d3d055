"""What the gateway keeps of pairs that left, and how much it keeps: not more than so many, the newest."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from awex_delta.gateway import app, create_app
from awex_delta.gateway.pairs import Services
from tests.unit.test_gateway_hostile_sides import COUNTS, HEADERS, ON, TOKEN, Sides

LIMIT = 4


@pytest.fixture
def sides() -> Sides:
    return Sides()


@pytest.fixture
def client(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A gateway for few pairs; every host but t is an engine, and host dead does not answer."""
    monkeypatch.setattr(app, "MAX_PAIRS", LIMIT)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "dead":
            raise httpx.ConnectError("refused", request=request)
        return sides.answer(request)

    gateway = create_app(token=TOKEN, transport=httpx.MockTransport(answer))
    with TestClient(gateway, headers=HEADERS) as client:
        yield client


def connect(client: TestClient, pair: str, engine: str = "") -> Any:
    urls = {"trainers": ["http://t"], "engines": [f"http://{engine or pair}"]}
    config = {"train": ON, "rollout": {"backend": "vllm:d1"}}
    return client.post("/connect", json={"pair": pair, **urls, "config": config})


def post(client: TestClient, verb: str, pair: str, **more: int) -> int:
    return client.post(f"/{verb}", json={"pair": pair, **more}).status_code


def known(client: TestClient) -> set[str]:
    return set(client.get("/health").json()["pairs"])


def shown(client: TestClient) -> set[str]:
    """Names of pairs among the labels of all metrics."""
    return set(re.findall(r'pair="([^"]*)"', client.get("/metrics").text))


def test_a_pair_that_left_is_shown_until_its_place_is_needed(client: TestClient) -> None:
    for pair in ("a", "b", "c", "d"):
        assert connect(client, pair).status_code == 200
        assert post(client, "update_weights", pair, version=7) == 200
    for pair in ("c", "b", "d"):  # left in this order
        assert post(client, "disconnect", pair) == 200
    assert (known(client), shown(client)) == (set("abcd"), set("abcd"))
    last = client.get("/pairs/c").json()
    assert (last["state"], last["last_update"]["version"]) == ("disconnected", 7)

    assert connect(client, "e").status_code == 200
    assert (known(client), shown(client)) == (set("abde"), set("abde"))
    assert client.get("/pairs/c").status_code == 404
    assert post(client, "disconnect", "c") == 404
    assert connect(client, "b").status_code == 200, "who comes back needs no second place"
    assert connect(client, "f").status_code == 200
    assert (known(client), shown(client)) == (set("abef"), set("abef"))


def test_pairs_in_use_are_never_forgotten_and_the_refusal_says_what_to_do(
    client: TestClient, sides: Sides
) -> None:
    for pair in ("a", "b", "c", "d"):
        assert connect(client, pair).status_code == 200
    sides.counts = {"kind": "no such kind"}
    assert post(client, "update_weights", "b", version=1) == 502
    refused = connect(client, "e")
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "there are 4 pairs, all that one gateway serves: disconnect one of them first",
    )
    states = client.get("/health").json()["pairs"]
    assert states == {"a": "connected", "b": "failed", "c": "connected", "d": "connected"}
    assert post(client, "disconnect", "b") == 200
    assert connect(client, "e").status_code == 200


def test_names_that_never_connected_take_no_place_and_leave_no_label(client: TestClient) -> None:
    assert connect(client, "a").status_code == 200
    for number in range(50):
        assert connect(client, f"x{number}", engine="dead").status_code == 502
    assert known(client) == {"a", "x47", "x48", "x49"}
    assert shown(client) == {"a", "x47", "x48", "x49"}


def test_the_words_that_a_side_chooses_do_not_fill_the_metrics(client: TestClient, sides: Sides) -> None:
    assert connect(client, "a").status_code == 200
    for version in range(60):
        sides.counts = {"reason": f"R{version}", "seconds": {f"p{version}": 1.0, **COUNTS["seconds"]}}
        assert post(client, "update_weights", "a", version=version) == 200
    text = client.get("/metrics").text
    reasons = set(re.findall(r'awex_delta_updates_total{.*reason="([^"]*)"', text))
    assert (len(reasons), "other" in reasons) == (33, True)
    assert 'awex_delta_updates_total{kind="full",pair="a",reason="other"} 28.0' in text
    phases = set(re.findall(r'awex_delta_phase_seconds_count{.*phase="([^"]*)"', text))
    assert (len(phases), {"other", "transfer"} < phases) == (33, True)


def test_no_lock_of_a_url_outlives_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Services] = []

    def kept(**given: Any) -> Services:
        made.append(Services(**given))
        return made[-1]

    monkeypatch.setattr(app, "Services", kept)
    gateway = create_app(token=TOKEN, transport=httpx.MockTransport(Sides().answer))
    with TestClient(gateway, headers=HEADERS) as client:
        for number in range(20):
            assert connect(client, "a", f"e{number}").status_code == 200
            assert post(client, "disconnect", "a") == 200
    gc.collect()
    assert dict(made[0].locks) == {}
