"""What `awex-delta gateway` refuses, and what it hands to the server."""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from awex_delta.cli.gateway import app
from tests.procs.ports import hold_port, number_of


class Served:
    """Notes where the server was asked to serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: self._serve(*sockets))

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            self.calls.append(listener.getsockname()[:2])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.fixture
def port() -> Iterator[int]:
    with hold_port() as held:
        yield number_of(held)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "192.0.2.7"], "--host 192.0.2.7 is reached from other machines: add --allow-remote"),
        (["--host", "gateway.example"], "--host gateway.example is reached from other machines"),
        (["--meeting-host", "10.0.0.1"], "--meeting-host 10.0.0.1 is reached from other machines"),
        (["--host", "192.0.2.7", "--allow-remote", "--no-token"], "would let every machine in"),
        (["--no-token", "--token-file", "x"], "contradict each other"),
        (["--side-token-file", "absent"], "token file absent cannot be read"),
    ],
)
def test_what_is_unsafe_is_refused_before_anything_listens(
    served: Served, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert served.calls == []


def test_a_random_token_is_shown_once_and_loopback_is_the_default(served: Served, port: int) -> None:
    first, second = (CliRunner().invoke(app, ["--port", str(port)]) for _ in range(2))
    assert (first.exit_code, first.output.count("token (shown once")) == (0, 1)
    assert first.output != second.output
    assert served.calls[0] == ("127.0.0.1", port)


def test_a_token_file_is_made_and_its_token_never_shown(served: Served, tmp_path: Path, port: int) -> None:
    path = tmp_path / "token"
    arguments = ["--token-file", str(path), "--port", str(port), "--host", "::1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert path.read_text().strip() not in result.output
    assert served.calls == [("::1", port)]


def test_where_it_listens_is_said_as_json(served: Served, tmp_path: Path, port: int) -> None:
    path = tmp_path / "token"
    result = CliRunner().invoke(
        app, ["--json", "--token-file", str(path), "--host", "::1", "--port", str(port)]
    )
    assert json.loads(result.stdout) == {
        "url": f"http://[::1]:{port}",
        "documentation": f"http://[::1]:{port}/docs",
        "token_file": str(path),
    }
    assert len(served.calls) == 1


def test_a_port_that_is_taken_is_refused_before_a_token_is_made(served: Served, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        token = str(tmp_path / "token")
        result = CliRunner().invoke(app, ["--json", "--port", str(port), "--token-file", token])
    assert (result.exit_code, result.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert f"port={port}: cannot listen there" in result.output
    assert "free port" in result.output
    assert served.calls == []


def test_without_the_packages_of_the_extra_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "awex_delta.gateway.app":
            raise ModuleNotFoundError(
                "awex_delta.gateway needs the package 'fastapi': pip install 'awex-delta[gateway]'"
            )
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    result = CliRunner().invoke(app, [])
    assert (result.exit_code, "awex-delta[gateway]" in result.output) == (2, True)
