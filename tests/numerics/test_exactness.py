"""A part of what make exactness judges, and that it goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from awex_delta.detection import moves
from awex_delta.lines.compiling import SHORTEST_COMPILED
from tests.numerics import exactness
from tests.numerics.test_oracle import FORWARDS, ROW, WEIGHTS


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["exactness", *arguments])
    exactness.main()


def test_it_goes_on_where_it_was_and_counts_every_element_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "deep" / "exactness.json"
    run(monkeypatch, "--elements", "1", "--record", str(record))
    first = json.loads(record.read_text())
    run(monkeypatch, "--elements", str(2 * ROW), "--record", str(record))
    both = json.loads(record.read_text())
    assert (first["parts"], both["parts"]) == (1, 2)
    assert first["totals"].items() <= both["totals"].items()
    judged = {"eager": 0, "compiled": 0, "capture eager": 0, "capture compiled": 0}
    for where, counts in both["totals"].items():
        judged[where.split(" | ")[1]] += counts["elements"]
    assert judged == dict.fromkeys(judged, 2 * ROW)
    assert len(both["totals"]) == 2 * 4 * len(WEIGHTS)  # the first two parts are of two forms
    assert {where.split(" | ")[0] for where in both["totals"]} == set(list(FORWARDS)[:2])


def test_the_pages_hold_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for page in exactness.PAGES:
        assert exactness.TABLE.search(page.read_text()), page
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text("before\n\n<!-- exactness -->\n\nold\n\n<!-- /exactness -->\n\nafter\n")
    total = {"elements": 2_000_000, "changed": 20_000, "missed": 0, "extra": 40}
    rare = {"elements": 1_000_000, "changed": 10_000, "missed": 0, "extra": 50}
    totals = {
        "torch fused | compiled | normal | 1e-06": total,
        "in update | compiled | normal | 1e-06": rare,
        "in update | eager | normal | 1e-06": total,
        "in update | compiled | awkward | 1e-06": total,
    }
    record.write_text(json.dumps({"parts": 1, "totals": totals}))
    words = exactness.PAGES[exactness.ENGLISH]
    monkeypatch.setattr(exactness, "PAGES", {page: words})
    run(monkeypatch, "--pages", "--record", str(record))
    row = "| normal | 1e-06 | 3,000,000 | 1.00% | 0 | 0.500% |"
    table = f"{words['head']}\n|---|---|---|---|---|---|\n{row}"
    assert page.read_text() == (f"before\n\n<!-- exactness -->\n\n{table}\n\n<!-- /exactness -->\n\nafter\n")


def test_the_compiled_capture_is_judged_too() -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.int32)
    assert moves._compiled(moves.moves, "cpu", dtypes) is not None, "this machine needs a compiler for it"
    assert min(numel for _, numel in WEIGHTS.values()) >= SHORTEST_COMPILED


@pytest.mark.all
@pytest.mark.timeout(600)
def test_a_hundred_million_elements_miss_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--elements", "1e8", "--record", str(tmp_path / "exactness.json"))
