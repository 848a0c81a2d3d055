"""`awex-delta demo`: train a small model, keep engines identical to it, and prove it at every version."""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from awex_delta.cli.output import JsonOption, print_json, refuse, stdout_kept
from awex_delta.demo.scenario import DemoPlan, check_plan, choose_fault, choose_models, parse_layout
from awex_delta.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="qwen3, qwen3-moe, or both one after the other.")] = "both",
    train: Annotated[str, typer.Option(help="Trainer ranks, from tp, pp, dp and ep.")] = "dp=2",
    infer: Annotated[str, typer.Option(help="Ranks of the sharded engine: tp, and ep among them.")] = "tp=1",
    steps: Annotated[int, typer.Option(help="Optimizer steps, each followed by an update.")] = 8,
    anchor_interval: Annotated[
        int, typer.Option(help="Committed deltas between two full syncs; 0 means never.")
    ] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-6,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the batches.")] = 0,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 32.")] = 128,
    as_json: JsonOption = False,
    fault: Annotated[
        str,
        typer.Option(
            help="Break something halfway and watch the recovery: none, drop-engine (killed while it "
            "receives), fail-apply (fails while it writes), or stale-engine (loses its weights)."
        ),
    ] = "none",
    timeout: Annotated[float, typer.Option(help="Longest wait for any process, in seconds.")] = 60.0,
    host: Annotated[str, typer.Option(help="Where all ranks meet, such as ::1.")] = "127.0.0.1",
    secret_file: Annotated[str, typer.Option(help="File with a secret that all ranks share.")] = "",
) -> None:
    """Train a small Megatron model and update two inference engines after every step.

    One engine is a transformers model in one process, which generates text. The other stores its
    weights fused and sharded, as SGLang does. After each version all bits are compared.
    """
    try:
        plans = [
            DemoPlan(
                model=name,
                train=parse_layout("--train", train, ("tp", "pp", "dp", "ep")),
                infer=parse_layout("--infer", infer, ("tp", "ep")),
                steps=steps,
                anchor_interval=anchor_interval,
                lr=lr,
                seed=seed,
                layers=layers,
                hidden=hidden,
                fault=choose_fault(fault),
                timeout_seconds=timeout,
                host=host,
                secret_source=secret_file and f"file:{Path(secret_file).absolute()}",
            )
            for name in choose_models(model)
        ]
        for plan in plans:
            check_plan(plan)
    except ConfigError as error:
        refuse("demo", error)
    # A polite kill must run the same clean-up as Ctrl-C.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        code = _run(plans, as_json=as_json)
    finally:
        signal.signal(signal.SIGTERM, before)
    raise typer.Exit(code=code)


def _run(plans: list[DemoPlan], *, as_json: bool) -> int:
    """Import what is heavy only now, while the fork server imports what is heavier."""
    with stdout_kept(as_json), tempfile.TemporaryDirectory(prefix="awex-delta-demo-") as folder:
        importlib.import_module("awex_delta.testing.fleet").warm_up()
        finished = importlib.import_module("awex_delta.demo.show").run_all(plans, Path(folder))
    if as_json:
        print_json(importlib.import_module("awex_delta.demo.record").as_data(finished))
    return 0 if all(run.result.passed for run in finished) else 1


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
