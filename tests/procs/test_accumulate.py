"""Several optimizer steps of real Megatron trainings between two commits, each rank a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from awex_delta.lines.bits import UNSTATED
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec
from awex_delta.trainers.view import WeightInfo
from tests.procs.test_megatron_trainer import bits, by_key, decaying, start

pytestmark = pytest.mark.timeout(120)

MINIBATCHES = 4
NUM_UPDATES = 2
ACCUMULATE = DeltaSettings(accumulate=True)
MOE = TinySpec(model="qwen3-moe", ep=2, layers=1, expert_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One update of one rank: bits of each whole parameter at the last commit and now, and what it found."""

    weights: tuple[WeightInfo, ...]
    old: Mapping[str, torch.Tensor]
    new: Mapping[str, torch.Tensor]
    index: Mapping[str, torch.Tensor]
    code: Mapping[str, torch.Tensor]


def train_and_watch(me: Rank, spec: TinySpec) -> list[Seen]:
    tiny, view = start(me, spec, ACCUMULATE)
    scheduler = decaying(tiny)
    assert view.detect().reason is Reason.FIRST_SYNC
    seen: list[Seen] = []
    for _ in range(NUM_UPDATES):
        view.gather_params()
        view.committed()
        old = bits(view)
        for _ in range(MINIBATCHES):
            tiny.train_step()
            scheduler.step(1)
        detection = view.detect()
        assert detection.reason is Reason.NONE, detection
        view.gather_params()
        seen.append(
            Seen(
                weights=tuple(view.weights()),
                old=old,
                new=bits(view),
                index={key: index for key, (index, _) in by_key(view, detection).items()},
                code={key: code for key, (_, code) in by_key(view, detection).items()},
            )
        )
    tiny.optimizer.load_state_dict(tiny.optimizer.state_dict())
    tiny.train_step()
    assert view.detect().reason is Reason.STEP_GAP
    view.committed()
    assert view.detect().num_changed == 0
    view.detach()
    tiny.train_step()
    assert view.detect().reason is Reason.NO_STEP_RECORD
    return seen


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(MOE, id="experts beside dense parameters"),
        pytest.param(replace(MOE, ep=1, expert_bias=False, overlap_param_gather=True), id="late gather"),
        pytest.param(TinySpec(layers=1, distributed_optimizer=False, lr=0.03), id="replicated optimizer"),
    ],
)
def test_owners_find_what_four_minibatches_changed(spec: TinySpec) -> None:
    ranks: list[list[Seen]] = run_ranks(train_and_watch, 2, spec)
    num_changed = num_listed = num_stated = 0
    for update in range(NUM_UPDATES):
        for rank, seen in enumerate(updates[update] for updates in ranks):
            for info in seen.weights:
                if not info.sparse:
                    continue
                old, new = seen.old[info.key], seen.new[info.key]
                owners = [
                    ranks[owner][update] for owner in info.owners if info.key in ranks[owner][update].index
                ]
                index = torch.cat([owner.index[info.key] for owner in owners] or [torch.empty(0).long()])
                code = torch.cat([owner.code[info.key] for owner in owners] or [torch.empty(0).char()])
                truth = set((old != new).nonzero().view(-1).tolist())
                assert not truth - set(index.tolist()), (rank, info.param)
                assert len(set(index.tolist())) == index.numel()
                same_sign = (code != UNSTATED) & ((old[index] < 0) == (new[index] < 0))
                away = torch.where(old[index] < 0, -1, 1) * (new[index].long() - old[index].long())
                assert away[same_sign].tolist() == code[same_sign].tolist(), info.param
                num_changed += len(truth)
                num_listed += index.numel()
                num_stated += int(same_sign.sum())
    assert num_changed > 1000
    assert num_listed <= num_changed * 1.01 + 5
    assert num_stated > 1000
