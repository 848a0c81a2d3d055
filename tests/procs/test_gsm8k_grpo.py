"""The GRPO example: it learns, and with deltas it is bit for bit the training that it is with full syncs."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from awex_delta.observe.runlog.reader import read_run
from awex_delta.observe.runlog.writer import UpdateLine
from awex_delta.testing.fleet import warm_up
from examples.gsm8k_grpo import train

ROOT = Path(__file__).parents[2]
SMALL = (
    *(
        "model.hidden_size=128",
        "model.num_hidden_layers=2",
        "model.head_dim=32",
        "model.intermediate_size=384",
    ),
    *("warmup.steps=14", "warmup.lr=3e-3", "warmup.batch_size=32"),
    *("optimizer.lr=1e-3", "grpo.prompts=32", "grpo.num_updates=24", "data.limit=32"),
    *("train.weight_update_anchor_interval=8", "train.weight_update_timeout_seconds=200.0"),
)


class Training:
    """One run of the program, forked from a server that has imported what is heavy."""

    def __init__(self, folder: Path, name: str, preset: str, overrides: Sequence[str]) -> None:
        warm_up()
        self.log, self._output = folder / f"{name}.jsonl", folder / f"{name}.txt"
        arguments = [preset, *overrides, f"run.log={self.log}"]
        context = multiprocessing.get_context("forkserver")
        self._process: BaseProcess = context.Process(target=run_program, args=(arguments, self._output))
        self._process.start()

    def lines(self) -> tuple[UpdateLine, ...]:
        """Wait for its end; what it did, version by version."""
        self._process.join(560)
        assert self._process.exitcode == 0, self._output.read_text()[-4000:]
        return read_run(self.log).updates

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def lines_of(runs: Sequence[Training]) -> list[tuple[UpdateLine, ...]]:
    """Of all of them, at the end of all of them."""
    try:
        return [run.lines() for run in runs]
    finally:
        for run in runs:
            run.close()


def run_program(arguments: Sequence[str], output: Path) -> None:
    """In a new process: what a person starts with these arguments."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.argv = ["train", *arguments]
    train.main()


def rewards(lines: Sequence[UpdateLine]) -> list[float]:
    return [float(line.extra["reward"] or 0.0) for line in lines]


@pytest.mark.timeout(600)
@pytest.mark.all
def test_it_learns_and_is_the_same_training_with_full_syncs(tmp_path: Path) -> None:
    off = "train.enable_delta_weight_update=false"
    runs = [
        Training(tmp_path, "delta", "tiny_cpu", SMALL),
        Training(tmp_path, "full", "tiny_cpu", [*SMALL, off]),
        Training(tmp_path, "other", "tiny_cpu", [*SMALL, "run.seed=1"]),
    ]
    delta, full, other = lines_of(runs)
    assert [line.version for line in delta] == list(range(1, 26))
    assert [line.version for line in delta if line.kind == "full"] == [1, 10, 19]
    assert {line.kind for line in full} == {"full"}
    for ours, theirs in zip(delta, full, strict=True):
        assert ours.extra == theirs.extra, f"version {ours.version}"  # reward, tokens and weights
    for line in delta:
        assert line.kind == "full" or 0 < line.total_wire_bytes < 0.6 * line.full_bytes
    for lines in (delta, other):
        history = rewards(lines)
        # A mean of five rounds of 256 samples has a standard deviation below 0.015.
        assert sum(history[-5:]) / 5 > sum(history[:5]) / 5 + 0.25, history


@pytest.mark.timeout(600)
@pytest.mark.all
def test_four_minibatches_a_round_travel_in_one_delta(tmp_path: Path) -> None:
    few = [*SMALL, "grpo.num_updates=3", "optimizer.lr=5e-5"]
    runs = [
        Training(tmp_path, "delta", "tiny_accumulate", few),
        Training(tmp_path, "full", "tiny_accumulate", [*few, "train.enable_delta_weight_update=false"]),
    ]
    delta, full = lines_of(runs)
    assert [line.kind for line in delta] == ["full", "delta", "delta", "delta"]
    assert [line.extra for line in delta] == [line.extra for line in full]
    assert all(line.total_changed for line in delta[1:])


@pytest.mark.timeout(600)
def test_vllm_samples_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
    log = tmp_path / "vllm.jsonl"
    # As a person starts it.
    command = [sys.executable, "-W", "ignore", "-m", "examples.gsm8k_grpo.train", "tiny_vllm", *SMALL]
    done = subprocess.run(
        [*command, "grpo.num_updates=2", f"run.log={log}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_run(log).updates
    assert [line.kind for line in lines] == ["full", "delta", "delta"]
    # What vLLM says at once earns as much as what a transformers model of the same weights says.
    assert 0.2 < rewards(lines)[0] < 0.6
