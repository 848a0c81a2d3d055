"""Our engines under the suite that any engine can run: memory that moves, or that cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from awex_delta.engines.fused import FusedEngine
from awex_delta.engines.transformers import TransformersEngine
from awex_delta.engines.view import EngineTensor, EngineView
from awex_delta.errors import UpdateAborted
from awex_delta.folder.reader import DiskReader
from awex_delta.protocol.verdict import Kind, Reason, Verdict
from awex_delta.testing.contract import ContractBroken
from awex_delta.testing.contract.engines import MOVES, UNUSABLE, EngineTrial, Weights
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.ranks import results
from tests.fused_oracle import load_hf_state
from tests.ranks.conftest import DOWN
from tests.ranks.disk import Engine, Trainers
from tests.unit.test_engines import dense_config, group, logits, model_of, moe_config


class Followed:
    """A transformers model under trial, and a second one that only ever loads what the trainer holds."""

    def __init__(self, kind: str) -> None:
        self.model = model_of(kind, 1)
        self._fresh = model_of(kind, 2)
        self.trial = EngineTrial([TransformersEngine(self.model)], self.computes, self.expects)

    def computes(self) -> Sequence[torch.Tensor]:
        return [logits(self.model), *self.model.state_dict().values()]

    def expects(self, weights: Weights) -> Sequence[torch.Tensor]:
        fuse_experts(self._fresh, weights)
        return [logits(self._fresh), *self._fresh.state_dict().values()]


def fuse_experts(model: PreTrainedModel, weights: Weights) -> None:
    """Load HF tensors by hand, without a view and without transformers' loader."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in weights:
                tensor.copy_(weights[name])
                continue
            prefix, kind = name.rsplit(".", 1)
            for expert in range(tensor.shape[0]):
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                tensor[expert] = torch.cat([weights[f"{prefix}.{expert}.{one}.weight"] for one in names])


@pytest.fixture(params=["tied", "moe"])
def followed(request: pytest.FixtureRequest) -> Iterator[Followed]:
    made = Followed(request.param)
    with made.trial:
        yield made


@pytest.mark.parametrize("move", MOVES)
def test_a_transformers_model_is_followed_wherever_it_moves(followed: Followed, move: str) -> None:
    followed.trial.check_move(lambda: MOVES[move](followed.model))


@pytest.mark.parametrize("change", UNUSABLE)
def test_a_transformers_model_that_cannot_be_written_is_refused(followed: Followed, change: str) -> None:
    followed.trial.check_refusal(lambda: UNUSABLE[change](followed.model))


def test_a_head_that_is_untied_and_tied_again_is_followed() -> None:
    made = Followed("tied")
    head: Any = made.model.get_submodule("lm_head")
    embedding = made.model.get_submodule("model.embed_tokens")

    def untie() -> None:
        head.weight = nn.Parameter(torch.zeros_like(head.weight))

    def tie() -> None:
        head.weight = embedding.weight

    with made.trial:
        made.trial.check_move(untie)
        tie()
        made.trial.commit(Kind.FULL, Reason.ENGINE_MOVED)
        made.trial.commit(Kind.DELTA)


def test_a_head_that_the_trainer_trains_apart_cannot_be_tied() -> None:
    made = Followed("dense")
    head: Any = made.model.get_submodule("lm_head")
    embedding = made.model.get_submodule("model.embed_tokens")

    def tie() -> Callable[[], None]:
        apart, head.weight = head.weight, embedding.weight

        def untie() -> None:
            head.weight = apart

        return untie

    with made.trial:
        made.trial.check_refusal(tie)


def fused_ranks(*, tied: bool = False) -> tuple[list[FusedEngine], EngineTrial]:
    config = dense_config(tied=True) if tied else moe_config()
    engines, loaded = group(config, 2), group(config, 2)

    def expects(weights: Weights) -> Sequence[torch.Tensor]:
        for engine in loaded:
            load_hf_state(engine, weights)
        return [tensor for engine in loaded for tensor in engine.params.values()]

    def computes() -> Sequence[torch.Tensor]:
        return [tensor for engine in engines for tensor in engine.params.values()]

    return engines, EngineTrial(engines, computes, expects)


