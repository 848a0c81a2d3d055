"""A trainer, an engine and a gateway as processes that serve HTTP, and what a test asks of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI

from awex_delta.gateway import create_app, engine_router, trainer_router
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.fleet import fork_server
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.procs.ports import hold_port, number_of

TOKEN = "-".join(["the", "token", "of", "the", "processes"])
SHAPES = {
    "model.embed_tokens.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 96),
    "model.norm.weight": (32,),
}
TIMEOUT_SECONDS = 30.0
"""Patient: no test waits for it, as a death is heard at once."""

Bits = Mapping[str, Any]


class DyingEngine(DictEngine):
    """Kills its process in the middle of an update, after it has written, when it is told to."""

    dies = False

    def synchronize(self) -> None:
        super().synchronize()
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


def serve_engine(pipe: Connection, port: int) -> None:
    """An engine process: the router under uvicorn; its pipe gives the bits that it serves."""
    engine = DyingEngine(SHAPES)
    _serve(engine_router(engine, token=TOKEN), port)
    while True:
        command, _ = pipe.recv()
        if command == "die in the next update":
            engine.dies = True
            pipe.send(None)
        else:
            pipe.send(_bits(engine.tensors_by_name))


def serve_trainer(pipe: Connection, port: int, seed: int, num_steps: int) -> None:
    """A trainer process, set to a step; its pipe trains and gives the bits that it holds."""
    settings = DeltaSettings(anchor_interval=0)
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, seed=seed, settings=settings)
    for _ in range(num_steps):
        trainer.train_step()
    weights = {info.param: trainer.tensor(info.key) for info in trainer.weights()}
    _serve(trainer_router(trainer, token=TOKEN), port)
    while True:
        command, _ = pipe.recv()
        if command == "step":
            trainer.train_step()
            pipe.send(None)
        else:
            pipe.send(_bits(weights))


def serve_gateway(pipe: Connection, port: int) -> None:
    """A gateway process."""
    _serve(create_app(token=TOKEN, update_seconds=60.0), port)
    pipe.recv()


def _serve(app_or_router: Any, port: int) -> None:
    torch.set_num_threads(1)
    app = app_or_router
    if not isinstance(app, FastAPI):
        app = FastAPI()
        app.include_router(app_or_router)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()


def _bits(weights: Mapping[str, torch.Tensor]) -> Bits:
    return {name: weight.contiguous().view(torch.int16).numpy().copy() for name, weight in weights.items()}


@dataclass
class Life:
    """One process, the pipe to it and the URL that it serves."""

    process: BaseProcess
    pipe: Connection
    url: str

    def ask(self, command: str) -> Any:
        self.pipe.send((command, None))
        assert self.pipe.poll(30), "no answer in time"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Fleet:
    """Processes by name. Each keeps its port in all its lives."""

    def __init__(self) -> None:
        self._context = fork_server()
        self._held = ExitStack()
        self._ports: dict[str, int] = {}
        self.lives: dict[str, Life] = {}

    def start(self, name: str, function: Callable[..., None], *args: object) -> Life:
        """Start a process, or start it again."""
        if name not in self._ports:
            self._ports[name] = number_of(self._held.enter_context(hold_port()))
        port = self._ports[name]
        ours, theirs = self._context.Pipe()
        process: BaseProcess = self._context.Process(target=function, args=(theirs, port, *args), daemon=True)
        process.start()
        theirs.close()
        self.lives[name] = Life(process, ours, f"http://127.0.0.1:{port}")
        return self.lives[name]

    def wait(self) -> None:
        """Until every process answers."""
        for name, life in self.lives.items():
            wait_for(f"{life.url}/{'health' if name == 'gateway' else 'state'}", life.process)

    def close(self) -> None:
        """Kill what was started."""
        for life in self.lives.values():
            life.kill()
        self._held.close()


def wait_for(url: str, process: BaseProcess) -> None:
    deadline = time.monotonic() + 120  # the first one loads torch, AWEX and Megatron
    while True:
        try:
            if httpx.get(url, timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.is_alive(), f"{url}: the process died"
        assert time.monotonic() < deadline, f"{url} does not answer"
        time.sleep(0.05)


class Client:
    """Asks the gateway, as a user does."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

    def connect(self, pair: str, trainer: Life, engine: Life) -> httpx.Response:
        train = {
            "backend": "megatron:d1",
            "enable_delta_weight_update": True,
            "weight_update_anchor_interval": 0,
            "weight_update_timeout_seconds": TIMEOUT_SECONDS,
            "weight_update_connect_timeout_seconds": TIMEOUT_SECONDS,
        }
        body = {
            "pair": pair,
            "trainers": [trainer.url],
            "engines": [engine.url],
            "config": {"train": train, "rollout": {"backend": "vllm:d1"}},
        }
        return self.http.post("/connect", json=body)

    def update(self, pair: str, version: int) -> httpx.Response:
        return self.http.post("/update_weights", json={"pair": pair, "version": version})

    def disconnect(self, pair: str) -> httpx.Response:
        return self.http.post("/disconnect", json={"pair": pair})

    def pair(self, pair: str) -> Any:
        return self.http.get(f"/pairs/{pair}").json()
