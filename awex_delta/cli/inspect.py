"""`awex-delta inspect`: the chain of versions in a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from awex_delta.cli.output import JsonOption, print_json, refuse, stdout_kept
from awex_delta.errors import AwexDeltaError
from awex_delta.folder.folder import Folder
from awex_delta.folder.survey import Survey, VersionState, survey

app = typer.Typer(add_completion=False)

_FILE_WIDTH = 160


@app.command()
def inspect(
    directory: Annotated[str, typer.Argument(help="The folder of versions: a path, or a URL such as s3://…")],
    as_json: JsonOption = False,
    verify: Annotated[bool, typer.Option(help="Read every byte and compare checksums.")] = True,
    workers: Annotated[int, typer.Option(help="Files read at once.", min=1)] = 4,
) -> None:
    """Print every version of a folder: kind, size, density, whether it is whole, and where the chain breaks.

    Exit code 1 when something is wrong, 2 when the folder cannot be read.
    """
    try:
        folder = Folder(directory)
        with stdout_kept(as_json):
            found = survey(folder, verify=verify, workers=workers)
        if not found.versions and not folder.exists():
            what = "is a file, no folder" if Path(directory).is_file() else "does not exist"
            raise FileNotFoundError(
                f"{directory!r} {what}. Remedy: give the folder that a trainer writes into"
            )
    except (AwexDeltaError, OSError) as error:
        refuse("inspect", error)
    if as_json:
        versions = [{**asdict(state), "density": state.density} for state in found.versions]
        print_json({**asdict(found), "versions": versions, "problems": found.problems})
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(1)


def _show(found: Survey) -> None:
    if not found.versions:
        typer.echo(f"there is no version in {found.url}")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    table = Table(
        "version", "kind", "base", "state", "reachable", "bytes", "density", "tensors", "run", "encoding"
    )
    for state in found.versions:
        table.add_row(*map(escape, _row(state)))
    console.print(table)
    for problem in found.problems:
        console.print(problem, style="red", highlight=False, markup=False)
    console.print(f"newest version {found.newest}, newest that an engine can reach {found.reachable}")


def _row(state: VersionState) -> tuple[str, ...]:
    return (
        str(state.version),
        state.kind or "-",
        "-" if state.base is None else str(state.base),
        state.state,
        "yes" if state.reachable else "no",
        f"{state.size:,}",
        f"{state.density:.4%}" if state.owned else "-",
        str(state.num_tensors),
        state.run_id[:8] or "-",
        " ".join(state.encodings) or "-",
    )
