"""RUN.jsonl: what is written is what is read, also after a restart, a kill, and from several ranks."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from awex_delta.errors import ConfigError
from awex_delta.observe.runlog.reader import read_run
from awex_delta.observe.runlog.tally import place_of
from awex_delta.observe.runlog.writer import RunLog, UpdateLine, rank_path
from awex_delta.protocol.stats import PartCount, UpdateStats
from awex_delta.protocol.verdict import Kind, Reason, Verdict
from awex_delta.settings.agreed import DeltaSettings

DELTA = Verdict(kind=Kind.DELTA, reason=Reason.NONE)
FULL = Verdict(kind=Kind.FULL, reason=Reason.STEP_GAP, ranks=(2, 3), detail="0/w: \u2028 two steps")


def stats(version: int, verdict: Verdict = DELTA) -> UpdateStats:
    """An update in which every number is another one."""
    return UpdateStats(
        version=version,
        verdict=verdict,
        wire_bytes=11,
        num_elements=12,
        num_changed=13,
        num_owned=14,
        total_wire_bytes=15,
        total_changed=16,
        total_owned=17,
        full_bytes=18,
        verified="touched",
        seconds={"detect": 0.25, "apply": 0.5},
    )


def part(layer: int | None, changed: int, kind: str = "mlp") -> PartCount:
    return PartCount(layer=layer, kind=kind, changed=changed, owned=100)


def test_every_field_of_the_stats_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "RUN.jsonl"
    log = RunLog(path, settings=DeltaSettings(anchor_interval=7), model="tiny", topology={"trainer": "d2"})
    log.append(stats(4, FULL), digests={"all": "ab"}, extra={"reward": 0.5, "loss": math.nan})
    header, (line,) = read_run(path).headers[0], read_run(path).updates
    assert (header.model, header.topology, header.settings["anchor_interval"]) == (
        "tiny",
        {"trainer": "d2"},
        7,
    )
    assert {"python", "torch", "awex-delta"} <= header.environment.keys()
    told = {name.name for name in fields(UpdateStats)} - {"verdict"}
    assert told <= UpdateLine.model_fields.keys()
    assert {name: getattr(line, name) for name in told} == {name: getattr(stats(4), name) for name in told}
    assert (line.kind, line.reason, line.seats, line.detail) == ("full", "STEP_GAP", (2, 3), FULL.detail)
    assert line.text == Reason.STEP_GAP.text
    assert (line.digests, line.extra) == ({"all": "ab"}, {"reward": 0.5, "loss": None})


def test_every_line_is_json_of_its_own(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "RUN.jsonl")
    log.append(stats(1))
    log.append_failure(2, ValueError("no\nmore"))
    first, second, third = (tmp_path / "RUN.jsonl").read_text().removesuffix("\n").split("\n")
    assert json.loads(first)["type"] == "run"
    assert json.loads(second)["total_wire_bytes"] == 15
    assert json.loads(third) | {"kind": "aborted", "reason": "ValueError", "text": "no\nmore"} == json.loads(
        third
    )


def test_a_last_line_that_was_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "RUN.jsonl"
    log = RunLog(path)
    log.append(stats(1))
    log.append(stats(2))
    path.write_bytes(path.read_bytes()[:-30])
    history = read_run(path)
    assert [line.version for line in history.updates] == [1]
    assert history.notes == ("RUN.jsonl, line 3, was cut short and is left out: the training was killed.",)


def test_a_restart_goes_on_below_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "RUN.jsonl"
    RunLog(path).append(stats(1))
    path.write_bytes(path.read_bytes()[:-30])
    RunLog(path).append(stats(2))
    history = read_run(path)
    assert [line.version for line in history.updates] == [2]
    assert len(history.headers) == 2
    assert len(history.notes) == 1


def test_a_damaged_line_in_the_middle_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "RUN.jsonl"
    log = RunLog(path)
    log.append(stats(1))
    log.append(stats(2))
    path.write_text(path.read_text().replace('"version":1', '"version":"one"'))
    with pytest.raises(ConfigError, match=r"RUN\.jsonl, line 2: update\.version: .*integer"):
        read_run(path)


@pytest.mark.parametrize(
    "text", ["", "{}\n", '{"type": "update", "time": 1, "version": 1, "kind": "delta"}\n', "[" * 9]
)
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="RunLog"):
        read_run(path)


def test_paths_that_cannot_be_used_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        RunLog(tmp_path / "absent" / "RUN.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / "absent.jsonl")


def test_counts_of_all_ranks_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "RUN.jsonl"
    logs = [RunLog(path, rank=rank, num_ranks=2) for rank in range(2)]
    for rank, log in enumerate(logs):
        log.append_failure(1, OSError())
        log.append(stats(1), changed_by=[part(0, 5 + rank), *([part(None, 1, "norm")] if rank else [])])
        log.append(stats(2), changed_by=[part(0, 50 + rank)])
    assert rank_path(path, 1).name == "RUN.rank1.jsonl"
    history = read_run(path)
    assert history.notes == ()
    counts = [{(p.layer, p.kind): (p.changed, p.owned) for p in line.changed_by} for line in history.updates]
    assert counts == [{}, {(0, "mlp"): (11, 200), (None, "norm"): (1, 100)}, {(0, "mlp"): (101, 200)}]


def test_missing_files_of_other_ranks_are_said(tmp_path: Path) -> None:
    RunLog(tmp_path / "RUN.jsonl", num_ranks=4).append(stats(1), changed_by=[part(0, 5)])
    (note,) = read_run(tmp_path / "RUN.jsonl").notes
    assert "1 of 4 trainer ranks" in note
    assert "RUN.rank3.jsonl" in note


PLACES = {
    ("decoder.layers.1.self_attention.linear_qkv.weight", "model.layers.9.self_attn.q_proj.weight"): (
        9,
        "self_attention.linear_qkv",
    ),
    ("decoder.layers.0.mlp.experts.linear_fc1.weight12", "model.layers.0.mlp.experts.12.up_proj.weight"): (
        0,
        "mlp.experts.linear_fc1",
    ),
    ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", "model.layers.4.mlp.experts.3.w"): (
        4,
        "mlp.experts.local_experts.linear_fc2",
    ),
    ("model.layers.2.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"): (2, "mlp.down_proj"),
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight"): (None, "embedding.word_embeddings"),
}


def test_the_place_of_a_parameter() -> None:
    assert {names: place_of(names[0], [names[1]]) for names in PLACES} == PLACES
