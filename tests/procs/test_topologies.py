"""Layouts that do not match, with real Megatron trainers: every bit, across an anchor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.test_demo import check_promises, kinds, run_demo_here

pytestmark = pytest.mark.timeout(240)

LAYOUTS = {
    "fewer key-value heads than engine ranks": ("qwen3", "tp=1", "tp=4"),
    "four trainer ranks to one engine rank": ("qwen3", "tp=2,dp=2", "tp=1"),
    "experts owned in parts to tensor-parallel experts": ("qwen3-moe", "ep=2,dp=2", "tp=2"),
    "a tied head on the last stage": ("qwen3", "pp=2", "tp=2"),
    "three owners": ("qwen3", "dp=3", "tp=2"),
    "stages and experts to other experts": ("qwen3-moe", "pp=2,ep=2", "tp=4,ep=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_versions_are_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    model, train, infer = LAYOUTS[layout]
    report, _ = run_demo_here(
        tmp_path,
        monkeypatch,
        *("--model", model, "--train", train, "--infer", infer),
        *("--steps", "8", "--anchor-interval", "3", "--hidden", "64"),
    )
    (run,) = report["runs"]
    check_promises(run)
    full = {1, 5}
    assert kinds(run) == [(v, "full" if v in full else "delta") for v in range(1, 9)]
