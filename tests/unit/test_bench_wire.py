"""The record of `awex-delta bench wire`: its rows, and bytes that hold at any speed of the machine."""

from __future__ import annotations

import json
from itertools import cycle

import pytest
import torch
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.wire.registry import CODECS
from benchmarks.wire import STEP, Update, entropy_bytes, measure, simulated

FIELDS = {
    *("scenario", "encoding", "changed_share", "bytes_per_change", "entropy_bytes_per_change"),
    *("encode_changes_per_second", "decode_changes_per_second"),
}


def test_the_command_prints_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = simulated(STEP, 300_000)
    monkeypatch.setattr("benchmarks.wire.demo", lambda: changes)
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["bench", "wire", "--elements", "1000000", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    record = json.loads(result.stdout)
    rows = record["rows"]
    scenarios = {row["scenario"] for row in rows}
    assert len(scenarios) == 3
    assert {(row["scenario"], row["encoding"]) for row in rows} == {
        (scenario, encoding) for scenario in scenarios for encoding in (*CODECS, "xor_zstd")
    }
    assert all(set(row) == FIELDS for row in rows)
    best = {row["scenario"]: row["bytes_per_change"] for row in rows if row["encoding"] == "ulp_zstd"}
    for row in rows:
        limit = {"indices": 6.01, "gaps": 3.05, "ulp": 2.05, "ulp_zstd": 1.20}.get(row["encoding"])
        if row["scenario"].startswith("simulated"):
            assert 0.015 < row["changed_share"] < 0.08
            assert limit is None or row["bytes_per_change"] <= limit
            assert best[row["scenario"]] <= 1.10 * row["entropy_bytes_per_change"]
            if row["encoding"] == "xor_zstd":
                assert row["bytes_per_change"] >= 1.9 * best[row["scenario"]]


def test_detection_finds_all_that_the_simulated_step_changed() -> None:
    update = simulated(STEP, 100_000)
    assert update.num_elements == 100_000
    missed = update.before.view(torch.int16) != update.after.view(torch.int16)
    missed[update.changes.pos] = False
    assert not missed.any()


def test_entropy_of_known_symbols() -> None:
    assert entropy_bytes(torch.arange(1024)) == pytest.approx(1280)
    assert entropy_bytes(torch.zeros(9)) == 0


def test_rows_mean_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four changes in sixteen elements, each a gap of 3 and a step of 1; encoding takes 2 s, decoding 4."""
    times = cycle([2.0, 4.0])
    monkeypatch.setattr("benchmarks.wire.seconds", lambda _: next(times))
    old = torch.full((16,), 1.0, dtype=torch.bfloat16)
    pos = torch.tensor([3, 7, 11, 15])
    new = old.clone()
    new.view(torch.int16)[pos] += 1
    rows = measure("by hand", Update.of(pos, torch.ones(4, dtype=torch.int8), old, new), repeats=3)
    assert [row["encoding"] for row in rows] == [*CODECS, "xor_zstd"]
    for row in rows:
        assert (row["scenario"], row["changed_share"]) == ("by hand", 0.25)
        assert (row["encode_changes_per_second"], row["decode_changes_per_second"]) == (2.0, 1.0)
        assert row["entropy_bytes_per_change"] == 0  # all gaps and all steps are equal
    # A header, four positions of 4 bytes and four values of 2.
    assert rows[0]["bytes_per_change"] == (120 + 16 + 8) / 4
