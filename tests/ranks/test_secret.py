"""Who may take a seat: ranks that share a secret, ranks that do not, and intruders at the store."""

from __future__ import annotations

import logging
import queue
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from awex_delta.errors import ConfigError, ConnectError, PeerError, UpdateAborted
from awex_delta.observe.runlog.writer import RunLog
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.seal import Seal
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.ranks import ThreadRanks, results
from awex_delta.wire.registry import CODECS
from tests.pairing import Pairing
from tests.ranks import disk
from tests.ranks.conftest import SETTINGS, train, wrong
from tests.ranks.seams import frames_damaged_at
from tests.ranks.test_faults import check_recovery

Make = Callable[..., Pairing]

SECRET = "a-secret-of-tests-0123"
OTHER = "A-secret-of-tests-0123"
NAME = "AWEX_DELTA_TEST_SECRET"
NUM_ENGINES = 2


def written(path: Path, text: str) -> str:
    """The source of a secret in a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(f"{text}\n")
    return f"file:{path}"


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> str:
    """The source of the secret in the environment, which all thread ranks share."""
    monkeypatch.setenv(NAME, SECRET)
    return f"env:{NAME}"


class Seats:
    """Two engine ranks and a trainer rank, as bare seats of thread ranks, each with a secret of its own."""

    def __init__(self, sources: Sequence[str], store: Store | None = None, **changes: Any) -> None:
        self.store = store or HashStore()
        self.place = Rendezvous(
            num_engine_ranks=NUM_ENGINES, num_trainer_ranks=len(sources) - NUM_ENGINES, store=self.store
        )
        self.threads = ThreadRanks(len(sources))
        self.comms = [self.comm(seat, source, **changes) for seat, source in enumerate(sources)]

    def comm(self, seat: int, source: str, **changes: Any) -> Comm:
        settings = replace(SETTINGS, secret_source=source, **changes)
        return Comm(self.place, seat, settings)

    def connect(self) -> list[Any]:
        """What connecting came to, by seat."""
        return list(self.threads.run(lambda seat: self.comms[seat].connect()))

    def abandon(self) -> None:
        self.threads.run(lambda seat: self.comms[seat].abandon())

    def close(self) -> None:
        self.threads.run(lambda seat: self.comms[seat].close())
        self.threads.close()


@pytest.fixture
def sit() -> Iterator[Callable[..., Seats]]:
    """Build seats that are left when the test ends."""
    built: list[Seats] = []

    def build(*args: Any, **options: Any) -> Seats:
        built.append(Seats(*args, **options))
        return built[-1]

    yield build
    for seats in built:
        seats.close()


@pytest.mark.parametrize("encoding", [*CODECS, "auto"])
def test_ranks_that_share_a_secret_are_updated_by_every_encoding(
    make: Make, right: str, tmp_path: Path, encoding: str
) -> None:
    pairing = make(secret_source=right, encoding=encoding)
    # The same secret from elsewhere is the same secret.
    elsewhere = replace(pairing.settings, secret_source=written(tmp_path / "secret", SECRET))
    pairing._engine_settings = elsewhere
    pairing.restart_engine(0)
    kinds = []
    for version in range(3):
        train(pairing)
        kinds.append(pairing.commit(version)[0].verdict.kind)
        assert wrong(pairing) == [{}] * 3
    assert kinds == [Kind.FULL, Kind.DELTA, Kind.DELTA]
    keys = {end.comm.seal.frame_key for end in pairing.ends}
    assert len(keys) == 1
    assert len(keys.pop()) == 32


def test_ranks_around_a_folder_share_the_secret_among_themselves(
    build: Callable[..., Any], right: str, tmp_path: Path
) -> None:
    """Two trainer ranks that write, and an engine on two ranks that reads."""
    trainers = build(disk.Trainers, str(tmp_path / "run"), secret_source=right)
    engine = build(disk.Engine, trainers, num_ranks=2)
    trainers.write(0, 1)
    assert engine.read() == 1
    assert engine.holds(trainers.history[1])
    keys = [writer.comm.seal.frame_key for writer in trainers.writers]
    assert len(set(keys) - {b""}) == 1


def test_each_epoch_and_each_pairing_has_keys_of_its_own(sit: Callable[..., Seats], right: str) -> None:
    keys = []
    for seats in (sit([right] * 3), sit([right] * 3)):
        for _ in range(2):
            assert results(seats.connect()) == [None] * 3
            keys.append({comm.seal.frame_key for comm in seats.comms})
            seats.abandon()
    assert [len(one) for one in keys] == [1] * 4
    assert len(set.union(*keys)) == 4


def test_without_a_secret_nothing_is_added(sit: Callable[..., Seats]) -> None:
    seats = sit([""] * 3)
    assert results(seats.connect()) == [None] * 3
    assert [comm.trace for comm in seats.comms] == [["connect"]] * 3
    assert {(comm.seal.num_bytes, comm.seal.frame_key) for comm in seats.comms} == {(0, b"")}
    assert re.fullmatch(r"[0-9a-f]{32}", seats.store.get("awex_delta/0/seat/1").decode())


def test_a_wrong_secret_is_refused_by_the_name_of_its_seat(
    make: Make, right: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte differs. The others hear which seat it is, and nothing of the weights was told or touched."""
    caplog.set_level(logging.DEBUG)
    pairing = make(secret_source=right)
    pairing._engine_settings = replace(pairing.settings, secret_source=written(tmp_path / "s", OTHER))
    pairing.restart_engine(1)
    before = [{n: t.clone() for n, t in engine.tensors_by_name.items()} for engine in pairing.engines]
    outcome = pairing.update(0)
    assert [type(one) for one in outcome] == [ConnectError] * 5
    for seat in (0, 2, 3, 4):
        assert "engine rank 1 did not prove the secret" in str(outcome[seat])
        assert "own may be the wrong one" not in str(outcome[seat])
    assert "engine rank 0, engine rank 2, trainer rank 0, trainer rank 1 did not" in str(outcome[1])
    assert "this rank's own may be the wrong one" in str(outcome[1])
    assert [end.comm.trace for end in pairing.ends] == [["connect", "challenge", "prove"]] * 5
    for engine, old in zip(pairing.engines, before, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in engine.tensors_by_name.items())
    said = caplog.text + "".join(map(str, outcome))
    assert SECRET not in said
    assert OTHER not in said
    pairing._engine_settings = pairing.settings
    pairing.restart_engine(1)
    train(pairing)
    pairing.commit(0)
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("without", [(0,), (2,), (0, 1), (1, 2)])
def test_a_secret_on_some_ranks_only_is_refused_on_all(
    sit: Callable[..., Seats], right: str, without: tuple[int, ...]
) -> None:
    seats = sit(["" if seat in without else right for seat in range(3)])
    outcome = seats.connect()
    assert [type(one) for one in outcome] == [ConnectError] * 3
    names = seats.place.name_seats(without)
    remedy = "Remedy: give all ranks the same weight_update_secret_source, or none"
    said = f"without a secret: {names}; all other ranks have one. {remedy}"
    assert [str(one) for one in outcome] == [said] * 3
    seats.comms = [seats.comm(seat, right) for seat in range(3)]
    assert results(seats.connect()) == [None] * 3


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "secret of 0 characters: give at least 16"),
        ("fifteen-letters", 0o600, "secret of 15 characters: give at least 16"),
        ("two words that are long", 0o600, "printable ASCII without blanks"),
        (SECRET, 0o640, r"secret file .*s can be read by others. Remedy: chmod 600 "),
        (SECRET, 0o604, r"secret file .*s can be read by others. Remedy: chmod 600 "),
        (None, 0, r"secret file .*s cannot be read: FileNotFoundError"),
        ("folder", 0o700, r"secret file .*s cannot be read: IsADirectoryError"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_opened(
    make: Make, tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "s"
    if text == "folder":
        path.mkdir(mode)
    elif text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message) as caught:
        make(secret_source=f"file:{path}")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, f"this process has no variable {NAME}"),
        ("", f"secret in the variable {NAME} of 0 characters"),
        ("short", f"secret in the variable {NAME} of 5 characters"),
    ],
)
def test_a_bad_variable_is_refused_before_anything_is_opened(
    make: Make, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if text is not None:
        monkeypatch.setenv(NAME, text)
    with pytest.raises(ConfigError, match=message) as caught:
        make(secret_source=f"env:{NAME}")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("source", [SECRET, f"text:{SECRET}", f"env:{SECRET}", f"{SECRET}\n"])
def test_a_secret_in_place_of_its_source_is_not_shown(source: str) -> None:
    with pytest.raises(ConfigError, match="file:PATH or env:NAME") as caught:
        DeltaSettings(secret_source=source)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("source", ["file:", "env:", "env:1", "env:A B", "file:a\nb"])
def test_a_source_that_cannot_be_one_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="file:PATH or env:NAME"):
        DeltaSettings(secret_source=source)


