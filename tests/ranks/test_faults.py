"""Updates that fail, on any side, in any phase: nothing moves, nobody hangs, the next is full and exact."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from awex_delta.errors import ConfigError, ConnectError, LockstepError, PeerError, UpdateAborted, UpdateError
from awex_delta.plan.rank import PairKey
from awex_delta.protocol import receiver
from awex_delta.protocol.session import Session
from awex_delta.protocol.staging import Staging
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.faults import InjectedFault
from awex_delta.testing.ranks import results
from tests.pairing import EngineSeat, Outcome, Pairing
from tests.ranks.conftest import DOWN, EMBED, NORM, Q_PROJ, SETTINGS, SHAPES, SOON, train, truth, wrong
from tests.ranks.seams import frames_damaged_at

Make = Callable[..., Pairing]
TRAINER, ENGINE = 4, 1
"""Transfer ranks of a trainer and of an engine rank (three engine ranks come first)."""


def ready(pairing: Pairing) -> Pairing:
    """Two committed versions, and one more step to send."""
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    return pairing


def errors(outcome: list[Outcome]) -> list[type]:
    return [type(one) for one in outcome]


def check_recovery(pairing: Pairing, version: int, reason: Reason) -> None:
    """The next update is full for `reason`, exact, and followed by a delta."""
    stats = pairing.commit(version)
    assert {s.verdict.kind for s in stats} == {Kind.FULL}
    assert stats[0].verdict.reason is reason
    assert wrong(pairing) == [{}] * len(pairing.engines)
    train(pairing)
    assert pairing.commit(version + 1)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * len(pairing.engines)


@pytest.mark.parametrize(
    ("phase", "seat", "kind"),
    [
        ("encode", TRAINER, Kind.DELTA),
        ("stage", ENGINE, Kind.DELTA),
        ("apply", ENGINE, Kind.DELTA),
        ("prepare", TRAINER, Kind.FULL),
        ("prepare", ENGINE, Kind.FULL),
        ("apply", ENGINE, Kind.FULL),
    ],
)
def test_a_local_failure_aborts_everywhere_and_moves_nothing(
    make: Make, phase: str, seat: int, kind: Kind
) -> None:
    pairing = ready(make())
    before = [{n: t.clone() for n, t in engine.tensors_by_name.items()} for engine in pairing.engines]
    version = 2 if kind is Kind.DELTA else 5
    pairing.faults[seat].fail(phase)
    outcome = pairing.update(version)
    assert errors(outcome) == [UpdateAborted] * 5
    for error in outcome:
        assert f"seat {seat}: InjectedFault: injected in phase '{phase}'" in str(error)
        assert f"phase '{phase}'" in str(error)
    assert [end.version for end in pairing.ends] == [1] * 5
    written = phase == "apply"
    assert [receiver.ready for receiver in pairing.receivers] == [not written] * 3
    if not written:
        for engine, old in zip(pairing.engines, before, strict=True):
            assert all(torch.equal(tensor, old[name]) for name, tensor in engine.tensors_by_name.items())
    assert [engine.published for engine in pairing.engines] == [[0, 1]] * 3
    traces = [[p for p in end.comm.trace if not p.startswith("send")] for end in pairing.ends]
    assert all(trace == traces[0] for trace in traces)
    check_recovery(pairing, version, Reason.PREVIOUS_ABORTED)


STOPS = [
    ("propose", TRAINER),
    ("propose", ENGINE),
    ("encode", TRAINER),
    ("encode", ENGINE),
    ("frames", TRAINER),
    ("frames", ENGINE),
    ("send torch", TRAINER),
    ("send torch", ENGINE),
    ("stage", TRAINER),
    ("stage", ENGINE),
    ("apply", TRAINER),
    ("apply", ENGINE),
    ("verify", TRAINER),
    ("verify", ENGINE),
    ("prepare", TRAINER),
    ("prepare", ENGINE),
    ("send weights", TRAINER),
    ("send weights", ENGINE),
]


def stop_at(pairing: Pairing, seat: int, phase: str, action: Callable[[], None]) -> None:
    """Do `action` as `seat` is about to communicate in `phase`, once.

    Not before all others began the update: who begins it after `seat` has left waits for it to come back.
    """
    comm: Any = pairing.ends[seat].comm
    mark = comm._mark
    begun = []
    for other in pairing.ends:
        if other.comm is not comm:
            begun.append(threading.Event())
            _tell_when_marked(other.comm, begun[-1])

    def act(name: str) -> None:
        if name.startswith(phase):
            comm._mark = mark
            assert all(event.wait(SETTINGS.timeout_seconds) for event in begun)
            action()
        mark(name)

    comm._mark = act


def _tell_when_marked(comm: Any, event: threading.Event) -> None:
    """Set `event` as this rank communicates next, which is after it began."""
    mark = comm._mark

    def tell(name: str) -> None:
        comm._mark = mark
        event.set()
        mark(name)

    comm._mark = tell


@pytest.mark.parametrize(("phase", "seat"), STOPS)
def test_a_rank_that_dies_takes_nobody_with_it(make: Make, phase: str, seat: int) -> None:
    pairing = ready(make())
    full = phase in ("prepare", "send weights")
    version = 5 if full else 2

    def die() -> None:
        pairing.ends[seat].disconnect()  # its sockets close; the end stands for a new life, too
        raise InjectedFault("killed")

    stop_at(pairing, seat, phase, die)
    groups = [weakref.ref(end.comm._group) for end in pairing.ends]
    begin = time.monotonic()
    outcome = pairing.update(version)
    held = [one for one, group in enumerate(groups) if group() is not None]
    assert held == [], "an error that is kept holds sockets open, on which others may wait"
    assert time.monotonic() - begin < SETTINGS.timeout_seconds / 2, "nobody waits for who is gone"
    assert [kind for s, kind in enumerate(errors(outcome)) if s != seat] == [PeerError] * 4
    assert all(end.version == 1 for end in pairing.ends)
    if seat == ENGINE:
        pairing.restart_engine(
            ENGINE, DictEngine(SHAPES, cut={EMBED: 0, Q_PROJ: 0, DOWN: 1}, rank=1, num_ranks=2)
        )
    stats = pairing.commit(version)
    assert stats[0].verdict.reason is Reason.PREVIOUS_ABORTED
    assert wrong(pairing) == [{}] * 3
    train(pairing)
    assert pairing.commit(version + 1)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * 3


def update_while_one_hangs(pairing: Pairing, seat: int, phase: str, version: int) -> list[Outcome]:
    """An update in which `seat` hangs as it comes to `phase`, until all others have given it up."""
    calls = [end.update_weights for end in pairing.ends]
    done, given_up, seen = set[int](), threading.Event(), list[bool]()
    stop_at(pairing, seat, phase, lambda: seen.append(given_up.wait(5 * SOON)))

    def run(one: int) -> UpdateStats:
        try:
            return calls[one](version)
        finally:
            done.add(one)
            if len(done - {seat}) == len(calls) - 1:
                given_up.set()

    outcome = list(pairing.threads.run(run))
    assert seen == [True], "the others waited for longer than they may"
    return outcome


@pytest.mark.parametrize("seat", [TRAINER, ENGINE])
@pytest.mark.parametrize("phase", ["propose", "stage", "apply"])
def test_a_rank_that_hangs_is_named_with_the_phase_within_the_timeout(
    make: Make, phase: str, seat: int
) -> None:
    pairing = ready(make(timeout_seconds=SOON))
    outcome = update_while_one_hangs(pairing, seat, phase, 2)
    name = "trainer rank 1" if seat == TRAINER else "engine rank 1"
    others = [error for s, error in enumerate(outcome) if s != seat]
    assert {type(error) for error in others} == {PeerError}
    assert any(name in str(error) and f"'{phase} of version 2'" in str(error) for error in others)
    assert all(sender.version == 1 for sender in pairing.senders)
    stats = pairing.commit(2)
    assert stats[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 3


def test_a_full_sync_waits_no_longer_than_a_delta(make: Make) -> None:
    """The group was made under the longer limit of connect."""
    pairing = ready(make(timeout_seconds=SOON, connect_timeout_seconds=30.0))
    outcome = update_while_one_hangs(pairing, ENGINE, "send weights", 5)
    assert [type(one) for seat, one in enumerate(outcome) if seat != ENGINE] == [PeerError] * 4
    assert any("engine rank 1" in str(error) and "'send weights'" in str(error) for error in outcome)


def test_weights_of_another_dtype_than_agreed_are_never_sent(make: Make) -> None:
    """Gloo would end the receiving process."""
    pairing = ready(make())
    trainer = pairing.trainers[0]
    convert = trainer.convert

    def cast(key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, value.float() if name == NORM else value) for name, value in convert(key, tensor)]

    trainer.convert = cast  # type: ignore[method-assign]
    outcome = pairing.update(5)
    assert errors(outcome) == [UpdateAborted] * 5
    assert "torch.bfloat16" in str(outcome[0])
    assert "torch.float32" in str(outcome[0])
    trainer.convert = convert  # type: ignore[method-assign]
    check_recovery(pairing, 5, Reason.PREVIOUS_ABORTED)


def test_an_absent_rank_is_named(make: Make) -> None:
    pairing = ready(make(timeout_seconds=SOON))
    outcome = pairing.update(2, absent=[TRAINER])
    assert any("trainer rank 1" in str(error) for error in outcome if isinstance(error, PeerError))
    check_recovery(pairing, 3, Reason.PREVIOUS_ABORTED)


def test_an_engine_that_restarts_joins_again_by_a_full_sync(make: Make) -> None:
    pairing = ready(make())
    pairing.restart_engine(2, DictEngine(SHAPES))
    assert not pairing.receivers[2].ready
    check_recovery(pairing, 2, Reason.ENGINE_STALE)


def test_an_engine_that_was_killed_may_come_back_within_an_update(make: Make) -> None:
    """Killed between two updates, it told nobody; its new life arrives first and calls no `connect`."""
    pairing = ready(make())
    old = pairing.receivers[2].comm
    epoch, store = old.epoch, pairing.rendezvous.open_store(timedelta(seconds=20))
    pairing._on_thread(2, old._leave)  # its sockets close
    old._store = None  # and that is all
    pairing.restart_engine(2, DictEngine(SHAPES))
    calls = [end.update_weights for end in pairing.ends]

    def run(seat: int) -> UpdateStats:
        while seat != 2 and not store.check([f"{epoch + 1}/seat/2"]):
            time.sleep(0.01)
        return calls[seat](2)

    stats = results(pairing.threads.run(run, timeout_seconds=20))
    assert stats[0].verdict.reason is Reason.ENGINE_STALE
    assert wrong(pairing) == [{}] * 3


def test_a_trainer_that_restarts_is_another_run(make: Make) -> None:
    pairing, other = ready(make()), make()
    run = pairing.senders[0].run_id
    for rank in range(2):
        pairing.restart_trainer(rank, other.trainers[rank])
    train(pairing)
    stats = pairing.commit(2)
    assert stats[0].verdict.reason is Reason.FIRST_SYNC
    assert wrong(pairing) == [{}] * 3
    assert pairing.senders[0].run_id == pairing.senders[1].run_id != run


def test_a_commit_that_reached_only_some_ranks_ends_in_a_full_sync(make: Make) -> None:
    pairing = ready(make())
    pairing.commit(2)
    sender = pairing.senders[1]
    sender._ledger = sender._ledger.__class__(run_id=sender.run_id, version=1)  # it missed the end of 2
    train(pairing)
    stats = pairing.commit(3)
    assert stats[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 3
    assert pairing.senders[1].version == 3


def test_ranks_that_are_asked_for_different_versions_all_refuse(make: Make) -> None:
    pairing = ready(make())
    outcome = pairing.update([2, 2, 3, 2, 2])
    assert errors(outcome) == [LockstepError] * 5
    assert "{2: [0, 1, 3, 4], 3: [2]}" in str(outcome[0])
    assert [receiver.ready for receiver in pairing.receivers] == [True] * 3
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


def test_a_damaged_frame_is_refused_before_the_first_write(make: Make) -> None:
    pairing = ready(make())
    before = [{n: t.clone() for n, t in engine.tensors_by_name.items()} for engine in pairing.engines]
    with frames_damaged_at(pairing.receivers[0]):
        outcome = pairing.update(2)
    assert errors(outcome) == [UpdateAborted] * 5
    assert "seat 0: CorruptFrameError" in str(outcome[4])
    assert all(receiver.ready for receiver in pairing.receivers)
    for engine, old in zip(pairing.engines, before, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in engine.tensors_by_name.items())
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


def test_more_frames_than_there_are_elements_are_refused_everywhere(make: Make) -> None:
    pairing = ready(make())
    session = pairing.senders[1]._session
    exchange = session.exchange_counts
    session.exchange_counts = lambda dtype, counts: exchange(dtype, dict.fromkeys(counts, 2**40))  # type: ignore[method-assign]
    outcome = pairing.update(2)
    assert errors(outcome) == [LockstepError] * 5
    assert "seat 4 announces 1099511627776 frames" in str(outcome[0])
    session.exchange_counts = exchange  # type: ignore[method-assign]
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


def test_an_engine_that_writes_less_than_was_sent_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames of one sender are lost after they arrived: no frame is missing between two others."""

    class Losing(Staging):
        def __init__(self, session: Session, *rest: Any) -> None:
            self.loses = session.comm.seat == 2
            super().__init__(session, *rest)

        def add(self, key: PairKey, frame: torch.Tensor) -> None:
            if not self.loses or key[0] != TRAINER:
                super().add(key, frame)

    pairing = ready(make())
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "Staging", Losing)
        outcome = pairing.update(2)
    assert errors(outcome) == [UpdateAborted] * 5
    assert "elements, engines wrote" in str(outcome[0])
    assert [r.ready for r in pairing.receivers] == [False] * 3
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


