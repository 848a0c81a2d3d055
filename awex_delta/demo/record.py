"""How the demo shows its results: a table that grows by a line a version, and a report as plain data."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from rich import box
from rich.table import Table

from awex_delta._version import __version__
from awex_delta.demo.run import RunResult, VersionRecord
from awex_delta.demo.scenario import DemoPlan

_PACKAGES = ("awex", "megatron-core", "torch", "transformers")
_PHASES = {
    "detect": ("detect",),
    "encode": ("encode", "prepare"),
    "transfer": ("transfer",),
    "apply": ("stage", "apply"),
}
_NARROW = ("v", "sync", "changed", "share", "extra", "missed", "of full", "total")
_WIDE = (*_NARROW[:-2], "bytes", "B/chg", *_NARROW[-2:], *_PHASES)
_STREAMED = {"v": 3, "sync": 24, "changed": 10, "bytes": 13, "transfer": 8}  # characters
_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A plan and what came of it."""

    plan: DemoPlan
    result: RunResult


def new_table(plan: DemoPlan, *, wide: bool) -> Table:
    """An empty table for one run; a wide one also shows bytes and seconds by phase, in 120 characters."""
    title = f"{plan.model}: {plan.topology}"
    table = Table(
        title=title, box=box.SIMPLE_HEAD, collapse_padding=True, title_justify="left", pad_edge=False
    )
    _add_columns(table, _WIDE if wide else _NARROW, {})
    return table


def new_row(record: VersionRecord, *, header: bool) -> Table:
    """One attempt to update as a row of a wide table that is printed row by row."""
    table = Table(
        box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False, show_header=header
    )
    _add_columns(table, _WIDE, {name: _STREAMED.get(name, 7) for name in _WIDE})
    add_row(table, record)
    return table


def _add_columns(table: Table, names: Sequence[str], widths: Mapping[str, int]) -> None:
    for name in names:
        justify: Literal["left", "right"] = "left" if name == "sync" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=widths.get(name))


def add_row(table: Table, record: VersionRecord) -> None:
    """Add one attempt to update. Bytes a change are those of one copy of the model."""
    cells = {
        "v": str(record.version),
        "sync": "[red]aborted[/red]",
        "changed": f"{record.changed:,}",
        "share": f"{100 * record.changed / record.numel:.1f}%",
    }
    if record.kind != "aborted":
        cells |= _committed_cells(record)
    table.add_row(*(cells.get(str(column.header), "") for column in table.columns))


def _committed_cells(record: VersionRecord) -> dict[str, str]:
    cells = {
        "sync": f"full: {record.reason.replace('_', ' ')}",
        "missed": f"[bold red]{record.missed:,}[/bold red]" if record.missed else "0",
        "bytes": f"{record.wire_bytes:,}",
        "of full": f"{100 * record.wire_bytes / record.full_bytes:.1f}%",
        "total": f"{sum(record.seconds.values()):.3f}",
    }
    for name, phases in _PHASES.items():
        cells[name] = f"{sum(record.seconds.get(phase, 0.0) for phase in phases):.3f}"
    if record.kind == "delta":
        copies = record.full_bytes / (_BYTES_PER_ELEMENT * record.numel)
        cells["sync"] = "[green]delta[/green]"
        cells["extra"] = f"{record.sent - record.changed:,}"
        cells["B/chg"] = f"{record.wire_bytes / copies / max(record.changed, 1):.2f}"
    return cells


def as_data(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """The report. Its shape is described in docs/en/demo.md."""
    return {
        "runs": [
            {
                "model": run.plan.model,
                "topology": run.plan.topology,
                "versions": [dataclasses.asdict(record) for record in run.result.versions],
                "generation_equal": run.result.generation_equal,
            }
            for run in runs
        ],
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "awex-delta": __version__,
            **{name: version(name) for name in _PACKAGES},
        },
    }