def overheard(seal: Seal) -> list[bytes]:
    """All that a rank tells from now on, as it stands before it is sealed."""
    told: list[bytes] = []
    sealed = seal.sealed

    def listen(row: bytes) -> bytes:
        told.append(row)
        return sealed(row)

    seal.sealed = listen  # type: ignore[method-assign]
    return told


class Impostor(Seal):
    """What somebody without the secret can send: anything that it has seen, at the time it likes."""

    _word = b"S"

    def _is_due(self, words: Sequence[bytes]) -> bool:
        return words[0] == self._word

    def __init__(
        self, place: Rendezvous, challenge: Callable[[], bytes], proof: Callable[[Sequence[bytes]], bytes]
    ) -> None:
        super().__init__(place, 0, "")
        self._seen = challenge, proof

    def _challenge(self) -> bytes:
        return self._seen[0]()

    def _proof(self, challenges: Sequence[bytes]) -> bytes:
        return self._seen[1](challenges)

    def _accept(self, proofs: Sequence[bytes]) -> None:
        """It is content with anybody."""


def refused(seats: Seats) -> None:
    """The ranks with the secret name the first engine, and only that."""
    outcome = seats.connect()
    assert outcome[0] is None
    for one in outcome[1:]:
        assert isinstance(one, ConnectError)
        assert ": engine rank 0 did not prove the secret" in str(one)


