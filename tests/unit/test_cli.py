"""The command itself; what its subcommands do is tested where they are."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from awex_delta._version import __version__
from awex_delta.cli.main import app


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"awex-delta {__version__}\n")


def test_help_names_the_subcommands_without_loading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo", "bench", "plan"):
        monkeypatch.delitem(sys.modules, f"awex_delta.cli.{name}", raising=False)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "bench" in result.output
    assert "plan" in result.output
    assert not {"awex_delta.cli.demo", "awex_delta.cli.bench", "awex_delta.cli.plan"} & sys.modules.keys()


@pytest.mark.parametrize("name", ["demo", "bench", "plan"])
def test_a_subcommand_gets_its_own_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = typer.Typer()

    @inner.command()
    def command(steps: int) -> None:
        """Say what was asked for."""
        typer.echo(f"{name} with {steps} steps")

    module = ModuleType(f"awex_delta.cli.{name}")
    monkeypatch.setattr(module, "app", inner, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    result = CliRunner().invoke(app, [name, "7"])
    assert f"{name} with 7 steps" in result.output
    assert "Say what was asked for" in CliRunner().invoke(app, [name, "--help"]).output
    assert CliRunner().invoke(app, [name, "--nonsense"]).exit_code == 2


def test_an_unknown_subcommand_is_refused() -> None:
    assert CliRunner().invoke(app, ["demonstrate"]).exit_code == 2
