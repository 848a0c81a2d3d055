"""Runs the demo's plans one after the other in front of a person."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from awex_delta.demo.record import FinishedRun, add_row, new_table
from awex_delta.demo.run import PROMPT, DemoRun, RunResult, VersionRecord
from awex_delta.demo.scenario import DemoPlan
from awex_delta.testing.fleet import Fleet

_WIDE = 120
_FILE_WIDTH = 128


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
    table = new_table(plan, wide=console.width >= _WIDE)
    with Fleet() as fleet, Live(console=console, auto_refresh=False) as live:
        live.update(Text(f"starting {plan.world_size} ranks"), refresh=True)

        def show(record: VersionRecord) -> None:
            add_row(table, record)
            live.update(table, refresh=True)

        result = DemoRun(plan, fleet, folder, show).execute()
    console.print()
    return result


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
