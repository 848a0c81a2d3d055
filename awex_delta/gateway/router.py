"""The routers that a trainer's process and an engine's process mount."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import APIRouter, FastAPI

from awex_delta.gateway.adapters import engine_side, trainer_side
from awex_delta.gateway.guard import SHOWN_IN_THE_DOCUMENTATION, guarded, open_routes, problems
from awex_delta.gateway.host import SideHost, to_its_end
from awex_delta.gateway.models import Problem
from awex_delta.gateway.side_models import (
    SideAnswer,
    SideConnect,
    SideDisconnect,
    SidePublish,
    SideState,
    SideUpdate,
)
from awex_delta.gateway.sides import Side
from awex_delta.observe.compare.engine_digests import DigestFile


def trainer_router(
    trained: Any,
    optimizer: Any = None,
    *,
    token: str | None,
    hf_config: Any = None,
    masters: Mapping[str, torch.Tensor] | None = None,
    router_dtype: str = "bf16",
    prefix: str = "",
) -> APIRouter:
    """A router for one trainer rank. Mount it in the app of that rank's process.

    While it works, the training must stand still: take the step, ask the gateway for the update, wait.

    Args:
        trained: what is trained; one of

            * Megatron's model chunks (with `optimizer` and `hf_config`)
            * a `torch.nn.Module`, or a mapping of names to tensors (with `optimizer`, a
              `torch.optim.AdamW`, and `masters`)
            * a `TrainerView`
            * a `Sender`, or a mapping of pair names to Senders, if one trainer serves several pairs

        optimizer: Megatron's, or torch's.
        token: what the gateway must show. None lets everybody in who reaches the port.
        hf_config: config of the HF model that the engines serve (Megatron).
        masters: name -> fp32 tensor that a torch `optimizer` steps for the bf16 weight of that name.
        router_dtype: dtype in which engines hold the router weights, "bf16" or "fp32" (Megatron).
        prefix: before every path.

    Raises:
        UnsupportedError: the objects are none of these; names their types.
        ConfigError: the token is easily guessed.

    Every trainer rank mounts its own.
    """
    side = trainer_side(trained, optimizer, hf_config=hf_config, masters=masters, router_dtype=router_dtype)
    return side_router(side, token=token, prefix=prefix)


def engine_router(
    engine: Any, *, token: str | None, num_ranks: int | None = None, prefix: str = ""
) -> APIRouter:
    """A router for one engine, in the process that drives it.

    Args:
        engine: what serves; one of

            * a transformers model
            * an `EngineView`
            * a vLLM `LLM` or `AsyncLLM`, or a `VllmDriver` (with `num_ranks`)
            * an SGLang `Engine`
            * a `Receiver`

        token: what the gateway must show. None lets everybody in who reaches the port.
        num_ranks: workers of a `VllmDriver`'s deployment; known for the others.
        prefix: before every path.

    Raises:
        UnsupportedError: the object is none of these; names its type.
        ConfigError: the token is easily guessed, or `num_ranks` is missing.
    """
    return side_router(engine_side(engine, num_ranks=num_ranks), token=token, prefix=prefix)


def side_router(side: Side, *, token: str | None, prefix: str = "", tags: Sequence[str] = ()) -> APIRouter:
    """A router for a side that is described already.

    The gateway must show `token`, if it is not None. `tags` of the OpenAPI document are the role if empty.
    """
    host = SideHost(side)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        host.close()

    labels = list(tags) or [side.role]
    router = APIRouter(route_class=open_routes(), tags=list(labels), lifespan=lifespan)
    closed = APIRouter(
        route_class=guarded(token),
        tags=list(labels),
        dependencies=[SHOWN_IN_THE_DOCUMENTATION],
        responses={**problems(502)},
    )

    @router.get("/state")
    async def state() -> SideState:
        """Who this side is, what it does, what it holds."""
        return host.state()

    @closed.post("/connect")
    async def connect(call: SideConnect) -> SideAnswer:
        """Join a pair."""
        return await to_its_end(host.connect(call))

    @closed.post("/update_weights")
    async def update_weights(call: SideUpdate) -> SideAnswer:
        """Take part in one update."""
        return await to_its_end(host.update_weights(call))

    @closed.post("/publish")
    async def publish(call: SidePublish) -> SideAnswer:
        """Hear that the trainer has committed a version."""
        return await to_its_end(host.publish(call))

    @closed.post("/disconnect")
    async def disconnect(call: SideDisconnect) -> SideAnswer:
        """Leave a pair."""
        return await to_its_end(host.disconnect(call))

    if side.role == "engine":
        _serve_digests(closed, host)
    router.include_router(closed)
    outer = APIRouter(prefix=prefix)
    outer.include_router(router)
    return outer


def _serve_digests(router: APIRouter, host: SideHost) -> None:
    @router.get("/digests", responses={501: {"model": Problem}})
    async def digests() -> DigestFile:
        """Digests of the live weights, for `awex-delta verify`. Nothing is updated meanwhile."""
        return await to_its_end(host.digests())
