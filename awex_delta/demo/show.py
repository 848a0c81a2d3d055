"""Runs the demo's plans one after the other in front of a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from awex_delta.demo.record import FinishedRun, add_row, new_row, new_table
from awex_delta.demo.run import PROMPT, DemoRun, RunResult, VersionRecord
from awex_delta.demo.scenario import DemoPlan
from awex_delta.testing.fleet import Fleet

OnRecord: TypeAlias = Callable[[VersionRecord], None]

_WIDE = 120
_FILE_WIDTH = 160


def run_all(plans: list[DemoPlan], folder: Path) -> list[FinishedRun]:
    """Run checked plans, and show each: what came of them, as far as the first that ended in an error.

    folder is for files of the runs; the caller removes it.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    finished: list[FinishedRun] = []
    for plan in plans:
        result = _run_one(plan, folder / plan.model, console)
        finished.append(FinishedRun(plan=plan, result=result))
        _conclude(result, console)
        if result.error:
            break
    return finished


def _run_one(plan: DemoPlan, folder: Path, console: Console) -> RunResult:
    folder.mkdir()
    if plan.padded_schedule:
        console.print(
            f"{plan.world_size} ranks are not a power of two: the transfer schedule is padded "
            "(allow_any_world_size)."
        )
    show = _grow_table if console.is_terminal else _print_rows
    with Fleet() as fleet, show(plan, console) as on_record:
        result = DemoRun(plan, fleet, folder, on_record).execute()
    console.print()
    return result


@contextmanager
def _grow_table(plan: DemoPlan, console: Console) -> Iterator[OnRecord]:
    """A table that grows in place, and below it what is being done."""
    table = new_table(plan, wide=console.width >= _WIDE)
    with Live(console=console, auto_refresh=False) as live:
        live.update(Text(f"starting {plan.world_size} ranks"), refresh=True)

        def show(record: VersionRecord) -> None:
            add_row(table, record)
            following = record.version + (record.kind != "aborted")
            doing = f"version {following} of {plan.steps}" if following <= plan.steps else "generating"
            live.update(Group(table, Text(doing, style="dim")), refresh=True)

        yield show
        live.update(table, refresh=True)


@contextmanager
def _print_rows(plan: DemoPlan, console: Console) -> Iterator[OnRecord]:
    """Each row is printed as it comes, for whoever reads a pipe."""
    console.print(f"{plan.model}: {plan.topology}", highlight=False)
    begun: list[VersionRecord] = []

    def show(record: VersionRecord) -> None:
        console.print(new_row(record, header=not begun))
        begun.append(record)

    yield show


def _conclude(result: RunResult, console: Console) -> None:
    for record in result.versions:
        if record.kind == "aborted":
            console.print(f"Version {record.version}: {escape(record.reason)}", highlight=False)
    for difference in result.differences:
        console.print(f"[bold red]different[/bold red] {difference}", highlight=False)
    if result.error:
        console.print(f"[bold red]failed[/bold red] {escape(result.error)}", highlight=False)
    if result.generation_equal is None:
        return
    words = "the same text as" if result.generation_equal else "[bold red]other text than[/bold red]"
    console.print(
        f"The transformers engine continues {PROMPT!r} with {words} a model loaded from a checkpoint of the "
        f"trainer's weights:",
        highlight=False,
    )
    console.print(f"    {result.text!r}", markup=False, highlight=False)
    if result.passed:
        console.print("[green]Every engine held the trainer's bits at every committed version.[/green]\n")
