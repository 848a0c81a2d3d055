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


def owned(weight: torch.Tensor, *, param: str = "w", start: int = 0, begin: int = 0) -> OwnedSlice:
    return OwnedSlice(
        param=param,
        chunk=0,
        start=start,
        stop=start + weight.numel(),
        begin=begin + start,
        main=None,
        weight=weight,
        exp_avg=None,
        exp_avg_sq=None,
        step=0,
    )


def line(trainer: TorchAdamWTrainer) -> torch.Tensor:
    """The bits of all weights, as they lie in the trainer's line."""
    weights = [trainer.tensor(info.key).reshape(-1) for info in trainer.weights()]
    return torch.cat(weights).view(torch.int16)


def test_bits_are_compared_and_steps_are_those_between_neighbours() -> None:
    patterns = [0x3F80, 0x3F80, 0x0000, 0x7FC1, 0x7FC1, -0x8000, 0x7F80, 0x4000, 0x0001]
    weight = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    baseline = SnapshotBaseline(lambda: [owned(weight, start=100)])
    assert baseline.detect().reason is Reason.FIRST_SYNC
    baseline.committed()
    assert baseline.num_bytes == 2 * len(patterns)
    assert baseline.detect().num_changed == 0
    # 1.0 up by one; +0 to -0; another NaN; -0 to +0; infinity kept; 2.0 far away; a subnormal down by one.
    after = [0x3F81, 0x3F80, -0x8000, 0x7FC2, 0x7FC1, 0x0000, 0x7F80, 0x4100, 0x0000]
    weight.view(torch.int16).copy_(torch.tensor(after))
    changes = baseline.detect().changes
    assert changes.pos.tolist() == [100, 102, 103, 105, 107, 108]
    assert changes.code is not None
    assert changes.code.tolist() == [1, -1, 1, 1, UNSTATED, -1]
    assert changes.value is not None
    assert changes.value.view(torch.int16).tolist() == [after[place] for place in (0, 2, 3, 5, 7, 8)]


def test_only_the_owned_share_is_kept_and_all_ranks_together_find_every_change() -> None:
    ranks = [TorchAdamWTrainer.create(SHAPES, dp_rank=r, dp_size=3, settings=SNAPSHOT) for r in range(3)]
    baselines = [SnapshotBaseline(rank.owned_slices) for rank in ranks]
    for baseline in baselines:
        baseline.committed()
    assert sum(baseline.num_bytes for baseline in baselines) == 2 * (300 * 40 + 7)
    assert max(baseline.num_bytes for baseline in baselines) <= 2 * (300 * 40 // 3 + 3)
    before = line(ranks[0])
    for rank in ranks:
        rank.train_step()
        rank.train_step()
    found = [baseline.detect().changes.pos for baseline in baselines]
    assert all(bool((pos.diff() > 0).all()) for pos in found)
    expected = (before != line(ranks[0])).nonzero().view(-1)
    assert torch.equal(torch.cat(found).sort().values, expected)
    assert expected.numel() > 1000


def test_inversion_of_the_same_step_gives_the_same_codes_and_little_more() -> None:
    inverting = TorchAdamWTrainer.create(SHAPES, lr=1e-5)
    copying = SnapshotBaseline(inverting.owned_slices)
    inverting.committed()
    copying.committed()
    inverting.train_step()
    certified, exact = inverting.detect().changes, copying.detect().changes
    assert certified.code is not None
    assert exact.code is not None
    stated = dict(zip(certified.pos.tolist(), certified.code.tolist(), strict=True))
    for pos, code in zip(exact.pos.tolist(), exact.code.tolist(), strict=True):
        assert stated[pos] in (code, UNSTATED)
    assert 0 < exact.num_changed <= certified.num_changed <= 1.02 * exact.num_changed + 3


def test_many_pieces_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.zeros(numel, dtype=torch.bfloat16) for numel in (6, 1000, 3, 5, 300, 4)]
    begins = [0, 6, 1006, 1009, 1014, 1314]
    slices = [owned(weight, begin=begin) for weight, begin in zip(weights, begins, strict=True)]
    monkeypatch.setattr("awex_delta.detection.snapshot._PIECE", 13)
    baseline = SnapshotBaseline(lambda: slices)
    baseline.committed()
    assert baseline.num_bytes == 2 * 1318
    for weight, begin in zip(weights, begins, strict=True):
        weight[-begin % 7 :: 7] = 1.0
    changes = baseline.detect().changes
    assert changes.pos.tolist() == list(range(0, 1318, 7))
    assert changes.code is not None
    assert set(changes.code.tolist()) == {UNSTATED}


def test_a_commit_takes_a_copy_into_the_same_memory_and_detach_frees_it() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16)
    baseline = SnapshotBaseline(lambda: [owned(weight)])
    baseline.committed()
    weight.mul_(2)
    baseline.committed()
    assert baseline.detect().num_changed == 0
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
    with pytest.raises(UnsupportedError, match=r"0/w: only bits of bf16 are compared, not of torch.float16"):
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
