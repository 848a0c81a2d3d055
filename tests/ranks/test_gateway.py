"""The life of pairs over the gateway: connect, update, disconnect, with everything that may go wrong."""

from __future__ import annotations

import asyncio
import logging
import re

import httpx
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from awex_delta.gateway import create_app, engine_router, trainer_router
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.ranks import isolate_threads
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import differing
from tests.ranks.gateway_world import (
    HEADERS,
    PATIENCE,
    SHAPES,
    TOKEN,
    SlowEngine,
    app_of,
    config,
    new_trainer,
    weights,
    world,
)
from tests.serving import needs_ipv6, served


def test_connect_update_repeat_disconnect_and_connect_again() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engines = w.add_trainer("t"), [w.add_engine("e0"), w.add_engine("e1")]
            connected = await w.connect("a", ["t"], ["e0", "e1"])
            assert connected.status_code == 200, connected.text
            assert (connected.json()["state"], connected.json()["ready"]) == ("connected", False)
            assert all("no full sync" in engine["why"] for engine in connected.json()["engines"])
            kinds = []
            for version in range(3):
                trainer.train_step()
                answer = await w.update("a", version)
                assert answer.status_code == 200, answer.text
                kinds.append(answer.json()["kind"])
                assert [differing(engine, weights(trainer)) for engine in engines] == [{}, {}]
                again = await w.update("a", version)
                assert again.json() == answer.json()
                assert [engine.published[-1] for engine in engines] == [version, version]
            assert kinds == ["full", "delta", "delta"]
            assert engines[0].published == [0, 1, 2]
            state = await w.pair("a")
            assert (state["state"], state["version"], state["ready"]) == ("connected", 2, True)
            back = await w.update("a", 1)
            assert (back.status_code, back.json()["state"]) == (409, "connected")
            assert "out of order" in back.json()["detail"]
            assert (await w.disconnect("a")).json()["state"] == "disconnected"
            assert (await w.disconnect("a")).status_code == 200
            refused = await w.update("a", 3)
            assert (refused.status_code, refused.json()["state"]) == (409, "disconnected")
            assert (await w.connect("a", ["t"], ["e0", "e1"])).status_code == 200
            trainer.train_step()
            answer = await w.update("a", 3)
            assert (answer.json()["kind"], answer.json()["reason"]) == ("full", "FIRST_SYNC")
            assert [differing(engine, weights(trainer)) for engine in engines] == [{}, {}]

    asyncio.run(scenario())


async def inside(engine: SlowEngine) -> None:
    """Wait until the engine stands in the middle of its update."""
    assert await asyncio.to_thread(engine.inside.wait, 20)


def test_while_one_update_runs_everything_answers_and_a_second_one_is_refused() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            engine.hold()
            running = asyncio.ensure_future(w.update("a", 0))
            await inside(engine)
            assert (await w.client.get("/health")).json()["pairs"] == {"a": "updating"}
            side = httpx.AsyncClient(transport=w.hosts, base_url="http://e")
            assert (await side.get("/state")).json()["busy"] == "update_weights of pair a"
            pair = await w.pair("a")
            assert (pair["state"], pair["ready"]) == ("updating", False)
            assert "written but never committed" in pair["engines"][0]["why"]
            for refused in (
                await w.update("a", 0),
                await w.update("a", 1),
                await w.disconnect("a"),
                await w.connect("a", ["t"], ["e"]),
            ):
                assert (refused.status_code, refused.json()["state"]) == (409, "updating")
            assert not running.done()
            engine.go.set()
            assert (await running).json()["version"] == 0
            assert differing(engine, weights(trainer)) == {}
            assert (await w.pair("a"))["ready"] is True
            counts = (await w.client.get("/metrics")).text
            assert 'awex_delta_refused_total{pair="a",verb="update_weights"} 2.0' in counts

    asyncio.run(scenario())


def test_a_client_that_goes_away_neither_stops_nor_halves_an_update() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            engine.hold()
            gone = asyncio.ensure_future(w.update("a", 5))
            await inside(engine)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert (await w.update("a", 5)).status_code == 409
            engine.go.set()
            while (await w.pair("a"))["state"] == "updating":
                await asyncio.sleep(0.02)
            answer = await w.update("a", 5)
            assert (answer.status_code, answer.json()["version"], engine.published) == (200, 5, [5])
            assert differing(engine, weights(trainer)) == {}

    asyncio.run(scenario())


