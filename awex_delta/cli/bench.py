"""`awex-delta bench`: the benchmarks of a source checkout, each one run with ratios."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from awex_delta.cli.output import JsonOption, print_json, stdout_kept
from awex_delta.errors import ConfigError
from awex_delta.settings.schema import DeltaMethod
from awex_delta.wire.choice import AUTO
from awex_delta.wire.registry import CODECS, codecs_for

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure detection, encodings and synchronization on this machine.",
)

METHODS: tuple[str, ...] = get_args(DeltaMethod)
DETECT_FIELDS = (
    *("ratio_to_copy_bound", "speedup_over_eager", "elements_per_second", "peak_extra_bytes"),
    *("digest_over_detect", "digest_engine_over_detect", "digest_all_over_detect"),
)
METHOD_FIELDS = (
    *("elements_per_second", "bytes_per_element", "num_missed", "extra_share", "seconds_in_step"),
    *("seconds_in_update", "kept_bytes_per_element", "peak_extra_bytes"),
)
SCALE_FIELDS = (
    *("tensors", "storages", "encoding", "identical", "changed_share", "connect_seconds", "delta_seconds"),
    *("full_seconds", "delta_over_full_seconds", "full_digest_over_transfer", "microseconds_per_tensor"),
)
PROVE_FIELDS = ("parameters", "elements", "kinds", "seconds", "peak_bytes", "threads")
LIVE_FIELDS = ("apply_over_scatter", "vllm_sparse_over_apply", "pause_seconds")
SYNC_FIELDS = (
    *("encoding", "method", "parameters", "changed_share", "bytes_per_change", "delta_over_full_bytes"),
    *("delta_over_full_seconds", "delta_seconds", "full_seconds", "training_collective_bytes", "identical"),
    *LIVE_FIELDS,
)


@app.command()
def detect(
    as_json: JsonOption = False,
    elements: Annotated[int, typer.Option(help="Elements to detect changes in.", min=1 << 16)] = 32_000_000,
    repeats: Annotated[int, typer.Option(help="Samples of each kind.", min=1)] = 5,
) -> None:
    """Detection against a measured memory copy and eager reconstruct, cast and compare; then all methods."""
    with _measuring(as_json):
        record = _benchmark("detect").run(num_elements=elements, repeats=repeats)
    _report(record, DETECT_FIELDS, as_json=as_json)
    if as_json:
        return
    table = Table("method", *(name.replace("_", " ") for name in METHOD_FIELDS))
    for method, row in record["methods"].items():
        table.add_row(method, *(_number(row[field]) for field in METHOD_FIELDS))
    Console().print(table)


@app.command()
def sync(
    as_json: JsonOption = False,
    link: Annotated[
        str, typer.Option(help="loopback, 1gbit or 100mbit; the last two need root.")
    ] = "loopback",
    repeats: Annotated[int, typer.Option(help="Measured deltas, and as many full syncs.", min=1)] = 3,
    lr: Annotated[
        float, typer.Option(help="Learning rate of the AdamW: 1e-6 changes near 1 %, 3e-6 near 3 %.", min=0)
    ] = 1e-6,
    encoding: Annotated[
        str, typer.Option(help=f"Encoding of the deltas: {', '.join([AUTO, *CODECS])}.")
    ] = AUTO,
    method: Annotated[str, typer.Option(help=f"How changes are found: {', '.join(METHODS)}.")] = METHODS[0],
) -> None:
    """A delta against AWEX's full sync: two Megatron trainer ranks, two engine ranks, 113 million weights.

    Then deltas into a live vLLM, where it is installed, against a bare scatter and vLLM's own sparse loader.
    """
    links = _benchmark("link")
    known = [links.LOOPBACK, *links.SPEEDS]
    if link not in known:
        raise typer.BadParameter(f"{link!r} is none of {', '.join(known)}.", param_hint="--link")
    if method not in METHODS:
        raise typer.BadParameter(f"{method!r} is none of {', '.join(METHODS)}.", param_hint="--method")
    try:
        codecs_for(encoding)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--encoding") from error
    try:
        with _measuring(as_json) as stage:
            record = _benchmark("sync").run(
                link=link, repeats=repeats, lr=lr, encoding=encoding, method=method, stage=stage
            )
    except links.NoLinkError as error:
        Console(stderr=True).print(str(error))
        raise typer.Exit(2) from error
    _report(record, SYNC_FIELDS, as_json=as_json)
    if record["live"]["reason"]:
        Console(stderr=True).print(f"Nothing was measured in a live vLLM: {record['live']['reason']}")


@app.command()
def wire(
    as_json: JsonOption = False,
    elements: Annotated[int, typer.Option(help="Simulated weights.", min=1 << 16)] = 32_000_000,
    repeats: Annotated[int, typer.Option(help="Samples of each kind.", min=1)] = 7,
) -> None:
    """Every encoding against zstd over a whole-tensor XOR, and against the entropy of a change."""
    with _measuring(as_json) as stage:
        record = _benchmark("wire").run(num_elements=elements, repeats=repeats, stage=stage)
    if as_json:
        print_json(record)
        return
    table = Table("scenario", "encoding", "changed", "B/change", "entropy", "encode M/s", "decode M/s")
    for row in record["rows"]:
        table.add_row(
            row["scenario"],
            row["encoding"],
            f"{row['changed_share']:.2%}",
            f"{row['bytes_per_change']:.2f}",
            f"{row['entropy_bytes_per_change']:.2f}",
            f"{row['encode_changes_per_second'] / 1e6:.1f}",
            f"{row['decode_changes_per_second'] / 1e6:.1f}",
        )
    Console().print(table)


@app.command()
def scale(
    as_json: JsonOption = False,
    tensors: Annotated[
        int, typer.Option(help="HF tensors of the larger of two models; the other has a quarter.", min=64)
    ] = 18_867,
    elements: Annotated[int, typer.Option(help="Elements of each tensor, a multiple of 64.", min=64)] = 2048,
    changed: Annotated[
        float, typer.Option(help="About the share of the weights that a step changes.", min=0, max=0.1)
    ] = 0.01,
    encoding: Annotated[
        list[str] | None, typer.Option(help=f"Encodings of the deltas, one or more of {', '.join(CODECS)}.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measured deltas, and as many full syncs.", min=1)] = 5,
    plan: Annotated[
        str | None, typer.Option(help="Measure connecting instead: a model and ranks, qwen3_30b_a3b:8+8.")
    ] = None,
    prove: Annotated[bool, typer.Option(help="Measure the proof of relocations at connect instead.")] = False,
) -> None:
    """What an update costs by the tensor: a mixture of experts as one trainer rank and one engine rank.

    Beside it stands AWEX's full sync of the same tensors. Without --encoding two encodings are measured.
    """
    if plan is not None:
        _scale_plan(as_json, plan)
        return
    if prove:
        with _measuring(as_json):
            record = _benchmark("prove").run()
        _report(record, PROVE_FIELDS, as_json=as_json)
        return
    benchmark = _benchmark("scale")
    encodings = tuple(encoding or benchmark.ENCODINGS)
    for one in encodings:
        if one not in CODECS:
            raise typer.BadParameter(f"{one!r} is none of {', '.join(CODECS)}.", param_hint="--encoding")
    if elements % 64:
        raise typer.BadParameter(f"{elements} is not a multiple of 64.", param_hint="--elements")
    with _measuring(as_json) as stage:
        record = benchmark.run(
            tensors=tensors,
            elements=elements,
            changed=changed,
            encodings=encodings,
            repeats=repeats,
            stage=stage,
        )
    if as_json:
        print_json(record)
        return
    _show_rows(record["rows"], SCALE_FIELDS)
    _show_rows(record["slopes"], tuple(record["slopes"][0]))


def _scale_plan(as_json: bool, shape: str) -> None:
    plans = _benchmark("plans")
    if shape not in plans.SHAPES:
        raise typer.BadParameter(f"{shape!r} is none of {', '.join(plans.SHAPES)}.", param_hint="--plan")
    with _measuring(as_json):
        record = plans.run(shape)
    if as_json:
        print_json(record)
    else:
        _show_rows(record["rows"], tuple(record["rows"][0]))


@contextmanager
def _measuring(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Show in a terminal what is measured, which is told to what this gives, and for how long."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with (
        stdout_kept(as_json),
        Progress(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not console.is_terminal,
        ) as bar,
    ):
        task = bar.add_task("measuring; a minute or some", total=None)
        yield lambda stage: bar.update(task, description=stage)


def _benchmark(name: str) -> Any:
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{name}"):
            raise
        Console(stderr=True).print(
            "The benchmarks are not part of the installed package: run this from a source checkout."
        )
        raise typer.Exit(2) from error


def _report(record: dict[str, Any], fields: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    table = Table("measured", "value")
    for field in fields:
        table.add_row(field, _number(record[field]))
    for kind, phases in record.get("phases", {}).items():
        table.add_row(
            f"{kind}, seconds by phase", ", ".join(f"{name} {value:.3f}" for name, value in phases.items())
        )
    Console().print(table)


def _show_rows(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    table = Table(*(field.replace("_", " ") for field in fields))
    for row in rows:
        table.add_row(*(_number(row[field]) for field in fields))
    Console().print(table)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
