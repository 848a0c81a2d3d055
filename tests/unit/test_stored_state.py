"""Trainings whose optimizer keeps its state as Transformer Engine's does, judged by a copy of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from awex_delta.detection.sample import MasterSample
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.te_adam import E4M3, FusedAdam
from tests.unit.test_step_evidence import LR, SHAPES, Follower, trainer_of

BF16, FP16 = torch.bfloat16, torch.float16
TE = "transformer_engine.pytorch.optimizers.fused_adam"
MOMENTS = [(BF16, BF16), (FP16, FP16), (E4M3, FP16), (E4M3, E4M3)]


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAdam, "__module__", TE)


def own_masters(*, method: str = "adamw", accumulate: bool = False, **options: Any) -> TorchAdamWTrainer:
    """bf16 weights that the optimizer steps itself, with masters of its own."""
    weights = {
        name: (torch.randn(shape) * 0.02).bfloat16().requires_grad_() for name, shape in SHAPES.items()
    }
    optimizer = FusedAdam(list(weights.values()), lr=LR, master_weights=True, **options)
    settings = DeltaSettings(method=method, accumulate=accumulate)
    return TorchAdamWTrainer(weights=weights, masters={}, optimizer=optimizer, settings=settings)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("first", "second"), MOMENTS, ids=str)
def test_moments_in_few_bits_are_followed(first: torch.dtype, second: torch.dtype, accumulate: bool) -> None:
    trainer = trainer_of(
        lambda params: FusedAdam(params, lr=LR, exp_avg_dtype=first, exp_avg_sq_dtype=second),
        accumulate=accumulate,
    )
    engine = Follower(trainer)
    for _ in range(5):
        trainer.train_step()
        assert engine.update() is Reason.NONE
    assert engine.num_changed > 500


@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize(("first", "second"), MOMENTS, ids=str)
def test_masters_that_the_optimizer_keeps_are_followed(
    first: torch.dtype, second: torch.dtype, remainders: bool
) -> None:
    trainer = own_masters(store_param_remainders=remainders, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    engine = Follower(trainer)
    for _ in range(4):
        trainer.train_step()
        assert engine.update() is Reason.NONE
    assert engine.num_changed > 300


def test_fp16_masters_are_refused_by_name_and_served_by_capture() -> None:
    trainer = own_masters(master_weight_dtype=FP16)
    engine = Follower(trainer)
    for _ in range(3):
        trainer.train_step()
        assert trainer.detect().detail == "0/a: master is 2560 elements of torch.float16"
        assert engine.update() is Reason.NO_FP32_MASTER
    captured = own_masters(method="capture", master_weight_dtype=FP16, exp_avg_sq_dtype=E4M3)
    engine = Follower(captured)
    for _ in range(3):
        captured.train_step()
        assert engine.update() is Reason.NONE


@pytest.mark.parametrize("remainders", [False, True])
def test_masters_that_were_replaced_behind_the_optimizer_are_noticed(remainders: bool) -> None:
    trainer = own_masters(store_param_remainders=remainders)
    engine = Follower(trainer)
    for info in trainer.weights():
        trainer.tensor(info.key).data.mul_(1.5)
    trainer.train_step()  # which makes its masters of weights that the engine does not hold
    assert engine.update() is Reason.STEP_DISPROVED
    for state in trainer.optimizer.state.values():
        state["master_param"].data.add_(3)  # as a kernel does it, which torch does not see
    if remainders:
        for info in trainer.weights():
            trainer.tensor(info.key).data.mul_(1.5)
    trainer.train_step()
    assert engine.update() is Reason.STEP_DISPROVED
    trainer.train_step()
    assert engine.update() is Reason.NONE


def test_moments_that_hide_the_step_make_an_update_full() -> None:
    trainer = trainer_of(
        lambda params: FusedAdam(params, lr=LR / 100, exp_avg_dtype=E4M3, exp_avg_sq_dtype=E4M3)
    )
    engine = Follower(trainer)
    grads = {name: torch.randn(shape) * (2 * torch.randn(shape)).exp() for name, shape in SHAPES.items()}
    for _ in range(2):
        trainer.train_step(grads)
        assert engine.update() is Reason.MOMENTS_COARSE


def test_a_sample_holds_masters_of_two_halves() -> None:
    trainer = own_masters(store_param_remainders=True)
    trainer.train_step()
    sample = MasterSample()
    sample.take(trainer.optimizer, trainer._stepped.live())
    assert len(sample.keys()) == len(SHAPES)
    for held in sample._held.values():
        assert held.main.dtype is torch.float32
