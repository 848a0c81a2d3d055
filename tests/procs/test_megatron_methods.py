"""A real Megatron training with L2 decay, which no inversion covers: captured at each step, or by a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer
from awex_delta.trainers.megatron import MegatronTrainer
from tests.procs.test_megatron_trainer import by_key

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Changed elements of one rank by parameter, really and as found."""

    truth: Mapping[str, list[int]]
    found: Mapping[str, list[int]]
    by_inversion: Reason
    after_a_reload: Reason


def train_and_watch(me: Rank, spec: TinySpec, method: str) -> Seen:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build_trainer(spec)
    settings = DeltaSettings(method=method)
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=settings)
    inverting = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=DeltaSettings())
    for group in tiny.optimizer.param_groups:
        group["decoupled_weight_decay"] = False
    for one in (view, inverting):
        one.committed()
    sparse = [info for info in view.weights() if info.sparse]
    before = {info.key: view.tensor(info.key).clone() for info in sparse}
    tiny.train_step()
    inverted = inverting.detect()
    tiny.train_step()
    detection = view.detect()
    assert detection.reason is Reason.NONE, detection
    view.gather_params()
    truth = {}
    for info in sparse:
        differs = before[info.key].view(torch.int16) != view.tensor(info.key).view(torch.int16)
        truth[info.key] = differs.view(-1).nonzero().view(-1).tolist()
    view.committed()
    assert view.detect().num_changed == 0
    for info in sparse:
        view.tensor(info.key).mul_(2.0)  # as loading another checkpoint into the model would
    return Seen(
        truth=truth,
        found={key: index.tolist() for key, (index, _) in by_key(view, detection).items()},
        by_inversion=inverted.reason,
        after_a_reload=view.detect().reason,
    )


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(TinySpec(model="qwen3-moe", ep=2), id="ep2"),
        pytest.param(TinySpec(overlap_param_gather=True), id="dp2-overlap"),
    ],
)
@pytest.mark.parametrize("method", ["capture", "snapshot"])
def test_owners_together_find_exactly_what_two_steps_changed(spec: TinySpec, method: str) -> None:
    ranks = run_ranks(train_and_watch, 2, spec, method)
    for seen in ranks:
        assert seen.by_inversion is Reason.NOT_ADAMW
        assert seen.after_a_reload is (Reason.UNSEEN_CHANGE if method == "capture" else Reason.NONE)
    assert sum(map(len, ranks[0].truth.values())) > 1000
    for key in ranks[0].truth:
        found = [index for seen in ranks for index in seen.found.get(key, [])]
        # An expert has one owner, on the rank that holds it; everything else is shared by both ranks.
        local = [index for seen in ranks for index in seen.truth[key]]
        expected = sorted(local) if ".experts." in key else sorted(set(local))
        assert sorted(found) == expected, key
