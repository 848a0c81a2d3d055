"""Ranks of which one began alone and gave up, and that are then called together, as a launcher does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from awex_delta.errors import ConnectError, PeerError
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.ranks import results
from tests.pairing import EngineSeat, Outcome, Pairing
from tests.ranks.conftest import SHAPES, train, wrong

Make = Callable[..., Pairing]
SHORT = 1.5
"""Seconds that a rank waits for the others in vain, once or twice a test."""

FIRST = [0, pytest.param(1, marks=pytest.mark.all), 2]
"""Two engines and a trainer: who begins."""


@pytest.fixture
def pairing(make: Make) -> Pairing:
    seats = [EngineSeat(engine=name, view=DictEngine(SHAPES)) for name in "ab"]
    pairing = make(engines=seats, num_trainers=1, timeout_seconds=SHORT, connect_timeout_seconds=SHORT)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    return pairing


def restart(pairing: Pairing, seat: int) -> None:
    if seat < 2:
        pairing.restart_engine(seat, DictEngine(SHAPES))
    else:
        pairing.restart_trainer(0, pairing.trainers[0])


def call_alone(pairing: Pairing, seat: int, work: Callable[[Any], Any]) -> Any:
    return pairing.threads.run(lambda one: work(pairing.ends[one]) if one == seat else None)[seat]


def call_all(pairing: Pairing, last: int, work: Callable[[Any], Any]) -> list[Outcome]:
    """All at once; `last` is slower than the others, so that it sits down after they have looked for it."""
    others, done = threading.Event(), set[int]()

    def run(seat: int) -> Any:
        if seat == last:
            assert others.wait(5 * SHORT)
            return work(pairing.ends[seat])
        try:
            return work(pairing.ends[seat])
        finally:
            done.add(seat)
            if len(done) == 2:
                others.set()

    return list(pairing.threads.run(run))


def check_together(pairing: Pairing, version: int) -> None:
    assert pairing.commit(version)[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 2
    train(pairing)
    assert pairing.commit(version + 1)[0].verdict.kind is Kind.DELTA


@pytest.mark.parametrize("first", FIRST)
def test_who_comes_back_before_the_others_begin_is_met_at_once(pairing: Pairing, first: int) -> None:
    assert isinstance(call_alone(pairing, first, lambda end: end.update_weights(5)), PeerError)
    epoch = pairing.ends[(first + 1) % 3].comm.epoch + 1
    store, calls = (
        pairing.ends[(first + 1) % 3].comm._open_store(),
        [end.update_weights for end in pairing.ends],
    )

    def run(seat: int) -> Any:
        while seat != first and store.find(f"{epoch}/seat/{first}") is None:
            threading.Event().wait(0.01)
        return calls[seat](5)

    assert results(pairing.threads.run(run))[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 2


@pytest.mark.parametrize("first", FIRST)
def test_ranks_that_try_a_version_again_together_meet_the_second_time(pairing: Pairing, first: int) -> None:
    assert isinstance(call_alone(pairing, first, lambda end: end.update_weights(5)), PeerError)
    outcome = call_all(pairing, first, lambda end: end.update_weights(5))
    assert [type(one) for seat, one in enumerate(outcome) if seat != first] == [PeerError] * 2
    assert isinstance(outcome[first], ConnectError)
    check_together(pairing, 5)


@pytest.mark.parametrize("first", FIRST)
def test_ranks_that_connect_again_together_meet_the_second_time(pairing: Pairing, first: int) -> None:
    results(pairing.threads.run(lambda seat: pairing.ends[seat].connect()))
    restart(pairing, first)
    assert isinstance(call_alone(pairing, first, lambda end: end.connect()), ConnectError)
    call_all(pairing, first, lambda end: end.connect())
    results(pairing.threads.run(lambda seat: pairing.ends[seat].connect()))
    check_together(pairing, 5)


@pytest.mark.parametrize("first", FIRST)
def test_who_left_in_order_gave_nothing_up(pairing: Pairing, first: int) -> None:
    """The version that it committed last is begun once more: all meet the first time."""
    restart(pairing, first)
    check_together(pairing, 1)
