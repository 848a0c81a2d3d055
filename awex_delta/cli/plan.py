"""`awex-delta plan`: what a run will need, on any machine and without a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from awex_delta.cli.output import JsonOption, print_json, refuse, stdout_kept
from awex_delta.errors import ConfigError
from awex_delta.presets.files import ModelShape, find_preset, load_section, read_preset
from awex_delta.presets.forecast import ENCODINGS, SHARES, Memory, RunPlan, plan_run
from awex_delta.presets.seconds import (
    LINKS,
    MEMORY_BYTES_PER_SECOND,
    LinkSeconds,
    assumptions,
    seconds_by_link,
)
from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig

app = typer.Typer(add_completion=False)

_MAX_SHOWN = 8  # ranks of a group, and groups
_READ = ("train", "rollout", "model")  # sections


@app.command()
def plan(
    preset: Annotated[str, typer.Argument(help="A YAML file, or the name of a preset: qwen3_30b_a3b.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, such as train.weight_update_delta_encoding=ulp.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Speed of a rank's link, such as 25gbit; may be repeated.", show_default=" ".join(LINKS)
        ),
    ] = None,
    changed: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of changed elements, such as 0.01; may be repeated.",
            show_default=" ".join(f"{share:g}" for share in SHARES),
        ),
    ] = None,
    memory: Annotated[
        float, typer.Option(help="GB/s of a trainer rank's memory, for the seconds of detection.")
    ] = MEMORY_BYTES_PER_SECOND / 1e9,
    as_json: JsonOption = False,
) -> None:
    """Print ranks, owners, memory, bytes and seconds of an update, and the workers' environment of a run.

    Starts nothing.

    Exit codes: 0 when the run can work, 2 when a setting is refused.
    """
    try:
        with stdout_kept(as_json):
            found = plan_preset(find_preset(preset), overrides or (), changed or SHARES)
            seconds = seconds_by_link(found, link or LINKS, memory * 1e9)
    except ConfigError as error:
        refuse("plan", error)
    if as_json:
        print_json(as_data(found) | {"seconds": [asdict(row) for row in seconds]})
    else:
        show(found, Console(), seconds, memory * 1e9)


def plan_preset(path: Path, overrides: Sequence[str] = (), shares: Sequence[float] = SHARES) -> RunPlan:
    """The plan of a preset: its sections `train`, `rollout` and `model`, after dotted changes.

    shares: of changed elements, for which the bytes of a delta are said.

    Other sections belong to the program that will run, and are not looked at. Raises ConfigError if a section
    is missing, a setting is unknown or cannot work, or a change is one of another section.
    """
    data = read_preset(path, overrides)
    missing = [name for name in _READ if name not in data]
    if missing:
        raise ConfigError(f"{path} has no section {', '.join(missing)}. Remedy: write it as in a preset")
    for override in overrides:
        if override.partition(".")[0] not in _READ:
            raise ConfigError(
                f"override {override!r}: a plan reads the sections {', '.join(_READ)} alone. "
                "Remedy: leave it out, or ask the program that reads it"
            )
    return plan_run(
        load_section(TrainEngineConfig, data, "train"),
        load_section(RolloutConfig, data, "rollout"),
        load_section(ModelShape, data, "model"),
        shares,
    )


def as_data(found: RunPlan) -> dict[str, object]:
    """The plan as plain data, with its sums."""
    data = asdict(found)
    data["parameters"]["total"] = found.parameters.total
    data["trainer_memory"]["total"] = found.trainer_memory.total
    data["engine_memory"]["total"] = found.engine_memory.total
    return data


def show(
    found: RunPlan,
    console: Console,
    seconds: Sequence[LinkSeconds] | None = None,
    memory: float = MEMORY_BYTES_PER_SECOND,
) -> None:
    """Print a plan for people. `memory` is bytes per second, which the seconds assume."""
    if seconds is None:
        seconds = seconds_by_link(found, LINKS, memory)
    world_size = found.num_trainer_ranks + found.num_engine_ranks
    counts = found.parameters
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_row("trainer", f"{found.trainer}: {found.num_trainer_ranks} ranks")
    rows.add_row("engines", f"{found.engine}: {found.num_engine_ranks} ranks, {found.num_replicas} replicas")
    rows.add_row(
        "world",
        f"{found.num_trainer_ranks} + {found.num_engine_ranks} = {world_size} ranks, "
        f"{found.rounds} rounds: allowed",
    )
    rows.add_row("parameters", f"{counts.total:,}, of which experts {counts.experts:,}")
    for owners in found.owners:
        groups = _first("  ", [_first("+", group) for group in owners.groups])
        rows.add_row("owners", f"{owners.kind}: trainer ranks {groups}")
    rows.add_row("memory, trainer rank", _memory(found.trainer_memory))
    rows.add_row("", f"and in a full sync up to {_size(found.conversion_bytes)} of converted weights")
    largest = max(row.changed_share for row in found.traffic)
    rows.add_row(
        "", f"and in a delta of {largest:.1%} {_size(found.detection_bytes)} of positions, and frames"
    )
    if found.kept_bytes:
        rows.add_row("", f"and between updates {_size(found.kept_bytes)}")
    rows.add_row("memory, engine rank", _memory(found.engine_memory))
    rows.add_row("full sync", f"{_size(found.full_bytes)} over all engines")
    console.print(rows)
    console.print(_traffic(found))
    console.print(_seconds(seconds))
    console.print(assumptions(memory), highlight=False)
    console.print("# a launcher sets for every worker of both sides, as worker_environment() says:")
    for name, value in found.environment.items():
        console.print(f"export {name}={shlex.quote(value)}", markup=False, soft_wrap=True)


def _first(separator: str, items: Sequence[object]) -> str:
    """The first of them for a person; --json has all."""
    shown = separator.join(map(str, items[:_MAX_SHOWN]))
    return shown if len(items) <= _MAX_SHOWN else f"{shown}{separator}... ({len(items)} in all)"


def _traffic(found: RunPlan) -> Table:
    columns = ("encoding", "changed", "all bytes", "of full", "largest sender", "largest receiver")
    table = Table(*columns, caption=f"the settings choose {found.encoding}", caption_justify="left")
    for row in found.traffic:
        table.add_row(
            row.encoding,
            f"{row.changed_share:.1%}",
            _size(row.total_bytes),
            f"{row.of_full:.2%}",
            _size(row.largest_sender_bytes),
            _size(row.largest_receiver_bytes),
        )
    return table


def _seconds(rows: Sequence[LinkSeconds]) -> Table:
    """The encoding that takes least is marked."""
    table = Table("link", "changed", "full", *ENCODINGS, "pays below", title="seconds of an update")
    for row in rows:
        deltas = [
            f"[bold]{_time(value)}*[/bold]" if encoding == row.best else _time(value)
            for encoding, value in row.deltas.items()
        ]
        pays = f"{row.break_even:.1%}" if row.break_even else "never"
        table.add_row(row.link, f"{row.changed_share:.1%}", _time(row.full), *deltas, pays)
    return table


def _time(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"


def _memory(memory: Memory) -> str:
    parts = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    words = " + ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)
    return f"{words} = {_size(memory.total)}" if memory.gradients else words


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
