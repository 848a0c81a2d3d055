"""What a side says of itself between the ticks of its loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from awex_delta.gateway.host import SideHost, to_its_end
from awex_delta.gateway.models import PairConfig
from awex_delta.gateway.side_models import SideConnect
from awex_delta.gateway.sides import Holding, Side
from awex_delta.protocol.rendezvous import Rendezvous

ON = {"backend": "megatron:d1", "enable_delta_weight_update": True}


def opened(_: Any) -> Any:
    """An end that meets the other side at once."""
    return SimpleNamespace(
        connect=lambda: None, close=lambda: None, holding=lambda: Holding(version=None, why="no first sync")
    )


def test_a_side_is_busy_until_it_has_noted_what_a_call_did() -> None:
    """Were it idle before, a call that came just then would do the same work again."""
    side = Side(
        role="engine", kind="a stand-in", num_ranks=1, brings_meeting=False, num_pairs=None, open=opened
    )
    call = SideConnect(
        pair="a",
        connection="f" * 32,
        config=PairConfig.model_validate({"train": ON, "rollout": {"backend": "vllm:d1"}}),
        meeting=Rendezvous(host="h", port=1, name="n", num_engine_ranks=1, num_trainer_ranks=1),
        first_rank=0,
        engine="e",
    )

    async def scenario() -> list[tuple[bool, bool]]:
        host = SideHost(side)
        connecting = asyncio.ensure_future(to_its_end(host.connect(call)))
        seen = []
        while not connecting.done():
            await asyncio.sleep(0)
            seen.append((bool(host.state().busy), "a" in host.state().pairs))
        host.close()
        return seen

    seen = asyncio.run(scenario())
    begin = seen.index((True, False))
    assert set(seen[begin:]) <= {(True, False), (False, True)}
    assert seen[-1] == (False, True)
