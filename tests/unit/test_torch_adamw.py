"""The trainer over plain tensors: what it owns, what it finds, judged by a copy of the old weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from awex.sharding.rank_info import RankInfo

from awex_delta.detection.slices import Detection
from awex_delta.errors import UnsupportedError
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import TrainerView, trainer_line

SHAPES = {
    "model.embed_tokens.weight": (40, 9),
    "model.layers.0.up": (7, 31),
    "model.norm": (5,),
    "scalar": (),
}
Bits = Mapping[str, torch.Tensor]


def bits(trainer: TorchAdamWTrainer) -> Bits:
    """A copy of every weight, as integers."""
    copies = {info.key: trainer.tensor(info.key).clone().reshape(-1) for info in trainer.weights()}
    return {
        key: t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32) for key, t in copies.items()
    }


def truly_changed(before: Bits, trainer: TorchAdamWTrainer) -> dict[str, set[int]]:
    after = bits(trainer)
    return {
        info.key: set((before[info.key] != after[info.key]).nonzero().flatten().tolist())
        for info in trainer.weights()
        if info.sparse
    }


def found(trainer: TorchAdamWTrainer, *detections: Detection) -> dict[str, set[int]]:
    """The union of what ranks found by parameter, each element by one rank only."""
    for detection in detections:
        assert detection.reason is Reason.NONE, detection
    listed = [pos for detection in detections for pos in detection.changes.pos.tolist()]
    union = set(listed)
    assert len(listed) == len(union)
    place, by_key = 0, {}
    for info in (info for info in trainer.weights() if info.sparse):
        numel = torch.Size(info.shape).numel()
        by_key[info.key] = {pos - place for pos in union if place <= pos < place + numel}
        place += numel
    assert sum(map(len, by_key.values())) == len(union)
    return by_key


def assert_covers(union: dict[str, set[int]], truth: dict[str, set[int]]) -> None:
    missed = {key: indices - union.get(key, set()) for key, indices in truth.items()}
    assert not any(missed.values()), missed
    num_true = sum(map(len, truth.values()))
    assert sum(map(len, union.values())) <= num_true * 1.05 + 5


def test_it_is_a_trainer_view_that_awex_can_plan_for() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, dp_rank=2, dp_size=4)
    assert isinstance(trainer, TrainerView)
    layout = trainer.layout()
    info = RankInfo(**layout.rank_info)
    assert (info.global_rank, info.world_size, info.tp_size, info.is_infer) == (2, 4, 1, False)
    assert set(layout.rank_info) == set(RankInfo.__dataclass_fields__)
    assert layout.vocab_size == 40


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_own_every_element_once(size: int) -> None:
    ranks = [TorchAdamWTrainer.create(SHAPES, dp_rank=rank, dp_size=size) for rank in range(size)]
    for place, (name, shape) in enumerate(SHAPES.items()):
        infos = [rank.weights()[place] for rank in ranks]
        assert {(info.param, info.shape, info.owners) for info in infos} == {
            (name, shape, tuple(range(size)))
        }
        covered = [i for info in infos for i in range(info.owned_start, info.owned_stop)]
        assert covered == list(range(torch.Size(shape).numel()))
    for rank in ranks:
        for owned in rank.owned_slices():
            weight = rank.tensor(owned.key).view(-1)
            assert owned.weight.data_ptr() == weight[owned.start :].data_ptr()
            assert owned.weight.shape == (owned.stop - owned.start,)
            line = trainer_line(rank.weights())
            assert owned.begin == line.starts[line.names.index(owned.key)] + owned.start


@pytest.mark.parametrize(("lr", "weight_decay"), [(1e-3, 0.01), (1e-5, 0.1), (1e-2, 0.0)])
def test_ranks_together_find_all_that_changed(lr: float, weight_decay: float) -> None:
    ranks = [
        TorchAdamWTrainer.create(SHAPES, dp_rank=r, dp_size=3, lr=lr, weight_decay=weight_decay)
        for r in range(3)
    ]
    for rank in ranks:
        rank.committed()
    for _ in range(5):
        before = bits(ranks[0])
        for rank in ranks:
            rank.train_step()
        reference = bits(ranks[0])
        assert all(bits(rank)[key].equal(reference[key]) for rank in ranks for key in reference)
        truth = truly_changed(before, ranks[0])
        assert any(truth.values())
        assert_covers(found(ranks[0], *(rank.detect() for rank in ranks)), truth)
        for rank in ranks:
            rank.committed()


def test_a_parameter_without_gradient_sits_the_step_out() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES)
    trainer.train_step()
    trainer.committed()
    before = bits(trainer)
    trainer.train_step({"model.norm": torch.ones(5)})
    truth = truly_changed(before, trainer)
    assert {key for key, indices in truth.items() if indices} == {"0/model.norm"}
    assert_covers(found(trainer, trainer.detect()), truth)


def test_a_zero_gradient_moves_weights_by_momentum_and_decay() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES)
    trainer.train_step()
    trainer.committed()
    before = bits(trainer)
    trainer.train_step({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    truth = truly_changed(before, trainer)
    assert sum(map(len, truth.values())) > 100
    assert_covers(found(trainer, trainer.detect()), truth)


def test_groups_with_their_own_values_may_be_swapped() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES)
    optimizer = trainer.optimizer
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:2]
    optimizer.add_param_group({"params": params[2:], "lr": 3e-2, "weight_decay": 0.5, "eps": 1e-3})
    for _ in range(3):
        trainer.committed()
        before = bits(trainer)
        trainer.train_step()
        optimizer.param_groups.reverse()
        assert_covers(found(trainer, trainer.detect()), truly_changed(before, trainer))


def test_without_a_learning_rate_nothing_changes() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=0.0)
    trainer.committed()
    trainer.train_step()
    assert not any(found(trainer, trainer.detect()).values())


def test_buffers_and_fp32_parameters_are_sent_whole_and_are_live() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, buffers={"bias": (3,)}, fp32={"router": (4, 2)})
    whole = {info.param: info for info in trainer.weights() if not info.sparse}
    assert {name: (info.dtype, info.owned_stop) for name, info in whole.items()} == {
        "router": (torch.float32, 0),
        "bias": (torch.float32, 0),
    }
    before = bits(trainer)
    trainer.train_step()
    after = bits(trainer)
    assert not before["0/router"].equal(after["0/router"])
    assert before["0/bias"].equal(after["0/bias"])
    trainer.tensor("0/bias").fill_(7.0)
    assert trainer.tensor("0/bias").tolist() == [7.0] * 3
    assert {owned.param for owned in trainer.owned_slices()} == set(SHAPES)


def test_a_tied_head_is_listed_beside_the_embedding() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, tied_embeddings=True)
    plane = torch.zeros(40, 9, dtype=torch.int8)
    converted = trainer.convert("0/model.embed_tokens.weight", plane)
    assert [name for name, _ in converted] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(tensor is plane for _, tensor in converted)
    assert [name for name, _ in trainer.convert("0/model.norm", plane)] == ["model.norm"]


Harm = Callable[[TorchAdamWTrainer], object]


def replace_weights(trainer: TorchAdamWTrainer) -> None:
    trainer.tensor("0/model.layers.0.up")[3, 5] += 1


def lose_moments(trainer: TorchAdamWTrainer) -> None:
    for state in trainer.optimizer.state.values():
        del state["exp_avg"]


def restart_optimizer(trainer: TorchAdamWTrainer) -> None:
    trainer.optimizer.state.clear()


def load_optimizer(trainer: TorchAdamWTrainer) -> None:
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (replace_weights, Reason.MASTER_MISMATCH),
        (lose_moments, Reason.MOMENTS_MISSING),
        (restart_optimizer, Reason.STEP_GAP),
        (load_optimizer, Reason.STEP_GAP),
        (TorchAdamWTrainer.train_step, Reason.STEP_GAP),
    ],
)
def test_doubt_has_a_reason(harm: Harm, reason: Reason) -> None:
    trainer = TorchAdamWTrainer.create(SHAPES)
    assert trainer.detect().reason is Reason.FIRST_SYNC
    trainer.train_step()
    trainer.committed()
    trainer.train_step()
    harm(trainer)
    assert trainer.detect().reason is reason


def plain_module(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Parameter]:
    return {"weight": torch.nn.Parameter(torch.ones(4, 3, dtype=dtype))}


def test_a_trained_weight_that_no_optimizer_steps_is_refused() -> None:
    weights, other = plain_module(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([other])
    for masters in ({}, {"weight": torch.ones(4, 3)}):
        with pytest.raises(UnsupportedError, match="weight"):
            TorchAdamWTrainer(weights=weights, masters=masters, optimizer=optimizer, settings=DeltaSettings())


def test_a_bf16_weight_stepped_without_a_master_is_never_sent_as_a_delta() -> None:
    weights = plain_module()
    trainer = TorchAdamWTrainer(
        weights=weights,
        masters={},
        optimizer=torch.optim.AdamW(weights.values()),
        settings=DeltaSettings(),
    )
    trainer.committed()
    trainer.train_step()
    assert trainer.detect().reason is Reason.NO_FP32_MASTER


def test_when_off_no_hook_is_installed() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, settings=DeltaSettings(enabled=False))
    optimizer: Any = trainer.optimizer
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    assert trainer.detect().reason is Reason.DELTA_DISABLED
    on: Any = TorchAdamWTrainer.create(SHAPES)
    assert on.optimizer._optimizer_step_post_hooks
    on.detach()
    assert not on.optimizer._optimizer_step_post_hooks


def refusal(change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], object]) -> str:
    """Why two weights with their masters are refused once something about them is changed."""
    weights = {name: torch.randn(8, 16).bfloat16() for name in ("first", "second")}
    masters = {name: weight.float() for name, weight in weights.items()}
    change(weights, masters)
    optimizer = torch.optim.AdamW([*{id(tensor): tensor for tensor in masters.values()}.values()])
    with pytest.raises(UnsupportedError) as caught:
        TorchAdamWTrainer(weights=weights, masters=masters, optimizer=optimizer, settings=DeltaSettings())
    return str(caught.value)


def overlap(weights: dict[str, torch.Tensor], _: object) -> None:
    memory = torch.zeros(200, dtype=torch.bfloat16)
    weights |= {"first": memory[:128].view(8, 16), "second": memory[72:].view(8, 16)}


def free(weights: dict[str, torch.Tensor], _: object) -> None:
    weights["first"].untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, m: w.update(first=torch.randn(16, 8).bfloat16().t()), "first: the weight: .*contiguous"),
        (lambda w, m: w.update(first=torch.randn(8, 1).bfloat16().expand(8, 16)), "first.*not contiguous"),
        (lambda w, m: m.update(first=torch.randn(16, 8).t()), "first: its master: .*not contiguous"),
        (lambda w, m: w.update(first=torch.eye(8, 16).bfloat16().to_sparse()), "first.*torch.sparse_coo"),
        (lambda w, m: w.update(first=torch.zeros(8, 16, dtype=torch.complex64)), "first.*complex64"),
        (lambda w, m: w.update(first=w["first"].to("meta")), "first: the weight: .*meta device"),
        (lambda w, m: m.update(first=torch.randn(16, 8)), r"first.* \(8, 16\), its master \(16, 8\)"),
        (lambda w, m: m.update(third=torch.randn(8, 16)), "third: there is a master, but no weight"),
        (lambda w, m: w.update(second=w["first"]), "first and second share memory"),
        (lambda w, m: m.update(second=m["first"]), "second and first are trained by one tensor"),
        (overlap, "first and second share memory"),
        (free, "first: the weight: its storage was freed"),
    ],
)
def test_tensors_that_cannot_be_followed_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], object], words: str
) -> None:
    assert re.search(words, refusal(change))
