"""The command itself; what its subcommands do is tested where they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from awex_delta._version import __version__
from awex_delta.cli.main import SUBCOMMANDS, app


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"awex-delta {__version__}\n")


def test_help_names_the_subcommands_without_loading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo", "bench", "gateway"):
        monkeypatch.delitem(sys.modules, f"awex_delta.cli.{name}", raising=False)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "bench" in result.output
    assert "gateway" in result.output
    heavy = {"awex_delta.cli.demo", "awex_delta.cli.bench", "awex_delta.cli.gateway"}
    assert not heavy & sys.modules.keys()


@pytest.mark.parametrize("name", ["demo", "bench", "gateway"])
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


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_is_written_for_users_of_the_command(name: str) -> None:
    output = CliRunner().invoke(app, [name, "--help"]).output
    assert f"Usage: awex-delta {name}" in output
    assert not {"Args:", "Returns:", "Raises:"} & set(output.split())


def test_an_unknown_subcommand_is_refused() -> None:
    assert CliRunner().invoke(app, ["demonstrate"]).exit_code == 2


def said(arguments: list[str]) -> str:
    """What a refused command line prints, without the frame around it."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_a_wrong_word_is_answered_with_the_right_one() -> None:
    assert "Did you mean 'report'" in said(["reprot"])
    assert "Did you mean 'sync'" in said(["bench", "snyc"])
    assert "--steps" in said(["demo", "--stpes", "3"])


def test_a_value_of_a_wrong_type_is_named_with_its_option_and_the_remedy() -> None:
    for words in (["--steps", "x"], ["--steps=x"]):
        answer = said(["demo", *words])
        assert "Invalid value for '--steps': 'x' " in answer
        assert "Give a whole number, such as 8." in answer
    assert "Give a number, such as 3e-06." in said(["demo", "--lr", "fast"])
    assert "Give a whole number, such as 3." in said(["bench", "sync", "--repeats", "0"])


def test_benchmarks_refuse_before_anything_heavy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.sync", raising=False)
    assert "'2gbit' is none of loopback, 1gbit, 100mbit" in said(["bench", "sync", "--link", "2gbit"])
    assert "choose one of auto, gaps, indices" in " ".join(
        said(["bench", "sync", "--encoding", "zip"]).split()
    )
    assert "benchmarks.sync" not in sys.modules


def test_a_shell_completes_commands_and_their_options(tmp_path: Path) -> None:
    def completed(words: str) -> set[str]:
        environment = {
            "PATH": str(tmp_path),
            "PYTHONPATH": ":".join(sys.path),
            "_AWEX_DELTA_COMPLETE": "complete_bash",
            "COMP_WORDS": f"awex-delta {words}",
            "COMP_CWORD": str(len(words.split(" "))),
        }
        code = "from awex_delta.cli.main import app; app(prog_name='awex-delta')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        return set(done.stdout.split())

    assert completed("re") == {"report"}
    assert {"--json", "--output"} <= completed("report --")
    assert "sync" in completed("bench s")


PRINTS_IN_EVERY_WAY = """
import ctypes, os, subprocess, sys
from awex_delta.cli.output import print_json, stdout_kept

as_json = sys.argv[1] == "json"
with stdout_kept(as_json):
    print("python")
    os.write(1, b"system\\n")
    ctypes.CDLL(None).printf(b"c\\n")
    subprocess.run(["echo", "child"], check=True)
if as_json:
    print_json({"a": 1})
"""


@pytest.mark.parametrize("answer", ["json", "words"])
def test_stdout_holds_the_json_alone_whatever_libraries_print(answer: str) -> None:
    command = [sys.executable, "-c", PRINTS_IN_EVERY_WAY, answer]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    printed, other = (done.stderr, done.stdout) if answer == "json" else (done.stdout, done.stderr)
    assert sorted(printed.split()) == ["c", "child", "python", "system"]
    assert other == ('{\n  "a": 1\n}\n' if answer == "json" else "")


def test_json_is_the_same_flag_of_every_command() -> None:
    from scripts.cli_page import page

    sections = page().split("\nawex-delta ")[1:]  # each begins with a line of usage
    assert {section.split()[0] for section in sections} == set(SUBCOMMANDS)
    row = "\n| `--json` | flag | `false` | Print JSON to stdout, and everything else to stderr. |\n"
    assert [section.splitlines()[0] for section in sections if row not in section] == []
