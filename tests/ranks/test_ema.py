"""A moving average as a second stream: engines, bits and failures against a dense reference in numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from awex_delta.errors import ConfigError, UnsupportedError, UpdateAborted
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.ema import EmaShadow
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import EngineSeat, Outcome, Pairing, differing
from tests.ranks.conftest import BIAS, CUT, EMBED, ROUTER, SETTINGS, SHAPES

RANKS = 2
EXTRA = {BIAS: (4,), ROUTER: (4, 8)}


class Meeting:
    """Where ranks that are threads put their parts together."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=10)
        self._parts: dict[int, Mapping[str, torch.Tensor]] = {}

    def gather(self, trainer: TorchAdamWTrainer, rank: int, parts: Mapping[str, torch.Tensor]) -> Any:
        self._parts[rank] = parts
        self._barrier.wait()
        whole = {}
        for info in trainer.weights():
            if info.sparse:
                found = [self._parts[r][info.key] for r in range(RANKS) if info.key in self._parts[r]]
                whole[info.key] = torch.cat(found).view(info.shape)
        self._barrier.wait()
        return whole


class Reference:
    """Dense averages of whole tensors, in numpy's fp32, kept apart from everything that is tested."""

    def __init__(self, trainer: TorchAdamWTrainer, alpha: float) -> None:
        self._trainer, self._alpha = trainer, alpha
        self.average = {name: value.copy() for name, value in self.policy().items()}
        self.bias = trainer.tensor(f"0/{BIAS}").clone()

    def policy(self) -> dict[str, Any]:
        masters = {key.removeprefix("0/"): main for key, main in self._trainer._stepped.live().items()}
        masters[ROUTER] = self._trainer.tensor(f"0/{ROUTER}")
        return {name: main.detach().numpy().copy() for name, main in masters.items()}

    def step(self) -> None:
        alpha, beta = np.float32(self._alpha), np.float32(1.0 - self._alpha)
        for name, policy in self.policy().items():
            self.average[name] = alpha * policy + beta * self.average[name] if self._alpha < 1 else policy
        self.bias = self._trainer.tensor(f"0/{BIAS}").clone()

    def weights(self) -> dict[str, torch.Tensor]:
        found = {name: torch.from_numpy(value) for name, value in self.average.items()}
        return {BIAS: self.bias, **{n: t if n == ROUTER else t.bfloat16() for n, t in found.items()}}


class World:
    """Two trainer ranks with a student pairing and a teacher pairing."""

    def __init__(self, alpha: float, settings: DeltaSettings, lr: float = 1e-4) -> None:
        self.trainers = [
            TorchAdamWTrainer.create(
                SHAPES,
                lr=lr,
                dp_rank=r,
                dp_size=RANKS,
                settings=settings,
                buffers={BIAS: (4,)},
                fp32={ROUTER: (4, 8)},
            )
            for r in range(RANKS)
        ]
        meeting = Meeting()
        for rank, trainer in enumerate(self.trainers):
            gather = partial(meeting.gather, trainer, rank)
            trainer.gather_owned = gather  # type: ignore[method-assign]
        self.shadows = [EmaShadow(trainer, alpha=alpha) for trainer in self.trainers]
        self.reference = Reference(self.trainers[0], alpha)
        self.student = Pairing(self.trainers, self._seats("student"), settings)
        self.teacher = Pairing(self.shadows, self._seats("teacher"), settings)

    def train(self) -> None:
        for trainer in self.trainers:
            trainer.train_step()
            trainer.tensor(f"0/{BIAS}").add_(1.0)

    def average(self, version: int) -> None:
        for shadow in self.shadows:
            shadow.average(version)

    def wrong(self) -> list[dict[str, int]]:
        return [differing(engine, self.reference.weights()) for engine in self.teacher.engines]

    def close(self) -> None:
        self.student.close()
        self.teacher.close()

    def _seats(self, name: str) -> list[EngineSeat]:
        shapes, dtypes = {**SHAPES, **EXTRA}, dict.fromkeys(EXTRA, torch.float32)
        views = [DictEngine(shapes, dtypes=dtypes, cut=CUT, rank=rank, num_ranks=2) for rank in range(2)]
        return [EngineSeat(engine=name, view=view) for view in views]


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    built: list[World] = []

    def build(alpha: float, lr: float = 1e-4, **changes: Any) -> World:
        built.append(World(alpha, replace(SETTINGS, **changes), lr))
        return built[-1]

    yield build
    for world in built:
        world.close()


