"""`awex-delta report`: one self-contained page about a training's weight updates."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from awex_delta.cli.output import JsonOption, check_output, print_json, refuse, stdout_kept
from awex_delta.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The RUN.jsonl that the training's RunLog wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    as_json: JsonOption = False,
) -> None:
    """Draw what every update changed, sent and took, with the reasons of full syncs, as one HTML page.

    With --json the numbers of its summary are printed as well.

    Exit code 0 when the page was written, 2 when the run cannot be read or the page not be written.
    """
    check_output("--output", output)
    if output.exists() and run.exists() and output.samefile(run):
        raise typer.BadParameter(
            f"{str(output)!r} is the run itself. Give another file.", param_hint="--output"
        )
    with stdout_kept(as_json):
        summary = _draw(run, output)
    if as_json:
        print_json(summary)
    else:
        typer.echo(f"{output}: {summary['num_deltas']} of {summary['num_updates']} updates were deltas")


def _draw(run: Path, output: Path) -> dict[str, Any]:
    """Write the page; its summary."""
    try:
        page = importlib.import_module("awex_delta.observe.report.page")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        refuse("report", "the pictures need matplotlib: pip install 'awex-delta[report]'")
    try:
        history = importlib.import_module("awex_delta.observe.runlog.reader").read_run(run)
    except ConfigError as error:
        refuse("report", error)
    with Console(stderr=True).status(f"Drawing {len(history.updates)} updates"):
        output.write_text(page.render(history), encoding="utf-8")
    for note in history.notes:
        typer.echo(note, err=True)
    return dataclasses.asdict(page.summarize(history.updates))
