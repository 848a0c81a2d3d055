"""The oracle over ten billion elements: python -m tests.numerics.exactness, or make exactness.

It takes hours. Stopped at any moment it goes on where it was, from the record exactness.json beside it, which
it replaces after each part of half a million elements. Every part is one optimizer step in one kernel form,
judged four times: detection by inversion and by capturing the step, each eager and compiled. With --pages
the table in docs/*/numerics.md is written from the record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from awex_delta.detection.capture import StepCapture
from awex_delta.detection.invert import detect_changes
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.slices import Detection, OwnedSlice
from tests.numerics.test_oracle import FORWARDS, ROW, WEIGHTS, before_step, judge, owned_slice, steps

RECORD = Path("tests/numerics/exactness.json")
ENGLISH = Path("docs/en/numerics.md")
PAGES = {
    ENGLISH: {
        "head": "| weights | lr | elements | changed | missed | extra |",
        "normal": "normal",
        "heavy-tailed": "heavy-tailed",
    },
    Path("docs/zh/numerics.md"): {
        "head": "| 权重 | lr | 元素数 | 变化 | 漏掉 | 多发 |",
        "normal": "正态",
        "heavy-tailed": "重尾",
    },
}
TABLE = re.compile(r"(?<=<!-- exactness -->\n\n).*?(?=\n\n<!-- /exactness -->)", re.DOTALL)
SHOWN = ("normal", "heavy-tailed")

Totals = dict[str, Counter[str]]
"""By "form | pass | kind of weights | lr": what `judge` counts."""


def load(path: Path) -> tuple[int, Totals]:
    """How many parts were judged, and what was counted."""
    if not path.exists():
        return 0, {}
    record = json.loads(path.read_text())
    return record["parts"], {where: Counter(counts) for where, counts in record["totals"].items()}


def save(path: Path, parts: int, totals: Totals) -> None:
    """Replace the record as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"parts": parts, "totals": totals}, indent=1))
    beside.replace(path)


def judge_part(number: int) -> Totals:
    """Judge one step. Parts of consecutive numbers go through all forms, then through all steps.

    Raises:
        AssertionError: a change was missed, a code is wrong, or capture sends something without need.
    """
    forms, table = list(FORWARDS), steps()
    form, step = forms[number % len(forms)], table[number // len(forms) % len(table)]
    generator = torch.Generator().manual_seed(1000 + number)
    slices, olds, begin = [], {}, 0
    for kind, (draw, numel) in WEIGHTS.items():
        state = before_step(draw(numel, generator), step, generator)
        olds[kind] = state.main.detach().bfloat16()
        FORWARDS[form](state, step)
        slices.append(owned_slice(kind, state, step.step, begin=begin))
        begin += numel
    found = {
        "eager": detect_changes(slices, lambda _: step, compiled=False),
        "compiled": detect_changes(slices, lambda _: step, compiled=True),
        "capture eager": captured(slices, olds, compiled=False),
        "capture compiled": captured(slices, olds, compiled=True),
    }
    totals: Totals = {}
    for how, detection in found.items():
        assert not detection.reason, detection
        for each in slices:
            counts = judge(olds[each.param], each, detection.changes)
            where = f"{form} | {how} | {each.param} | {step.lr:.0e}"
            assert counts["missed"] == counts["wrong_codes"] == 0, f"part {number}: {where}: {dict(counts)}"
            assert "capture" not in how or not counts["extra"], f"part {number}: {where}: {dict(counts)}"
            totals[where] = counts
    return totals


def captured(slices: list[OwnedSlice], olds: dict[str, torch.Tensor], *, compiled: bool) -> Detection:
    """The same step, seen by hooks while the weights are still the old ones."""
    live = [replace(owned, weight=olds[owned.param].clone()) for owned in slices]
    stepped = {owned.key: owned.main for owned in live if owned.main is not None}
    optimizer = torch.optim.SGD(list(stepped.values()))  # without gradients it calls its hooks and no more
    baseline = StepCapture(lambda: live, [SteppedParams(optimizer, stepped)], compiled=compiled).add()
    baseline.committed()
    optimizer.step()
    for owned, new in zip(live, slices, strict=True):
        owned.weight.copy_(new.weight)
    detection = baseline.detect()
    line = torch.cat([owned.weight for owned in live])
    changes = replace(detection.changes, value=line[detection.changes.pos])
    return replace(detection, changes=changes)


def table_of(totals: Totals, words: Mapping[str, str]) -> str:
    """What a page shows of inversion; of all forms the largest share of extra."""
    sums: defaultdict[tuple[float, str], Counter[str]] = defaultdict(Counter)
    extra: defaultdict[tuple[float, str], float] = defaultdict(float)
    for where, counts in totals.items():
        _, how, kind, lr = where.split(" | ")
        if how == "compiled" and kind in SHOWN:
            sums[float(lr), kind] += counts
            extra[float(lr), kind] = max(extra[float(lr), kind], counts["extra"] / max(counts["changed"], 1))
    rows = [words["head"], "|---|---|---|---|---|---|"]
    for key in sorted(sums, key=lambda key: (key[0], SHOWN.index(key[1]))):
        (rate, kind), counts = key, sums[key]
        cells = f"{counts['elements']:,} | {counts['changed'] / counts['elements']:.2%} | {counts['missed']}"
        rows.append(f"| {words[kind]} | {rate:.0e} | {cells} | {extra[key]:.3%} |")
    return "\n".join(rows)


def main() -> None:
    """Go on with the record until enough elements are judged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=float, default=1e10)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument(
        "--pages", action="store_true", help="write the table of the pages, and judge nothing"
    )
    given = parser.parse_args()
    parts, totals = load(given.record)
    if given.pages:
        for page, words in PAGES.items():
            page.write_text(TABLE.sub(table_of(totals, words), page.read_text()))
        return
    for number in range(parts, -(-int(given.elements) // ROW)):
        for where, counts in judge_part(number).items():
            totals[where] = totals.get(where, Counter()) + counts
        save(given.record, number + 1, totals)
        print(f"\r{(number + 1) * ROW:,} elements of {given.elements:,.0f}", end="", file=sys.stderr)
    print(f"\n{table_of(totals, PAGES[ENGLISH])}")


if __name__ == "__main__":
    main()
