"""The report in a real browser: no complaints, no requests, figures that fit, numbers that are the run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.observe.runlog.writer import RunLog
from awex_delta.protocol.stats import PartCount, UpdateStats
from awex_delta.protocol.verdict import Kind, Reason, Verdict
from awex_delta.settings.agreed import DeltaSettings
from tests.browser import Browser, find_browser

CHROMIUM = find_browser()
HOSTILE = '<script>document.title="taken"</script><img src=x onerror="document.title=1">&amp;$x$'
NUM_VERSIONS = 12

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]


def verdict(version: int) -> Verdict:
    if version == 1:
        return Verdict(kind=Kind.FULL, reason=Reason.FIRST_SYNC)
    if version in (5, 10):
        return Verdict(kind=Kind.FULL, reason=Reason.ANCHOR_DUE, ranks=(2, 3))
    if version == 7:
        return Verdict(kind=Kind.FULL, reason=Reason.STEP_GAP, ranks=(3,), detail=HOSTILE)
    return Verdict(kind=Kind.DELTA, reason=Reason.NONE)


def write_run(path: Path) -> None:
    """A run with deltas, anchors, a fallback, a failure, two ranks, digests, and hostile names."""
    logs = [
        RunLog(path, rank=rank, num_ranks=2, model=HOSTILE, settings=DeltaSettings(), topology={"a": HOSTILE})
        for rank in range(2)
    ]
    for version in range(1, NUM_VERSIONS + 1):
        delta = verdict(version).kind is Kind.DELTA
        changed = 1000 * version + 7 if delta else 0
        stats = UpdateStats(
            version=version,
            verdict=verdict(version),
            total_wire_bytes=6 * changed if delta else 4_000_000,
            total_changed=2 * changed,
            total_owned=1_000_000 if delta else 0,
            full_bytes=4_000_000,
            seconds={"connect": 3.0 if version == 1 else 0.0, "detect": 0.25, "transfer": 0.5},
        )
        for rank, log in enumerate(logs):
            if version == 7:
                log.append_failure(version, RuntimeError(HOSTILE))
            parts = [PartCount(layer=i, kind=kind, changed=changed // 6, owned=80_000 + rank)
                     for i in range(3) for kind in ("attention", f"{HOSTILE}-mlp")]  # fmt: skip
            log.append(
                stats,
                changed_by=parts if delta else (),
                digests={HOSTILE: f"{version:016x}"},
                extra={"reward": version / 10, HOSTILE: 1, "name": "no number", "flag": True},
            )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder / "RUN.jsonl")
    arguments = ["report", str(folder / "RUN.jsonl"), "-o", str(folder / "report.html")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    (folder / "summary.json").write_text(result.stdout)
    return folder


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(str(CHROMIUM), tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1000, 900)
        browser.open((run / "report.html").as_uri())
        yield browser


def numbers(page: Browser, table: str) -> list[list[float | None]]:
    """The exact numbers of a table, by row."""
    script = f"""[...document.querySelectorAll('#{table} tbody tr')].map(row =>
        [...row.querySelectorAll('td.number')].map(cell =>
            cell.querySelector('data') ? Number(cell.querySelector('data').value) : null))"""
    found: list[list[float | None]] = page.evaluate(script)
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_nothing_is_complained_of_and_nothing_fetched(run: Path, page: Browser) -> None:
    assert page.complaints == []
    assert page.requests == [(run / "report.html").as_uri()]


def test_hostile_texts_stay_texts(page: Browser) -> None:
    assert page.evaluate("document.title") == f"Weight updates of {HOSTILE}"
    assert page.evaluate("document.querySelectorAll('script, img').length") == 0
    assert page.evaluate("document.body.innerText.split('<script>').length") > 4
    assert page.evaluate("document.querySelector('h1').textContent") == f"Weight updates of {HOSTILE}"
    labels = "[...document.querySelectorAll('#heat svg text')].some(t => t.textContent.includes('$x$'))"
    assert page.evaluate(labels) is True


def test_every_update_is_a_row_with_the_numbers_of_the_log(run: Path, page: Browser) -> None:
    expected = []
    for line in lines_of(run / "RUN.jsonl"):
        seconds = line["seconds"]
        expected.append(
            [
                line["version"],
                line["total_changed"],
                line["total_changed"] / line["total_owned"] if line["total_owned"] else None,
                line["total_wire_bytes"],
                line["total_wire_bytes"] / line["full_bytes"] if line["full_bytes"] else None,
                seconds["detect"] + seconds["transfer"] if seconds else None,
            ]
        )
    assert len(expected) == NUM_VERSIONS + 1
    assert numbers(page, "updates") == expected


def test_counts_by_layer_and_kind_are_the_sums_of_both_ranks(run: Path, page: Browser) -> None:
    sums: dict[tuple[int, str], list[int]] = {}
    for rank_file in ("RUN.jsonl", "RUN.rank1.jsonl"):
        for line in lines_of(run / rank_file):
            for part in line["changed_by"]:
                place = sums.setdefault((part["layer"], part["kind"]), [0, 0])
                place[0] += part["changed"]
                place[1] += part["owned"]
    assert len(sums) == 6
    found = numbers(page, "parts")
    assert found == [[None, changed, owned, changed / owned] for changed, owned in sums.values()]


def test_the_summary_agrees_with_the_log(run: Path, page: Browser) -> None:
    summary = json.loads((run / "summary.json").read_text())
    committed = [line for line in lines_of(run / "RUN.jsonl") if line["kind"] != "aborted"]
    deltas = [line for line in committed if line["kind"] == "delta"]
    assert summary["total_wire_bytes"] == sum(line["total_wire_bytes"] for line in committed)
    assert summary["delta_ratio"] == sum(d["total_wire_bytes"] for d in deltas) / (4_000_000 * len(deltas))
    assert (summary["num_deltas"], summary["num_expected_full"], summary["num_fallbacks"]) == (8, 3, 1)
    assert summary["num_aborted"] == 1
    shown = page.evaluate("Object.fromEntries([...document.querySelectorAll('.figures-of-merit > div')].map("
                          "d => [d.id, Number(d.querySelector('data').value)]))")  # fmt: skip
    assert shown == {name: summary[name] for name in shown if name != "unplanned"} | {"unplanned": 2}
    rows = page.evaluate("[...document.querySelectorAll('#causes tbody tr')].map(r => r.innerText)")
    assert len(rows) == 4
    assert "did not commit" in rows[0]
    assert ("STEP_GAP" in rows[1], HOSTILE in rows[1], "seat 3" in rows[1]) == (True, True, True)


# Of every figure that is shown: left, right, height; and the height of its smallest text.
FIGURES = """[...document.querySelectorAll('figure svg')].filter(s => s.clientWidth).map(s => {
    const box = s.getBoundingClientRect();
    const texts = [...s.querySelectorAll('text')].map(t => t.getBoundingClientRect().height);
    return [box.left, box.right, box.height, Math.min(...texts), s.getAttribute('aria-label').length]; })"""

# What is drawn as text, and first what it is drawn on: red, green, blue.
COLOURS = r"""['--paper', '--ink', '--muted', '--accent', '--warn'].map(name => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = `var(${name})`;
    const parts = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
    probe.remove();
    return parts; })"""


@pytest.mark.parametrize("width", [390, 1000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_there_fit_and_can_be_read(width: int, scheme: str, page: Browser) -> None:
    page.resize(width, 800)
    page.media(scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figures = page.evaluate(FIGURES)
    assert len(figures) == 6  # changed, heat, bytes, phases, and two metrics
    for left, right, height, smallest_text, description in figures:
        assert left >= 0
        assert right <= width
        assert height > 100
        assert smallest_text >= 8
        assert description > 20
    paper, *inks = map(luminance, page.evaluate(COLOURS))
    assert (paper > 0.5) is (scheme == "light")
    # The contrast that small text needs, by WCAG.
    assert all((max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5 for ink in inks)


def luminance(colour: list[float]) -> float:
    """Relative luminance of an sRGB colour, by WCAG's formula."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in colour[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_are_the_schemes_own(page: Browser) -> None:
    script = "getComputedStyle(document.querySelector('#heat svg [style*=heat]')).fill"
    page.media(scheme="light")
    light = page.evaluate(script)
    page.media(scheme="dark")
    assert page.evaluate(script) not in (light, "none", "rgb(0, 0, 0)")


def test_in_print_all_numbers_are_shown_on_white(page: Browser) -> None:
    page.resize(1000, 900)
    page.media(scheme="dark", kind="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.querySelector('#updates').getBoundingClientRect().height") > 100
    page.media()


def test_identifiers_are_unique_and_resolve(page: Browser) -> None:
    assert page.evaluate("""(() => {
        const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
        const used = [...document.body.innerHTML.matchAll(/(?:url\\(#|href="#)([^)"]+)/g)].map(m => m[1]);
        return [ids.length - new Set(ids).size, used.filter(u => !ids.includes(u)).length];
    })()""") == [0, 0]