def test_what_was_recorded_in_an_earlier_session_is_refused(sit: Callable[..., Seats], right: str) -> None:
    """The same seat, epoch and name, as after a store has started anew; only the challenges differ."""
    earlier = sit([right] * 3)
    told = overheard(earlier.comms[0].seal)
    assert results(earlier.connect()) == [None] * 3
    word, challenge, proof = told
    assert (word, len(challenge), len(proof)) == (b"S", 32, 32)
    ticket = earlier.store.get("awex_delta/0/seat/0").decode()
    later = sit([right] * 3)
    later.comms[0].seal = Impostor(later.place, lambda: challenge, lambda _: proof)
    later.comms[0].seal.new_ticket = lambda epoch: ticket  # type: ignore[method-assign]
    refused(later)
    later.comms[0] = later.comm(0, right)
    assert results(later.connect()) == [None] * 3


def test_what_another_seat_says_is_refused_when_it_comes_back(sit: Callable[..., Seats], right: str) -> None:
    seats = sit([right] * 3)
    victim, seen = seats.comms[2].seal, queue.SimpleQueue[bytes]()
    draw = victim._challenge

    def tell() -> bytes:
        challenge = draw()
        seen.put(challenge)
        return challenge

    victim._challenge = tell  # type: ignore[method-assign]
    # A MAC of all challenges, which the impostor knows before it has to answer itself.
    seats.comms[0].seal = Impostor(seats.place, lambda: seen.get(timeout=20), victim._proof)
    refused(seats)