def test_a_failed_update_is_told_and_the_engine_is_not_ready_until_a_full_sync() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            trainer.train_step()
            engine.fails = True
            failed = await w.update("a", 1)
            assert (failed.status_code, failed.json()["state"]) == (502, "failed")
            assert "injected: the device failed" in failed.json()["sides"]["http://e"]
            assert "UpdateAborted" in failed.json()["sides"]["http://t"]
            pair = await w.pair("a")
            assert (pair["ready"], pair["version"], pair["last_update"]["version"]) == (False, 0, 0)
            assert "never committed" in pair["engines"][0]["why"]
            assert (await w.update("a", 0)).status_code == 409, "the answer of version 0 hides the failure"
            done = await w.update("a", 1)
            assert (done.json()["kind"], done.json()["reason"]) == ("full", "PREVIOUS_ABORTED")
            assert (differing(engine, weights(trainer)), (await w.pair("a"))["ready"]) == ({}, True)
            counts = (await w.client.get("/metrics")).text
            assert 'awex_delta_updates_total{kind="full",pair="a",reason="PREVIOUS_ABORTED"} 1.0' in counts
            assert 'awex_delta_failures_total{pair="a",verb="update_weights"} 1.0' in counts
            assert 'awex_delta_engine_ready{engine="http://e",pair="a"} 1.0' in counts

    asyncio.run(scenario())


def test_an_engine_that_was_restarted_is_found_before_any_rank_begins_and_rejoins_by_a_full_sync() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer = w.add_trainer("t")
            w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            trainer.train_step()
            engine = w.add_engine("e")
            assert (await w.pair("a"))["engines"][0]["why"] == "it has not joined this pair"
            refused = await w.update("a", 1)
            assert (refused.status_code, refused.json()["state"]) == (502, "failed")
            assert "POST /connect again" in refused.json()["sides"]["http://e"]
            assert set(refused.json()["sides"]) == {"http://e"}
            assert (await w.connect("a", ["t"], ["e"])).status_code == 200
            assert (await w.update("a", 1)).json()["reason"] == "FIRST_SYNC"
            assert differing(engine, weights(trainer)) == {}
            trainer.train_step()
            assert (await w.update("a", 2)).json()["kind"] == "delta"
            assert differing(engine, weights(trainer)) == {}

    asyncio.run(scenario())


def test_a_trainer_set_back_to_an_older_step_connects_again_and_counts_from_there() -> None:
    async def scenario() -> None:
        async with world() as w:
            first, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            for version in range(4):
                first.train_step()
                await w.update("a", version)
            second = w.add_trainer("t")
            for _ in range(2):
                second.train_step()
            assert (await w.update("a", 1)).status_code == 409
            assert (await w.connect("a", ["t"], ["e"])).json()["version"] is None
            second.train_step()
            again = await w.update("a", 2)
            assert (again.json()["kind"], again.json()["reason"]) == ("full", "FIRST_SYNC")
            assert differing(engine, weights(second)) == {}
            assert differing(engine, weights(first)) != {}

    asyncio.run(scenario())


def test_two_pairs_at_once_one_of_which_fails() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainers = [w.add_trainer("t0"), w.add_trainer("t1", new_trainer(seed=1))]
            engines = [w.add_engine("e0"), w.add_engine("e1")]
            answers = await asyncio.gather(w.connect("a", ["t0"], ["e0"]), w.connect("b", ["t1"], ["e1"]))
            assert [answer.status_code for answer in answers] == [200, 200]
            engines[1].fails = True
            answers = await asyncio.gather(w.update("a", 0), w.update("b", 7))
            assert [answer.status_code for answer in answers] == [200, 502]
            trainers[0].train_step()
            answers = await asyncio.gather(w.update("a", 1), w.update("b", 7))
            assert [answer.json()["kind"] for answer in answers] == ["delta", "full"]
            for trainer, engine in zip(trainers, engines, strict=True):
                assert differing(engine, weights(trainer)) == {}
            assert differing(engines[0], weights(trainers[1])) != {}

    asyncio.run(scenario())


