"""`awex-delta demo` as a person runs it: its report, its faults, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import awex_delta
from awex_delta.cli.main import app
from awex_delta.gateway import read_token
from awex_delta.testing.fleet import warm_up
from tests.serving import LOOPBACK

ROOT = Path(awex_delta.__file__).parents[1]
# A shell that starts pytest in the background has its processes ignore SIGINT, and they would hand that on.
RUN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from awex_delta.cli.main import app
app()
"""
# Pretends that the judge found an engine wrong at version 2.
RUN_WITH_A_DIFFERENCE = """
from awex_delta.demo import run as demo_run
from awex_delta.demo.oracle import Difference
judged = []
def engine_differences(plan, truth, dumps):
    judged.append(1)
    wrong = Difference(engine="sharded engine", name="model.norm.weight", count=3, first=(5,))
    return [wrong] if len(judged) == 2 else []
demo_run.engine_differences = engine_differences
from awex_delta.cli.main import app
app()
"""

pytestmark = pytest.mark.timeout(240)


def launch(folder: Path, *options: str, code: str = RUN) -> subprocess.Popen[str]:
    """Start the demo in a process group of its own, with `folder` for its temporary files."""
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", code, "demo", *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_demo(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run to the end; the report, and what people read."""
    process = launch(tmp_path / "tmp", *options, "--json")
    output, errors = process.communicate(timeout=220)
    assert process.returncode == 0, output + errors
    assert re.search("Traceback|Warning", errors) is None
    assert left_in(tmp_path / "tmp") == []
    parsed: dict[str, Any] = json.loads(output)
    return parsed, errors


def run_demo_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[Any, str]:
    """As `run_demo`, its launcher in this process: its members fork from a server that is warm already."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    warm_up()  # before the change: the server keeps a folder of its own
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    result = CliRunner().invoke(app, ["demo", *options, "--json"])
    assert result.exit_code == 0, result.output
    assert re.search("Traceback|Warning", result.stderr) is None
    assert left_in(folder) == []
    return json.loads(result.stdout), result.stderr


def left_in(folder: Path) -> list[str]:
    """What is left of the temporary files, but for the compiler cache that torch keeps for all programs."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def check_promises(run: dict[str, Any]) -> None:
    """What must hold of every run, whatever its layout and its fault."""
    committed = [record for record in run["versions"] if record["kind"] != "aborted"]
    assert run["generation_equal"] is True
    assert committed[0]["kind"] == "full"
    assert committed[0]["reason"] == "first_sync"
    for record in committed:
        assert record["identical"] is True
        assert record["missed"] == 0
        assert 0 < record["changed"] <= record["sent"] <= record["numel"]
        assert record["full_bytes"] >= 2 * 2 * record["numel"]  # two engines, two bytes an element
        if record["kind"] == "full":
            assert record["sent"] == record["numel"]
            assert record["wire_bytes"] == record["full_bytes"]
        else:
            assert record["reason"] == "none"
            assert record["sent"] - record["changed"] < 0.01 * record["changed"]
            assert record["wire_bytes"] < 0.5 * record["full_bytes"]
            assert {"detect", "encode", "transfer", "apply"} <= record["seconds"].keys()


def kinds(run: dict[str, Any]) -> list[tuple[int, str]]:
    return [(record["version"], record["kind"]) for record in run["versions"]]


def test_both_models_stay_identical_with_anchors_where_due(tmp_path: Path) -> None:
    report, output = run_demo(tmp_path, "--steps", "5", "--anchor-interval", "2")
    assert [run["model"] for run in report["runs"]] == ["qwen3", "qwen3-moe"]
    for run in report["runs"]:
        check_promises(run)
        assert kinds(run) == [(1, "full"), (2, "delta"), (3, "delta"), (4, "full"), (5, "delta")]
        assert run["versions"][3]["reason"] == "anchor_due"
        assert run.keys() == {"model", "topology", "versions", "generation_equal"}
    assert report.keys() == {"runs", "environment"}
    assert output.count("Every engine held the trainer's bits at every committed version.") == 2