def test_one_rank_of_a_fused_engine_moves() -> None:
    engines, trial = fused_ranks()
    rank = engines[1]

    def move() -> None:
        rank.params |= {name: tensor.clone() for name, tensor in rank.params.items() if "experts" in name}

    with trial:
        trial.check_move(move)


def test_one_rank_of_a_fused_engine_is_cast() -> None:
    engines, trial = fused_ranks(tied=True)
    rank = engines[1]

    def cast() -> Callable[[], None]:
        saved = dict(rank.params)
        rank.params |= {"model.norm.weight": saved["model.norm.weight"].float()}
        return lambda: rank.params.update(saved)

    with trial:
        trial.check_refusal(cast)


class Foreign(EngineView):
    """A view that describes nn.Parameters, a strided slice of one, and a tensor made in inference mode."""

    def __init__(self, *, kept: bool = False) -> None:
        self.rows = nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.zeros(5, 12, dtype=torch.bfloat16))
        with torch.inference_mode():
            self.norm = torch.zeros(7, dtype=torch.bfloat16)
            self.router = torch.zeros(4, 3)
        self._kept = list(self._parts()) if kept else None

    def _parts(self) -> Iterator[EngineTensor]:
        named = {"rows": self.rows, "columns": self.wide[:, 2:9:2], "norm": self.norm, "router": self.router}
        for name, view in named.items():
            shape = tuple(view.shape)
            yield EngineTensor(name=name, view=view, global_shape=shape, global_offset=(0,) * len(shape))

    def tensors(self) -> Sequence[EngineTensor]:
        return list(self._parts()) if self._kept is None else self._kept

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def committed(self, version: int) -> None:
        """Nothing to publish."""

    def memory(self) -> list[torch.Tensor]:
        """What the owner of the memory reads, the columns between those of the view included."""
        return [self.rows.detach(), self.wide.detach(), self.norm, self.router]

    def move(self) -> None:
        """Everything lies elsewhere."""
        self.wide.data = self.wide.data.clone()
        self.rows = nn.Parameter(torch.zeros_like(self.rows))
        self.norm, self.router = self.norm.clone(), self.router.clone()


def foreign_trial(view: Foreign) -> EngineTrial:
    def expects(weights: Weights) -> Sequence[torch.Tensor]:
        wide = torch.zeros(5, 12, dtype=torch.bfloat16)
        wide[:, 2:9:2] = weights["columns"]
        return [weights["rows"], wide, weights["norm"], weights["router"]]

    return EngineTrial([view], view.memory, expects)


@pytest.mark.parametrize("inference", [False, True])
def test_parameters_slices_of_them_and_inference_tensors_are_written(inference: bool) -> None:
    view = Foreign()
    with foreign_trial(view) as trial:
        receiver = trial.receivers[0]
        vars(receiver)["update_weights"] = torch.inference_mode(inference)(receiver.update_weights)
        trial.check_move(view.move)


def test_a_view_that_keeps_what_it_found_once_does_not_pass() -> None:
    view = Foreign(kept=True)
    with foreign_trial(view) as trial, pytest.raises(ContractBroken, match="should be: full, ENGINE_MOVED"):
        trial.check_move(view.move)
    view = Foreign(kept=True)
    with foreign_trial(view) as trial:
        trial.begin()
        view.move()
        with pytest.raises(ContractBroken, match="computes with other weights"):
            trial.commit(Kind.DELTA)


