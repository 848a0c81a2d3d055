"""Where commands write: JSON to a file or to stdout, and refusals before a long run rather than after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

STDOUT = Path("-")


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written at the end.

    Args:
        option: name of the command-line option.
        path: its value; None and `-` (stdout) always pass.

    Raises:
        typer.BadParameter: names the file and the cause. Nothing is left behind.
    """
    if not can_write(path):
        raise typer.BadParameter(
            f"{str(path)!r} cannot be written. Give a file in a folder that exists.", param_hint=option
        )


def can_write(path: Path | None) -> bool:
    """True where a file could be written, by opening it; also for None and `-` (stdout)."""
    if path is None or path == STDOUT:
        return True
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError:
        return False
    if not existed:
        path.unlink()
    return True


def write_json(path: Path | None, record: Any) -> None:
    """Write a record to a file, to stdout for `-`, or nowhere for None."""
    if path is None:
        return
    text = json.dumps(record, indent=2)
    if path == STDOUT:
        typer.echo(text)
    else:
        path.write_text(f"{text}\n", encoding="utf-8")
