"""Detection by comparing bits with a copy: exact, of what is owned alone, and with inversion's records."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from awex_delta.detection.slices import OwnedSlice
from awex_delta.detection.snapshot import SnapshotBaseline
from awex_delta.errors import UnsupportedError
from awex_delta.lines.bits import UNSTATED
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

SNAPSHOT = DeltaSettings(method="snapshot")
SHAPES = {"a": (300, 40), "b": (7,)}


def owned(weight: torch.Tensor, *, param: str = "w", start: int = 0) -> OwnedSlice:
    return OwnedSlice(
        param=param,
        chunk=0,
        start=start,
        stop=start + weight.numel(),
        main=None,
        weight=weight,
        exp_avg=None,
        exp_avg_sq=None,
        step=0,
    )


def test_bits_are_compared_and_steps_are_those_between_neighbours() -> None:
    patterns = [0x3F80, 0x3F80, 0x0000, 0x7FC1, 0x7FC1, -0x8000, 0x7F80, 0x4000, 0x0001]
    weight = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    baseline = SnapshotBaseline(lambda: [owned(weight, start=100)])
    assert baseline.detect().reason is Reason.FIRST_SYNC
    baseline.committed()
    assert baseline.num_bytes == 2 * len(patterns)
    assert baseline.detect().changes == ()
    # 1.0 up by one; +0 to -0; another NaN; -0 to +0; infinity kept; 2.0 far away; a subnormal down by one.
    after = [0x3F81, 0x3F80, -0x8000, 0x7FC2, 0x7FC1, 0x0000, 0x7F80, 0x4100, 0x0000]
    weight.view(torch.int16).copy_(torch.tensor(after))
    (changes,) = baseline.detect().changes
    assert changes.index.tolist() == [100, 102, 103, 105, 107, 108]
    assert changes.code.tolist() == [1, -1, 1, 1, UNSTATED, -1]
    assert changes.key == "0/w"


def test_only_the_owned_share_is_kept_and_all_ranks_together_find_every_change() -> None:
    ranks = [TorchAdamWTrainer.create(SHAPES, dp_rank=r, dp_size=3, settings=SNAPSHOT) for r in range(3)]
    baselines = [SnapshotBaseline(rank.owned_slices) for rank in ranks]
    for baseline in baselines:
        baseline.committed()
    assert sum(baseline.num_bytes for baseline in baselines) == 2 * (300 * 40 + 7)
    assert max(baseline.num_bytes for baseline in baselines) <= 2 * (300 * 40 // 3 + 3)
    before = {info.key: ranks[0].tensor(info.key).clone() for info in ranks[0].weights()}
    for rank in ranks:
        rank.train_step()
        rank.train_step()
    found: dict[str, list[int]] = {key: [] for key in before}
    for baseline in baselines:
        for changes in baseline.detect().changes:
            found[changes.key] += changes.index.tolist()
    for key, old in before.items():
        new = ranks[0].tensor(key)
        expected = (old.view(torch.int16) != new.view(torch.int16)).view(-1).nonzero().view(-1).tolist()
        assert sorted(found[key]) == expected
        assert expected


def test_inversion_of_the_same_step_gives_the_same_codes_and_little_more() -> None:
    inverting = TorchAdamWTrainer.create(SHAPES, lr=1e-5)
    copying = SnapshotBaseline(inverting.owned_slices)
    inverting.committed()
    copying.committed()
    inverting.train_step()
    certified = {
        c.key: dict(zip(c.index.tolist(), c.code.tolist(), strict=True)) for c in inverting.detect().changes
    }
    exact = copying.detect()
    num_exact = 0
    for changes in exact.changes:
        for index, code in zip(changes.index.tolist(), changes.code.tolist(), strict=True):
            assert certified[changes.key][index] in (code, UNSTATED)
            num_exact += 1
    assert 0 < num_exact <= sum(map(len, certified.values())) <= 1.02 * num_exact + 3


def test_many_pieces_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    baseline = SnapshotBaseline(lambda: [owned(weight)])
    baseline.committed()
    weight[::7] = 1.0
    whole = baseline.detect().changes[0]
    monkeypatch.setattr("awex_delta.detection.snapshot._PIECE", 13)
    cut = baseline.detect().changes[0]
    assert cut.index.equal(whole.index)
    assert cut.code.equal(whole.code)
    assert whole.index.tolist() == list(range(0, 1000, 7))


def test_a_commit_takes_a_copy_into_the_same_memory_and_detach_frees_it() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16)
    baseline = SnapshotBaseline(lambda: [owned(weight)])
    baseline.committed()
    weight.mul_(2)
    baseline.committed()
    assert baseline.detect().changes == ()
    weight[5] = 0
    assert baseline.detect().num_changed == 1
    baseline.detach()
    assert baseline.num_bytes == 0
    assert baseline.detect().reason is Reason.FIRST_SYNC


def test_other_slices_than_at_the_commit_are_a_reason_and_other_dtypes_an_error() -> None:
    slices = [owned(torch.ones(8, dtype=torch.bfloat16))]
    baseline = SnapshotBaseline(lambda: slices)
    baseline.committed()
    slices[0] = owned(torch.ones(9, dtype=torch.bfloat16))
    found = baseline.detect()
    assert (found.reason, found.detail) == (
        Reason.STEP_GAP,
        "0/w: other elements are owned than at the last commit",
    )
    slices[0] = owned(torch.ones(8, dtype=torch.float16))
    with pytest.raises(UnsupportedError, match=r"0/w: a snapshot needs bf16 weights, not torch.float16"):
        baseline.detect()


def test_no_optimizer_is_hooked_and_with_deltas_off_nothing_is_copied() -> None:
    on = TorchAdamWTrainer.create(SHAPES, settings=SNAPSHOT)
    hooks = on.optimizer._optimizer_step_post_hooks
    assert not hooks
    on.committed()
    on.train_step()
    on.optimizer.load_state_dict(on.optimizer.state_dict())
    assert on.detect().reason is Reason.NONE
    off = TorchAdamWTrainer.create(SHAPES, settings=replace(SNAPSHOT, enabled=False))
    off.committed()
    assert not any(isinstance(value, SnapshotBaseline) for value in vars(off).values())
    assert off.detect().reason is Reason.DELTA_DISABLED
