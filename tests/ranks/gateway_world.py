"""A gateway, trainers and engines as ASGI apps of one process, over real Gloo and no HTTP socket."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import torch
from fastapi import FastAPI

from awex_delta.gateway import create_app, engine_router, trainer_router
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.ranks import isolate_threads
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

TOKEN = "-".join(["the", "token", "of", "the", "gateway", "tests"])
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
    "model.norm.weight": (8,),
}
PATIENCE = 20.0
"""Seconds that a rank waits for another one. No test waits for their end, so a slow machine may take them."""


class Hosts(httpx.AsyncBaseTransport):
    """Sends a request to the app of its host; a host without an app refuses the connection.

    Attributes:
        apps: by host name.
        asked: method and URL of every request.
    """

    def __init__(self) -> None:
        self.apps: dict[str, Any] = {}
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url}")
        if request.url.host not in self.apps:
            raise httpx.ConnectError("refused", request=request)
        transport = httpx.ASGITransport(self.apps[request.url.host])
        return await transport.handle_async_request(request)


def app_of(router: Any) -> FastAPI:
    """An app with nothing but a router."""
    app = FastAPI()
    app.include_router(router)
    return app


def new_trainer(lr: float = 1e-5, seed: int = 0) -> TorchAdamWTrainer:
    """A tiny trainer of one rank."""
    settings = DeltaSettings(timeout_seconds=PATIENCE, connect_timeout_seconds=PATIENCE)
    return TorchAdamWTrainer.create(SHAPES, lr=lr, seed=seed, settings=settings)


def config(num_engines: int = 1, **train: Any) -> dict[str, Any]:
    """Settings of one trainer rank and some engine ranks, as JSON."""
    return {
        "train": {
            "backend": "megatron:d1",
            "enable_delta_weight_update": True,
            "weight_update_anchor_interval": 0,
            "weight_update_timeout_seconds": PATIENCE,
            "weight_update_connect_timeout_seconds": PATIENCE,
            "world_size_policy": "any",
            **train,
        },
        "rollout": {"backend": f"vllm:d{num_engines}"},
    }


class SlowEngine(DictEngine):
    """Waits inside an update, after it has written, until it is let go."""

    def __init__(self) -> None:
        super().__init__(SHAPES)
        self.inside = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.fails = False

    def synchronize(self) -> None:
        super().synchronize()
        self.inside.set()
        assert self.go.wait(20)
        if self.fails:
            self.fails = False
            raise RuntimeError("injected: the device failed while weights were written")

    def hold(self) -> None:
        """Wait in the next update."""
        self.inside.clear()
        self.go.clear()


class World:
    """A gateway and sides under host names, with a client of the gateway."""

    def __init__(self) -> None:
        isolate_threads()
        self.hosts = Hosts()
        self.trainers: dict[str, TorchAdamWTrainer] = {}
        self.engines: dict[str, SlowEngine] = {}
        self.gateway = create_app(token=TOKEN, transport=self.hosts, update_seconds=40.0)
        self.client = self.new_client()

    def new_client(self) -> httpx.AsyncClient:
        """One more client, with the token."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.gateway), base_url="http://gateway", headers=HEADERS
        )

    def add_trainer(self, host: str, trainer: TorchAdamWTrainer | None = None) -> TorchAdamWTrainer:
        """A new life of a trainer."""
        self.trainers[host] = trainer or new_trainer()
        self.hosts.apps[host] = app_of(trainer_router(self.trainers[host], token=TOKEN))
        return self.trainers[host]

    def add_engine(self, host: str) -> SlowEngine:
        """A new life of an engine."""
        self.engines[host] = SlowEngine()
        self.hosts.apps[host] = app_of(engine_router(self.engines[host], token=TOKEN))
        return self.engines[host]

    async def connect(
        self, pair: str, trainers: Sequence[str], engines: Sequence[str], **train: Any
    ) -> httpx.Response:
        body = {
            "pair": pair,
            "trainers": [f"http://{host}" for host in trainers],
            "engines": [f"http://{host}" for host in engines],
            "config": config(len(engines), **train),
        }
        return await self.client.post("/connect", json=body)

    async def update(self, pair: str, version: int) -> httpx.Response:
        return await self.client.post("/update_weights", json={"pair": pair, "version": version})

    async def disconnect(self, pair: str) -> httpx.Response:
        return await self.client.post("/disconnect", json={"pair": pair})

    async def pair(self, pair: str) -> Any:
        return (await self.client.get(f"/pairs/{pair}")).json()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """A world that leaves nothing behind."""
    one = World()
    try:
        yield one
    finally:
        for name in (await one.client.get("/health")).json()["pairs"]:
            await one.disconnect(name)
        await one.client.aclose()


def weights(trainer: TorchAdamWTrainer) -> Mapping[str, torch.Tensor]:
    """What engines must hold, by name."""
    return {info.param: trainer.tensor(info.key) for info in trainer.weights()}
