"""Requests made up from the gateway's own OpenAPI document; its sides do what they are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from awex_delta.gateway import create_app

TOKEN = "-".join(["a", "token", "of", "the", "contract", "tests"])
COUNTS = {
    "kind": "full",
    "reason": "FIRST_SYNC",
    "verdict": "full",
    "total_wire_bytes": 10,
    "total_changed": 0,
    "total_owned": 0,
    "full_bytes": 10,
    "seconds": {"transfer": 0.5},
}


class Sides:
    """One side a URL, that holds what it is told. The trainer is the one of the document's example."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        url, _, verb = str(request.url).rpartition("/")
        pairs = self.held.setdefault(url, {})
        if verb == "state":
            role = "trainer" if request.url.port == 8101 else "engine"
            state = {"role": role, "kind": "fake", "num_ranks": 1, "brings_meeting": False, "busy": ""}
            return httpx.Response(200, json={**state, "pairs": pairs})
        call = json.loads(request.content)
        pairs[call["pair"]] = {
            "connection": call["connection"],
            "connected": verb != "disconnect",
            "version": call.get("version"),
            "ready": "version" in call,
            "why": "" if "version" in call else "nothing yet",
        }
        counts = {**COUNTS} if verb == "update_weights" else None
        return httpx.Response(200, json={"pair": pairs[call["pair"]], "counts": counts})


def app() -> Any:
    return create_app(token=TOKEN, transport=httpx.MockTransport(Sides().answer))


def bad_data_is_rejected(context: Any, response: Any, case: Any) -> bool | None:
    """As `negative_data_rejection`, which does not know that a body may be too long, too."""
    return None if response.status_code == 413 else negative_data_rejection(context, response, case)


schema = schemathesis.openapi.from_asgi("/openapi.json", app())
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    bad_data_is_rejected,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """One gateway on one loop, for all made-up requests."""
    with TestClient(app(), raise_server_exceptions=False) as client:
        yield client


@schema.parametrize()
@settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_gateway_keeps_to_its_document(case: Any, client: TestClient) -> None:
    request = case.as_transport_kwargs(
        base_url="http://testserver", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    request.pop("cookies", None)  # there are none, and the client would warn of the argument
    if "data" in request:
        request["content"] = request.pop("data")
    case.validate_response(client.request(**request), checks=CHECKS)


def test_the_examples_of_the_document_work_one_after_the_other() -> None:
    with TestClient(app()) as client:
        document = client.get("/openapi.json").json()
        for verb, field, value in (
            ("connect", "state", "connected"),
            ("update_weights", "version", 1),
            ("disconnect", "state", "disconnected"),
        ):
            body = document["paths"][f"/{verb}"]["post"]["requestBody"]["content"]["application/json"]
            name = body["schema"]["$ref"].rpartition("/")[2]
            example = document["components"]["schemas"][name]["examples"][0]
            answer = client.post(f"/{verb}", json=example, headers={"Authorization": f"Bearer {TOKEN}"})
            assert (answer.status_code, answer.json()[field]) == (200, value), answer.text
