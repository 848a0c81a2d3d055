"""Adapters that raise, in every method, at every call: an `UpdateError` or `ConnectError` on all ranks or a
commit on all of them, at once, and the next update is full and repairs everything."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from awex_delta.errors import ConnectError, PeerError, UpdateError
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.targets import Targets
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.ranks import results
from awex_delta.trainers.ema import EmaShadow
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import EngineSeat, Outcome, Pairing, differing
from tests.ranks.conftest import BIAS, DOWN, NORM, SETTINGS

ERRORS: list[Callable[[str], Exception]] = [
    RuntimeError,
    KeyError,
    AttributeError,
    torch.OutOfMemoryError,
    UpdateError,  # as it comes out of another pairing that an adapter holds
]
SHAPES = {DOWN: (8, 24), NORM: (8,)}
ENGINE_METHODS = ["tensors", "synchronize", "committed"]
TRAINER_METHODS = [
    *("layout", "weights", "tensor", "owned_slices", "gather_params", "committed", "convert", "detect"),
    *("transfer", "transfer enters", "transfer exits"),
]


Due = tuple[str, int, BaseException]
"""What raises: a method, which of its calls, and with what."""


class Raising:
    """A view that counts the calls of each method, and raises at a chosen one."""

    def __init__(self, view: Any) -> None:
        self.inner = view
        self.calls: dict[str, int] = {}
        self.due: Due | None = None
        self._lock = threading.Lock()  # methods are called by the threads that pack and stage, too

    def begin(self, due: Due | None = None) -> None:
        self.calls, self.due = {}, due

    def fork(self) -> Raising:
        self.count("fork")
        return Raising(self.inner.fork())

    def count(self, name: str) -> None:
        with self._lock:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.due is not None and self.due[:2] == (name, self.calls[name]):
                raise self.due[2]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.count(name)
            found = method(*args, **options)
            return self._counted(found) if name == "transfer" else found

        return call if callable(method) else method

    @contextmanager
    def _counted(self, held: AbstractContextManager[None]) -> Iterator[None]:
        self.count("transfer enters")
        with held:
            try:
                yield
            finally:
                self.count("transfer exits")


class Scene:
    """A pairing whose views may raise, and that is brought to each kind of update again and again."""

    def __init__(self, pairing: Pairing, views: dict[int, Raising], step: Callable[[int], None]) -> None:
        self.pairing, self.views, self._step = pairing, views, step
        self.version = 0
        self.update("full")

    def update(self, kind: str, due: Due | None = None, seat: int = -1) -> list[Outcome]:
        """A step, and one update: a delta, a full sync, or one before which all ranks connect anew."""
        self.version += 1 if kind == "delta" else 2
        self._step(self.version)
        for one, view in self.views.items():
            view.begin(due if one == seat else None)
        if kind == "connect":
            for end in self.pairing.ends:
                end.comm.abandon()
            for sender in self.pairing.senders:
                sender._routes = {}
        return self.pairing.update(self.version)

    def calls(self, seat: int, kind: str) -> dict[str, int]:
        """How often each method of one view is called in an update of that kind."""
        outcome = self.update(kind)
        assert all(isinstance(one, UpdateStats) for one in outcome), outcome
        if kind != "connect":
            assert outcome[0].verdict.kind.value == kind  # type: ignore[union-attr]
        return dict(self.views[seat].calls)

    def check(self, seat: int, kind: str, name: str, call: int, error: Exception) -> None:
        """Let one call raise, and look at how all ranks take it."""
        before = self.version
        begin = time.monotonic()
        outcome = self.update(kind, (name, call, error), seat)
        assert time.monotonic() - begin < SETTINGS.timeout_seconds / 2, "somebody waited"
        stats = [isinstance(one, UpdateStats) for one in outcome]
        held = [end.version for end in self.pairing.ends]
        is_engine = seat < len(self.pairing.receivers)
        if name == "detect" or (name == "owned_slices" and all(stats)):
            assert all(stats), outcome  # a doubt, so that the update was full
            assert outcome[0].verdict.kind is Kind.FULL  # type: ignore[union-attr]
        elif name == "committed" and is_engine:
            assert [not one for one in stats] == [one == seat for one in range(len(stats))], outcome
            assert held == [self.version] * len(held)
            assert not self.pairing.receivers[seat].ready
        else:
            assert not any(stats), (outcome, kind)
            if name == "tensors":  # what this engine computes with is not known, so it is not ready
                assert held.pop(seat) in (None, before)
                assert not self.pairing.receivers[seat].ready or kind == "connect"
            assert held == [before] * len(held), (held, outcome)
        for one in (one for one in outcome if not isinstance(one, UpdateStats)):
            assert isinstance(one, UpdateError | ConnectError), repr(one)
            assert type(error).__name__ in str(one), str(one)
        mine = outcome[seat]
        if not isinstance(mine, UpdateStats):
            assert isinstance(mine, BaseException)
            cause: BaseException | None = mine
            while cause is not error:
                assert cause is not None, repr(mine)
                cause = cause.__cause__
        if not all(stats):
            after = self.update("delta")
            assert all(isinstance(one, UpdateStats) for one in after), after
            assert {one.verdict.kind for one in after} == {Kind.FULL}  # type: ignore[union-attr]
        self.check_content()

    def check_content(self) -> None:
        """The engines hold what the trainer rank has, and say so."""
        trainer = self.views[len(self.pairing.engines)].inner
        weights = {info.param: trainer.tensor(info.key) for info in trainer.weights()}
        assert [differing(engine, weights) for engine in self.pairing.engines] == [{}] * len(
            self.pairing.engines
        )
        assert all(receiver.ready for receiver in self.pairing.receivers)

    def drive(self, seat: int, kind: str, names: list[str]) -> set[str]:
        """Every method, at every call if it has no more than four; the kinds of errors take turns.

        Returns the methods that an update of that kind calls.
        """
        errors, called = itertools.cycle(ERRORS), set[str]()
        for name in names:
            count = self.calls(seat, kind).get(name, 0)
            for call in range(1, count + 1):
                if min(call, count + 1 - call) <= 2:  # to prove a converter takes hundreds
                    self.check(seat, kind, name, call, next(errors)(f"{name} of {kind}"))
                    called.add(name)
        return called


def scene(make: Callable[..., Pairing]) -> Scene:
    views: list[Any] = [DictEngine(SHAPES | {BIAS: (4,)}, dtypes={BIAS: torch.float32}) for _ in range(2)]
    engines = [Raising(view) for view in views]
    pairing = make(
        shapes=SHAPES,
        buffers={BIAS: (4,)},
        engines=[EngineSeat(engine=name, view=view) for name, view in zip("ab", engines, strict=True)],  # type: ignore[arg-type]
        verify="full",
    )
    inner = list(pairing.trainers)
    trainers = [Raising(view) for view in inner]
    for sender, trainer in zip(pairing.senders, trainers, strict=True):
        sender._view = trainer
    pairing.engines = views

    def step(_: int) -> None:
        for trainer in inner:
            trainer.train_step()  # type: ignore[attr-defined]

    return Scene(pairing, dict(enumerate([*engines, *trainers])), step)


CALLED = {
    (1, "delta"): {"tensors", "synchronize", "committed"},
    (1, "full"): {"tensors", "synchronize", "committed"},
    (1, "connect"): {"tensors", "synchronize", "committed"},
    (3, "delta"): {"detect", "tensor", "convert"},
    (3, "full"): {"detect", "gather_params", "tensor", "convert"},
    (3, "connect"): {"layout", "weights", "detect", "gather_params", "tensor", "convert"},
}
AROUND = {"transfer", "transfer enters", "transfer exits", "committed"}


@pytest.mark.parametrize(("seat", "kind"), CALLED)
def test_whatever_a_view_raises_ends_the_update_of_all(
    make: Callable[..., Pairing], seat: int, kind: str
) -> None:
    """A trainer rank and an engine rank, of two each."""
    called = scene(make).drive(seat, kind, ENGINE_METHODS if seat == 1 else TRAINER_METHODS)
    assert called == CALLED[seat, kind] | (AROUND if seat == 3 else set())


@pytest.mark.parametrize("call", [1, 2, 3])
def test_weights_that_moved_before_their_view_raised_are_written_where_they_are(
    make: Callable[..., Pairing], call: int
) -> None:
    """Asked once, twice to see that it gives no copies, and once more after the writes."""
    one = scene(make)
    engine = one.views[1].inner
    engine.tensors_by_name[DOWN] = torch.zeros(SHAPES[DOWN], dtype=torch.bfloat16, device="cpu")
    outcome = one.update("delta", ("tensors", call, RuntimeError("no answer")), 1)
    assert not any(isinstance(stats, UpdateStats) for stats in outcome)
    assert not one.pairing.receivers[1].ready
    assert {stats.verdict.kind for stats in results(one.update("delta"))} == {Kind.FULL}
    one.check_content()


@pytest.mark.parametrize(("seat", "name"), [(1, "synchronize"), (3, "convert"), (3, "transfer exits")])
def test_a_view_that_is_interrupted_ends_the_update_of_the_others_at_once(
    make: Callable[..., Pairing], seat: int, name: str
) -> None:
    one = scene(make)
    begin = time.monotonic()
    outcome = one.update("full", (name, 1, KeyboardInterrupt()), seat)
    assert time.monotonic() - begin < SETTINGS.timeout_seconds / 2, "somebody waited"
    assert [type(error) for error in outcome] == [
        KeyboardInterrupt if place == seat else PeerError for place in range(4)
    ]
    assert {stats.verdict.kind for stats in results(one.update("delta"))} == {Kind.FULL}
    one.check_content()


@pytest.mark.parametrize("kind", ["delta", "full"])
def test_whatever_a_view_raises_under_an_average_ends_the_update_of_all(kind: str) -> None:
    """The view of the average asks the trainer's view, which puts together what all ranks own."""
    inner = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=SETTINGS)
    view, engine = Raising(inner), DictEngine(SHAPES)
    shadow = EmaShadow(view, alpha=1.0)
    pairing = Pairing([shadow], [EngineSeat(engine="a", view=engine)], SETTINGS)

    def step(version: int) -> None:
        inner.train_step()
        shadow.average(version)

    one = Scene(pairing, {1: view}, step)
    called = one.drive(1, kind, [*TRAINER_METHODS, "gather_owned"])
    assert called >= ({"gather_owned", "convert"} if kind == "full" else {"transfer exits"})
    pairing.close()


def test_a_fork_that_raises_adds_nothing_and_a_detach_that_raises_stops_nobody_from_leaving() -> None:
    view = Raising(TorchAdamWTrainer.create(SHAPES, settings=SETTINGS))
    store = HashStore()
    alone = Rendezvous(num_engine_ranks=0, num_trainer_ranks=1, name="alone", store=store)
    targets = Targets(view, trainers=alone, trainer_rank=0, settings=SETTINGS)
    view.begin(("fork", 2, KeyError("fork")))
    for name in "ab":
        meeting = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, name=name, store=store)
        if name == "b":
            with pytest.raises(KeyError, match="fork"):
                targets.add(name, meeting)
        targets.add(name, meeting)
    assert list(targets) == ["a", "b"]
    forks: Any = targets._forks
    forks["a"].begin(("detach", 1, KeyError("detach")))
    last = forks["b"]
    with pytest.raises(KeyError, match="detach"):
        targets.close()
    assert list(targets) == []
    assert last.calls == {"detach": 1}
