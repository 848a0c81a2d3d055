"""The records of `awex-delta bench scale`, on small models."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from awex_delta.cli.main import app
from benchmarks.experts import ExpertsEngine, Shape
from benchmarks.scale import slopes

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
