"""Whether sides fit together, and what each is told as it joins."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch._C._distributed_c10d import TCPStore

from awex_delta.gateway.models import ConnectRequest
from awex_delta.gateway.side_models import Attempt, SideConnect, SideState
from awex_delta.protocol.rendezvous import Rendezvous, host_store, warn_without_secret
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.resolve import resolve


class StoreHost:
    """Hosts the store in which the ranks of all pairs meet, each connection under a name of its own.

    host is an address of this machine that all sides reach; port 0 picks a free one.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    def meet(
        self,
        pair: str,
        connection: str,
        *,
        num_engine_ranks: int,
        num_trainer_ranks: int,
        settings: DeltaSettings,
    ) -> Rendezvous:
        """Where the ranks of one connection meet. Opens the store at the first call.

        Raises ConfigError if the store cannot listen there.
        """
        with self._lock:
            if self._store is None:
                self._store = host_store(self._host, self._port, settings=settings)
            else:
                warn_without_secret(self._host, settings)
            port = self._store.port
        return Rendezvous(
            host=self._host,
            port=port,
            name=f"{pair}/{connection}",
            num_engine_ranks=num_engine_ranks,
            num_trainer_ranks=num_trainer_ranks,
        )


def join_problem(request: ConnectRequest, states: Mapping[str, SideState]) -> dict[str, str]:
    """Why sides cannot form the pair that is asked for, by URL; empty if they can."""
    said: dict[str, str] = {}
    brings = {url for url, state in states.items() if state.brings_meeting}
    first: dict[str, str] = {}
    for url, state in states.items():
        wanted = "trainer" if url in request.trainers else "engine"
        elsewhere = [n for n, held in state.pairs.items() if held.connected and n != request.pair]
        same = url if state.id is None else first.setdefault(state.id, url)
        if same != url:
            said[url] = f"is the same side as {same}: name it once"
        elif state.role != wanted:
            said[url] = f"is {_article(state.role)} ({state.kind}), not {_article(wanted)}"
        elif state.busy:
            said[url] = f"is busy with {state.busy}"
        elif state.num_pairs is not None and len(elsewhere) >= state.num_pairs:
            said[url] = f"is in pair {elsewhere[0]}: disconnect that first"
        elif brings and url not in brings:
            said[url] = (
                "takes the gateway's meeting point, while others bring a Rendezvous of their own: "
                "give ready Senders and Receivers on all sides, or on none"
            )
    return said or _rank_problem(request, states)


def _rank_problem(request: ConnectRequest, states: Mapping[str, SideState]) -> dict[str, str]:
    topology = resolve(request.config.train, request.config.rollout).topology
    if topology is None:
        return {}
    for field, urls, wanted in (
        ("train.backend", request.trainers, topology.trainer.world_size),
        ("rollout.backend", request.engines, topology.engine.world_size),
    ):
        found = sum(states[url].num_ranks for url in urls)
        if found != wanted:
            text = f"config.{field} means {wanted} ranks, and the sides at these URLs have {found} together"
            return dict.fromkeys(urls, text)
    return {}


def _article(role: str) -> str:
    return "an engine" if role == "engine" else "a trainer"


def side_connects(
    request: ConnectRequest, states: Mapping[str, SideState], connection: str, stores: StoreHost
) -> dict[str, Attempt]:
    """What each side is told, by URL, to join the new `connection`.

    Raises ConfigError if the store in which they meet cannot listen.
    """
    meeting = stores.meet(
        request.pair,
        connection,
        num_engine_ranks=sum(states[url].num_ranks for url in request.engines),
        num_trainer_ranks=sum(states[url].num_ranks for url in request.trainers),
        settings=resolve(request.config.train, request.config.rollout).settings,
    )
    calls: dict[str, Attempt] = {}
    for urls, label in ((request.trainers, "trainer"), (request.engines, "engine")):
        first_rank = 0
        for index, url in enumerate(urls):
            calls[url] = SideConnect(
                pair=request.pair,
                connection=connection,
                config=request.config,
                meeting=meeting,
                first_rank=first_rank,
                engine=f"{label}{index}",
            )
            first_rank += states[url].num_ranks
    return calls
