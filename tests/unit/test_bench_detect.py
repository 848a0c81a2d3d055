"""The record of `awex-delta bench detect`: both methods side by side, on few elements."""

from __future__ import annotations

import torch

from benchmarks.detect import detect, run, snapshot, train


def test_both_methods_stand_side_by_side() -> None:
    record = run(num_elements=100_000, repeats=1)
    methods = record["methods"]
    assert isinstance(methods, dict)
    adamw, copied = methods["adamw"], methods["snapshot"]
    assert adamw.keys() == copied.keys()
    assert (adamw["kept_bytes"], copied["kept_bytes"]) == (0, 200_000)
    # Six bytes a change; inversion sends a few in a thousand besides.
    assert copied["wire_bytes"] <= adamw["wire_bytes"] <= 1.02 * copied["wire_bytes"] + 60
    assert copied["wire_bytes"] == 6 * round(record["changed_share"] * 100_000)  # type: ignore[operator]
    assert record["num_missed"] == 0


def test_the_snapshot_is_of_the_weights_before_the_step() -> None:
    training = train(50_000)
    after = training.weight.clone()
    baseline = snapshot(training)
    assert torch.equal(training.weight, after)
    changed = (training.before.view(torch.int16) != after.view(torch.int16)).nonzero().view(-1)
    assert changed.numel() > 0
    assert torch.equal(baseline.detect().changes.pos, changed)
    assert bool(torch.isin(changed, detect(training).changes.pos).all())
