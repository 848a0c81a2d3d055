"""Ranks that leave the common order, and rows that are none: clear errors, at once, and the next is full."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from awex_delta.errors import ConnectError, LockstepError, PeerError, UpdateError
from awex_delta.plan.columns import pack
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from tests.pairing import Outcome, Pairing
from tests.ranks.conftest import SETTINGS, SOON, train, wrong
from tests.ranks.test_faults import ENGINE, TRAINER, check_recovery, errors, ready

Make = Callable[..., Pairing]


def fail_once(owner: object, name: str, error: BaseException) -> None:
    """Make one method of one object raise, the first time that it is called."""
    original = getattr(owner, name)

    def fail(*_: object, **__: object) -> object:
        setattr(owner, name, original)
        raise error

    setattr(owner, name, fail)


def check_at_once(begin: float) -> None:
    assert time.monotonic() - begin < SETTINGS.timeout_seconds / 2


def test_a_failure_outside_any_phase_ends_the_update_of_all_at_once(make: Make) -> None:
    pairing = ready(make())
    error = OSError("no memory for a row")
    fail_once(pairing.senders[1].comm, "gather", error)
    begin = time.monotonic()
    outcome = pairing.update(2)
    check_at_once(begin)
    assert errors(outcome) == [PeerError] * 4 + [UpdateError]
    assert "trainer rank 1, seat 4: OSError: no memory for a row" in str(outcome[TRAINER])
    assert outcome[TRAINER].__cause__ is error  # type: ignore[union-attr]
    assert [receiver.ready for receiver in pairing.receivers] == [True] * 3
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


def test_a_rank_that_tries_again_at_once_does_not_disturb_the_old_update(make: Make) -> None:
    pairing = ready(make(connect_timeout_seconds=SOON))
    fail_once(pairing.senders[1].comm, "gather", OSError("no memory for a row"))
    sender = pairing.senders[1]
    update = sender.update_weights

    def again(version: int) -> UpdateStats:
        try:
            return update(version)
        except UpdateError:
            return update(version + 1)

    sender.update_weights = again  # type: ignore[method-assign]
    outcome = pairing.update(2)
    sender.update_weights = update  # type: ignore[method-assign]
    assert errors(outcome[:TRAINER]) == [PeerError] * 4
    assert isinstance(outcome[TRAINER], ConnectError)  # nobody else came for version 3
    assert all(receiver.ready and receiver.version == 1 for receiver in pairing.receivers)
    check_recovery(pairing, 4, Reason.PREVIOUS_ABORTED)


def test_a_rank_that_comes_after_a_version_was_given_up_hears_who_did(make: Make) -> None:
    pairing = ready(make())
    fail_once(pairing.senders[1].comm, "gather", OSError("no memory for a row"))
    receiver, given_up = pairing.receivers[ENGINE], threading.Event()
    update = receiver.update_weights
    abandon = pairing.senders[1].comm.abandon

    def tell() -> None:
        abandon()
        given_up.set()

    def late(version: int) -> UpdateStats:
        assert given_up.wait(SETTINGS.timeout_seconds)
        return update(version)

    pairing.senders[1].comm.abandon = tell  # type: ignore[method-assign]
    receiver.update_weights = late  # type: ignore[method-assign]
    begin = time.monotonic()
    outcome = pairing.update(2)
    check_at_once(begin)
    receiver.update_weights = update  # type: ignore[method-assign]
    assert isinstance(outcome[ENGINE], PeerError)
    who = "version 2 was given up by trainer rank 1, seat 4 (last in phase 'verify of version 1')"
    assert who in str(outcome[ENGINE])
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


@pytest.mark.parametrize("error", [KeyError("model.layers.0"), TypeError("odd"), RuntimeError("odd")])
def test_an_engine_that_cannot_describe_itself_is_a_connect_error_on_every_rank(
    make: Make, error: Exception
) -> None:
    pairing = make()
    fail_once(pairing.engines[ENGINE], "tensors", error)
    begin = time.monotonic()
    outcome = pairing.update(0)
    check_at_once(begin)
    assert errors(outcome) == [ConnectError] * 5
    assert all(f"seat {ENGINE}: {type(error).__name__}" in str(one) for one in outcome)
    train(pairing)
    assert pairing.commit(0)[0].verdict.reason is Reason.FIRST_SYNC
    assert wrong(pairing) == [{}] * 3


HOSTILE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"[" * 4000,
    b'{"phase": "apply"}',
    b'{"role": "trainer", "version": NaN, "run_id": "a", "held": null}',
    b'{"role": "trainer", "version": 1e999, "run_id": "a", "held": null}',
    b'{"role": "trainer", "version": 2, "run_id": "a", "held": 1, "reason": 12345}',
    b'{"role": "engine", "version": ' + b"9" * 3000 + b', "run_id": "a", "held": null}',
    b'{"phase": "encode", "version": 2, "failure": "", "facts": {"sent": "NaN"}}',
    b'{"phase": "encode", "version": 2, "failure": 5, "facts": []}',
]


def instead(pairing: Pairing, seat: int, where: str, said: bytes) -> Callable[[], None]:
    """Let `seat` say something else in phase `where`; the result undoes it."""
    comm = pairing.ends[seat].comm
    gather = comm.gather

    def lie(row: bytes, *, width: int, phase: str) -> list[bytes]:
        return gather(said if phase.startswith(where) else row, width=width, phase=phase)

    comm.gather = lie  # type: ignore[method-assign]

    def undo() -> None:
        comm.gather = gather  # type: ignore[method-assign]

    return undo


@pytest.mark.parametrize("phase", ["propose", "encode"])
def test_a_row_that_cannot_be_read_is_a_lockstep_error_on_every_rank(make: Make, phase: str) -> None:
    pairing = ready(make())
    for version, row in enumerate(HOSTILE, start=2):
        undo = instead(pairing, ENGINE, phase, row)
        begin = time.monotonic()
        outcome = pairing.update(version)
        check_at_once(begin)
        assert errors(outcome) == [LockstepError] * 5, row
        assert all(one.ready and one.version == version - 1 for one in pairing.receivers), row
        undo()
        assert pairing.commit(version)[0].verdict.reason is Reason.PREVIOUS_ABORTED, row
        assert wrong(pairing) == [{}] * 3, row
        train(pairing)  # the next one is a delta, which comes to both phases
    assert pairing.commit(2 + len(HOSTILE))[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * 3


SPECS: list[Any] = [
    5,
    None,
    "error",
    [],
    {"error": 7},
    {"role": "engine", "rank": float("nan")},
    {"role": "engine", "rank": 1, "engine": "e", "agreed": {}, "tensors": [{"shape": [-1]}]},
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_a_description_that_cannot_be_read_is_refused_by_every_rank(make: Make, spec: Any) -> None:
    pairing = make()
    session = pairing.receivers[ENGINE]._session
    describe = session._describe
    session._describe = lambda agreed: spec
    begin = time.monotonic()
    outcome = pairing.update(0)
    check_at_once(begin)
    assert all(isinstance(error, ConnectError) and "seat 1" in str(error) for error in outcome), outcome
    session._describe = describe
    train(pairing)
    assert pairing.commit(0)[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize(
    ("size", "message"),
    [(2**30, "announces"), (2**62, "announces"), (2**64 - 1, "announces"), (3, "malformed description")],
)
def test_a_description_of_a_wrong_size_is_refused_before_memory_is_taken_for_it(
    make: Make, size: int, message: str
) -> None:
    pairing = make()
    comm = pairing.ends[ENGINE].comm
    gather = comm.gather

    def lie(row: bytes, *, width: int, phase: str) -> list[bytes]:
        if phase == "describe" and width == 16:
            row = size.to_bytes(8, "little")
        if phase == "describe" and width != 16:
            row = row[:size]
        return gather(row, width=width, phase=phase)

    comm.gather = lie  # type: ignore[method-assign]
    begin = time.monotonic()
    outcome = pairing.update(0)
    check_at_once(begin)
    for error in outcome:
        assert isinstance(error, ConnectError)
        assert f"seat {ENGINE}" in str(error)
        assert message in str(error)
    comm.gather = gather  # type: ignore[method-assign]
    assert pairing.commit(0)[0].verdict.kind is Kind.FULL


def packed(**header: object) -> bytes:
    """A description with this header and no columns."""
    return pack(header, {}, {})


ENGINE_HEADER: dict[str, Any] = {
    "role": "engine",
    "rank": 1,
    "engine": "cut",
    "agreed": {},
    "context": False,
    "layout": "0" * 32,
    "layout_bytes": 100,
}
BLOBS = [
    b"",
    b"{}",
    zstandard.compress(b"5"),
    zstandard.compress(b"{}"),
    zstandard.compress(b"[" * 100_000),
    packed(),
    packed(role="engine"),
    packed(**{**ENGINE_HEADER, "rank": 1.5}),
    packed(**{**ENGINE_HEADER, "layout": "x"}),
    packed(**{**ENGINE_HEADER, "layout_bytes": 2**62}),
    packed(**{**ENGINE_HEADER, "layout_bytes": -1}),
    packed(**ENGINE_HEADER, surprise=1),
]


def connect_with(
    pairing: Pairing, monkeypatch: pytest.MonkeyPatch, name: str, lie: Callable[..., Any]
) -> list[Outcome]:
    """An update in which one call of an engine rank's `Comm` gets other arguments."""
    comm = pairing.ends[ENGINE].comm
    honest = getattr(comm, name)
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(comm, name, lambda *given, phase: honest(*lie(phase, *given), phase=phase))
        outcome = pairing.update(0)
    check_at_once(begin)
    return outcome


