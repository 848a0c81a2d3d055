"""The record of `awex-delta bench detect`: all methods side by side, on few elements."""

from __future__ import annotations

import pytest
import torch

from benchmarks.detect import detect, run, snapshot, train


def test_all_methods_stand_side_by_side() -> None:
    record = run(num_elements=100_000, repeats=1)
    methods = record["methods"]
    assert isinstance(methods, dict)
    assert set(methods) == {"adamw", "capture", "snapshot"}
    assert {method["num_missed"] for method in methods.values()} == {0}
    # Inversion sends a few in a thousand besides, the others nothing.
    assert methods["capture"]["extra_share"] == methods["snapshot"]["extra_share"] == 0.0
    assert 0 <= methods["adamw"]["extra_share"] < 0.02
    changed_share = record["changed_share"]
    assert isinstance(changed_share, float)
    kept = {name: method["kept_bytes_per_element"] for name, method in methods.items()}
    assert kept == {"adamw": 0, "capture": pytest.approx(9 * changed_share), "snapshot": 2}
    assert [methods[name]["seconds_in_step"] > 0 for name in methods] == [False, True, False]


def test_the_snapshot_is_of_the_weights_before_the_step() -> None:
    training = train(50_000)
    after = training.weight.clone()
    baseline = snapshot(training)
    assert torch.equal(training.weight, after)
    changed = (training.before.view(torch.int16) != after.view(torch.int16)).nonzero().view(-1)
    assert changed.numel() > 0
    assert torch.equal(baseline.detect().changes.pos, changed)
    assert bool(torch.isin(changed, detect(training).changes.pos).all())
