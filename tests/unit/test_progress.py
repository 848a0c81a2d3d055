"""What commands and examples show while they run: something on a terminal, and in a pipe what is a result."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from rich.console import Console

from awex_delta.cli.bench import _measuring
from awex_delta.demo.run import VersionRecord
from awex_delta.demo.show import _grow_table, _print_rows
from examples.gsm8k_grpo.progress import Activity
from tests.unit.test_demo import plan_of

FULL = VersionRecord(
    version=1,
    kind="full",
    reason="first_sync",
    numel=12_345_678,
    changed=12_345_678,
    sent=12_345_678,
    wire_bytes=24_691_356,
    full_bytes=24_691_356,
    seconds={"transfer": 1.5},
)
DELTA = VersionRecord(
    version=2, kind="delta", reason="none", numel=12_345_678, changed=1_234, sent=1_240, full_bytes=24_691_356
)


def test_the_demo_prints_a_row_into_a_pipe_as_it_comes() -> None:
    pipe = io.StringIO()
    with _print_rows(plan_of(), Console(file=pipe, width=160)) as show:
        assert pipe.getvalue().startswith("qwen3: trainer one rank")
        show(FULL)
        first = pipe.getvalue().splitlines()
        assert "full: first sync" in first[-1]
        assert "24,691,356" in first[-1]
        show(DELTA)
        second = pipe.getvalue().splitlines()
    assert second[: len(first)] == first
    assert len(second) == len(first) + 1
    header = next(line for line in second if "missed" in line)
    end = header.index("changed") + len("changed")
    assert [line[:end].split()[-1] for line in second[-2:]] == ["12,345,678", "1,234"]
    assert len({len(line.rstrip()) for line in second[-2:]}) == 1


def test_the_demo_says_on_a_terminal_which_version_comes() -> None:
    terminal = io.StringIO()
    with _grow_table(plan_of(), Console(file=terminal, width=128, force_terminal=True)) as show:
        assert "starting 3 ranks" in terminal.getvalue()
        show(FULL)
        assert terminal.getvalue().rstrip().endswith("version 2 of 2\x1b[0m")
        show(DELTA)
        assert terminal.getvalue().rstrip().endswith("generating\x1b[0m")


@contextmanager
def grpo() -> Iterator[Callable[[str], None]]:
    activity = Activity(shown=True)
    yield activity
    if activity._status is not None:
        activity._status.stop()


@pytest.mark.parametrize("shown", [lambda: _measuring(as_json=False), grpo], ids=["bench", "example"])
@pytest.mark.parametrize("terminal", [False, True])
def test_what_runs_is_said_on_a_terminal_alone(
    terminal: bool,
    shown: Callable[[], AbstractContextManager[Callable[[str], None]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    with shown() as say:
        say("updates of 7 tensors")
    captured = capsys.readouterr()
    assert ("updates of 7 tensors" in captured.out + captured.err) == terminal
    assert terminal or (captured.out, captured.err) == ("", "")
