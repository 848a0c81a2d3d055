"""What every state-changing route goes through: token first, then size, then JSON of the right shape."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Message

from awex_delta.gateway.models import MAX_BODY_BYTES, Problem
from awex_delta.gateway.token import check_token, matches

SHOWN_IN_THE_DOCUMENTATION = Security(
    HTTPBearer(
        auto_error=False, description="The token of `--token-file`; asked for by every POST, and for digests."
    )
)
"""Names the scheme in the OpenAPI document. `guarded` is what checks it, before the body is read."""


class Rejection(Exception):
    """An answer that is no success: a status and a `Problem`."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.status = status
        self.problem = problem


def problems(*statuses: int) -> Mapping[int | str, dict[str, Any]]:
    """The `responses` of a route, for the OpenAPI document."""
    return {status: {"model": Problem} for status in (400, 401, 409, 413, 422, *statuses)}


def answer(status: int, problem: Problem) -> Response:
    """A `Problem` as a response; plain ASCII, whatever a caller put into names."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return Response(
        json.dumps(problem.model_dump(mode="json")), status, headers, media_type="application/json"
    )


def guarded(token: str | None, max_body_bytes: int = MAX_BODY_BYTES) -> type[APIRoute]:
    """A class of routes that ask for a token, limit the body, and answer with a `Problem`.

    Everybody may call if `token` is None. Raises ConfigError if it is easily guessed.
    """
    check_token(token)

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner = super().get_route_handler()

            async def handle(request: Request) -> Response:
                if token is not None and not matches(request.headers.get("authorization"), token):
                    return answer(
                        401, Problem(error="unauthorized", detail="give Authorization: Bearer TOKEN")
                    )
                limited = Request(request.scope, _limited(request, max_body_bytes))
                return await _answered(inner, limited)

            return handle

    return GuardedRoute


def open_routes() -> type[APIRoute]:
    """A class of routes that everybody may call, and that answer with a `Problem`, too."""

    class OpenRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner = super().get_route_handler()

            async def handle(request: Request) -> Response:
                return await _answered(inner, request)

            return handle

    return OpenRoute


async def _answered(inner: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    try:
        return await inner(request)
    except Rejection as error:
        return answer(error.status, error.problem)
    except RequestValidationError as error:
        return answer(422, Problem(error="invalid", detail=_explain(error)))
    except HTTPException as error:
        return answer(error.status_code, Problem(error="rejected", detail=str(error.detail)))


def _limited(request: Request, max_body_bytes: int) -> Callable[[], Awaitable[Message]]:
    """The request's own `receive`, until too much has come."""
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_body_bytes:
            raise HTTPException(413, f"a body may have {max_body_bytes} bytes")
        return message

    return receive


def _explain(error: RequestValidationError) -> str:
    """Place and cause of each fault, without what was sent: it may hold a secret, or be no text at all."""
    lines = [f"{'.'.join(map(str, one['loc']))[:200]}: {one['msg'][:1000]}" for one in error.errors()[:20]]
    return "; ".join(lines)