def test_one_trainer_serves_two_pairs_each_at_its_own_pace() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engines = new_trainer(), [w.add_engine("e0"), w.add_engine("e1")]
            trainer.detach()
            router = trainer_router(
                weights(trainer), trainer._optimizer, masters=masters(trainer), token=TOKEN
            )
            w.hosts.apps["t"] = app_of(router)
            for pair, engine in (("a", "e0"), ("b", "e1")):
                assert (await w.connect(pair, ["t"], [engine])).status_code == 200
            trainer.train_step()
            await asyncio.gather(w.update("a", 0), w.update("b", 0))
            trainer.train_step()
            assert (await w.update("a", 1)).json()["kind"] == "delta"
            trainer.train_step()
            answers = await asyncio.gather(w.update("a", 2), w.update("b", 1))
            # Two steps lie between the updates of pair b, which one inversion does not cover.
            assert [a.json()["reason"] for a in answers] == ["NONE", "STEP_GAP"]
            assert [differing(engine, weights(trainer)) for engine in engines] == [{}, {}]

    asyncio.run(scenario())


class Unshared:
    """A trainer that one pair at a time can follow."""

    def __init__(self, trainer: TorchAdamWTrainer) -> None:
        names = "layout weights tensor owned_slices detect gather_params committed convert transfer"
        for name in names.split():
            setattr(self, name, getattr(trainer, name))


def masters(trainer: TorchAdamWTrainer) -> dict[str, torch.Tensor]:
    return {key.removeprefix("0/"): tensor for key, tensor in trainer._stepped.live().items()}


@pytest.mark.parametrize(
    ("trainers", "engines", "status", "said"),
    [
        (["e0"], ["t"], 409, r"http://e0 is an engine \(SlowEngine\), not a trainer"),
        (["t"], ["e0", "e1"], 409, "rollout.backend means 1 ranks, and the sides at these URLs have 2"),
        (["t"], ["e0", "e0b"], 409, "http://e0b is the same side as http://e0: name it once"),
        (["t", "e0b"], ["e0"], 409, "http://e0 is the same side as http://e0b: name it once"),
        (["t"], ["absent"], 502, r"http://absent does not answer \(ConnectError\)"),
        (["t"], ["taken"], 409, "http://taken is in pair other: disconnect that first"),
        (["whole"], ["e0"], 409, "http://whole is in pair third: disconnect that first"),
        (["t"], ["ready"], 409, "http://t takes the gateway's meeting point, while others bring"),
    ],
)
def test_sides_that_do_not_fit_are_named_before_any_is_asked(
    trainers: list[str], engines: list[str], status: int, said: str
) -> None:
    async def scenario() -> None:
        async with world() as w:
            for host in ("t", "t1"):
                w.add_trainer(host)
            for host in ("e0", "e1", "taken"):
                w.add_engine(host)
            meeting = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, store=HashStore())
            receiver = Receiver(DictEngine(SHAPES), meeting, 0, "e", DeltaSettings())
            w.hosts.apps["e0b"] = w.hosts.apps["e0"]
            w.hosts.apps["ready"] = app_of(engine_router(receiver, token=TOKEN))
            w.hosts.apps["whole"] = app_of(trainer_router(Unshared(new_trainer()), token=TOKEN))
            w.add_engine("e2")
            assert (await w.connect("third", ["whole"], ["e2"])).status_code == 200
            await w.connect("other", ["t1"], ["taken"])
            w.hosts.asked.clear()
            body = {
                "pair": "a",
                "trainers": [f"http://{host}" for host in trainers],
                "engines": [f"http://{host}" for host in engines],
                "config": config(1),
            }
            answer = await w.client.post("/connect", json=body)
            assert (answer.status_code, answer.json()["state"]) == (status, "disconnected")
            assert re.search(said, answer.json()["detail"]), answer.text
            assert not [one for one in w.hosts.asked if one.startswith("POST")]

    asyncio.run(scenario())


def test_connect_is_repeated_without_effect_and_refused_for_other_sides() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.add_trainer("t")
            for host in ("e", "f"):
                w.add_engine(host)
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            w.hosts.asked.clear()
            again = await w.connect("a", ["t"], ["e"])
            assert (again.status_code, again.json()["version"]) == (200, 0)
            assert not [one for one in w.hosts.asked if one.startswith("POST")]
            other = await w.connect("a", ["t"], ["f"])
            assert (other.status_code, other.json()["state"]) == (409, "connected")
            assert "disconnect it first" in other.json()["detail"]
            assert (await w.disconnect("a")).status_code == 200
            assert (await w.connect("a", ["t"], ["f"])).status_code == 200

    asyncio.run(scenario())


