"""What the gateway makes of requests before any side is asked: tokens, sizes, shapes, and hostile ones."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from awex_delta.errors import ConfigError
from awex_delta.gateway import create_app, read_token
from awex_delta.gateway.models import MAX_BODY_BYTES
from awex_delta.gateway.token import matches

TOKEN = "-".join(["a", "token", "of", "the", "unit", "tests"])
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
CONFIG: dict[str, Any] = {
    "train": {"backend": "megatron:d1", "enable_delta_weight_update": True},
    "rollout": {"backend": "vllm:d1"},
}
CONNECT = {"pair": "a", "trainers": ["http://t:1"], "engines": ["http://e:1"], "config": CONFIG}
VERBS = ("connect", "update_weights", "disconnect")


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


@pytest.fixture
def client() -> Iterator[TestClient]:
    """A gateway whose sides do not answer."""
    app = create_app(token=TOKEN, transport=httpx.MockTransport(refuse))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN} {TOKEN}",
        "Bearer \u00e4\u00f6\u00fc",
    ],
)
def test_no_verb_works_without_the_token(client: TestClient, verb: str, header: str | None) -> None:
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    answer = client.post(f"/{verb}", content=b"{", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"] == "unauthorized"


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN} "])
def test_the_token_opens(header: str) -> None:
    assert matches(header, TOKEN)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json", "/docs"])
def test_what_changes_nothing_can_be_read_without_a_token(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_a_gateway_without_a_token_has_to_be_asked_for() -> None:
    app = create_app(token=None, transport=httpx.MockTransport(refuse))
    with TestClient(app) as client:
        assert client.post("/disconnect", json={"pair": "a"}).status_code == 404


@pytest.mark.parametrize("token", ["", "short", "fifteen-letters", "a token with blanks in", "tokén" * 8])
def test_a_token_that_is_easily_guessed_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="give at least 16") as refused:
        create_app(token=token)
    assert not token or token not in str(refused.value)


def changed(**fields: Any) -> bytes:
    return json.dumps({**CONNECT, **fields}).encode()


def in_train(**fields: Any) -> bytes:
    return changed(config={**CONFIG, "train": {**CONFIG["train"], **fields}})


HOSTILE = [
    ("connect", b"", 422),
    ("connect", b"{", 422),
    ("connect", b"null", 422),
    ("connect", b"[]", 422),
    ("connect", b'"text"', 422),
    ("connect", b"[" * 100_000, 400),
    ("connect", b'{"pair":' * 20_000, 400),
    ("connect", b"\xff\xfe\x00", 400),
    ("connect", b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.", 400),  # a pickle
    ("connect", changed(pair=""), 422),
    ("connect", changed(pair="a/../b"), 422),
    ("connect", changed(pair="a\n"), 422),
    ("connect", changed(pair="x" * 65), 422),
    ("connect", changed(pair="\ud800"), 422),
    ("connect", changed(pair=7), 422),
    ("connect", changed(trainers=[]), 422),
    ("connect", changed(trainers="http://t:1"), 422),
    ("connect", changed(trainers=["http://t:1", "http://t:1/"]), 422),
    ("connect", changed(trainers=[f"http://t:{n}" for n in range(1, 1026)]), 422),
    ("connect", changed(trainers=["file:///etc/passwd"]), 422),
    ("connect", changed(trainers=["gopher://t:1"]), 422),
    ("connect", changed(trainers=["HTTP://t:1"]), 422),
    ("connect", changed(trainers=["http://user:hunter2@t:1"]), 422),
    ("connect", changed(trainers=["http://t:1/?next=http://u"]), 422),
    ("connect", changed(trainers=["http://t:1/#x"]), 422),
    ("connect", changed(trainers=["http://t:99999"]), 422),
    ("connect", changed(trainers=["http://t:1/a b"]), 422),
    ("connect", changed(trainers=["http://t\r\nHost: u"]), 422),
    ("connect", changed(trainers=["http://" + "t" * 3000]), 422),
    ("connect", changed(trainers=["http://"]), 422),
    ("connect", changed(trainers=["http://[::1"]), 422),
    ("connect", changed(engines=["http://t:1/"]), 422),
    ("connect", changed(config={}), 422),
    ("connect", changed(config={**CONFIG, "more": 1}), 422),
    ("connect", changed(more=1), 422),
    ("connect", changed(**{"\ud800": 1}), 422),
    ("connect", in_train(nonsense=True), 422),
    ("connect", in_train(weight_update_timeout_seconds=-1), 422),
    ("connect", in_train(weight_update_timeout_seconds=1e300), 422),
    ("connect", in_train(weight_update_transport="disk", weight_update_disk_url="/shared/run"), 422),
    ("connect", in_train(weight_update_anchor_interval="5"), 422),
    ("connect", in_train(use_lora=True), 422),
    ("connect", in_train(backend="megatron:d2"), 422),
    ("connect", b'{"pair": "a", "config": {"train": {"weight_update_timeout_seconds": NaN}}}', 422),
    ("update_weights", b'{"pair": "a", "version": NaN}', 422),
    ("update_weights", b'{"pair": "a", "version": Infinity}', 422),
    ("update_weights", b'{"pair": "a", "version": 1.5}', 422),
    ("update_weights", b'{"pair": "a", "version": 1.0}', 422),
    ("update_weights", b'{"pair": "a", "version": "1"}', 422),
    ("update_weights", b'{"pair": "a", "version": true}', 422),
    ("update_weights", b'{"pair": "a", "version": -1}', 422),
    ("update_weights", b'{"pair": "a", "version": 9223372036854775808}', 422),
    ("update_weights", b'{"pair": "a", "version": ' + b"9" * 5000 + b"}", 400),
    ("update_weights", b'{"pair": "a"}', 422),
    ("update_weights", b'{"pair": "a", "version": 1, "force": true}', 422),
    ("update_weights", b'{"pair": "a", "version": 1}', 404),
    ("disconnect", b'{"pair": {"$ne": ""}}', 422),
    ("disconnect", b'{"pair": "nobody"}', 404),
]


@pytest.mark.parametrize(("verb", "body", "status"), HOSTILE, ids=lambda value: str(value)[:60])
def test_a_hostile_request_is_refused_in_plain_words(
    client: TestClient, verb: str, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        headers = {**AUTHORIZED, "Content-Type": "application/json"}
        answer = client.post(f"/{verb}", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.text.isascii()
    problem = answer.json()
    assert problem["error"]
    assert problem["detail"]
    assert "hunter2" not in answer.text + caplog.text
    assert TOKEN not in answer.text + caplog.text
    assert len(answer.content) < 20_000
    assert client.get("/health").json()["pairs"] == {}


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("text/plain", 422), ("application/x-www-form-urlencoded", 422), ("application/octet-stream", 422)],
)
def test_only_json_is_read(client: TestClient, content_type: str, status: int) -> None:
    headers = {**AUTHORIZED, "Content-Type": content_type}
    answer = client.post("/disconnect", content=b'{"pair": "a"}', headers=headers)
    assert answer.status_code == status


def in_parts(total: int) -> Iterator[bytes]:
    for _ in range(0, total, 1000):
        yield b" " * 1000


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_not_read_to_its_end(client: TestClient, announced: bool) -> None:
    size = 2 * MAX_BODY_BYTES
    content = b" " * size if announced else in_parts(size)
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    answer = client.post("/connect", content=content, headers=headers)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/connect", 405),
        ("DELETE", "/pairs/a", 405),
        ("GET", "/pairs/nobody", 404),
        ("GET", "/pairs/..%2f..%2fetc", 404),
        ("GET", "/pairs/a%00b", 422),
        ("GET", "/pairs/" + "x" * 5000, 422),
    ],
)
def test_other_paths(client: TestClient, method: str, path: str, status: int) -> None:
    answer = client.request(method, path, headers=AUTHORIZED)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert answer.json()["detail"]


def test_sides_that_do_not_answer_are_named_and_the_pair_stays_disconnected(client: TestClient) -> None:
    answer = client.post("/connect", json=CONNECT, headers=AUTHORIZED)
    assert answer.status_code == 502
    problem = answer.json()
    assert problem["state"] == "disconnected"
    assert set(problem["sides"]) == {"http://t:1", "http://e:1"}
    assert "http://t:1 does not answer (ConnectError)" in problem["detail"]
    pair = client.get("/pairs/a").json()
    assert (pair["state"], pair["ready"], pair["failure"]) == ("disconnected", False, problem["detail"])
    assert pair["engines"] == [
        {"url": "http://e:1", "ready": False, "version": None, "why": "does not answer (ConnectError)"}
    ]
    assert 'awex_delta_failures_total{pair="a",verb="connect"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(200, content=b"x" * (1 << 21)), "too long"),
        (httpx.Response(200, json={"role": "trainer"}), "none of a side's router"),
        (httpx.Response(200, content=b"\x80\x04K\x01."), "none of a side's router"),
        (httpx.Response(302, headers={"Location": "http://elsewhere/state"}), "answers 302"),
        (httpx.Response(500, text="<html>secret</html>"), "answers 500"),
    ],
)
def test_an_answer_of_a_side_is_not_trusted(answer: httpx.Response, said: str) -> None:
    asked: list[httpx.URL] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    app = create_app(token=TOKEN, transport=httpx.MockTransport(respond))
    with TestClient(app) as client:
        problem = client.post("/connect", json=CONNECT, headers=AUTHORIZED).json()
    assert said in problem["detail"]
    assert "secret" not in problem["detail"]
    assert {url.host for url in asked} == {"t", "e"}, "a redirect was followed, with the token"


def test_the_document_says_which_calls_need_the_token(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    guarded = {path for path, verbs in paths.items() if any("security" in verb for verb in verbs.values())}
    assert guarded == {f"/{verb}" for verb in VERBS}
    assert set(paths) == {*guarded, "/health", "/pairs/{name}", "/metrics"}


def test_a_token_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(path)
    token = read_token(path, create=True)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path, create=True) == read_token(path) == token
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as refused:
        read_token(path)
    assert token not in str(refused.value)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_token(path)
    with pytest.raises(ConfigError, match="give a path that can be written"):
        read_token(tmp_path / "absent" / "token", create=True)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_token_file_without_an_end_is_not_read_to_it(device: str) -> None:
    with pytest.raises(ConfigError, match="can be read by others"):
        read_token(device)


def test_a_token_may_come_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(path.write_text, f"{TOKEN}\n")
        assert read_token(path) == TOKEN
        writing.result(20)


def test_a_token_that_several_processes_make_at_once_is_one_and_whole(tmp_path: Path) -> None:
    path, threads = tmp_path / "token", 8
    begin = threading.Barrier(threads)

    def make(_: int) -> str:
        begin.wait(20)
        return read_token(str(path), create=True)

    for _ in range(20):
        with ThreadPoolExecutor(threads) as pool:
            assert len(set(pool.map(make, range(threads)))) == 1
        assert [file.name for file in tmp_path.iterdir()] == ["token"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
