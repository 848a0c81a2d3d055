"""The gateway's app: three verbs, and what can be read without a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from weakref import WeakValueDictionary

import httpx
from fastapi import APIRouter, FastAPI, Path
from fastapi.responses import PlainTextResponse

from awex_delta._version import __version__
from awex_delta.errors import ConfigError
from awex_delta.gateway.client import Sides
from awex_delta.gateway.guard import (
    SHOWN_IN_THE_DOCUMENTATION,
    Rejection,
    answer,
    guarded,
    open_routes,
    problems,
)
from awex_delta.gateway.joining import StoreHost
from awex_delta.gateway.metrics import Metrics
from awex_delta.gateway.models import (
    ConnectRequest,
    DisconnectRequest,
    Health,
    Name,
    PairAnswer,
    PairConfig,
    Problem,
    UpdateAnswer,
    UpdateRequest,
)
from awex_delta.gateway.pairs import Pair, Services
from awex_delta.gateway.states import PairState
from awex_delta.gateway.token import check_token
from awex_delta.settings.resolve import resolve

MAX_PAIRS = 256
"""How many pairs a gateway knows. Of those that are disconnected it forgets the oldest for a new one."""

_DESCRIPTION = """\
Connects trainers to inference engines and moves them from version to version. Every POST asks for
`Authorization: Bearer TOKEN`. A request that does not fit the state of its pair gets 409, with the state.
"""


class Gateway:
    """All pairs by name."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._pairs: dict[str, Pair] = {}

    @property
    def pairs(self) -> dict[str, Pair]:
        """By name."""
        return dict(self._pairs)

    def pair(self, name: str) -> Pair:
        """A pair that was connected once, and is not forgotten. Raises Rejection 404."""
        if name not in self._pairs:
            raise Rejection(
                404, Problem(error="unknown_pair", detail=f"no pair {name}: POST /connect makes it")
            )
        return self._pairs[name]

    def admit(self, request: ConnectRequest) -> Pair:
        """The pair that a request names; it is made if it is new.

        Raises Rejection: 422 if its settings cannot work, 409 if too many pairs are in use.
        """
        try:
            _check_config(request.config)
        except ConfigError as error:
            raise Rejection(422, Problem(error="invalid", detail=str(error))) from error
        if request.pair not in self._pairs:
            self._make_room()
            self._pairs[request.pair] = Pair(request, self.services)
        return self._pairs[request.pair]

    def _make_room(self) -> None:
        """Forget the pair that has been disconnected for longest, if there are as many pairs as allowed."""
        if len(self._pairs) < MAX_PAIRS:
            return
        left = [name for name, pair in self._pairs.items() if pair.record.state is PairState.DISCONNECTED]
        if not left:
            text = f"there are {MAX_PAIRS} pairs, all that one gateway serves: disconnect one of them first"
            raise Rejection(409, Problem(error="conflict", detail=text))
        self._pairs.pop(min(left, key=lambda name: self._pairs[name].record.since)).forget()

    async def close(self) -> None:
        """Wait for what is under way, and close all connections. Sides stay connected to each other."""
        await asyncio.gather(*(pair.settle() for pair in self._pairs.values()))
        await self.services.sides.close()


def _check_config(config: PairConfig) -> None:
    transport = resolve(config.train, config.rollout).settings.transport
    if transport != "p2p":
        raise ConfigError(
            f"config.train.weight_update_transport = {transport!r}: the gateway connects ranks, and through "
            "a folder none are connected. Remedy: p2p, or no gateway"
        )


def create_app(
    *,
    token: str | None,
    side_token: str | None = None,
    meeting_host: str = "127.0.0.1",
    meeting_port: int = 0,
    update_seconds: float = 3600.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """The gateway as an ASGI app, which one process serves.

    Args:
        token: what callers must show. None lets everybody in who reaches the port.
        side_token: what the gateway shows to sides; `token` if it is None.
        meeting_host: address of this machine where the ranks of a pair meet; all sides must reach it.
        meeting_port: the port there; 0 picks a free one.
        update_seconds: longest wait for all sides in one update or connect.
        transport: how the gateway's own requests travel; None for the network.

    Raises:
        ConfigError: the token is easily guessed.
    """
    check_token(token)
    check_token(side_token)
    sides = Sides(token if side_token is None else side_token, transport)
    services = Services(
        sides=sides,
        stores=StoreHost(meeting_host, meeting_port),
        metrics=Metrics(),
        locks=WeakValueDictionary(),
        update_seconds=update_seconds,
    )
    gateway = Gateway(services)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.close()

    app = FastAPI(
        title="awex-delta gateway",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.include_router(_verbs(gateway, token))
    app.include_router(_reads(gateway))

    @app.exception_handler(404)
    async def unknown(*_: object) -> object:
        return answer(404, Problem(error="unknown_path", detail="GET /docs lists what there is"))

    @app.exception_handler(405)
    async def wrong_method(*_: object) -> object:
        return answer(405, Problem(error="wrong_method", detail="GET /docs lists what there is"))

    return app


def _verbs(gateway: Gateway, token: str | None) -> APIRouter:
    router = APIRouter(
        route_class=guarded(token),
        tags=["verbs"],
        dependencies=[SHOWN_IN_THE_DOCUMENTATION],
        responses={**problems(500, 502)},
    )

    @router.post("/connect")
    async def connect(request: ConnectRequest) -> PairAnswer:
        """Let the trainer and the engines of a pair meet, and agree on a plan. No weight moves."""
        return await gateway.admit(request).connect(request)

    @router.post("/update_weights", responses={404: {"model": Problem}})
    async def update_weights(request: UpdateRequest) -> UpdateAnswer:
        """Bring the engines of a pair to the trainer's current weights. Answers once they have committed."""
        return await gateway.pair(request.pair).update_weights(request.version)

    @router.post("/disconnect", responses={404: {"model": Problem}})
    async def disconnect(request: DisconnectRequest) -> PairAnswer:
        """Let the sides of a pair leave. Engines keep what they hold."""
        return await gateway.pair(request.pair).disconnect()

    return router


def _reads(gateway: Gateway) -> APIRouter:
    router = APIRouter(route_class=open_routes(), tags=["reads"])

    @router.get("/health")
    async def health() -> Health:
        """The gateway answers, and these are its pairs."""
        states = {name: pair.record.state for name, pair in gateway.pairs.items()}
        return Health(status="ok", version=__version__, pairs=states)

    @router.get("/pairs/{name}", responses={404: {"model": Problem}, 422: {"model": Problem}})
    async def pair(name: Annotated[Name, Path()]) -> PairAnswer:
        """Where a pair stands, and which of its engines may serve."""
        return await gateway.pair(name).answer()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """What Prometheus scrapes."""
        return PlainTextResponse(gateway.services.metrics.text(), media_type="text/plain; version=0.0.4")

    return router
