"""Entry point of `awex-delta`. A subcommand's module is imported when it runs, so `--help` stays quick."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from awex_delta._version import __version__

app = typer.Typer(
    name="awex-delta",
    help="Send to inference engines only the weights that an AdamW step changed.",
    no_args_is_help=True,
    add_completion=False,
)

# The subcommand parses its own options, `--help` included.
_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Handle the options that stand before any subcommand.

    Args:
        version: print the version and stop.

    Raises:
        typer.Exit: after the version was printed.
    """
    if version:
        typer.echo(f"awex-delta {__version__}")
        raise typer.Exit


@app.command(context_settings=_FORWARD, help="Train a small model and watch engines follow it bit by bit.")
def demo(context: typer.Context) -> None:
    """Run the demonstration."""
    _run("demo", context)


@app.command(context_settings=_FORWARD, help="Measure detection, packing and transfer on this machine.")
def bench(context: typer.Context) -> None:
    """Run the benchmarks."""
    _run("bench", context)


@app.command(context_settings=_FORWARD, help="Serve the HTTP control plane: connect, update, disconnect.")
def gateway(context: typer.Context) -> None:
    """Serve the gateway."""
    _run("gateway", context)


@app.command(context_settings=_FORWARD, help="Say what a run will need, without starting it.")
def plan(context: typer.Context) -> None:
    """Plan a run."""
    _run("plan", context)


@app.command(context_settings=_FORWARD, help="Make one HTML page of a training's RUN.jsonl.")
def report(context: typer.Context) -> None:
    """Draw the report."""
    _run("report", context)


@app.command(context_settings=_FORWARD, help="Compare a trainer's checkpoint with an engine, bit by bit.")
def verify(context: typer.Context) -> None:
    """Compare two sides."""
    _run("verify", context)


@app.command(context_settings=_FORWARD, help="Keep a local HF checkpoint at the newest version of a folder.")
def pull(context: typer.Context) -> None:
    """Pull versions."""
    _run("pull", context)


@app.command(
    context_settings=_FORWARD, help="Print the chain of versions in a folder, and whether it is whole."
)
def inspect(context: typer.Context) -> None:
    """Inspect a folder."""
    _run("inspect", context)


def _run(name: str, context: typer.Context) -> None:
    """Hand the remaining arguments to the subcommand."""
    module = importlib.import_module(f"awex_delta.cli.{name}")
    module.app(args=context.args, prog_name=f"awex-delta {name}")
