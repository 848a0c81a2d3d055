"""Entry point of `awex-delta`. A subcommand's module is imported when it runs, so `--help` stays quick."""

from __future__ import annotations

import importlib
import re
import warnings
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from awex_delta._version import __version__

SUBCOMMANDS = {
    "demo": "Train a small model and watch engines follow it bit by bit.",
    "bench": "Measure detection, packing and transfer on this machine.",
    "plan": "Say what a run will need, without starting it.",
    "gateway": "Serve the HTTP control plane: connect, update, disconnect.",
    "verify": "Compare a trainer's checkpoint with an engine, bit by bit.",
    "report": "Make one HTML page of a training's RUN.jsonl.",
    "pull": "Keep a local HF checkpoint at the newest version of a folder.",
    "inspect": "Print the chain of versions in a folder, and whether it is whole.",
}
"""Name and help of each; the module of that name in `awex_delta.cli` holds it as `app`."""


class LazyGroup(TyperGroup):
    """Puts the real subcommand in place of its stub when one is run, completed, or asked for help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name, command and remaining arguments; the module of the command is loaded here."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in SUBCOMMANDS else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; a refused value is named with what to give in its place."""
        words = list(ctx.args)
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _explain(error.message, error.param, words)
            raise


app = typer.Typer(
    name="awex-delta",
    cls=LazyGroup,
    help="Send to inference engines only the weights that an AdamW step changed.",
    no_args_is_help=True,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Handle the options that stand before any subcommand."""
    if version:
        typer.echo(f"awex-delta {__version__}")
        raise typer.Exit


def load(name: str) -> Any:
    """Import a subcommand's module and make its command, which may hold further ones."""
    # What Megatron says about packages that it would like is of no use to a command.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    command = typer.main.get_command(importlib.import_module(f"awex_delta.cli.{name}").app)
    for one in (command, *(command.commands.values() if isinstance(command, TyperGroup) else ())):
        one.help = _for_users(one.help or "")
    return command


def _for_users(docstring: str) -> str:
    """What a docstring says to those who run the command: whole paragraphs, without `Args` and `Raises`."""
    said = re.split(r"\n\n(?:Args|Returns|Raises):", docstring)[0]
    return re.sub(r"(?<!\n)\n(?!\n)", " ", said)


def _stub() -> None:
    """Stands for a subcommand in the list of all; `LazyGroup` loads the real one."""


for _name, _help in SUBCOMMANDS.items():
    app.command(_name, help=_help)(_stub)


def _explain(message: str, param: Any, words: list[str]) -> str:
    """A refusal with the value that was given and what the option takes, as far as its default tells.

    param is None where a command refused by itself, and said all.
    """
    if param is None or not isinstance(param.default, int | float) or isinstance(param.default, bool):
        return message
    given = [value for word, value in _pairs(words) if word in param.opts]
    value = f"{given[-1]!r} is refused: " if given and repr(given[-1]) not in message else ""
    kind = "whole number" if isinstance(param.default, int) else "number"
    return f"{value}{message.rstrip('.')}. Give a {kind}, such as {param.default}."


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """Each word with what may be its value: the next word, or what follows `=` in it."""
    inside = [(name, value) for name, is_pair, value in (word.partition("=") for word in words) if is_pair]
    return [*pairwise(words), *inside]
