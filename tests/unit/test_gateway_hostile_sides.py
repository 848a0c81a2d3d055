"""Sides that answer what no side would, or never stop answering: refused in plain words, and soon."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from awex_delta.gateway import client as client_module
from awex_delta.gateway import create_app, pairs
from awex_delta.gateway.side_models import SideState, SideUpdate

TOKEN = "-".join(["a", "token", "for", "hostile", "sides"])
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ON = {"backend": "megatron:d1", "enable_delta_weight_update": True}
COUNTS: dict[str, Any] = {
    "kind": "full",
    "reason": "FIRST_SYNC",
    "verdict": "full",
    "total_wire_bytes": 10,
    "total_changed": 0,
    "total_owned": 0,
    "full_bytes": 10,
    "seconds": {"transfer": 0.5},
}


class Sides:
    """A trainer t and engines that do what they are told, but for what is overridden in their answers."""

    def __init__(self, state: dict[str, Any] | None = None, counts: dict[str, Any] | None = None) -> None:
        self.state, self.counts = state or {}, counts or {}
        self.held: dict[str, dict[str, Any]] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        host, verb = request.url.host, request.url.path.strip("/")
        pairs_held = self.held.setdefault(host, {})
        if verb == "state":
            role = "trainer" if host == "t" else "engine"
            state = {"role": role, "kind": "fake", "num_ranks": 1, "brings_meeting": False, "busy": ""}
            hostile = self.state if role == "engine" else {}
            return httpx.Response(200, content=json.dumps({**state, "pairs": pairs_held, **hostile}))
        call = json.loads(request.content)
        held = {
            "connection": call["connection"],
            "connected": verb != "disconnect",
            "version": call.get("version"),
            "ready": "version" in call,
            "why": "" if "version" in call else "nothing yet",
        }
        pairs_held[call["pair"]] = held
        counts = {**COUNTS, **self.counts} if verb == "update_weights" and host == "t" else None
        return httpx.Response(200, content=json.dumps({"pair": held, "counts": counts}))


def client_of(handler: Callable[[httpx.Request], httpx.Response]) -> TestClient:
    app = create_app(token=TOKEN, transport=httpx.MockTransport(handler))
    return TestClient(app, raise_server_exceptions=False, headers=HEADERS)


def connect(client: TestClient, engine: str = "http://e:1", trainer: str = "http://t:1", **train: Any) -> Any:
    config = {"train": {**ON, **train}, "rollout": {"backend": "vllm:d1"}}
    body = {"pair": "a", "trainers": [trainer], "engines": [engine], "config": config}
    return client.post("/connect", json=body)


def update(client: TestClient, version: int) -> Any:
    return client.post("/update_weights", json={"pair": "a", "version": version})


@pytest.mark.parametrize(
    "state",
    [
        {"num_ranks": 0},
        {"num_ranks": -1},
        {"num_ranks": 10**30},
        {"pairs": {"a": {"connection": "x", "connected": True, "version": None, "ready": True, "why": ""}}},
        {"pairs": {"a\nb": {}}},
        {"kind": "x" * 100_000},
    ],
    ids=str,
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_state_that_no_side_has(state: dict[str, Any], enabled: bool) -> None:
    with client_of(Sides(state=state).answer) as client:
        refused = connect(client, enable_delta_weight_update=enabled)
        assert (refused.status_code, refused.json()["state"]) == (502, "disconnected")
        assert set(refused.json()["sides"]) == {"http://e:1"}
        assert "none of a side's router" in refused.json()["detail"]


@pytest.mark.parametrize(
    "counts",
    [
        {"total_wire_bytes": -5},
        {"total_wire_bytes": 10**400},
        {"full_bytes": -1},
        {"seconds": {"transfer": float("nan")}},
        {"seconds": {"transfer": float("inf")}},
        {"seconds": {"transfer": -1.0}},
        {"seconds": {f"phase{n}": 1.0 for n in range(1000)}},
        {"seconds": {"x" * 1000: 1.0}},
        {"reason": "x" * 100_000},
        {"reason": '"} 1\nfaked 2'},
    ],
    ids=lambda counts: str(counts)[:50],
)
def test_counts_that_no_update_has(counts: dict[str, Any]) -> None:
    with client_of(Sides(counts=counts).answer) as client:
        assert connect(client).status_code == 200
        refused = update(client, 1)
        assert (refused.status_code, refused.json()["state"]) == (502, "failed")
        assert set(refused.json()["sides"]) == {"http://t:1"}
        numbers = client.get("/metrics").text
        assert "faked" not in numbers
        assert len(numbers) < 5000


def test_what_a_side_says_of_a_failure_is_cut() -> None:
    problem = {"error": "x", "detail": "y" * 500_000}
    with client_of(lambda _: httpx.Response(500, json=problem)) as client:
        refused = connect(client)
    assert refused.status_code == 502
    assert len(refused.content) < 20_000


def test_what_a_side_says_of_a_failure_stays_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    problem = {"error": "x", "detail": "real\n2026-01-01 INFO forged\r\x1b[2Jforged\u2028forged"}
    with client_of(lambda _: httpx.Response(500, json=problem)) as client:
        said = connect(client).json()["sides"]["http://t:1"]
    assert said == "x: real 2026-01-01 INFO forged  [2Jforged forged"
    (line,) = [record for record in caplog.messages if "forged" in record]
    assert line.isprintable()


def test_many_who_look_at_a_pair_ask_its_engines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sides, looks, lookers, go = Sides(), 0, 0, asyncio.Event()
    engine_states = pairs.Pair._engine_states

    def counted(self: pairs.Pair) -> Any:
        nonlocal lookers
        lookers += 1
        if lookers == 50:
            go.set()
        return engine_states(self)

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal looks
        if (request.url.host, request.url.path) == ("e", "/state"):
            looks += 1
            await go.wait()  # nobody looks again before all have looked
        return sides.answer(request)

    async def scenario() -> None:
        nonlocal looks
        app = create_app(token=TOKEN, transport=httpx.MockTransport(answer))
        gateway = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=gateway, base_url="http://g", headers=HEADERS) as client:
            body = {"pair": "a", "trainers": ["http://t"], "engines": ["http://e"]}
            config = {"train": ON, "rollout": {"backend": "vllm:d1"}}
            go.set()
            assert (await client.post("/connect", json={**body, "config": config})).status_code == 200
            go.clear()
            looks = 0
            monkeypatch.setattr(pairs.Pair, "_engine_states", counted)
            found = await asyncio.gather(*(client.get("/pairs/a") for _ in range(50)))
            assert {one.status_code for one in found} == {200}
            assert looks == 1
            sides.held["e"]["a"]["connected"] = False
            sides.held["e"]["a"]["why"] = "changed meanwhile"
            later = (await client.get("/pairs/a")).json()
            assert (looks, later["engines"][0]["why"]) == (2, "changed meanwhile")

    asyncio.run(scenario())


@pytest.fixture
def forgetful() -> Iterator[str]:
    """A side that answers one request a connection, and closes it at the next without an answer."""
    state = {
        "role": "engine",
        "kind": "fake",
        "num_ranks": 1,
        "brings_meeting": False,
        "busy": "",
        "pairs": {},
    }
    body = json.dumps(state).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    server = socket.create_server(("127.0.0.1", 0))

    def once(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            connection.sendall(head + body)
            connection.recv(65536)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=once, args=(connection,), daemon=True).start()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    stop_listening(server, serving)


def stop_listening(server: socket.socket, serving: threading.Thread) -> None:
    """Close a socket in which a thread waits for connections; closing alone would leave both behind."""
    server.shutdown(socket.SHUT_RDWR)
    serving.join(20)
    server.close()


def test_a_connection_that_was_idle_is_not_used_again(
    forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_module._IDLE_SECONDS < 5, "after which uvicorn closes a connection"
    monkeypatch.setattr(client_module, "_IDLE_SECONDS", 0.1)

    async def scenario() -> list[type]:
        asking = client_module.Sides(TOKEN)
        found = []
        for _ in range(3):
            found.append(type((await asking.states([forgetful], seconds=5))[forgetful]))
            await asyncio.sleep(0.3)
        await asking.close()
        return found

    assert asyncio.run(scenario()) == [SideState] * 3


def test_a_packed_answer_is_not_unpacked() -> None:
    sides = Sides()
    asked: list[str] = []

    def packed(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["accept-encoding"])
        plain = sides.answer(request)
        headers = {"Content-Encoding": "gzip"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(gzip.compress(plain.content)))

    with client_of(packed) as client:
        assert "its answer is packed" in connect(client).json()["detail"]
    assert set(asked) == {"identity"}


@pytest.fixture
def dripping() -> Iterator[str]:
    """A side that answers byte by byte, and never ends."""
    stop = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the gateway went away
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not stop.wait(0.05):
                connection.sendall(b" ")

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    stop.set()
    stop_listening(server, serving)


@pytest.mark.timeout(30)
def test_a_side_that_answers_byte_by_byte_is_given_up(dripping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_STATE_SECONDS", 0.3)
    with TestClient(create_app(token=TOKEN), headers=HEADERS) as client:
        begin = time.monotonic()
        # A trainer that refuses at once: a name would be looked up, for as long as that takes here.
        refused = connect(client, engine=dripping, trainer="http://127.0.0.1:1")
        assert refused.json()["sides"][dripping] == "did not answer in time"
        assert client.get("/pairs/a").json()["engines"][0]["why"] == "did not answer in time"
        assert time.monotonic() - begin < 20, "its two answers end after 50 seconds each"


def test_an_engine_that_left_the_pair_is_no_longer_shown() -> None:
    with client_of(Sides().answer) as client:
        for number in range(5):
            assert connect(client, engine=f"http://e{number}:1").status_code == 200
            assert update(client, number).status_code == 200
            assert client.post("/disconnect", json={"pair": "a"}).status_code == 200
        lines = [
            line
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("awex_delta_engine_r")
        ]
    assert lines == ['awex_delta_engine_ready{engine="http://e4:1",pair="a"} 0.0'], (
        "this fake holds nothing once it left"
    )


def test_attempts_are_counted_as_far_as_versions() -> None:
    life = "0" * 32
    assert SideUpdate(pair="a", connection=life, version=2**62, attempt=2**62).attempt == 2**62
