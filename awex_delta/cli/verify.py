"""`awex-delta verify`: do a trainer's checkpoint and an engine hold the same bits?"""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from awex_delta import disk
from awex_delta.cli.output import JsonOption, print_json, refuse, stdout_kept
from awex_delta.errors import ConfigError

app = typer.Typer(add_completion=False)

_TIMEOUT_SECONDS = 600
_MAX_BYTES = 1 << 28  # of the digests of one rank
_ADDRESS = ("http://", "https://")


@app.command()
def verify(
    trainer: Annotated[
        Path, typer.Argument(help="HF checkpoint of the trainer: a folder, or a .safetensors.")
    ],
    engine: Annotated[
        list[str],
        typer.Argument(
            help="Another HF checkpoint; or the digests of an engine, one JSON file or http address a rank."
        ),
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that the http addresses ask for.")
    ] = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(help="Differing tensors to print.", min=0)] = 20,
) -> None:
    """Compare every tensor bit by bit, or by digest, one piece in memory at a time.

    Exit code 0 when all tensors are the same, 1 when any differs, is missing or is extra, 2 when a side
    cannot be read.
    """
    try:
        with stdout_kept(as_json):
            left = _open("TRAINER", trainer)
            right = _open_engine(engine, token_file)
            results = _compare(left, right, Console(stderr=True))
    except ConfigError as error:
        refuse("verify", error)
    counts = Counter(str(result.outcome) for result in results)
    same = counts["same"] == len(results)
    if as_json:
        tensors = [dataclasses.asdict(result) for result in results]
        print_json({"same": same, "counts": dict(counts), "tensors": tensors})
    else:
        _show(results, counts, limit)
    raise typer.Exit(code=0 if same else 1)


def _open(argument: str, path: Path) -> Any:
    """A checkpoint; a refusal says which argument it is about."""
    try:
        return importlib.import_module("awex_delta.observe.compare.checkpoints").Checkpoint(path)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from error


def _open_engine(engine: list[str], token_file: Path | None) -> Any:
    digests = [ref for ref in engine if ref.endswith(".json") or ref.startswith(_ADDRESS)]
    if not digests:
        if len(engine) > 1:
            raise ConfigError(
                f"ENGINE is {' '.join(engine)}: give one checkpoint, or one file of digests a rank"
            )
        return _open("ENGINE", Path(engine[0]))
    if len(digests) < len(engine):
        raise ConfigError(f"ENGINE is {' '.join(engine)}: give either a checkpoint or digests, not both")
    module = importlib.import_module("awex_delta.observe.compare.engine_digests")
    token = None if token_file is None else _read_token(token_file)
    return module.DigestedState({ref: _read(ref, token) for ref in digests})


def _read_token(path: Path) -> str:
    try:
        from awex_delta.gateway.token import read_token
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    return read_token(path)


def _read(ref: str, token: str | None) -> bytes:
    """The bytes of a file or of an address."""
    try:
        return _ask(ref, token) if ref.startswith(_ADDRESS) else disk.read(ref)
    except OSError as error:  # what requests raises is one too
        raise ConfigError(
            f"ENGINE: {ref!r} cannot be read ({error.strerror or error}); "
            "give a file of digests, or an address that answers with them"
        ) from error


def _ask(url: str, token: str | None) -> bytes:
    """What an address answers. No proxy, no redirect: the token goes to what was named, and nowhere else."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    received = bytearray()
    with requests.Session() as session:
        session.trust_env = False
        with session.get(
            url, headers=headers, timeout=_TIMEOUT_SECONDS, allow_redirects=False, stream=True
        ) as answer:
            for part in answer.iter_content(1 << 16):
                received += part
                if len(received) > _MAX_BYTES:
                    raise ConfigError(f"{url} answers with more than {_MAX_BYTES} bytes: are these digests?")
    if answer.status_code != requests.codes.ok:
        raise ConfigError(f"{url} answers {answer.status_code}: {ascii(bytes(received[:400]))[2:-1]}")
    return bytes(received)


def _compare(left: Any, right: Any, console: Console) -> list[Any]:
    compare = importlib.import_module("awex_delta.observe.compare.tensors").compare
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    total = sum(entry.numel for entry in left.entries.values())
    results = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("comparing", total=total)
        for result in compare(left, right):
            results.append(result)
            progress.update(task, advance=result.numel, description=result.name[-40:])
    return results


def _show(results: list[Any], counts: Counter[str], limit: int) -> None:
    wrong = [result for result in results if result.outcome != "same"]
    for result in wrong[:limit]:
        detail = f", {result.detail}" if result.detail else ""
        if result.num_different:
            detail += (
                f": {result.num_different:,} of {result.numel:,} elements, first at {list(result.first)}"
            )
        typer.echo(f"{result.outcome}: {result.name}{detail}")
    if len(wrong) > limit:
        typer.echo(f"... and {len(wrong) - limit} more (--limit, --json)")
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    typer.echo(f"{len(results)} tensors: {words or 'none'}")