def test_weights_that_moved_between_updates_are_written_where_they_are_now(make: Make) -> None:
    """An engine that sleeps and wakes gives its parameters other storages, with the same values."""
    pairing = ready(make())
    engines = pairing.engines
    for version in (2, 3):
        left = [{n: t.data for n, t in engine.tensors_by_name.items()} for engine in engines]
        for tensor in (t for engine in engines for t in engine.tensors_by_name.values()):
            tensor.data = tensor.data.clone()
        before = [{n: t.clone() for n, t in one.items()} for one in left]
        verdict = pairing.commit(version)[0].verdict
        assert (verdict.reason, verdict.ranks) == (Reason.ENGINE_MOVED, (0, 1, 2))
        assert EMBED in verdict.detail
        assert wrong(pairing) == [{}] * 3
        for old, memory in zip(before, left, strict=True):
            assert all(torch.equal(memory[name], value) for name, value in old.items()), (
                "written to old memory"
            )
        assert any(not torch.equal(t, left[2][n]) for n, t in engines[2].tensors_by_name.items())
        train(pairing)
    assert pairing.commit(4)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * 3


def test_weights_that_moved_before_ranks_connect_anew_are_noticed(make: Make) -> None:
    pairing = ready(make())
    pairing.engines[0].tensors_by_name[EMBED] = torch.zeros_like(pairing.engines[0].tensors_by_name[EMBED])
    outcome = pairing.threads.run(lambda seat: pairing.ends[seat].comm.abandon())
    assert outcome == [None] * 5
    assert pairing.commit(2)[0].verdict.reason is Reason.ENGINE_MOVED
    assert wrong(pairing) == [{}] * 3


