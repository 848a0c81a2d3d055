"""What `awex-delta bench sync` says where no vLLM is installed, and how temporaries are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from awex_delta.cli.bench import LIVE_FIELDS
from awex_delta.cli.main import app
from benchmarks import live
from benchmarks.temporaries import LargestNew


def test_without_vllm_the_numbers_are_null_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.live.find_spec", lambda _: None)
    fields = ("parameters", "changed_share", "bytes_per_change", "delta_over_full_bytes")
    told: list[object] = []
    others = (
        "delta_over_full_seconds",
        "delta_seconds",
        "full_seconds",
        "training_collective_bytes",
    )
    summary: dict[str, Any] = {**dict.fromkeys((*fields, *others), 1.0), "identical": True}
    summary["encoding"] = "ulp_zstd"

    def measure(*given: object) -> dict[str, Any]:
        told.extend(given)
        return summary

    monkeypatch.setattr("benchmarks.sync._run_ranks", measure)
    words = ["bench", "sync", "--lr", "3e-6", "--encoding", "ulp_zstd", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "vLLM is not installed: make vllm" in result.stderr
    record = json.loads(result.stdout)
    assert told[2:4] == [3e-6, "ulp_zstd"]
    assert LIVE_FIELDS == live.KEYS
    assert {key: record[key] for key in live.KEYS} == dict.fromkeys(live.KEYS)
    assert record["live"]["reason"] == "vLLM is not installed: make vllm"


def test_only_new_storage_counts_as_a_temporary() -> None:
    weight = torch.zeros(1000)
    with LargestNew() as seen:
        weight.view(10, 100)[3].add_(1)
        weight.index_copy_(0, torch.arange(5), torch.ones(5))
    assert seen.num_bytes == 40
    assert seen.num_operations >= 5
    with LargestNew() as seen:
        torch.where(weight.isnan(), weight, weight, out=weight)
    assert seen.num_bytes == 1000
    with LargestNew() as seen:
        torch.full((2000,), 1.0)
        weight[:3].clone()
    assert seen.num_bytes == 8000