def test_a_rank_with_a_secret_never_goes_on_without_proofs(sit: Callable[..., Seats], right: str) -> None:
    """Somebody in the path of the first all-gather makes all words say that there is no secret."""
    seats = sit([right] * 3)
    comm = seats.comms[1]
    gather = comm.gather

    def changed(row: bytes, *, width: int, phase: str) -> list[bytes]:
        told = gather(row, width=width, phase=phase)
        return [b""] * 3 if phase == "connect" else told

    comm.gather = changed  # type: ignore[method-assign]
    outcome = seats.connect()
    assert [type(one) for one in outcome] == [ConnectError] * 3
    assert str(outcome[1]).startswith("without a secret: engine rank 0, engine rank 1, trainer rank 0; all")
    assert comm.seal.frame_key == b""


@pytest.mark.parametrize("proof", [b"", b"\0" * 32, b"\0" * (32 - 1)])
def test_no_proof_is_no_proof(sit: Callable[..., Seats], right: str, proof: bytes) -> None:
    seats = sit([right] * 3)
    seats.comms[0].seal = Impostor(seats.place, lambda: b"", lambda _: proof)
    refused(seats)


def test_who_took_a_seat_without_the_secret_is_named_and_passed_over(
    make: Make, right: str, caplog: pytest.LogCaptureFixture
) -> None:
    pairing = make(secret_source=right)
    store: Any = pairing.rendezvous.store
    assert store.compare_set("awex_delta/epoch", "", "0") == b"0"
    store.set("awex_delta/0/seat/0", "an intruder")
    train(pairing)
    connect = pairing.receivers[0].connect

    def update(seat: int) -> None:
        if seat == 0:
            connect()
        else:
            store.wait(["awex_delta/1/seat/0"])
            pairing.ends[seat].connect()

    results(pairing.threads.run(update))
    warning = "engine rank 0, seat 0: this seat was taken; in epoch 0 somebody without this secret sat there"
    assert [one.getMessage() for one in caplog.records] == [f"{warning}, as 'an intruder'"]
    pairing.commit(0)
    assert wrong(pairing) == [{}] * 3


def test_who_meets_all_ranks_without_the_secret_keeps_nobody_out(make: Make, right: str) -> None:
    pairing = make(secret_source=right)
    train(pairing)
    intruder = Comm(pairing.rendezvous, 0, SETTINGS)
    outcome = pairing.threads.run(
        lambda seat: intruder.connect() if seat == 0 else pairing.ends[seat].update_weights(0)
    )
    assert [type(one) for one in outcome] == [ConnectError] * 5
    assert all(str(one).startswith("without a secret: engine rank 0; all other") for one in outcome)
    pairing.commit(0)
    assert wrong(pairing) == [{}] * 3


def test_a_seat_that_is_taken_in_every_epoch_ends_in_an_error(sit: Callable[..., Seats], right: str) -> None:
    store = HashStore()
    for epoch in range(50_000):  # more than a rank can look at in the time that it has
        store.set(f"awex_delta/{epoch}/seat/0", "an intruder")
    seats = sit([right] * 3, store, connect_timeout_seconds=0.2)
    outcome = seats.threads.run(lambda seat: seats.comms[0].connect() if seat == 0 else None)
    assert isinstance(outcome[0], ConnectError)
    assert "seat 0: this seat was taken again and again; in epoch 0 somebody without" in str(outcome[0])


def test_a_seat_without_a_proof_counts_as_missing(sit: Callable[..., Seats], right: str) -> None:
    """For the ranks that wait, and for targets that ask whether an engine is back."""
    seats = sit([right] * 3, connect_timeout_seconds=1.0)
    seats.store.set("awex_delta/0/seat/0", "an intruder")
    assert seats.comms[2].absent_engines() == (0, 1)
    outcome = seats.threads.run(lambda seat: seats.comms[seat].connect() if seat else None)
    assert outcome[0] is None
    for one in outcome[1:]:
        assert isinstance(one, ConnectError)
        assert ": engine rank 0 did not arrive within 1 s" in str(one)


