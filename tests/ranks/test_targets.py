"""One trainer and two groups of engines: different paces, failures of one group, on thread ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from awex_delta.errors import ConfigError, ConnectError, LockstepError, UpdateAborted
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.targets import Targets, TargetsUpdate
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.ranks import ThreadRanks, results
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import differing
from tests.ranks.conftest import CUT, SETTINGS, SHAPES, SOON

TRAINERS = 2
A, B = "students", "judges"
ENGINES = {A: 2, B: 1}
"""Target A is one engine on two ranks, B a whole engine on one."""


class World:
    """Two trainer ranks, then the engine ranks of A, then that of B: each a thread."""

    def __init__(self, settings: DeltaSettings) -> None:
        self.settings = settings
        self.threads = ThreadRanks(TRAINERS + sum(ENGINES.values()))
        store = HashStore()
        self.places = {
            name: Rendezvous(num_engine_ranks=count, num_trainer_ranks=TRAINERS, name=name, store=store)
            for name, count in ENGINES.items()
        }
        meeting = Rendezvous(num_engine_ranks=0, num_trainer_ranks=TRAINERS, name="trainers", store=store)
        self.trainers = [
            TorchAdamWTrainer.create(SHAPES, lr=1e-5, dp_rank=rank, dp_size=TRAINERS, settings=settings)
            for rank in range(TRAINERS)
        ]
        self.targets = [
            Targets(trainer, trainers=meeting, trainer_rank=rank, settings=settings)
            for rank, trainer in enumerate(self.trainers)
        ]
        self.engines = {
            A: [DictEngine(SHAPES, cut=CUT, rank=rank, num_ranks=2) for rank in range(2)],
            B: [DictEngine(SHAPES)],
        }
        self.receivers = {name: [self._receiver(name, r) for r in range(n)] for name, n in ENGINES.items()}
        self.truth: dict[str, Mapping[str, torch.Tensor]] = {}

    def add(self, *names: str, **options: Any) -> None:
        for targets in self.targets:
            for name in names:
                targets.add(name, self.places[name], **options)

    def train(self) -> None:
        for trainer in self.trainers:
            trainer.train_step()

    def update(
        self, versions: Mapping[str, int], *, engines: Mapping[str, int] | None = None
    ) -> TargetsUpdate:
        """Update on all ranks; `engines` says which groups take part, those of `versions` by default."""
        taking_part = versions if engines is None else engines

        def run(thread: int) -> object:
            if thread < TRAINERS:
                return self.targets[thread].update_weights(versions)
            name, rank = (A, thread - TRAINERS) if thread < TRAINERS + 2 else (B, 0)
            if name in taking_part:
                try:
                    return self.receivers[name][rank].update_weights(taking_part[name])
                except Exception as error:  # noqa: BLE001 - what became of it is the trainer's to say here
                    return repr(error)
            return None

        outcome = results(self.threads.run(run))
        updates = [one for one in outcome[:TRAINERS] if isinstance(one, TargetsUpdate)]
        assert updates[0].committed.keys() == updates[1].committed.keys()
        assert updates[0].failed == updates[1].failed
        for name in updates[0].committed:
            self.truth[name] = {
                info.param: self.trainers[0].tensor(info.key).clone() for info in self.trainers[0].weights()
            }
        return updates[0]

    def on_engine(self, name: str, job: Callable[[], None]) -> None:
        first = TRAINERS if name == A else TRAINERS + 2
        results(self.threads.run(lambda thread: job() if thread == first else None))

    def restart(self, name: str) -> None:
        self.engines[name][0] = DictEngine(SHAPES)
        self.receivers[name][0] = self._receiver(name, 0)

    def check(self) -> None:
        """Every group holds exactly the weights of its own last commit, bit for bit."""
        for name, weights in self.truth.items():
            for engine in self.engines[name]:
                assert differing(engine, weights) == {}, name

    def close(self) -> None:
        ends: list[Targets | Receiver] = [*self.targets, *self.receivers[A], *self.receivers[B]]
        self.threads.run(lambda thread: ends[thread].close())
        self.threads.close()

    def _receiver(self, name: str, rank: int) -> Receiver:
        return Receiver(self.engines[name][rank], self.places[name], rank, name, self.settings)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    built: list[World] = []

    def build(*names: str, **changes: Any) -> World:
        world = World(replace(SETTINGS, encoding="ulp", **changes))
        built.append(world)
        world.add(*(names or (A, B)))
        return world

    yield build
    for world in built:
        world.close()


def kind(update: TargetsUpdate, name: str) -> str:
    verdict = update.committed[name].verdict
    return "D" if verdict.kind is Kind.DELTA else verdict.reason.name


@pytest.mark.parametrize(
    ("accumulate", "fast", "slow"),
    [
        (False, ["FIRST_SYNC", *"DDDDDDD"], ["FIRST_SYNC", "STEP_GAP", "STEP_GAP"]),
        (True, ["FIRST_SYNC", *"DDDDDDD"], ["FIRST_SYNC", "D", "D"]),
    ],
)
def test_two_groups_at_different_paces(
    make: Callable[..., World], accumulate: bool, fast: list[str], slow: list[str]
) -> None:
    world = make(accumulate=accumulate)
    kinds: dict[str, list[str]] = {A: [], B: []}
    for step in range(8):
        world.train()
        versions = {A: step} if step % 3 else {A: step, B: 100 + step // 3}
        update = world.update(versions)
        assert (set(update.committed), update.failed) == (set(versions), {})
        for name in versions:
            kinds[name].append(kind(update, name))
        world.check()
    assert kinds == {A: fast, B: slow}
    assert [world.targets[1][name].version for name in world.targets[1]] == [7, 102]
    assert world.truth[A]["model.norm.weight"].equal(world.truth[B]["model.norm.weight"]) is False


def test_weights_that_are_away_fail_every_group_until_they_are_back(make: Callable[..., World]) -> None:
    world = make()
    for step in range(2):
        world.train()
        world.update({A: step, B: step})
    world.train()
    weight = world.trainers[1]._weights["0/model.norm.weight"]
    held, storage = weight.clone(), weight.untyped_storage()
    storage.resize_(0)
    update = world.update({A: 2, B: 2})
    assert update.committed == {}
    for name in (A, B):
        assert "WeightsAwayError" in update.failed[name]
        assert "trainer rank 1, seat" in update.failed[name]
        assert "0/model.norm.weight: its storage was freed" in update.failed[name]
        assert all(receiver.ready and receiver.version == 1 for receiver in world.receivers[name])
    storage.resize_(held.nbytes)
    weight.copy_(held)
    update = world.update({A: 2, B: 2})
    assert {name: kind(update, name) for name in (A, B)} == {A: "D", B: "D"}
    world.check()


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_a_group_that_is_gone_stops_nobody_and_comes_back(
    make: Callable[..., World], order: tuple[str, str]
) -> None:
    world = make(*order, accumulate=True)
    for step in range(2):
        world.train()
        world.update({A: step, B: step})
    world.on_engine(B, world.receivers[B][0].close)
    for step in (2, 3, 4):
        world.train()
        started = time.monotonic()
        update = world.update({A: step, B: step}, engines={A: step})
        assert kind(update, A) == "D"
        assert update.failed.keys() == {B}
        assert "engine rank 0" in update.failed[B]
        assert time.monotonic() - started < SETTINGS.timeout_seconds / 2, "nobody waits for who is gone"
        world.check()
    world.restart(B)
    world.train()

    waiting = world.targets[0][B].comm
    train_update = world.targets[0].update_weights

    def when_it_waits(versions: Mapping[str, int]) -> TargetsUpdate:
        while waiting.absent_engines():
            time.sleep(0.01)
        return train_update(versions)

    world.targets[0].update_weights = when_it_waits  # type: ignore[method-assign]
    update = world.update({A: 5, B: 5})
    assert (kind(update, A), update.failed) == ("D", {})
    assert update.committed[B].verdict.kind is Kind.FULL
    world.check()
    world.train()
    update = world.update({A: 6, B: 6})
    assert (kind(update, A), kind(update, B)) == ("D", "D")
    world.check()


def test_a_group_that_hangs_is_given_up_and_the_others_go_on(make: Callable[..., World]) -> None:
    world = make(A)
    world.add(B, settings=replace(world.settings, timeout_seconds=SOON, connect_timeout_seconds=SOON))
    for step in range(2):
        world.train()
        world.update({A: step, B: step})
    world.train()
    update = world.update({A: 2, B: 2}, engines={A: 2})
    assert (kind(update, A), list(update.failed)) == ("D", [B])
    assert "PeerError" in update.failed[B]
    assert "trainer rank 1: " in update.failed[B]
    world.check()


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_a_failure_on_one_trainer_rank_is_one_of_that_target_alone(
    make: Callable[..., World], order: tuple[str, str]
) -> None:
    world = make(*order, accumulate=True)
    for step in range(2):
        world.train()
        world.update({A: step, B: step})
    world.train()
    fault = FaultPlan()
    fault.fail("encode")
    world.targets[1][B]._session._on_phase = fault.on_phase
    update = world.update({A: 2, B: 2})
    assert (kind(update, A), list(update.failed)) == ("D", [B])
    assert "InjectedFault" in update.failed[B]
    world.check()
    world.train()
    update = world.update({A: 3, B: 2})
    assert (kind(update, A), kind(update, B)) == ("D", Reason.PREVIOUS_ABORTED.name)
    world.check()


def test_a_step_record_that_one_rank_cannot_forget_stops_one_target_alone(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(accumulate=True)
    for step in range(2):
        world.train()
        world.update({A: step, B: step})
    world.train()
    view: Any = world.targets[1][A]._view

    def fail() -> None:
        raise KeyError("a bug of the adapter")

    with monkeypatch.context() as patch:
        patch.setattr(view, "committed", fail)
        update = world.update({A: 2, B: 2})
    assert list(update.failed) == [A]
    for rank in range(TRAINERS):
        assert f"trainer rank {rank}: UpdateAborted" in update.failed[A]
    assert "KeyError: 'a bug of the adapter'" in update.failed[A]
    update = world.update({A: 3, B: 3})
    assert (kind(update, A), kind(update, B)) == (Reason.PREVIOUS_ABORTED.name, "D")
    world.check()


def test_a_target_may_leave_and_another_one_come(make: Callable[..., World]) -> None:
    world = make(accumulate=True)
    world.train()
    world.update({A: 0, B: 0})
    followers = world.trainers[0]._baselines._all
    held = len(followers)
    results(world.threads.run(lambda thread: world.targets[thread].remove(B) if thread < TRAINERS else None))
    gc.collect()
    assert len(followers) == held - 1
    world.train()
    assert kind(world.update({A: 1}), A) == "D"
    world.restart(B)
    world.add(B)
    world.train()
    update = world.update({B: 7, A: 2})
    assert (kind(update, A), kind(update, B)) == ("D", "FIRST_SYNC")
    world.check()


def test_ranks_that_mean_different_targets_all_refuse(make: Callable[..., World]) -> None:
    world = make()

    def run(thread: int) -> object:
        return world.targets[thread].update_weights({A: thread}) if thread < TRAINERS else None

    outcome = world.threads.run(run)
    assert [type(one) for one in outcome[:TRAINERS]] == [LockstepError, LockstepError]
    world.train()
    assert set(world.update({A: 0, B: 0}).committed) == {A, B}
    world.check()


class Broken(dict[str, int]):
    """Versions that cannot be read."""

    def items(self) -> Any:
        raise KeyError("a bug of the training loop")


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("rank", range(TRAINERS))
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"students": -1}, ConfigError, "ConfigError: version=-1: give an int"),
        ({"students": 2.0}, ConfigError, "ConfigError: version=2.0: give an int"),
        ({"studnets": 2}, ConfigError, "ConfigError: target 'studnets' is not known"),
        (Broken(), KeyError, "KeyError: 'a bug of the training loop'"),
        (None, AttributeError, "AttributeError: 'NoneType' object has no attribute 'items'"),
    ],
)
def test_what_one_rank_alone_cannot_begin_the_others_hear_at_once(
    make: Callable[..., World], given: Any, error: type[Exception], said: str, rank: int, connected: bool
) -> None:
    world = make(accumulate=True, connect_timeout_seconds=20.0, timeout_seconds=10.0)
    if connected:
        world.train()
        world.update({A: 1, B: 1})

    def run(thread: int) -> object:
        if thread >= TRAINERS:
            return None
        return world.targets[thread].update_weights(given if thread == rank else {A: 2, B: 2})

    started = time.monotonic()
    outcome = world.threads.run(run)
    assert time.monotonic() - started < 8, "the others waited for a rank that had given up"
    assert type(outcome[rank]) is error
    other = outcome[1 - rank]
    assert type(other) is UpdateAborted
    assert str(other).startswith(f"no target was begun: trainer rank {rank}: {said}")
    world.train()
    update = world.update({A: 2, B: 2})
    assert (kind(update, A), kind(update, B)) == (("D", "D") if connected else ("FIRST_SYNC", "FIRST_SYNC"))
    world.check()


def test_a_wrong_argument_is_told_also_where_no_other_rank_comes(make: Callable[..., World]) -> None:
    world = make(connect_timeout_seconds=0.5)

    def run(thread: int) -> object:
        return world.targets[thread].update_weights({A: -1}) if thread == 1 else None

    error = world.threads.run(run)[1]
    assert isinstance(error, ConfigError)
    assert isinstance(error.__cause__, ConnectError)


def test_wrong_arguments_name_what_is_wrong() -> None:
    store = HashStore()
    view = TorchAdamWTrainer.create(SHAPES)
    meeting = Rendezvous(num_engine_ranks=0, num_trainer_ranks=1, name="trainers", store=store)
    place = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, name=A, store=store)
    with pytest.raises(ConfigError, match="num_engine_ranks=1"):
        Targets(view, trainers=place, trainer_rank=0, settings=SETTINGS)
    targets = Targets(view, trainers=meeting, trainer_rank=0, settings=SETTINGS)
    targets.add(A, place)
    with pytest.raises(ConfigError, match="exists already"):
        targets.add(A, place)
    with pytest.raises(ConfigError, match="num_trainer_ranks=2"):
        targets.add(B, replace(place, num_trainer_ranks=2))
    with pytest.raises(ConfigError, match=r"timeout_seconds=30 s is longer than the 20 s"):
        targets.add(B, place, settings=replace(SETTINGS, timeout_seconds=30))
    with pytest.raises(ConfigError, match="'judges' is not known; there are: students"):
        targets.update_weights({B: 0})
    with pytest.raises(ConfigError, match="version=-1"):
        targets.update_weights({A: -1})
    assert list(targets) == [A]


def test_a_target_that_was_refused_leaves_no_record_of_steps_behind() -> None:
    trainer = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=SETTINGS)
    forks: list[TorchAdamWTrainer] = []
    fork = trainer.fork

    def counted() -> TorchAdamWTrainer:
        forks.append(fork())
        return forks[-1]

    trainer.fork = counted  # type: ignore[method-assign]
    hooks: Any = trainer._optimizer._optimizer_step_post_hooks
    before = len(hooks)
    meeting = Rendezvous(num_engine_ranks=0, num_trainer_ranks=1, name="trainers", store=HashStore())
    targets = Targets(trainer, trainers=meeting, trainer_rank=0, settings=SETTINGS)
    engineless = Rendezvous(num_engine_ranks=0, num_trainer_ranks=1, store=HashStore())
    with pytest.raises(ConfigError):
        targets.add("nobody", engineless)
    assert (len(forks), len(hooks), list(targets)) == (1, before, [])


def test_trainers_and_targets_share_the_secret(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWEX_DELTA_TEST_SECRET", "-".join(["the", "secret", "of", "targets"]))
    world = make(secret_source="env:AWEX_DELTA_TEST_SECRET")
    for step in range(2):
        world.train()
        assert set(world.update({A: step, B: step}).committed) == {A, B}
        world.check()
    comms = [world.targets[0]._meeting, *(world.targets[0][name].comm for name in (A, B))]
    assert len({comm.seal.frame_key for comm in comms} - {b""}) == 3