class FollowedThroughFolder(Followed):
    """The same, written to a folder by one trainer rank and read from there."""

    def __init__(self, kind: str, url: str) -> None:
        super().__init__(kind)
        self.faults = FaultPlan()
        self.trainers = Trainers(url, views=[self.trial.trainer])
        view = TransformersEngine(self.model)
        self.reader = DiskReader(view, self.trainers.settings, on_phase=self.faults.on_phase)

    def update(self, version: int) -> Verdict:
        self.trainers.write(version)
        stats = self.reader.update_weights()
        assert self.reader.ready
        for found, wanted in zip(self.computes(), self.expects(self.trial.weights()), strict=True):
            assert torch.equal(found, wanted)
        return stats.verdict


@pytest.fixture
def through_folder(tmp_path: Path) -> Iterator[FollowedThroughFolder]:
    made = FollowedThroughFolder("tied", str(tmp_path))
    made.update(1)
    assert made.update(2).kind is Kind.DELTA
    yield made
    made.reader.close()
    made.trainers.close()


@pytest.mark.parametrize("move", ["data_swapped", "one_tensor", "state_dict_assigned", "module_replaced"])
def test_a_model_that_follows_a_folder_is_followed_wherever_it_moves(
    through_folder: FollowedThroughFolder, move: str
) -> None:
    MOVES[move](through_folder.model)
    verdict = through_folder.update(3)
    assert (verdict.kind, verdict.reason) == (Kind.FULL, Reason.ENGINE_MOVED)
    MOVES["weights_lost"](through_folder.model)  # and nothing new was written meanwhile
    assert through_folder.reader.update_weights().verdict.reason is Reason.ENGINE_MOVED
    through_folder.update(4)
    assert through_folder.update(5).kind is Kind.FULL  # the anchor
    through_folder.faults.act("apply", lambda: MOVES[move](through_folder.model))
    with pytest.raises(UpdateAborted, match="moved to other memory while they were updated"):
        through_folder.update(6)
    assert not through_folder.reader.ready
    assert through_folder.update(7).reason is Reason.ENGINE_MOVED
    assert through_folder.update(8).kind is Kind.DELTA


@pytest.mark.parametrize("change", UNUSABLE)
def test_a_model_that_follows_a_folder_and_cannot_be_written_is_refused(
    through_folder: FollowedThroughFolder, change: str
) -> None:
    undo = UNUSABLE[change](through_folder.model)
    for version in (3, 4):
        with pytest.raises(UpdateAborted, match=r"rank 0: .*(model\.|lm_head)\S*weight"):
            through_folder.update(version)
        assert not through_folder.reader.ready
    undo()
    assert through_folder.update(5).reason is Reason.ENGINE_MOVED
    assert through_folder.update(6).kind is Kind.DELTA


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_that_follow_a_folder_moves(
    build: Callable[..., Any], tmp_path: Path, rank: int
) -> None:
    trainers = build(Trainers, str(tmp_path))
    engine = build(Engine, trainers, num_ranks=2)
    trainers.write(1, 2)
    assert engine.read() == 2
    tensors = engine.views[rank].tensors_by_name
    tensors[DOWN] = torch.zeros_like(tensors[DOWN])
    stats = results(engine.try_read())  # nothing new was written meanwhile
    assert [one.verdict.reason for one in stats][rank] is Reason.ENGINE_MOVED
    assert engine.holds(trainers.history[2])
    trainers.write(3)
    tensors[DOWN] = tensors[DOWN].float()
    outcome = engine.try_read()
    assert all(isinstance(one, UpdateAborted) and f"rank {rank}: " in str(one) for one in outcome)
    assert not engine.readers[rank].ready
    tensors[DOWN] = tensors[DOWN].bfloat16()
    assert engine.read() == 3
    assert engine.holds(trainers.history[3])


def test_parameters_and_inference_tensors_follow_a_folder(build: Callable[..., Any], tmp_path: Path) -> None:
    view = Foreign()
    trial = foreign_trial(view)
    trainers = build(Trainers, str(tmp_path), views=[trial.trainer])
    reader = build(DiskReader, view, trainers.settings)
    for version in (1, 2, 3):
        trainers.write(version)
        reader.update_weights()
        trial.compare()
        if version == 2:
            view.move()