@pytest.mark.parametrize("found", ["x", "-1", "9" * 5000, "\udcff"])
def test_an_epoch_that_is_none_is_an_error(sit: Callable[..., Seats], found: str) -> None:
    seats = sit([""] * 3)
    store: Any = seats.store
    store.set("awex_delta/epoch", found.encode("utf-8", "surrogateescape"))
    outcome = seats.connect()
    assert [type(one) for one in outcome] == [ConnectError] * 3
    assert "the store holds '" in str(outcome[0])
    assert len(str(outcome[0])) < 200


@pytest.mark.parametrize("seat", [1, 4])
def test_what_is_changed_on_the_way_is_refused(make: Make, right: str, seat: int) -> None:
    """One bit of a row that one rank has sealed."""
    pairing = make(secret_source=right)
    train(pairing)
    pairing.commit(0)
    seal = pairing.ends[seat].comm.seal
    sealed = seal.sealed

    def changed(row: bytes) -> bytes:
        seal.sealed = sealed  # type: ignore[method-assign]
        whole = sealed(row)
        return bytes([whole[0] ^ 1]) + whole[1:]

    seal.sealed = changed  # type: ignore[method-assign]
    outcome = pairing.update(1)
    assert [type(one) for one in outcome] == [PeerError] * 5
    name = pairing.rendezvous.name_seats([seat])
    assert sum(f"what {name} told in phase 'propose of version 1'" in str(one) for one in outcome) >= 1
    assert all(receiver.ready for receiver in pairing.receivers)
    check_recovery(pairing, 1, Reason.PREVIOUS_ABORTED)


def test_a_damaged_frame_ends_the_update_on_all_ranks(make: Make, right: str) -> None:
    pairing = make(secret_source=right)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    with frames_damaged_at(pairing.receivers[0]):
        outcome = pairing.update(2)
    assert [type(one) for one in outcome] == [UpdateAborted] * 5
    assert "seat 0: CorruptFrameError" in str(outcome[4])
    assert "somebody without the key of this session" in str(outcome[4])
    assert all(receiver.ready for receiver in pairing.receivers)
    check_recovery(pairing, 2, Reason.PREVIOUS_ABORTED)


def test_the_secret_is_in_nothing_that_is_told_logged_or_written(
    make: Make, right: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pairing = make(secret_source=right)
    seal = pairing.senders[0].comm.seal
    told = overheard(seal)
    log = RunLog(tmp_path / "RUN.jsonl", settings=pairing.settings)
    for version in range(2):
        train(pairing)
        log.append(pairing.commit(version)[3])
    assert len(told) > 10
    key = seal.frame_key
    identity = pairing.senders[0]._session.frame_identity
    shown = repr(pairing.settings) + caplog.text + (tmp_path / "RUN.jsonl").read_text()
    assert f"env:{NAME}" in shown
    pair = next(iter(pairing.senders[0]._session.met.plan.pairs.values()))
    decision: Any = type("Decision", (), {"run_id": "0" * 32, "base": 0, "version": 1})
    shown += repr(identity(decision, pair))
    assert identity(decision, pair).key == key
    everything = b"".join([*told, shown.encode()])
    for secret in (SECRET.encode(), key):
        for form in (secret, secret.hex().encode(), repr(secret).encode()):
            assert form not in everything


def test_the_secret_is_read_once(make: Make, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of its source later changes nothing, also not for a new connection."""
    pairing = make(secret_source=right)
    monkeypatch.delenv(NAME)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
        pairing.threads.run(lambda seat: pairing.ends[seat].comm.abandon())
    assert wrong(pairing) == [{}] * 3
