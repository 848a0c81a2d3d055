"""What happens to a real DistributedOptimizer between two updates, judged by a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from awex_delta.lines.bits import UNSTATED
from awex_delta.protocol.verdict import Reason
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer
from awex_delta.trainers.megatron import MegatronTrainer
from tests.kernels import FusedAdam
from tests.procs.test_megatron_trainer import attach, bits, by_key
from tests.unit.test_step_evidence import ordered

pytestmark = pytest.mark.timeout(120)

NUM_VERSIONS = 4
SPEC = TinySpec(model="qwen3-moe", layers=1, lr=1e-4)
Harm = Callable[[TinyTrainer], object]


def parts(tiny: TinyTrainer) -> Sequence[Any]:
    """The DistributedOptimizers: of dense and of expert parameters."""
    return [part for part in tiny.optimizer.chained_optimizers if not part.is_stub_optimizer]


def nothing(_: TinyTrainer) -> None:
    pass


def reset_states(tiny: TinyTrainer) -> None:
    """As recipes do that begin each rollout with a new optimizer state."""
    for part in parts(tiny):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


def clear_states(tiny: TinyTrainer) -> None:
    for part in parts(tiny):
        part.optimizer.state.clear()


def load_parameter_states(tiny: TinyTrainer) -> None:
    """Masters and moments of a checkpoint, without the `load_state_dict` that torch's hooks see."""
    for part in parts(tiny):
        state = part.get_parameter_state_dp_zero()
        if state is not None:
            for of_dtype in (value for key, value in state.items() if isinstance(key, int)):
                for tensors in of_dtype.values():
                    tensors["param"].mul_(1.5)
        part.load_parameter_state_from_dp_zero(state)


def reload_model(tiny: TinyTrainer) -> None:
    """Other weights, of which the masters are made anew."""
    model = tiny.chunks[0].module
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    tiny.optimizer.reload_model_params()


def replace_masters(tiny: TinyTrainer) -> None:
    """As recipes do that offload masters and bring them back: the old storage is freed."""
    for part in parts(tiny):
        inner = part.optimizer
        new_of = {}
        for group in inner.param_groups:
            for place, old in enumerate(group["params"]):
                new = new_of[old] = old.detach().clone().requires_grad_(old.requires_grad)
                group["params"][place] = new
                if old in inner.state:
                    inner.state[new] = inner.state.pop(old)
        for mains in part.shard_fp32_from_float16_groups:
            mains[:] = [new_of[main] for main in mains]
        for old in new_of:
            old.untyped_storage().resize_(0)


def move_masters(tiny: TinyTrainer) -> None:
    for part in parts(tiny):
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                main.data = main.data.clone()


def offload_moments(tiny: TinyTrainer) -> None:
    for part in parts(tiny):
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].clone()


# Before the step: what it begins with other moments is a step like any other, so those are exact.
TORCH: Mapping[Harm, Reason] = {
    nothing: Reason.NONE,
    reset_states: Reason.NONE,
    clear_states: Reason.STEP_GAP,
    reload_model: Reason.STEP_DISPROVED,
    replace_masters: Reason.NONE,
    move_masters: Reason.NONE,
    offload_moments: Reason.NONE,
}
FUSED: Mapping[Harm, Reason] = {
    **TORCH,
    reset_states: Reason.STEP_GAP,
    clear_states: Reason.NONE,
    load_parameter_states: Reason.STATE_REPLACED,
}


class Engine:
    """The owned parts of a rank as an engine would hold them that does what each detection says."""

    def __init__(self, view: MegatronTrainer) -> None:
        self.view = view
        self.held = bits(view)
        view.committed()

    def update(self) -> Reason:
        found = self.view.detect()
        self.view.gather_params()
        now = bits(self.view)
        if found.reason is Reason.NONE:
            changes = by_key(self.view, found)
            for info in (info for info in self.view.weights() if info.owned_stop > info.owned_start):
                held, new = self.held[info.key], now[info.key]
                pos, code = changes[info.key]
                moved, stated = ordered(new[pos]) - ordered(held[pos]), code != UNSTATED
                assert torch.equal(moved[stated], code[stated].int()), "a step was stated that was not made"
                held[pos] = new[pos]
                owned = slice(info.owned_start, info.owned_stop)
                assert torch.equal(held[owned], new[owned]), f"{info.key}: changes were missed"
        self.held = now
        self.view.committed()
        return found.reason


def build(*, fused: bool) -> TinyTrainer:
    if not fused:
        return build_trainer(SPEC)
    with (
        patch.object(megatron_optimizer, "Adam", FusedAdam),
        patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        patch.object(distrib_optimizer, "Adam", FusedAdam),
    ):
        return build_trainer(SPEC)


@patch.object(FusedAdam, "__module__", "transformer_engine.pytorch.optimizers.fused_adam")
def check_all(me: Rank, fused: bool) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build(fused=fused)
    engine = Engine(attach(tiny))
    tiny.train_step()
    assert engine.update() is Reason.NONE
    for harm, expected in (FUSED if fused else TORCH).items():
        for version in range(NUM_VERSIONS):
            harm(tiny)
            tiny.train_step()
            reason = engine.update()
            assert reason is expected, (harm.__name__, version, reason.name)
        tiny.train_step()
        assert engine.update() is Reason.NONE, f"one full sync after {harm.__name__} it goes on"


@pytest.mark.parametrize("fused", [False, True])
def test_every_version_is_exact_whatever_happens_to_the_optimizer(fused: bool) -> None:
    run_ranks(check_all, 2, fused)