def test_an_engine_that_was_untied_in_a_failed_update_is_described_anew_in_the_next(make: Make) -> None:
    head = "lm_head.weight"
    view = DictEngine({**SHAPES, head: SHAPES[EMBED]}, tied={head: EMBED})
    pairing = ready(make(engines=[EngineSeat(engine="e", view=view)], tied_embeddings=True))
    view.tensors_by_name[head] = torch.zeros(SHAPES[EMBED], dtype=torch.bfloat16)
    assert {type(one) for one in pairing.update([2, 3, 3])} == {LockstepError}
    assert not pairing.receivers[0].ready
    assert pairing.commit(2)[0].verdict.kind is Kind.FULL
    assert torch.equal(view.tensors_by_name[head], truth(pairing)[EMBED])
    train(pairing)
    assert pairing.commit(3)[0].verdict.kind is Kind.DELTA
    assert torch.equal(view.tensors_by_name[head], truth(pairing)[EMBED])


def test_an_engine_left_dirty_by_a_lost_trainer_votes_full_to_the_next_one(make: Make) -> None:
    pairing = ready(make())
    pairing.faults[ENGINE].fail("apply")
    pairing.update(2)
    for sender in pairing.senders:
        sender._ledger = sender._ledger.__class__(run_id=sender.run_id, version=1)  # it forgot the abort
    assert pairing.commit(2)[0].verdict.reason is Reason.ENGINE_DIRTY
    assert wrong(pairing) == [{}] * 3


