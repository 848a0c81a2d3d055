"""The life of pairs over the gateway: connect, update, disconnect, with everything that may go wrong."""

from __future__ import annotations

import asyncio

from awex_delta.testing.pairing import differing
from tests.ranks.gateway_world import weights, world


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
