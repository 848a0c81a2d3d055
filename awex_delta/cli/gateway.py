"""`awex-delta gateway`: serve the HTTP control plane."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from awex_delta.cli.output import JsonOption, print_json, stdout_kept
from awex_delta.errors import ConfigError
from awex_delta.settings.address import host_and_port, is_loopback, listen

if TYPE_CHECKING:
    from fastapi import FastAPI

app = typer.Typer(add_completion=False)


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8090,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token; made with a random one, for its owner alone, if missing."),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Let everybody in. Loopback only.")] = False,
    side_token_file: Annotated[
        Path | None, typer.Option(help="File with the token that sides ask for, where it is another one.")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow --host and --meeting-host beyond this machine.")
    ] = False,
    meeting_host: Annotated[
        str, typer.Option(help="Address of this machine where the ranks of a pair meet.")
    ] = "127.0.0.1",
    meeting_port: Annotated[int, typer.Option(help="Port there; 0 picks a free one.", min=0, max=65535)] = 0,
    update_seconds: Annotated[
        float, typer.Option(help="Longest wait for all sides in one update or connect.", min=1.0)
    ] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Serve the control plane until it is interrupted. One process serves all pairs.

    The JSON is one line that says where it will listen.
    """
    try:
        from awex_delta.gateway.app import create_app
    except ModuleNotFoundError as error:
        raise _refuse(str(error)) from error
    listener = None
    try:
        if no_token and token_file is not None:
            raise _refuse("--no-token and --token-file contradict each other: give one of them")
        _check_hosts(host, meeting_host, allow_remote=allow_remote, no_token=no_token)
        side_token = None if side_token_file is None else _read(side_token_file)
        listener = listen(host, port)  # before a token is made, or a line printed, for nothing
        token = _token(token_file, no_token=no_token)
        server = create_app(
            token=token,
            side_token=side_token,
            meeting_host=meeting_host,
            meeting_port=meeting_port,
            update_seconds=update_seconds,
        )
    except ConfigError as error:
        if listener is not None:
            listener.close()
        raise _refuse(str(error)) from error
    if as_json:
        print_json(_where(host, port, token_file), indent=None)
    with stdout_kept(as_json):
        _serve(server, listener)


def _serve(server: FastAPI, listener: socket.socket) -> None:
    import uvicorn

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.Server(uvicorn.Config(server, log_config=None, server_header=False)).run([listener])


def _where(host: str, port: int, token_file: Path | None) -> dict[str, str | None]:
    url = f"http://{host_and_port(host, port)}"
    token = None if token_file is None else str(token_file)
    return {"url": url, "documentation": f"{url}/docs", "token_file": token}


def _refuse(text: str) -> typer.Exit:
    typer.echo(text, err=True)
    return typer.Exit(2)


def _check_hosts(host: str, meeting_host: str, *, allow_remote: bool, no_token: bool) -> None:
    for option, value in (("--host", host), ("--meeting-host", meeting_host)):
        if not is_loopback(value) and not allow_remote:
            raise ConfigError(f"{option} {value} is reached from other machines: add --allow-remote if meant")
    if no_token and not is_loopback(host):
        raise ConfigError(f"--no-token with --host {host} would let every machine in: give a --token-file")


def _token(path: Path | None, *, no_token: bool) -> str | None:
    """The token of callers. A random one that no file holds is shown once, here."""
    from awex_delta.gateway.token import new_token, read_token

    if no_token:
        return None
    if path is not None:
        return read_token(path, create=True)
    token = new_token()
    typer.echo(f"token (shown once; --token-file keeps it): {token}", err=True)
    return token


def _read(path: Path) -> str:
    from awex_delta.gateway.token import read_token

    return read_token(path)
