"""What `make gpu` runs, with small sizes on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    return gpu.main()


def test_everything_is_written_to_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "new" / "gpu.json"
    options = ["--device", "cpu", "--elements", "70000", "--tensors", "24", "--repeats", "1"]
    assert run(monkeypatch, "--out", str(out), *options) == 0
    record = json.loads(out.read_text())
    assert record["passed"] is True
    found = record["detection"]
    assert (found["elements"], found["num_missed"], found["goal"]) == (70_000, 0, 0.85)
    assert 0.002 < found["changed_share"] < 0.05
    assert 0 <= found["extra_share"] < 0.2
    assert [row["storages"] for row in record["mapping"]] == ["fused", "one_a_tensor"]
    assert all(row["identical"] and row["tensors"] == 24 for row in (*record["mapping"], *record["updates"]))


def test_without_a_device_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "--out", str(tmp_path / "gpu.json")) == 0
    assert "skipped" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
