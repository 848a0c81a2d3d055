"""`awex-delta pull`: keep a local HF checkpoint at the newest version of a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from awex_delta.cli.output import JsonOption, print_json, stdout_kept
from awex_delta.errors import AwexDeltaError, ConfigError
from awex_delta.folder import pull as pulling
from awex_delta.folder.folder import Folder

app = typer.Typer(add_completion=False)


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help="The folder of versions: a path, or a URL such as s3://…")],
    local_checkpoint: Annotated[Path, typer.Argument(help="The HF checkpoint to bring up to date.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on with every new version.")] = False,
    version: Annotated[int | None, typer.Option(help="Stop at this version, not at the newest.")] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks, with --follow.", min=0.01)
    ] = 5.0,
    workers: Annotated[int, typer.Option(help="Reads at once.", min=1)] = 4,
    as_json: JsonOption = False,
) -> None:
    """Bring a local HF checkpoint to the newest version of a folder, tensor by tensor, each one verified.

    Elements that changed are stored in the shards that are there, in place. After a kill, at any moment, the
    checkpoint loads as exactly one version, or as none until the next pull, which finishes what was begun.
    The JSON of a pull is one line.

    Exit code 1 when a version, or the newest one, cannot be reached, or the checkpoint cannot be written; 2
    when the URL is refused.
    """
    console = Console(stderr=True)
    try:
        with stdout_kept(as_json):
            checkpoint = pulling.LocalCheckpoint(local_checkpoint, Folder(source), workers=workers)
            done = _pull(checkpoint, version, console)
        _report(done, as_json=as_json)
        if done.unusable and not follow:
            raise typer.Exit(1)
    except ConfigError as error:
        _say(console, error, "red")
        raise typer.Exit(2) from error
    except (AwexDeltaError, OSError) as error:
        _say(console, error, "red")
        if not follow:
            raise typer.Exit(1) from error
    while follow:
        _pause(interval)
        try:
            with stdout_kept(as_json):
                done = _pull(checkpoint, version, console)
            if done.links:
                _report(done, as_json=as_json)
        except (AwexDeltaError, OSError) as error:
            _say(console, error, "red")


def _say(console: Console, what: object, style: str) -> None:
    # Names of files may look like markup.
    console.print(f"awex-delta pull: {what}", style=style, markup=False, highlight=False, soft_wrap=True)


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _pull(checkpoint: pulling.LocalCheckpoint, version: int | None, console: Console) -> pulling.Pulled:
    """One pull with a bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None, visible=False)
        done = checkpoint.pull(
            version,
            pulling.Progress(
                begin=lambda what, total: bar.update(
                    task, description=what, total=total, completed=0, visible=True
                ),
                advance=lambda num_bytes: bar.advance(task, num_bytes),
            ),
        )
    for problem in done.problems:
        _say(console, f"{checkpoint.source}: {problem}", "yellow")
    return done


def _report(done: pulling.Pulled, *, as_json: bool) -> None:
    if as_json:
        record = {
            "version": done.version,
            "applied": len(done.links),
            "in_place": done.in_place,
            "bytes_read": done.bytes_read,
            "bytes_written": done.bytes_written,
        }
        print_json({**record, "problems": [str(problem) for problem in done.problems]}, indent=None)
    elif done.links:
        how = "in place" if done.in_place else "into new shards"
        typer.echo(
            f"version {done.version}: {len(done.links)} applied {how}, "
            f"{done.bytes_read} bytes read, {done.bytes_written} written"
        )
    else:
        typer.echo(f"version {done.version}: nothing to do")