@pytest.mark.parametrize(
    ("model", "train", "infer"),
    [
        ("qwen3", "tp=2,dp=2", "tp=2"),
        ("qwen3", "tp=1", "tp=2"),
        ("qwen3", "tp=2", "tp=1"),
        ("qwen3-moe", "dp=2", "tp=1"),
        ("qwen3-moe", "dp=2,ep=2", "tp=2,ep=2"),
    ],
)
def test_eight_versions_across_anchors_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, train: str, infer: str
) -> None:
    report, _ = run_demo_here(
        tmp_path,
        monkeypatch,
        *("--model", model, "--train", train, "--infer", infer),
        *("--steps", "8", "--anchor-interval", "3"),
    )
    (run,) = report["runs"]
    check_promises(run)
    assert "".join(kind[0] for _, kind in kinds(run)) == "fdddfddd"


def test_a_killed_engine_rejoins_by_a_full_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among ranks that share a secret, and over IPv6 if this machine has it."""
    secret = read_token(tmp_path / "secret", create=True)
    report, output = run_demo_here(
        tmp_path,
        monkeypatch,
        *("--model", "qwen3-moe", "--train", "ep=2", "--infer", "tp=2,ep=2"),
        *("--steps", "4", "--fault", "drop-engine"),
        *("--secret-file", str(tmp_path / "secret"), "--host", LOOPBACK),
    )
    assert secret not in output + json.dumps(report)
    (run,) = report["runs"]
    check_promises(run)
    assert kinds(run) == [(1, "full"), (2, "delta"), (3, "aborted"), (3, "full"), (4, "delta")]
    assert "5 ranks are not a power of two" in output
    assert "engine rank 2" in run["versions"][2]["reason"]


def test_an_engine_that_fails_while_it_writes_aborts_the_version_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = run_demo_here(
        tmp_path,
        monkeypatch,
        *("--model", "qwen3", "--train", "tp=2,pp=2", "--infer", "tp=4"),
        *("--steps", "4", "--fault", "fail-apply", "--anchor-interval", "0"),
    )
    (run,) = report["runs"]
    check_promises(run)
    assert kinds(run) == [(1, "full"), (2, "delta"), (3, "aborted"), (3, "full"), (4, "delta")]
    aborted = run["versions"][2]
    assert "injected fault" in aborted["reason"]
    assert (aborted["identical"], aborted["wire_bytes"], aborted["sent"]) == (None, 0, 0)


def test_an_engine_that_lost_its_weights_gets_a_full_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = run_demo_here(
        tmp_path, monkeypatch, "--model", "qwen3", "--steps", "4", "--fault", "stale-engine"
    )
    (run,) = report["runs"]
    check_promises(run)
    assert kinds(run) == [(1, "full"), (2, "delta"), (3, "full"), (4, "delta")]
    assert run["versions"][2]["reason"] == "engine_stale"


def test_a_difference_is_named_and_fails_the_demo(tmp_path: Path) -> None:
    options = ("--model", "both", "--steps", "3", "--json")
    process = launch(tmp_path / "tmp", *options, code=RUN_WITH_A_DIFFERENCE)
    output, errors = process.communicate(timeout=220)
    assert process.returncode == 1, output + errors
    assert "sharded engine: model.norm.weight differs in 3 elements, the first at [5]" in errors
    first, second = json.loads(output)["runs"]
    assert [record["identical"] for record in first["versions"]] == [True, False]
    assert first["versions"][1]["missed"] == 3
    assert first["generation_equal"] is None
    assert second["generation_equal"] is True


def members_of(launcher: psutil.Process) -> list[psutil.Process]:
    """Processes that the launcher's fork server started, in their order."""
    members: list[psutil.Process] = []
    for child in launcher.children():
        with suppress(psutil.NoSuchProcess):  # a tool that was run for a moment
            members += child.children()
    return members


def still_run(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end soon. One whose parent did not take note of its end has ended, too."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    running = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


Started = tuple[subprocess.Popen[str], list[psutil.Process]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A long demo, once all of its five processes are there, and all processes that it started."""
    process = launch(tmp_path / "tmp", "--model", "qwen3", "--steps", "5000")
    launcher = psutil.Process(process.pid)
    try:
        wait_until(lambda: len(members_of(launcher)) == 5)
        yield process, launcher.children(recursive=True)
    finally:
        with suppress(ProcessLookupError):  # nothing is left, as it should be
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_nothing_behind(started: Started, tmp_path: Path, number: signal.Signals) -> None:
    process, others = started
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 1), output + errors
    assert still_run(others) == []
    assert left_in(tmp_path / "tmp") == []


def test_a_process_that_dies_unasked_fails_the_demo(started: Started) -> None:
    process, others = started
    members_of(psutil.Process(process.pid))[-1].kill()
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1, output + errors
    assert "failed process engine-1 died" in output
    assert still_run(others) == []
