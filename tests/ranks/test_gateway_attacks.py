"""Gateways and clients that die, answers that get lost, and requests that cross: nothing stays half done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from awex_delta.gateway import create_app
from awex_delta.gateway import host as gateway_host
from tests.pairing import differing
from tests.ranks.gateway_world import HEADERS, TOKEN, SlowEngine, World, config, weights, world

Request = Coroutine[Any, Any, httpx.Response]


async def inside(engine: SlowEngine) -> None:
    """Wait until the engine stands in the middle of its update."""
    assert await asyncio.to_thread(engine.inside.wait, 20)


async def idle(w: World, *hosts: str) -> None:
    """Wait until no side works."""
    async with httpx.AsyncClient(transport=w.hosts) as side:
        for host in hosts:
            while (await side.get(f"http://{host}/state")).json()["busy"]:
                await asyncio.sleep(0.02)


def second_gateway(w: World) -> httpx.AsyncClient:
    """Another gateway over the same sides, which knows nothing of the first."""
    app = create_app(token=TOKEN, transport=w.hosts)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://second", headers=HEADERS)


def request(pair: str = "a") -> dict[str, Any]:
    return {"pair": pair, "trainers": ["http://t"], "engines": ["http://e"], "config": config()}


def test_a_gateway_that_dies_in_an_update_leaves_a_whole_one_to_its_successor() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            engine.hold()
            lost = asyncio.ensure_future(w.update("a", 0))
            await inside(engine)
            next_one = second_gateway(w)
            refused = await next_one.post("/connect", json=request())
            assert (refused.status_code, refused.json()["state"]) == (409, "disconnected")
            assert refused.json()["sides"] == {
                f"http://{host}": "is busy with update_weights of pair a" for host in "te"
            }
            engine.go.set()
            await idle(w, "t", "e")
            assert (await next_one.post("/connect", json=request())).status_code == 200
            await lost
            trainer.train_step()
            done = await next_one.post("/update_weights", json={"pair": "a", "version": 1})
            assert (done.json()["kind"], done.json()["reason"]) == ("full", "FIRST_SYNC")
            assert differing(engine, weights(trainer)) == {}

    asyncio.run(scenario())


def test_of_two_gateways_the_one_that_connected_last_drives_and_the_other_is_told() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            other = second_gateway(w)
            assert (await other.post("/connect", json=request())).status_code == 200
            trainer.train_step()
            refused = await w.update("a", 1)
            assert refused.status_code == 502
            assert all("does not hold this connection" in text for text in refused.json()["sides"].values())
            assert (await other.post("/update_weights", json={"pair": "a", "version": 1})).status_code == 200
            assert differing(engine, weights(trainer)) == {}
            assert engine.published == [0, 1]
            pair = await w.pair("a")
            assert (pair["ready"], pair["version"]) == (False, 0), (
                "the first one must not call version 1 ready"
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["t", "e"])
def test_an_answer_that_was_lost_after_the_commit_is_healed_by_a_full_sync(host: str) -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            trainer.train_step()
            w.hosts.apps[host] = losing(w.hosts.apps[host], "/update_weights")
            failed = await w.update("a", 1)
            assert (failed.status_code, failed.json()["state"]) == (502, "failed")
            assert set(failed.json()["sides"]) == {f"http://{host}"}
            pair = await w.pair("a")
            assert (pair["ready"], pair["version"], pair["engines"][0]["version"]) == (False, 0, 1)
            done = await w.update("a", 1)
            assert (done.status_code, done.json()["kind"]) == (200, "full")
            assert (differing(engine, weights(trainer)), (await w.pair("a"))["ready"]) == ({}, True)

    asyncio.run(scenario())


def losing(app: Any, path: str) -> Callable[..., Any]:
    """Do what is asked, and lose the first answer of a path."""
    lost: list[str] = []

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != path or lost:
            await app(scope, receive, send)
            return
        lost.append(path)

        async def swallow(_: Any) -> None:
            """Nothing arrives."""

        await app(scope, receive, swallow)
        raise httpx.ReadError("the connection broke")

    return wrapped


def test_a_side_whose_caller_went_away_while_it_connected_knows_that_it_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go, join = threading.Semaphore(0), threading.Event(), gateway_host._join

    def held(*args: Any) -> Any:
        begun.release()
        assert go.wait(20)
        return join(*args)

    monkeypatch.setattr(gateway_host, "_join", held)

    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            calls: list[asyncio.Future[Any]] = []
            loop, at_once = asyncio.get_running_loop(), w.hosts.handle_async_request

            async def cancelled(one: httpx.Request) -> httpx.Response:
                """As a server that cancels a handler once its client is gone."""
                task = loop.create_task(at_once(one))
                if one.url.path == "/connect":
                    calls.append(task)
                return await asyncio.shield(task)

            w.hosts.handle_async_request = cancelled  # type: ignore[method-assign,assignment]
            gone = asyncio.ensure_future(w.connect("a", ["t"], ["e"]))
            for _ in range(2):  # both sides' threads are at work
                assert await asyncio.to_thread(begun.acquire, timeout=20)
            for call in calls:
                call.cancel()
            go.set()
            assert (await gone).status_code == 500
            w.hosts.handle_async_request = at_once  # type: ignore[method-assign]
            await idle(w, "t", "e")
            async with httpx.AsyncClient(transport=w.hosts) as side:
                states = [(await side.get(f"http://{host}/state")).json() for host in "te"]
            assert [state["pairs"]["a"]["connected"] for state in states] == [True, True]
            next_one = second_gateway(w)
            assert (await next_one.post("/connect", json=request())).status_code == 200
            assert (
                await next_one.post("/update_weights", json={"pair": "a", "version": 0})
            ).status_code == 200
            assert differing(engine, weights(trainer)) == {}

    asyncio.run(scenario())


def test_a_slow_look_at_a_pair_does_not_hide_an_update_that_began_meanwhile() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.add_trainer("t")
            engine = w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            app, asked, go = w.hosts.apps["e"], asyncio.Event(), asyncio.Event()

            async def late(scope: Any, receive: Any, send: Any) -> None:
                """Answers as it is now, and the answer arrives later."""
                if scope["path"] != "/state" or asked.is_set():
                    await app(scope, receive, send)
                    return
                messages: list[Any] = []

                async def keep(message: Any) -> None:
                    messages.append(message)

                await app(scope, receive, keep)
                asked.set()
                await go.wait()
                for message in messages:
                    await send(message)

            w.hosts.apps["e"] = late
            looking = asyncio.ensure_future(w.pair("a"))
            await asked.wait()
            engine.fails = True
            assert (await w.update("a", 1)).status_code == 502
            go.set()
            await looking
            numbers = (await w.client.get("/metrics")).text
            assert 'awex_delta_engine_ready{engine="http://e",pair="a"} 0.0' in numbers

    asyncio.run(scenario())


async def cross(w: World, first: Request, *others: Request) -> list[tuple[int, str]]:
    """Send the others as the first begins to ask the sides, which hear of it once the others have an answer.

    Returns:
        Status and state of each answer, the first one's first.
    """
    asked, go, at_once = asyncio.Event(), asyncio.Event(), w.hosts.handle_async_request

    async def held(one: httpx.Request) -> httpx.Response:
        asked.set()
        await go.wait()
        return await at_once(one)

    w.hosts.handle_async_request = held  # type: ignore[method-assign,assignment]
    running = asyncio.ensure_future(first)
    await asyncio.wait_for(asked.wait(), 20)
    answers = await asyncio.gather(*others)
    w.hosts.handle_async_request = at_once  # type: ignore[method-assign]
    go.set()
    return [(one.status_code, one.json().get("state", "")) for one in (await running, *answers)]


def test_requests_that_cross_are_run_once_or_refused_with_the_state() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.add_trainer("t")
            engine = w.add_engine("e")
            answers = await cross(w, *(w.connect("a", ["t"], ["e"]) for _ in range(3)))
            assert answers == [(200, "connected"), (409, "connecting"), (409, "connecting")]
            answers = await cross(w, *(w.update("a", version) for version in (0, 0, 1)))
            assert answers == [(200, ""), (409, "updating"), (409, "updating")]
            assert engine.published == [0]
            answers = await cross(w, *(w.disconnect("a") for _ in range(2)), w.update("a", 1))
            assert answers == [(200, "disconnected"), (409, "disconnecting"), (409, "disconnecting")]

    asyncio.run(scenario())