@pytest.mark.parametrize(
    ("alpha", "encoding", "lr"), [(0.05, "ulp", 1e-4), (0.3, "indices", 1e-5), (1.0, "ulp", 1e-4)]
)
def test_twenty_steps_of_teacher_and_student(
    make: Callable[..., World], alpha: float, encoding: str, lr: float
) -> None:
    world = make(alpha, lr, encoding=encoding, anchor_interval=7)
    kinds, old = "", world.reference.weights()
    for version in range(20):
        world.train()
        world.student.commit(version)
        world.average(version)
        world.reference.step()
        stats = world.teacher.commit(version)
        assert world.wrong() == [{}, {}]
        kinds += "F" if stats[0].verdict.kind is Kind.FULL else "D"
        new = world.reference.weights()
        if stats[0].verdict.kind is Kind.DELTA:
            changed = sum(int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in SHAPES)
            assert stats[-1].total_changed == changed > 0, "old and new are known, so nothing is in excess"
        old = new
        same = [
            student.tensors_by_name[EMBED].equal(teacher.tensors_by_name[EMBED])
            for student, teacher in zip(world.student.engines, world.teacher.engines, strict=True)
        ]
        assert same == [alpha == 1.0] * 2 or version == 0
    assert kinds == "FDDDDDDDFDDDDDDDFDDD"


def test_an_average_is_float32_and_close_to_one_in_double(make: Callable[..., World]) -> None:
    world = make(0.1)
    exact = {name: value.astype(np.float64) for name, value in world.reference.average.items()}
    for version in range(20):
        world.train()
        world.average(version)
        world.reference.step()
        for name, policy in world.reference.policy().items():
            exact[name] = 0.1 * policy + 0.9 * exact[name]
    for rank, shadow in enumerate(world.shadows):
        for key, average in shadow.state_dict().items():
            name = key.removeprefix("0/")
            whole = torch.from_numpy(world.reference.average[name]).view(-1)
            info = next(info for info in shadow.weights() if info.key == key)
            part = whole[info.owned_start : info.owned_stop] if info.sparse else whole
            assert torch.equal(average, part), (rank, name)
            double = torch.from_numpy(exact[name]).view(-1)
            double = double[info.owned_start : info.owned_stop] if info.sparse else double
            assert torch.allclose(average.double(), double, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("phase", "seat"), [("encode", 2), ("stage", 1), ("apply", 0)])
def test_an_aborted_version_is_retried_with_the_same_values(
    make: Callable[..., World], phase: str, seat: int
) -> None:
    world = make(0.2, encoding="ulp")
    for version in range(2):
        world.train()
        world.average(version)
        world.reference.step()
        world.teacher.commit(version)
    world.train()
    world.average(2)
    world.reference.step()
    world.teacher.faults[seat].fail(phase)
    assert_all_aborted(world.teacher.update(2))
    assert [receiver.version for receiver in world.teacher.receivers] == [1, 1]
    assert [sender.version for sender in world.teacher.senders] == [1, 1]
    world.train()  # the policy moves on, the version does not
    world.average(2)
    stats = world.teacher.commit(2)
    assert stats[0].verdict.reason is Reason.PREVIOUS_ABORTED
    assert world.wrong() == [{}, {}]
    world.average(3)
    world.reference.step()
    assert world.teacher.commit(3)[0].verdict.kind is Kind.DELTA
    assert world.wrong() == [{}, {}]


