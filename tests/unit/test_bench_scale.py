"""The records of `awex-delta bench scale`, on small models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.plan.describe import EngineColumns, TrainerColumns
from benchmarks import plans
from benchmarks.experts import ExpertsEngine, ExpertsTrainer, Shape, identical
from benchmarks.scale import SETTINGS, Run, copy_full_syncs, slopes

FIELDS = {
    *("tensors", "elements", "changed_share", "storages", "encoding", "verified", "identical"),
    *("connect_seconds", "delta_seconds", "full_seconds", "delta_over_full_seconds", "full_update_seconds"),
    *("full_digest_seconds", "full_digest_over_transfer", "microseconds_per_tensor", "phases", "samples"),
}


def test_the_command_prints_every_row_and_the_slopes() -> None:
    threads = torch.get_num_threads()
    options = ["--tensors", "96", "--elements", "128", "--repeats", "1", "--changed", "0.02", "--json"]
    result = CliRunner().invoke(app, ["bench", "scale", *options])
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    record = json.loads(result.stdout)
    kinds = {(s, e) for s in ("fused", "one_a_tensor") for e in ("indices", "ulp_zstd")}
    rows = record["rows"]
    assert {(row["tensors"], row["storages"], row["encoding"]) for row in rows} == {
        (tensors, *kind) for tensors in (24, 96) for kind in kinds
    }
    assert record["identical"] is True
    for row in rows:
        assert set(row) == FIELDS
        assert row["elements"] == 128
        assert row["identical"] is True
        assert row["verified"] == "touched"
        assert 0.002 < row["changed_share"] < 0.1
        assert row["delta_over_full_seconds"] == pytest.approx(row["delta_seconds"] / row["full_seconds"])
        assert {"detect", "encode"} <= row["phases"]["trainer"]["delta"].keys()
        assert {"prepare", "transfer", "digest"} <= row["phases"]["engine"]["full"].keys()
    assert {(one["storages"], one["encoding"]) for one in record["slopes"]} == kinds


def test_a_slope_is_the_difference_of_two_sizes() -> None:
    kind = {"storages": "fused", "encoding": "indices"}
    rows = [{**kind, "tensors": 100, "delta_seconds": 0.5}, {**kind, "tensors": 400, "delta_seconds": 0.506}]
    assert slopes(rows)[0]["slope_microseconds_per_tensor"] == pytest.approx(20)


def test_the_shape_of_a_30b_a3b_has_its_tensors() -> None:
    shape = Shape.of(18_867, 2048)
    assert (shape.tensors, shape.layers, shape.experts) == (18_867, 48, 128)
    assert sum(len(parts) for _, parts in shape.params()) == 18_867
    assert Shape.of(4716, 2048).tensors == 4719


@pytest.mark.parametrize("fused", [True, False])
def test_storages_are_those_of_an_engine(fused: bool) -> None:
    shape = Shape.of(96, 128)
    tensors = ExpertsEngine(shape, fused=fused).tensors()
    assert len({tensor.name for tensor in tensors}) == len(tensors) == shape.tensors
    assert {math.prod(tensor.view.shape) for tensor in tensors} == {128}
    storages = {tensor.view.untyped_storage().data_ptr() for tensor in tensors}
    # Of each layer: two for all experts, one for queries, keys and values, and six alone.
    assert len(storages) == (3 + shape.layers * 9 if fused else shape.tensors)


@pytest.mark.parametrize(
    ("options", "named"), [(["--encoding", "gzip"], "--encoding"), (["--elements", "100"], "--elements")]
)
def test_what_cannot_be_measured_is_refused(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "scale", *options])
    assert result.exit_code == 2
    assert named in result.output


def test_full_syncs_between_threads_follow_awexs_plan() -> None:
    shape = Shape.of(15, 128)
    trainer = ExpertsTrainer(shape, 1e-3, SETTINGS)
    engine = ExpertsEngine(shape, fused=True)
    run = Run(trainer, engine, "indices")
    copy_full_syncs(*run.ends)
    _, stats = run.update(1)
    assert stats[0].verdict.kind == "full"
    held = {tensor.name: tensor.view for tensor in engine.tensors()}
    weight = trainer.tensor("0/decoder.layers.0.mlp.experts.linear_fc1.weight0")
    assert torch.equal(held["model.layers.0.mlp.experts.0.gate_proj.weight"], weight[:2])
    assert torch.equal(held["model.layers.0.mlp.experts.0.up_proj.weight"], weight[2:])
    assert identical(engine, trainer)
    held["model.norm.weight"][0, 0] += 1
    assert not identical(engine, trainer)
    run.close()


def test_connecting_is_measured_from_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(name: str, side: str, folder: str) -> dict[str, Any]:
        return plans.measure(name, side, Path(folder))  # a fresh process would take long to import torch

    monkeypatch.setattr(plans, "_in_fresh_process", here)
    result = CliRunner().invoke(app, ["bench", "scale", "--plan", "tiny:2+4", "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["engines"], record["trainers"], record["layouts"]) == (4, 2, 4)
    engine, trainer = record["rows"]
    assert (engine["side"], engine["pairs"], trainer["side"], trainer["pairs"]) == ("engine", 2, "trainer", 4)
    # An engine rank takes one part of each of its 24 tensors in a full sync.
    assert engine["operations"] == 24
    assert engine["description_bytes"] == trainer["description_bytes"] > 1000
    assert all(row["parse_seconds"] > 0 and row["plan_seconds"] > 0 for row in record["rows"])


def test_descriptions_have_the_shapes_of_the_model() -> None:
    specs = plans.SHAPES["qwen3_30b_a3b:8+8"].describe()
    engine, trainer = specs[0].layout, specs[8].layout
    assert isinstance(engine, EngineColumns)
    assert isinstance(trainer, TrainerColumns)
    assert len(engine.names) == 18_867
    assert len(trainer.names) == 3 + 48 * (9 + 16 * 3)
    assert int(trainer.runs[3].sum()) == int(trainer.numels.sum())
    # 30.5 billion parameters: an engine rank holds a quarter, but for norms and routers.
    assert 4 * sum(math.prod(shape) for shape in engine.shapes) == pytest.approx(30.53e9, rel=0.002)


def test_an_unknown_plan_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "scale", "--plan", "qwen:1+1"])
    assert result.exit_code == 2
    assert "--plan" in result.output


def test_proofs_are_measured_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.prove.run", lambda: {"seconds": 1.5, "kinds": 12})
    result = CliRunner().invoke(app, ["bench", "scale", "--prove", "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"seconds": 1.5, "kinds": 12})
