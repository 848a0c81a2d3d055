"""The report's sums and words, and runs of unusual shapes; the page itself is tested in a browser."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.observe.report import words
from awex_delta.observe.report.page import render
from awex_delta.observe.report.summary import causes, summarize
from awex_delta.observe.runlog.reader import RunHistory, read_run
from awex_delta.observe.runlog.writer import RunHeader, RunLog, UpdateLine
from awex_delta.protocol.stats import PartCount, UpdateStats
from awex_delta.protocol.verdict import Kind, Reason, Verdict

HEADER = RunHeader(started=0.0)


def line(version: int, kind: str = "delta", reason: str = "NONE", **fields: object) -> UpdateLine:
    return UpdateLine.model_validate({"time": 0, "version": version, "kind": kind, "reason": reason} | fields)


def page_of(*updates: UpdateLine) -> str:
    return render(RunHistory(headers=(HEADER,), updates=updates))


CONNECTED = {"connect": 9, "transfer": 4}
UPDATES = [
    line(
        1, "full", "FIRST_SYNC", total_wire_bytes=100, full_bytes=100, seconds={"connect": 9, "transfer": 4}
    ),
    line(2, total_wire_bytes=10, full_bytes=100, total_changed=1, total_owned=50, seconds={"detect": 1}),
    line(3, "aborted", "PeerError", text="gone"),
    line(3, "full", "PREVIOUS_ABORTED", total_wire_bytes=100, full_bytes=100, seconds={"transfer": 2}),
    line(4, total_wire_bytes=30, full_bytes=100, total_changed=4, total_owned=50, seconds={"detect": 2}),
    line(5, "full", "STEP_GAP", detail="first", seats=[3], total_wire_bytes=100, full_bytes=100),
    line(6, "full", "STEP_GAP", detail="", seats=[2], total_wire_bytes=100, full_bytes=100),
    line(7, "full", "ANCHOR_DUE", total_wire_bytes=100, full_bytes=100, seconds={"transfer": 6}),
]


def test_the_summary_of_a_run() -> None:
    summary = summarize(UPDATES)
    assert (summary.num_updates, summary.num_deltas, summary.num_aborted) == (8, 2, 1)
    assert (summary.num_expected_full, summary.num_fallbacks) == (2, 3)
    assert (summary.total_wire_bytes, summary.all_full_bytes, summary.ratio) == (540, 700, 540 / 700)
    assert (summary.delta_ratio, summary.delta_share, summary.delta_seconds) == (0.2, 0.05, 1.5)
    assert summary.full_seconds == 2.0  # of 4, 2, 0, 0 and 6; connecting does not count
    assert (summary.first_version, summary.last_version) == (1, 7)


def test_causes_come_with_failures_and_fallbacks_first() -> None:
    found = [(cause.reason, cause.expected, cause.versions) for cause in causes(UPDATES)]
    assert found == [
        ("PeerError", False, (3,)),
        ("STEP_GAP", False, (5, 6)),
        ("PREVIOUS_ABORTED", False, (3,)),
        ("FIRST_SYNC", True, (1,)),
        ("ANCHOR_DUE", True, (7,)),
    ]
    gap = causes(UPDATES)[1]
    assert (gap.detail, gap.seats) == ("first", (2, 3))


@pytest.mark.parametrize(
    ("said", "words_"),
    [
        (words.percent(0.0), "0 %"),
        (words.percent(0.0000123), "0.0012 %"),
        (words.percent(0.012345), "1.23 %"),
        (words.percent(0.12345), "12.3 %"),
        (words.percent(1.0), "100 %"),
        (words.size(999), "999 B"),
        (words.size(1_675_776), "1.68 MB"),
        (words.seconds(0.0853), "85.3 ms"),
        (words.seconds(125), "2 min 5 s"),
        (words.short("a" * 26), "a" * 26),
        (len(words.short("a" * 99)), 26),
        (words.numbers([7, 1, 2, 3, 9, 10]), f"1{words.NONE}3, 7, 9, 10"),
        (words.numbers(range(0, 40, 2), limit=2), "0, 2 and 18 more"),
    ],
)
def test_numbers_in_words(said: object, words_: object) -> None:
    assert (said.replace("\N{NO-BREAK SPACE}", " ") if isinstance(said, str) else said) == words_


def test_a_run_without_updates_has_a_page() -> None:
    page = page_of()
    assert "No update was attempted." in page
    assert "<svg" not in page


def test_runs_without_deltas_or_without_commits_have_a_page() -> None:
    assert len(re.findall("<section id=", page_of(UPDATES[0]))) == 2  # bytes, and phases
    assert "did not commit" in page_of(UPDATES[2])


def test_a_delta_that_sent_nothing_and_counts_of_zero() -> None:
    parts = [
        {"layer": 0, "kind": "mlp", "changed": 0, "owned": 0},
        {"layer": 1, "kind": "mlp", "changed": 0, "owned": 5},
    ]
    page = page_of(line(2, total_owned=50, full_bytes=100, changed_by=parts))
    assert "Where it changed" in page


def test_a_long_run_with_restarts_is_drawn_in_order() -> None:
    many = [
        line(v, total_wire_bytes=v, full_bytes=900, total_changed=v, total_owned=900, seconds=CONNECTED)
        for v in [*range(1, 200), *range(100, 300)]
    ]
    page = page_of(*many)
    assert ">update</text>" in page  # versions go back, so the axis counts updates
    assert page.count("<tr>") == 1 + len(many)


def test_the_same_run_makes_the_same_page() -> None:
    assert page_of(*UPDATES) == page_of(*UPDATES)


def write_run(path: Path, model: str = "") -> None:
    log = RunLog(path, model=model)
    verdict = Verdict(kind=Kind.DELTA, reason=Reason.NONE)
    stats = UpdateStats(
        version=3, verdict=verdict, total_changed=2, total_owned=8, full_bytes=9, total_wire_bytes=3
    )
    log.append(stats, changed_by=[PartCount(layer=None, kind="norm", changed=2, owned=8)])


def test_the_command_writes_the_page_and_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path / "RUN.jsonl")
    page = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "RUN.jsonl"), "-o", str(page), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["delta_share"] == 0.25
    assert page.read_text() == render(read_run(tmp_path / "RUN.jsonl"))


@pytest.mark.parametrize(
    ("model", "named"), [("", "night <3>.jsonl"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")]
)
def test_a_page_is_called_after_the_model_or_else_the_file(model: str, named: str, tmp_path: Path) -> None:
    write_run(tmp_path / "night <3>.jsonl", model)
    page = render(read_run(tmp_path / "night <3>.jsonl"))
    for tag in ("title", "h1"):
        assert f"<{tag}>Weight updates of {html.escape(named)}</{tag}>" in page
    assert "from night &lt;3&gt;.jsonl.</footer>" in page


def test_the_command_refuses_before_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "RUN.jsonl")
    run, absent = str(tmp_path / "RUN.jsonl"), str(tmp_path / "absent" / "file")
    for arguments in (["-o", absent], ["-o", str(tmp_path)]):
        result = CliRunner().invoke(app, ["report", run, *arguments])
        assert result.exit_code == 2
        assert "cannot be written" in " ".join(result.output.replace("│", " ").split())
    result = CliRunner().invoke(app, ["report", absent, "-o", str(tmp_path / "new.html")])
    assert (result.exit_code, "cannot be read" in result.output) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN.jsonl"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [
        name for name in sys.modules if name.startswith(("awex_delta.observe.report.", "matplotlib."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(app, ["report", run, "-o", str(tmp_path / "new.html")])
    assert (result.exit_code, "awex-delta[report]" in result.output) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "run", "started": NaN}',
        '{"type": "run", "started": 1e300}',
        '{"type": "run", "started": 0, "num_ranks": 1000000000000}',
        '{"type": "update", "time": 0, "version": 1, "kind": "delta", "total_wire_bytes": 1'
        + "0" * 400
        + "}",
        '{"type": "update", "time": 0, "version": 1, "kind": "delta", "total_changed": -5}',
        '{"type": "update", "time": 0, "version": 1, "kind": "delta", "seconds": {"encode": NaN}}',
        '{"type": "update", "time": 0, "version": 1, "kind": "delta", "seconds": {"encode": 1e999}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:80],
)
def test_numbers_that_no_training_writes_are_refused_by_their_line(text: str, tmp_path: Path) -> None:
    run = tmp_path / "RUN.jsonl"
    run.write_text(f"{HEADER.model_dump_json()}\n{text}\n{line(2).model_dump_json()}\n")
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "report.html")])
    assert (result.exit_code, "line 2" in result.output) == (2, True)
    assert not (tmp_path / "report.html").exists()


def test_a_kind_that_looks_like_a_colour_is_drawn_as_text() -> None:
    part = {"layer": 0, "kind": "#01ffff", "changed": 5, "owned": 100}
    page = page_of(line(1, total_changed=5, total_owned=100, changed_by=[part]))
    assert "<code>#01ffff</code>" in page


def test_the_run_is_never_written_over(tmp_path: Path) -> None:
    run = tmp_path / "RUN.jsonl"
    RunLog(run)
    before = run.read_bytes()
    (tmp_path / "link").symlink_to(run)
    for target in (run, tmp_path / "link"):
        result = CliRunner().invoke(app, ["report", str(run), "-o", str(target)])
        assert (result.exit_code, run.read_bytes()) == (2, before)