def test_a_new_gateway_takes_over_the_sides_of_one_that_is_gone() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            await w.connect("a", ["t"], ["e"])
            await w.update("a", 0)
            w.gateway = create_app(token=TOKEN, transport=w.hosts)
            w.client = w.new_client()
            assert (await w.update("a", 1)).status_code == 404
            assert (await w.connect("a", ["t"], ["e"])).status_code == 200
            trainer.train_step()
            assert (await w.update("a", 1)).json()["kind"] == "full"
            assert differing(engine, weights(trainer)) == {}

    asyncio.run(scenario())


def test_ready_senders_and_receivers_keep_their_own_meeting_point_and_state() -> None:
    async def scenario() -> None:
        async with world() as w:
            trainer, engine = new_trainer(), DictEngine(SHAPES)
            meeting = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, store=HashStore())
            # So long the engine waits for the pair that its trainer does not know; later ones meet at once.
            settings = DeltaSettings(timeout_seconds=PATIENCE, connect_timeout_seconds=10.0)
            sender = Sender(trainer, meeting, 0, settings)
            receiver = Receiver(engine, meeting, 0, "e", settings)
            w.hosts.apps["t"] = app_of(trainer_router({"a": sender}, token=TOKEN))
            w.hosts.apps["e"] = app_of(engine_router(receiver, token=TOKEN))
            unknown = await w.connect("b", ["t"], ["e"])
            assert "this trainer has senders for a" in unknown.json()["sides"]["http://t"]
            assert (await w.connect("a", ["t"], ["e"])).status_code == 200
            trainer.train_step()
            assert (await w.update("a", 0)).json()["kind"] == "full"
            await w.disconnect("a")
            assert (await w.connect("a", ["t"], ["e"])).status_code == 200
            trainer.train_step()
            assert (await w.update("a", 1)).json()["kind"] == "delta", "both kept what they hold"
            assert differing(engine, weights(trainer)) == {}

    asyncio.run(scenario())


@needs_ipv6
@pytest.mark.parametrize("meeting_host", ["::1", "[::1]"])
def test_a_pair_over_http_on_ipv6_alone(meeting_host: str) -> None:
    """A gateway, a trainer and an engine that listen nowhere else, and ranks that meet there, too."""
    isolate_threads()
    trainer, engine = new_trainer(), DictEngine(SHAPES)
    trainer.train_step()
    with (
        served(app_of(trainer_router(trainer, token=TOKEN)), "::1") as trainer_url,
        served(app_of(engine_router(engine, token=TOKEN)), "::1") as engine_url,
        served(create_app(token=TOKEN, meeting_host=meeting_host), "::1") as url,
        httpx.Client(base_url=url, headers=HEADERS, trust_env=False, timeout=40) as client,
    ):
        body = {"pair": "a", "trainers": [trainer_url], "engines": [engine_url], "config": config()}
        connected = client.post("/connect", json=body)
        assert connected.status_code == 200, connected.text
        assert client.post("/update_weights", json={"pair": "a", "version": 1}).status_code == 200
        assert differing(engine, weights(trainer)) == {}
        assert client.post("/disconnect", json={"pair": "a"}).status_code == 200


SECRET_NAME = "AWEX_DELTA_TEST_SECRET"


def test_pairs_share_the_secret_that_their_settings_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "-".join(["the", "secret", "of", "a", "pair"])
    monkeypatch.setenv(SECRET_NAME, secret)
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        async with world() as w:
            trainer, engine = w.add_trainer("t"), w.add_engine("e")
            source = {"weight_update_secret_source": f"env:{SECRET_NAME}"}
            missing = await w.connect("a", ["t"], ["e"], weight_update_secret_source="env:ABSENT")
            assert missing.status_code == 502
            assert "this process has no variable ABSENT" in missing.json()["detail"]
            told = await w.connect("a", ["t"], ["e"], weight_update_secret_source=secret)
            assert (told.status_code, secret in told.text) == (422, False)
            connected = await w.connect("a", ["t"], ["e"], **source)
            assert connected.status_code == 200, connected.text
            trainer.train_step()
            assert (await w.update("a", 1)).status_code == 200
            assert differing(engine, weights(trainer)) == {}
            assert secret not in connected.text + (await w.client.get("/metrics")).text

    asyncio.run(scenario())
    assert secret not in caplog.text
