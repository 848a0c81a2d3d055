"""A moving average over real Megatron optimizer shards, each rank a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from awex_delta.errors import UnsupportedError
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec
from awex_delta.trainers.ema import EmaShadow
from awex_delta.trainers.view import WeightInfo
from tests.procs.test_megatron_trainer import by_key, start

pytestmark = pytest.mark.timeout(120)

ALPHA = 0.2
NUM_STEPS = 4
MOE = TinySpec(model="qwen3-moe", ep=2, layers=1, expert_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank's averages after the training, as it publishes them, and what a step changed of them.

    expected: dense averages in numpy of what this rank owns, with those of the step before.
    """

    weights: tuple[WeightInfo, ...]
    whole: Mapping[str, torch.Tensor]
    changed: Mapping[str, torch.Tensor]
    expected: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    live_fp32: Mapping[str, torch.Tensor]


def train_and_average(me: Rank, spec: TinySpec) -> Seen:
    tiny, view = start(me, spec)
    shadow = EmaShadow(view, alpha=ALPHA)

    def masters() -> dict[str, np.ndarray]:
        found = {o.key: o.main.numpy().copy() for o in view.owned_slices() if o.main is not None}
        trained = (info for info in view.weights() if info.trained and not info.sparse)
        return found | {info.key: view.tensor(info.key).view(-1).numpy().copy() for info in trained}

    expected = before = masters()
    for version in range(NUM_STEPS):
        shadow.committed()
        tiny.train_step()
        shadow.average(version)
        before = expected
        expected = {
            key: np.float32(ALPHA) * policy + np.float32(1 - ALPHA) * expected[key]
            for key, policy in masters().items()
        }
    changed = {key: index for key, (index, _) in by_key(shadow, shadow.detect()).items()}
    with shadow.transfer():
        shadow.gather_params()
        whole = {info.key: shadow.tensor(info.key).clone() for info in shadow.weights()}
    return Seen(
        weights=tuple(view.weights()),
        whole=whole,
        changed=changed,
        expected={k: (torch.from_numpy(before[k]), torch.from_numpy(expected[k])) for k in expected},
        live_fp32={i.key: view.tensor(i.key).clone() for i in view.weights() if not i.trained},
    )


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(replace(MOE, fp32_router=True), id="experts, router bias, fp32 router"),
        pytest.param(replace(MOE, ep=1, expert_bias=False, overlap_param_gather=True), id="late gather"),
    ],
)
def test_owners_put_a_dense_average_together(spec: TinySpec) -> None:
    ranks: list[Seen] = run_ranks(train_and_average, 2, spec)
    num_changed = 0
    for seen in ranks:
        for info in seen.weights:
            if not info.sparse:
                wanted = seen.live_fp32.get(info.key)
                if wanted is None:
                    wanted = seen.expected[info.key][1].view(info.shape)
                assert torch.equal(seen.whole[info.key], wanted), info.param
                continue
            whole = torch.zeros(torch.Size(info.shape).numel(), dtype=torch.bfloat16)
            for other in (ranks[owner] for owner in info.owners):
                part = next(one for one in other.weights if one.key == info.key)
                if part.owned_stop > part.owned_start:
                    before, now = (one.bfloat16() for one in other.expected[info.key])
                    whole[part.owned_start : part.owned_stop] = now
                    place = (before.view(torch.int16) != now.view(torch.int16)).nonzero().view(-1)
                    found = other.changed.get(info.key, torch.empty(0, dtype=torch.int64))
                    assert found.tolist() == (place + part.owned_start).tolist(), info.param
                    num_changed += place.numel()
            assert torch.equal(seen.whole[info.key].view(-1), whole), info.param
    assert num_changed > 1000


def check_refusal(me: Rank) -> None:
    spec = replace(MOE, ep=1, expert_bias=False, overlap_param_gather=True, fp32_router=True)
    _, view = start(me, spec)
    with pytest.raises(UnsupportedError, match="router"):
        EmaShadow(view, alpha=ALPHA)


def test_fp32_parameters_that_are_not_current_here_are_refused() -> None:
    run_ranks(check_refusal, 2)