def check_connects(pairing: Pairing) -> None:
    train(pairing)
    assert pairing.commit(0)[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("said", BLOBS, ids=range(len(BLOBS)))
def test_bytes_that_are_no_description_are_refused_by_every_rank(
    make: Make, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    pairing = make()
    outcome = connect_with(
        pairing, monkeypatch, "gather_bytes", lambda phase, blob: [said if phase == "describe" else blob]
    )
    assert errors(outcome) == [ConnectError] * 5
    assert all("seat 1 sent a malformed description" in str(error) for error in outcome), outcome
    check_connects(pairing)


def test_a_layout_that_was_damaged_is_refused_by_every_rank(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = make()

    def damage(_: str, blob: bytes, num_bytes: int, source: int) -> list[Any]:
        return [blob[:-1] + bytes([blob[-1] ^ 1]) if source == ENGINE else blob, num_bytes, source]

    outcome = connect_with(pairing, monkeypatch, "broadcast", damage)
    assert errors(outcome) == [ConnectError] * 5
    assert {str(error) for error in outcome} == {"a layout was damaged on the way"}
    check_connects(pairing)


WORDS = [
    b"",
    b"5",
    b"null",
    b"{",
    b'{"lines": 5}',
    b'{"lines": [[1]]}',
    b'{"lines": [[-1, "bfloat16", 1, 0, "0"]], "bytes": 0}',
    b'{"lines": [[9, "bfloat16", 1, 0, "0"]], "bytes": 0}',
    b'{"lines": [[3, "int8", 1, 0, "0"]], "bytes": 0}',
    b'{"lines": [[3, "bfloat16", 1, 0, "0"]], "bytes": 0}',
    b'{"lines": [], "bytes": 0}',
    b'{"lines": [], "bytes": "many"}',
]


@pytest.mark.parametrize("said", WORDS, ids=range(len(WORDS)))
def test_a_plan_that_cannot_be_read_or_is_another_one_is_refused_by_every_rank(
    make: Make, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    pairing = make()
    outcome = connect_with(
        pairing, monkeypatch, "gather_bytes", lambda phase, blob: [said if phase == "plan" else blob]
    )
    assert errors(outcome) == [LockstepError] * 5
    assert len({str(error) for error in outcome}) == 1
    check_connects(pairing)
