"""The GRPO example: it learns, and with deltas it is bit for bit the training that it is with full syncs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from awex_delta.runlog.reader import read_run
from awex_delta.runlog.writer import UpdateLine

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
    *("actor.weight_update_anchor_interval=8", "actor.weight_update_timeout_seconds=200.0"),
)


class Training:
    """One run of the program, as a person starts it."""

    def __init__(self, folder: Path, name: str, preset: str, overrides: Sequence[str]) -> None:
        self.log = folder / f"{name}.jsonl"
        self._output = (folder / f"{name}.txt").open("w+")
        command = [sys.executable, "-W", "ignore", "-m", "examples.gsm8k_grpo.train", preset]
        self._process = subprocess.Popen(
            [*command, *overrides, f"run.log={self.log}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def lines(self) -> tuple[UpdateLine, ...]:
        """Wait for its end; what it did, version by version."""
        try:
            code = self._process.wait(560)
        finally:
            self._process.kill()
            self._process.wait()
            self._output.seek(0)
            output = self._output.read()
            self._output.close()
        assert code == 0, output[-4000:]
        return read_run(self.log).updates


def rewards(lines: Sequence[UpdateLine]) -> list[float]:
    return [float(line.extra["reward"] or 0.0) for line in lines]


@pytest.mark.timeout(600)
def test_it_learns_and_is_the_same_training_with_full_syncs(tmp_path: Path) -> None:
    off = "actor.enable_delta_weight_update=false"
    runs = [
        Training(tmp_path, "delta", "tiny_cpu", SMALL),
        Training(tmp_path, "full", "tiny_cpu", [*SMALL, off]),
        Training(tmp_path, "other", "tiny_cpu", [*SMALL, "run.seed=1"]),
    ]
    delta, full, other = [run.lines() for run in runs]
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
def test_four_minibatches_a_round_travel_in_one_delta(tmp_path: Path) -> None:
    few = [*SMALL, "grpo.num_updates=3", "optimizer.lr=5e-5"]
    runs = [
        Training(tmp_path, "delta", "tiny_accumulate", few),
        Training(tmp_path, "full", "tiny_accumulate", [*few, "actor.enable_delta_weight_update=false"]),
    ]
    delta, full = [run.lines() for run in runs]
    assert [line.kind for line in delta] == ["full", "delta", "delta", "delta"]
    assert [line.extra for line in delta] == [line.extra for line in full]
    assert all(line.total_changed for line in delta[1:])


@pytest.mark.timeout(600)
def test_vllm_samples_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
    lines = Training(tmp_path, "vllm", "tiny_vllm", [*SMALL, "grpo.num_updates=2"]).lines()
    assert [line.kind for line in lines] == ["full", "delta", "delta"]
    # What vLLM says at once earns as much as what a transformers model of the same weights says.
    assert 0.2 < rewards(lines)[0] < 0.6
