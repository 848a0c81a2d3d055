"""The full life over HTTP between real processes: kills, restarts, and a client that goes away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.procs.gateway_sides import (
    TIMEOUT_SECONDS,
    TOKEN,
    Client,
    Fleet,
    Life,
    serve_engine,
    serve_gateway,
    serve_trainer,
)

pytestmark = pytest.mark.timeout(300)

STEPS_OF_CHECKPOINT = 2


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    try:
        fleet.start("gateway", serve_gateway)
        for name, seed in (("a", 0), ("b", 1)):
            fleet.start(f"trainer {name}", serve_trainer, seed, 0)
            fleet.start(f"engine {name}", serve_engine)
        fleet.wait()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    client = Client(fleet.lives["gateway"].url)
    yield client
    client.http.close()


def equal(trainer: Life, engine: Life) -> bool:
    """Whether the engine holds the trainer's bits, read from both processes past the product."""
    want, got = trainer.ask("bits"), engine.ask("bits")
    assert set(want) == set(got)
    return all(np.array_equal(want[name], got[name]) for name in want)


def test_the_full_life_of_two_pairs(fleet: Fleet, client: Client) -> None:
    for pair in "ab":
        answer = client.connect(pair, fleet.lives[f"trainer {pair}"], fleet.lives[f"engine {pair}"])
        assert answer.status_code == 200, answer.text
    for version in range(4):
        for pair in "ab":
            trainer, engine = fleet.lives[f"trainer {pair}"], fleet.lives[f"engine {pair}"]
            trainer.ask("step")
            answer = client.update(pair, version)
            assert (answer.status_code, answer.json()["kind"]) == (200, "delta" if version else "full")
            assert client.update(pair, version).json() == answer.json()
            assert equal(trainer, engine)
    assert not equal(fleet.lives["trainer a"], fleet.lives["engine b"])
    assert client.update("a", 2).status_code == 409
    assert client.disconnect("a").status_code == 200
    assert client.update("a", 4).status_code == 409
    client.connect("a", fleet.lives["trainer a"], fleet.lives["engine a"])
    fleet.lives["trainer a"].ask("step")
    assert client.update("a", 4).json()["reason"] == "FIRST_SYNC"
    assert equal(fleet.lives["trainer a"], fleet.lives["engine a"])


def test_an_engine_killed_in_an_update_rejoins_by_a_full_sync_while_the_other_pair_goes_on(
    fleet: Fleet, client: Client
) -> None:
    for pair in "ab":
        client.connect(pair, fleet.lives[f"trainer {pair}"], fleet.lives[f"engine {pair}"])
        assert client.update(pair, 0).status_code == 200
    trainer = fleet.lives["trainer a"]
    trainer.ask("step")
    fleet.lives["engine a"].ask("die in the next update")
    begin = time.monotonic()
    failed = client.update("a", 1)
    assert time.monotonic() - begin < TIMEOUT_SECONDS, "nobody waits for who is gone"
    assert (failed.status_code, failed.json()["state"]) == (502, "failed")
    assert "PeerError" in failed.json()["sides"][trainer.url]
    assert client.pair("a")["ready"] is False
    assert client.pair("a")["engines"][0]["why"].startswith("does not answer")
    fleet.lives["trainer b"].ask("step")
    assert client.update("b", 1).json()["kind"] == "delta"
    assert equal(fleet.lives["trainer b"], fleet.lives["engine b"])
    engine = fleet.start("engine a", serve_engine)
    fleet.wait()
    refused = client.update("a", 1)
    assert "POST /connect again" in refused.json()["detail"]
    connected = client.connect("a", trainer, engine)
    assert (connected.status_code, connected.json()["ready"]) == (200, False)
    assert client.update("a", 1).json()["kind"] == "full"
    assert equal(trainer, engine)
    assert client.pair("a")["ready"] is True
    trainer.ask("step")
    assert client.update("a", 2).json()["kind"] == "delta"
    assert equal(trainer, engine)


def test_a_trainer_killed_and_restarted_from_an_older_step_begins_a_new_run(
    fleet: Fleet, client: Client
) -> None:
    engine = fleet.lives["engine a"]
    client.connect("a", fleet.lives["trainer a"], engine)
    for version in range(1, 5):
        fleet.lives["trainer a"].ask("step")
        assert client.update("a", version).status_code == 200
    fleet.lives["trainer a"].kill()
    assert client.update("a", 5).status_code == 502
    trainer = fleet.start("trainer a", serve_trainer, 0, STEPS_OF_CHECKPOINT)
    fleet.wait()
    assert client.connect("a", trainer, engine).json()["version"] is None
    trainer.ask("step")
    again = client.update("a", STEPS_OF_CHECKPOINT + 1)
    assert (again.json()["kind"], again.json()["reason"]) == ("full", "FIRST_SYNC")
    assert equal(trainer, engine)


def test_a_client_that_goes_away_leaves_a_whole_update_behind(fleet: Fleet, client: Client) -> None:
    trainer, engine = fleet.lives["trainer a"], fleet.lives["engine a"]
    client.connect("a", trainer, engine)
    body = b'{"pair": "a", "version": 0}'
    head = (
        f"POST /update_weights HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    port = int(fleet.lives["gateway"].url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as gone:
        gone.sendall(head.encode() + body)
    deadline = time.monotonic() + 60
    while client.pair("a")["version"] is None or client.pair("a")["state"] != "connected":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert equal(trainer, engine)
    assert client.update("a", 0).json()["kind"] == "full"
    trainer.ask("step")
    assert client.update("a", 1).json()["kind"] == "delta"
    assert equal(trainer, engine)
