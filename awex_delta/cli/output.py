"""What commands print. JSON goes to stdout alone, and what is refused is refused before a long run begins."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer

JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout, and everything else to stderr.")
]


def check_output(option: str, path: Path) -> None:
    """Refuse a file that could not be written at the end, by opening it. Leaves nothing behind.

    Raises typer.BadParameter, which names the file and the cause.
    """
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"{str(path)!r} cannot be written. Give a file in a folder that exists.", param_hint=option
        ) from error
    if not existed:
        path.unlink()


@contextmanager
def stdout_kept(as_json: bool) -> Iterator[None]:
    """Keep stdout for the JSON: whatever is printed inside goes to stderr, child processes included."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        # C libraries buffer what they print where stdout is no terminal.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def refuse(command: str, message: object) -> NoReturn:
    """Say on stderr why a command cannot do what it was asked for, and end it with exit code 2."""
    typer.echo(f"awex-delta {command}: {message}", err=True)
    raise typer.Exit(code=2)


def print_json(record: Any, *, indent: int | None = 2) -> None:
    """Print a record to stdout; on one line without an indent."""
    typer.echo(json.dumps(record, indent=indent))