def test_a_cache_flush_that_fails_leaves_the_engine_unready(make: Make) -> None:
    pairing = ready(make())
    engine = pairing.engines[2]
    flush = engine.committed

    def fail(version: int) -> None:
        raise InjectedFault(f"requests are still running at version {version}")

    engine.committed = fail  # type: ignore[method-assign]
    outcome = pairing.update(2)
    assert [type(one) for one in outcome] == [
        UpdateStats,
        UpdateStats,
        UpdateError,
        UpdateStats,
        UpdateStats,
    ]
    assert "engine rank 2, seat 2 could not publish it and is not ready" in str(outcome[2])
    assert isinstance(outcome[2].__cause__, InjectedFault)  # type: ignore[union-attr]
    assert [receiver.ready for receiver in pairing.receivers] == [True, True, False]
    engine.committed = flush  # type: ignore[method-assign]
    train(pairing)
    assert pairing.commit(3)[0].verdict.reason is Reason.ENGINE_DIRTY
    assert pairing.receivers[2].ready


REFUSALS = [
    ({NORM: (9,)}, rf"{NORM}: the trainer holds shape \[8\], engine 'e' \[9\]"),
    ({"model.extra.weight": (4,)}, r"name different tensors.*only the engine has \[model.extra.weight\]"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_engines_that_do_not_fit_are_refused_at_connect(
    make: Make, change: dict[str, tuple[int, ...]], message: str
) -> None:
    view = DictEngine({**SHAPES, **change})
    pairing = make(engines=[EngineSeat(engine="e", view=view)])
    for error in pairing.update(0):
        assert isinstance(error, ConnectError)
        assert re.search(message, str(error)), str(error)
    assert all(not tensor.any() for tensor in view.tensors_by_name.values())


def test_a_missing_tensor_lists_both_names(make: Make) -> None:
    shapes = {("language_model." + name if name == NORM else name): shape for name, shape in SHAPES.items()}
    pairing = make(engines=[EngineSeat(engine="e", view=DictEngine(shapes))])
    for error in pairing.update(0):
        assert isinstance(error, ConnectError)
        assert (
            "only the trainer has [model.norm.weight]; only the engine has [language_model.model.norm.weight]"
            in str(error)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_another_dtype_is_refused_with_both(make: Make, dtype: torch.dtype) -> None:
    pairing = make(engines=[EngineSeat(engine="e", view=DictEngine(SHAPES, dtypes={NORM: dtype}))])
    for error in pairing.update(0):
        assert isinstance(error, ConnectError)
        assert NORM in str(error)
        assert str(dtype).removeprefix("torch.") in str(error)


@pytest.mark.parametrize(("field", "value"), [("enabled", False), ("anchor_interval", 7)])
def test_sides_that_are_set_differently_find_out_at_connect(make: Make, field: str, value: object) -> None:
    pairing = make()
    other = Pairing(
        pairing.trainers,
        [EngineSeat(engine="e", view=DictEngine(SHAPES))],
        SETTINGS,
        replace(SETTINGS, **{field: value}),  # type: ignore[arg-type]
    )
    for error in other.update(0):
        assert isinstance(error, ConnectError)
        assert field in str(error)
    other.close()


@pytest.mark.parametrize("breakage", ["hole", "overlap"])
def test_shards_that_do_not_tile_are_refused(make: Make, breakage: str) -> None:
    pairing = make()
    trainer = pairing.trainers[1]
    shift = 1 if breakage == "hole" else -1
    infos = [
        replace(i, owned_start=i.owned_start + shift) if i.param == EMBED else i for i in trainer.weights()
    ]
    trainer.weights = lambda: infos  # type: ignore[method-assign]
    for error in pairing.update(0):
        assert isinstance(error, ConnectError)
        word = "nobody owns" if breakage == "hole" else "two ranks own"
        assert f"{EMBED}: {word} elements" in str(error)


def test_a_world_that_is_no_power_of_two_is_refused_before_anything_opens(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"world_size=5 .*world_size_policy"):
        make(allow_any_world_size=False)


def test_two_ranks_on_one_seat_end_with_the_name_of_the_empty_one(make: Make) -> None:
    pairing = make(connect_timeout_seconds=SOON, engines=[EngineSeat(engine="e", view=DictEngine(SHAPES))])
    second = pairing.senders[1]
    pairing.senders[1] = pairing._sender(0)  # its launcher gave it the number of another
    begin = time.monotonic()
    outcome = pairing.update(0)
    assert time.monotonic() - begin < 2 * SOON + 3
    assert {type(error) for error in outcome} == {ConnectError}
    assert all("trainer rank 1" in str(error) for error in outcome), outcome
    pairing.senders[1] = second
    train(pairing)
    assert pairing.commit(0)[0].verdict.reason is Reason.FIRST_SYNC
    assert wrong(pairing) == [{}]


def test_connecting_again_changes_nothing(make: Make) -> None:
    pairing = make()
    for _ in range(3):
        results(pairing.threads.run(lambda seat: pairing.ends[seat].connect()))
    epochs = [end.comm.epoch for end in pairing.ends]
    assert not any(receiver.ready for receiver in pairing.receivers)  # nothing to serve yet
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    assert [end.comm.epoch for end in pairing.ends] == epochs == [epochs[0]] * 5
    assert wrong(pairing) == [{}] * 3


def test_the_device_has_finished_before_a_version_is_said_to_be_complete(make: Make) -> None:
    pairing = ready(make())
    engine, comm = pairing.engines[ENGINE], pairing.receivers[ENGINE].comm
    seen: list[str] = []
    synchronize, gather, committed = engine.synchronize, comm.gather, engine.committed

    def record(row: bytes, *, width: int, phase: str) -> list[bytes]:
        seen.append(phase.partition(" of ")[0])
        return gather(row, width=width, phase=phase)

    engine.synchronize = lambda: (seen.append("synchronize"), synchronize())[1]  # type: ignore[func-returns-value,method-assign]
    engine.committed = lambda version: (seen.append("commit"), committed(version))[1]  # type: ignore[func-returns-value,method-assign]
    comm.gather = record  # type: ignore[method-assign]
    pairing.commit(2)
    assert seen == ["propose", "encode", "frames", "stage", "synchronize", "apply", "verify", "commit"]
    seen.clear()
    pairing.commit(9)
    assert seen == ["propose", "prepare", "synchronize", "apply", "verify", "commit"]


def test_a_rank_that_never_comes_is_named_at_connect(make: Make) -> None:
    pairing = make(connect_timeout_seconds=SOON)
    outcome = pairing.update(0, absent=[ENGINE])
    for seat, error in enumerate(outcome):
        if seat != ENGINE:
            assert isinstance(error, ConnectError)
            assert "engine rank 1 did not arrive within 3 s" in str(error)
    train(pairing)
    assert pairing.commit(0)[0].verdict.reason is Reason.FIRST_SYNC
    assert wrong(pairing) == [{}] * 3


def test_no_update_error_escapes_the_tree() -> None:
    assert issubclass(PeerError, UpdateError)
    assert issubclass(LockstepError, UpdateError)
    assert issubclass(UpdateAborted, UpdateError)


@pytest.mark.parametrize("version", ["7", 1.5, -1, 2**63, True, None])
def test_what_is_no_version_is_refused_before_anything_is_said(make: Make, version: Any) -> None:
    pairing = ready(make())
    for error in pairing.update([version] * 5):
        assert isinstance(error, ConfigError)
        assert f"version={version!r}" in str(error)
    assert pairing.commit(2)[0].verdict.kind is Kind.DELTA


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda view: {"a": 1}, "AttributeError"),
        (lambda view: [replace(t, view=t.view.clone()) for t in DictEngine.tensors(view)], "gives copies"),
    ],
)
def test_an_engine_that_describes_itself_wrongly_is_refused_on_all_ranks(
    make: Make, tensors: Callable[[DictEngine], Any], message: str
) -> None:
    view: Any = DictEngine(SHAPES)
    view.tensors = lambda: tensors(view)
    pairing = make(engines=[EngineSeat(engine="e", view=view)])
    for error in pairing.update(0):
        assert isinstance(error, ConnectError)
        assert message in str(error)