def assert_all_aborted(outcome: list[Outcome]) -> None:
    assert {type(one) for one in outcome} == {UpdateAborted}, outcome


@pytest.mark.parametrize("first", [True, False])
def test_an_average_that_failed_on_one_rank_is_published_by_none(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    monkeypatch.setattr("awex_delta.trainers.ema._PIECE", 16)
    world = make(0.2, encoding="ulp")
    for version in range(0 if first else 2):
        world.train()
        world.average(version)
        world.reference.step()
        world.teacher.commit(version)
    world.train()
    world.reference.step()
    world.shadows[0].average(2)
    calls = iter(range(100))
    master = torch.Tensor.copy_

    def copy(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if next(calls) == 7:
            raise RuntimeError("out of memory")
        return master(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy)
        with pytest.raises(RuntimeError, match="out of memory"):
            world.shadows[1].average(2)
    assert [shadow.version for shadow in world.shadows] == [2, None]
    outcome = world.teacher.update(2)
    assert_all_aborted(outcome)
    assert "average(2) failed on this rank: call it again" in str(outcome[0])
    with pytest.raises(ConfigError, match=r"call average\(2\) again first"):
        world.shadows[1].average(3)
    world.average(2)
    world.teacher.commit(2)
    assert world.wrong() == [{}, {}]


def test_several_averages_between_two_updates_are_one_delta(make: Callable[..., World]) -> None:
    world = make(0.5, lr=1e-5, encoding="ulp")
    for version in range(8):
        world.train()
        world.average(version)
        world.reference.step()
        if version % 4 == 0:
            world.teacher.commit(version // 4)
    stats: list[UpdateStats] = world.teacher.commit(2)
    assert stats[0].verdict.kind is Kind.DELTA
    assert world.wrong() == [{}, {}]
    assert world.teacher.commit(3)[-1].total_changed == 0


def alone(alpha: float = 0.25) -> tuple[TorchAdamWTrainer, EmaShadow]:
    trainer = TorchAdamWTrainer.create(SHAPES)
    return trainer, EmaShadow(trainer, alpha=alpha)


def test_it_goes_on_from_a_checkpoint() -> None:
    trainer, shadow = alone()
    trainer.train_step()
    shadow.average(0)
    state = {key: tensor.clone() for key, tensor in shadow.state_dict().items()}
    other = EmaShadow(trainer, alpha=0.25)
    other.committed()
    other.load_state_dict(state)
    assert other.detect().reason is Reason.FIRST_SYNC
    trainer.train_step()
    for one in (shadow, other):
        one.average(1)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in shadow.state_dict().items())
    with pytest.raises(ConfigError, match=f"0/{EMBED} differ"):
        other.load_state_dict({key: tensor for key, tensor in state.items() if EMBED not in key})


def test_a_plain_copy_keeps_every_bit() -> None:
    values = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), float("nan"), 1e-40])
    weight = values.bfloat16()
    master = values.clone().requires_grad_()
    trainer = TorchAdamWTrainer(
        weights={"w": weight}, masters={"w": master}, optimizer=torch.optim.AdamW([master]), settings=SETTINGS
    )
    shadow = EmaShadow(trainer, alpha=1.0)
    shadow.committed()
    with torch.no_grad():
        master.copy_(values.flip(0))
    shadow.average(0)
    assert shadow.state_dict()["0/w"].view(torch.int32).tolist() == values.flip(0).view(torch.int32).tolist()
    assert shadow.detect().changes.pos.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_an_alpha_that_is_no_weight_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha="):
        alone(alpha)


def test_what_has_no_master_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    trainer = TorchAdamWTrainer(
        weights={"w": weight}, masters={}, optimizer=torch.optim.AdamW([weight]), settings=SETTINGS
    )
    with pytest.raises(UnsupportedError, match="0/w has no fp32 master"):
        EmaShadow(trainer, alpha=0.5)
