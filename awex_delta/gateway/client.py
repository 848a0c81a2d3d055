"""Asks sides over HTTP. What they answer is checked like anything that comes from a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from awex_delta.gateway.models import Problem
from awex_delta.gateway.side_models import Attempt, SideAnswer, SideState, Verb

_MAX_ANSWER_BYTES = 1 << 20
_MAX_TEXT_CHARS = 4000  # of what a side says of a failure; it is shown and logged
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = (
    2.0  # less than the 5 after which uvicorn closes a connection, maybe as a request is under way
)

Answer = TypeVar("Answer")
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFailure:
    """One side did not do what it was asked. status: None if it did not answer at all."""

    status: int | None
    text: str


class Sides:
    """Calls to sides, all at once."""

    def __init__(self, token: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Open nothing yet. Sides ask for `token`; requests travel over `transport`, None for the network."""
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    async def states(self, urls: Sequence[str], *, seconds: float) -> dict[str, SideState | SideFailure]:
        """Who each side is and what it holds."""
        # The time of the client is that of each read, which a side that sends byte by byte never exceeds.
        return await gather_with_grace(
            {url: self._ask("GET", f"{url}/state", None, SideState, seconds) for url in urls},
            seconds=seconds,
            grace_seconds=seconds,
        )

    async def call(
        self, verb: Verb, calls: Mapping[str, Attempt], *, seconds: float, grace_seconds: float
    ) -> dict[str, SideAnswer | SideFailure]:
        """Ask every side for one verb, all at once.

        The wait ends after `seconds`, and `grace_seconds` after a side has failed.
        """
        asked = {u: self._ask("POST", f"{u}/{verb}", call, SideAnswer, None) for u, call in calls.items()}
        return await gather_with_grace(asked, seconds=seconds, grace_seconds=grace_seconds)

    async def close(self) -> None:
        """Close all connections; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _opened(self) -> httpx.AsyncClient:
        """The client. No proxy, no redirect: the token goes to the URL that was named, and nowhere else."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                transport=self._transport,
                headers=self._headers,
                trust_env=False,
                follow_redirects=False,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_SECONDS
                ),
            )
        return self._client

    async def _ask(
        self,
        method: Literal["GET", "POST"],
        url: str,
        body: BaseModel | None,
        model: type[Model],
        seconds: float | None,
    ) -> Model | SideFailure:
        content = None if body is None else body.model_dump_json()
        timeout = httpx.Timeout(seconds, connect=min(seconds or _CONNECT_SECONDS, _CONNECT_SECONDS))
        # Nothing is unpacked: what is short on the wire must not fill memory.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        received = bytearray()
        try:
            async with self._opened().stream(
                method, url, content=content, headers=headers, timeout=timeout
            ) as response:
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    return SideFailure(status=None, text="its answer is packed, which it was not asked for")
                async for part in response.aiter_bytes():
                    received += part
                    if len(received) > _MAX_ANSWER_BYTES:
                        return SideFailure(status=None, text="its answer is too long for a side's")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return SideFailure(status=None, text=f"does not answer ({type(error).__name__})")
        if response.status_code == 200:
            return _parsed(model, bytes(received))
        problem = _parsed(Problem, bytes(received))
        if isinstance(problem, SideFailure):
            return SideFailure(
                status=response.status_code, text=f"answers {response.status_code}: is a side's router there?"
            )
        said = f"{problem.error}: {problem.detail}"[:_MAX_TEXT_CHARS]
        plain = "".join(one if one.isprintable() else " " for one in said)  # it becomes one line of a log
        return SideFailure(status=response.status_code, text=plain)


def _parsed(model: type[Model], text: bytes) -> Model | SideFailure:
    try:
        return model.model_validate_json(text)
    except ValidationError:
        return SideFailure(
            status=None, text="its answer is none of a side's router: does it run this version?"
        )


async def gather_with_grace(
    calls: Mapping[str, Awaitable[Answer | SideFailure]],
    *,
    seconds: float,
    grace_seconds: float,
) -> dict[str, Answer | SideFailure]:
    """Run all calls, by URL, at once, and do not wait for ever for those that are left once one has failed.

    The wait ends after `seconds`, and `grace_seconds` after the first failure. Answers come in the order of
    `calls`; a call that was not awaited to its end is a SideFailure.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
    pending: set[asyncio.Future[Answer | SideFailure]] = set(tasks.values())
    try:
        while pending and loop.time() < deadline:
            done, pending = await asyncio.wait(
                pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if any(isinstance(one.result(), SideFailure) for one in done):
                deadline = min(deadline, loop.time() + grace_seconds)
    finally:
        for one in pending:
            one.cancel()
    late = SideFailure(status=None, text="did not answer in time")
    return {url: late if task in pending else task.result() for url, task in tasks.items()}
