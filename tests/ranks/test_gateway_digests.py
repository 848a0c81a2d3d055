"""`GET /digests` of an engine's router: the live weights, for the token's holder, never of half an update."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.engines.vllm.driver import HttpControl, VllmDriver
from awex_delta.gateway import engine_router, trainer_router
from awex_delta.observe.compare.engine_digests import DigestedState
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.wire.digest import digest
from tests.ranks.gateway_world import HEADERS, SHAPES, TOKEN, app_of, new_trainer, weights, world
from tests.serving import needs_ipv6, served


def test_digests_are_of_the_live_weights_and_wait_for_no_update() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            side = httpx.AsyncClient(transport=w.hosts, base_url="http://e", headers=HEADERS)
            await w.connect("a", ["t"], ["e"])
            trainer.train_step()
            engine.hold()
            running = asyncio.ensure_future(w.update("a", 0))
            assert await asyncio.to_thread(engine.inside.wait, 20)
            refused = await side.get("/digests")
            assert (refused.status_code, refused.json()["detail"]) == (
                409,
                "busy with update_weights of pair a",
            )
            engine.go.set()
            assert (await running).status_code == 200
            state = DigestedState({"e": (await side.get("/digests")).content})
            assert set(state.entries) == set(SHAPES)
            for name, tensor in weights(trainer).items():  # an oracle that sees the whole tensor at once
                assert state.digest(name) == digest(tensor, name)

    asyncio.run(scenario())


def test_no_update_begins_while_digests_are_taken() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.add_trainer("t")
            engine = w.add_engine("e")
            side = httpx.AsyncClient(transport=w.hosts, base_url="http://e", headers=HEADERS)
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            go, listed = threading.Event(), engine.tensors

            def slowly() -> Any:
                assert go.wait(20)
                return listed()

            engine.tensors = slowly  # type: ignore[method-assign]
            taking = asyncio.ensure_future(side.get("/digests"))
            while not (await side.get("/state")).json()["busy"]:
                await asyncio.sleep(0.01)
            refused = await w.update("a", 1)
            assert (refused.status_code, refused.json()["state"]) == (502, "failed")
            assert refused.json()["sides"] == {"http://e": "is busy with digests"}
            go.set()
            assert (await taking).status_code == 200
            assert (await w.update("a", 1)).json()["kind"] == "delta", "no rank had begun"

    asyncio.run(scenario())


@pytest.mark.parametrize("header", [{}, {"Authorization": f"Bearer {TOKEN}x"}])
def test_digests_ask_for_the_token(header: dict[str, str]) -> None:
    async def scenario() -> None:
        transport = httpx.ASGITransport(app_of(engine_router(DictEngine(SHAPES), token=TOKEN)))
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as side:
            assert (await side.get("/digests", headers=header)).status_code == 401

    asyncio.run(scenario())


def test_who_has_no_weights_here_says_so() -> None:
    async def ask(router: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app_of(router))
        async with httpx.AsyncClient(transport=transport, base_url="http://e", headers=HEADERS) as side:
            return await side.get("/digests")

    elsewhere = VllmDriver(HttpControl("http://127.0.0.1:1"))
    answer = asyncio.run(ask(engine_router(elsewhere, token=TOKEN, num_ranks=2)))
    assert (answer.status_code, answer.json()["error"]) == (501, "unsupported")
    assert "VllmDriver holds its weights in other processes" in answer.json()["detail"]
    assert asyncio.run(ask(trainer_router(new_trainer(), token=TOKEN))).status_code == 404


@pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def serving(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """An engine under uvicorn."""
    engine = DictEngine(SHAPES)
    for number, tensor in enumerate(engine.tensors_by_name.values(), 1):
        tensor.fill_(number)
    with served(app_of(engine_router(engine, token=TOKEN)), request.param) as url:
        yield SimpleNamespace(engine=engine, url=f"{url}/digests")


def test_verify_compares_a_checkpoint_with_an_engine_that_serves(
    serving: SimpleNamespace, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    save_file(serving.engine.tensors_by_name, tmp_path / "model.safetensors")
    arguments = ["verify", str(tmp_path), serving.url]
    result = CliRunner().invoke(app, [*arguments, "--token-file", str(token)])
    assert (result.exit_code, result.output) == (0, "3 tensors: 3 same\n")
    serving.engine.tensors_by_name["model.norm.weight"][3] += 1
    result = CliRunner().invoke(app, [*arguments, "--token-file", str(token)])
    assert (result.exit_code, "different: model.norm.weight" in result.output) == (1, True)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, "answers 401" in result.output) == (2, True)
    token.chmod(0o644)
    result = CliRunner().invoke(app, [*arguments, "--token-file", str(token)])
    assert (result.exit_code, "can be read by others" in result.output) == (2, True)
    assert TOKEN not in result.output
