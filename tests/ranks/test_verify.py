"""Digests find what is wrong with live weights, name it, and let nothing commit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from awex_delta.errors import UpdateAborted, VerificationError
from awex_delta.lines.storages import scatter_into
from awex_delta.protocol import receiver
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.pairing import EngineSeat, Outcome, Pairing
from awex_delta.wire import digest
from tests.ranks.conftest import BIAS, CUT, DOWN, EMBED, NORM, Q_PROJ, ROUTER, SHAPES, train, truth, wrong

Make = Callable[..., Pairing]
Tamper = Callable[[DictEngine], None]
TRAINER, ENGINE = 4, 1
FULLER: dict[str, tuple[int, ...]] = {**SHAPES, "model.layers.1.mlp.down_proj.weight": SHAPES[DOWN]}


def ready(pairing: Pairing) -> Pairing:
    """Two committed versions, and one more step to send."""
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    return pairing


def flip(tensor: torch.Tensor, place: int, bit: int = 3) -> None:
    """Flip one bit of one element, counted row by row."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    row = np.unravel_index(place, tuple(tensor.shape))
    bits[tuple(int(one) for one in row)] ^= 1 << bit


def tamper_at_synchronize(engine: DictEngine, tamper: Tamper) -> None:
    """Do it once, after all writes of the next update and before they are read back."""
    synchronize = engine.synchronize

    def act() -> None:
        engine.synchronize = synchronize  # type: ignore[method-assign]
        tamper(engine)
        synchronize()

    engine.synchronize = act  # type: ignore[method-assign]


def expect_refusal(outcome: list[Outcome], *named: str) -> str:
    """All ranks refuse alike, and name exactly these tensors. The message."""
    assert [type(one) for one in outcome] == [VerificationError] * len(outcome)
    messages = {str(one) for one in outcome}
    assert len(messages) == 1
    message = messages.pop()
    assert {name for name in (*FULLER, BIAS, ROUTER) if f"{name} [" in message} == set(named)
    return message


def expect_recovery(pairing: Pairing, version: int) -> None:
    """Nothing moved, engines are dirty, and the next update is full, exact and verified."""
    assert [end.version for end in pairing.ends] == [version - 1] * len(pairing.ends)
    assert [(one.ready, one.dirty) for one in pairing.receivers] == [(False, True)] * len(pairing.receivers)
    assert all(engine.published[-1] == version - 1 for engine in pairing.engines)
    traces = [[p for p in end.comm.trace if not p.startswith("send")] for end in pairing.ends]
    assert all(trace == traces[0] for trace in traces)
    stats = pairing.commit(version)
    assert (stats[0].verdict.reason, stats[0].verified) == (Reason.PREVIOUS_ABORTED, "full")
    assert wrong(pairing) == [{}] * len(pairing.engines)
    train(pairing)
    assert pairing.commit(version + 1)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * len(pairing.engines)


class FaultyWrites:
    """Stands in for the receiver's write, and does it wrong once: for the last tensor of a kind."""

    def __init__(self, fault: str, engine: DictEngine) -> None:
        self.fault = fault
        self.engine = engine
        self.done = False
        self._lock = threading.Lock()

    def __call__(self, view: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        target = self.engine.tensors_by_name[DOWN]
        mine = view.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        with self._lock:
            wrong_now = mine and not self.done and index.numel() > 0
            self.done = self.done or wrong_now
        if not wrong_now:
            scatter_into(view, index, values)
        elif self.fault == "offset":
            scatter_into(view, (index + 1) % view.numel(), values)
        elif self.fault == "tensor":
            other = self.engine.tensors_by_name["model.layers.1.mlp.down_proj.weight"]
            scatter_into(other, index, values)
        else:
            assert self.fault == "dropped"


@pytest.mark.parametrize("encoding", ["indices", "ulp"])
@pytest.mark.parametrize("fault", ["dropped", "offset", "tensor"])
def test_a_write_that_goes_wrong_is_found_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, fault: str, encoding: str
) -> None:
    seats = [
        EngineSeat(engine="a", view=DictEngine(FULLER)),
        EngineSeat(engine="b", view=DictEngine(FULLER)),
    ]
    pairing = ready(make(shapes=FULLER, engines=seats, encoding=encoding))
    faulty = FaultyWrites(fault, pairing.engines[ENGINE])
    monkeypatch.setattr(receiver, "scatter_into", faulty)
    outcome = pairing.update(2)
    assert faulty.done
    assert sum(wrong(pairing)[ENGINE].values()) > 0
    message = str(outcome[0])
    assert [type(one) for one in outcome] == [VerificationError] * 4
    assert f"engine rank 1: {DOWN} [0:8, 0:24]" in message
    assert "engine rank 0" not in message
    assert f"{NORM} [" not in message
    expect_recovery(pairing, 2)


def touched(pairing: Pairing, name: str) -> list[int]:
    """Elements of a whole tensor that the last step changed, where the committed ones are on engine 2."""
    old, new = pairing.engines[2].tensors_by_name[name], truth(pairing)[name]
    return [int(one) for one in (old.view(torch.int16) != new.view(torch.int16)).view(-1).nonzero()]


def swap(tensor: torch.Tensor, one: int, other: int) -> None:
    """Swap two elements that differ."""
    flat = tensor.view(-1)
    assert flat[one] != flat[other]
    flat[[one, other]] = flat[[other, one]]


def test_a_bit_that_flips_in_a_touched_weight_is_found_at_once(make: Make) -> None:
    pairing = ready(make(lr=3e-5))
    place = touched(pairing, Q_PROJ)[0]
    tamper_at_synchronize(pairing.engines[2], lambda engine: flip(engine.tensors_by_name[Q_PROJ], place))
    message = expect_refusal(pairing.update(2), Q_PROJ)
    assert f"engine rank 2: {Q_PROJ} [0:12, 0:8]. " in message
    expect_recovery(pairing, 2)


def test_two_touched_elements_that_change_places_are_found_at_once(make: Make) -> None:
    pairing = ready(make(lr=3e-5))
    new = truth(pairing)[Q_PROJ].view(-1)
    first, *others = touched(pairing, Q_PROJ)
    second = next(place for place in others if new[place] != new[first])
    tamper_at_synchronize(
        pairing.engines[2], lambda engine: swap(engine.tensors_by_name[Q_PROJ], first, second)
    )
    expect_refusal(pairing.update(2), Q_PROJ)
    expect_recovery(pairing, 2)


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 1024])
@pytest.mark.parametrize("verify_interval", [0, 2])
@pytest.mark.parametrize("encoding", ["ulp", "ulp_zstd", "indices", "gaps"])
def test_a_bit_that_flipped_before_the_update_in_a_touched_weight_is_found_at_once(
    make: Make, encoding: str, verify_interval: int, bucket_bytes: int
) -> None:
    settings = {"encoding": encoding, "verify_interval": verify_interval, "bucket_bytes": bucket_bytes}
    pairing = ready(make(**settings))
    engine = pairing.engines[2].tensors_by_name
    place = touched(pairing, Q_PROJ)[-1]
    flip(engine[Q_PROJ], place)
    held = {name: tensor.clone() for name, tensor in engine.items()}
    outcome = pairing.update(2)
    if encoding.startswith("ulp"):  # the step from the wrong value was written, and read back
        expect_refusal(outcome, Q_PROJ)
        expect_recovery(pairing, 2)
        return
    assert [type(one) for one in outcome] == [UpdateAborted] * len(outcome)
    assert (
        f"engine rank 2, seat 2: DriftError: live weights are not those of version 1 any more: {Q_PROJ}. "
        in str(outcome[0])
    )
    assert all(torch.equal(held[name].view(torch.int16), engine[name].view(torch.int16)) for name in held)
    assert [(one.ready, one.dirty) for one in pairing.receivers] == [(True, False)] * 2 + [(False, True)]
    stats = pairing.commit(2)
    assert stats[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 3
    train(pairing)
    assert pairing.commit(3)[0].verdict.kind is Kind.DELTA


def test_without_verification_whole_values_repair_a_touched_weight_unseen(make: Make) -> None:
    pairing = ready(make(verify="off"))
    flip(pairing.engines[2].tensors_by_name[Q_PROJ], touched(pairing, Q_PROJ)[0])
    assert pairing.commit(2)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("damage", ["flip", "swap"])
def test_an_untouched_weight_is_found_at_the_next_full_verification(make: Make, damage: str) -> None:
    pairing = make(verify_interval=4, lr=0.0)  # updates touch nothing
    train(pairing)
    pairing.commit(0)
    down = pairing.engines[1].tensors_by_name[DOWN]
    if damage == "flip":
        flip(down, 17)
    else:
        swap(down, 17, 18)
    for version in (1, 2, 3):
        train(pairing)
        assert pairing.commit(version)[0].verified == "touched"
    message = expect_refusal(pairing.update(4), DOWN)
    assert f"engine rank 1: {DOWN} [0:8, 0:12]. " in message
    expect_recovery(pairing, 4)


def test_full_finds_it_in_every_delta(make: Make) -> None:
    pairing = ready(make(verify="full", lr=0.0))
    flip(pairing.engines[0].tensors_by_name[NORM], 2)
    flip(pairing.engines[2].tensors_by_name[EMBED], 100)
    message = expect_refusal(pairing.update(2), NORM, EMBED)
    assert f"engine rank 0: {NORM} [0:8]; engine rank 2: {EMBED} [0:16, 0:8]. " in message
    expect_recovery(pairing, 2)


@pytest.mark.parametrize(("name", "verify"), [(BIAS, "touched"), (ROUTER, "touched"), (ROUTER, "full")])
def test_tensors_that_travel_whole(make: Make, name: str, verify: str) -> None:
    pairing = ready(make(verify=verify, buffers={BIAS: (4,)}, fp32={ROUTER: (4, 8)}))
    tamper_at_synchronize(pairing.engines[0], lambda engine: flip(engine.tensors_by_name[name], 3, bit=0))
    expect_refusal(pairing.update(2), name)
    expect_recovery(pairing, 2)


def test_full_syncs_compare_everything(make: Make) -> None:
    pairing = ready(make(anchor_interval=1))
    tamper_at_synchronize(pairing.engines[1], lambda engine: flip(engine.tensors_by_name[DOWN], 5))
    message = expect_refusal(pairing.update(2), DOWN)
    assert "engine rank 1" in message
    expect_recovery(pairing, 2)


@pytest.mark.parametrize("separate", [True, False])
def test_a_tied_head(make: Make, separate: bool) -> None:
    head = "lm_head.weight"
    shapes = {**SHAPES, head: SHAPES[EMBED]}
    view = DictEngine(shapes) if separate else DictEngine(shapes, tied={head: EMBED})
    pairing = make(engines=[EngineSeat(engine="e", view=view)], tied_embeddings=True, verify="full")
    for version in range(3):
        train(pairing)
        assert pairing.commit(version)[0].verified == "full"
    flip(view.tensors_by_name[head if separate else EMBED], 9)
    train(pairing)
    outcome = pairing.update(3)
    assert [type(one) for one in outcome] == [VerificationError] * 3
    assert (f"{head} [" in str(outcome[0])) == separate
    assert (f"{EMBED} [" in str(outcome[0])) != separate


@pytest.mark.parametrize("encoding", ["indices", "ulp", "auto"])
@pytest.mark.parametrize("num_trainers", [1, 2, 3])
def test_full_agrees_with_itself_over_owners_replicas_and_cuts(
    make: Make, encoding: str, num_trainers: int
) -> None:
    pairing = make(
        verify="full",
        encoding=encoding,
        num_trainers=num_trainers,
        buffers={BIAS: (4,)},
        fp32={ROUTER: (4, 8)},
    )
    for version in range(4):
        train(pairing)
        assert {one.verified for one in pairing.commit(version)} == {"full"}
        assert wrong(pairing) == [{}] * 3


def splitmix_sum(tensor: torch.Tensor, salt: str) -> int:
    """An independent digest of a tensor: splitmix64 in numpy's uint64, one output an element."""
    bits = tensor.contiguous().view(-1).view(torch.int16).numpy().astype(np.int64).astype(np.uint64)
    seed = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        state = np.arange(bits.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed) + bits
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return sum(int(one) for one in state) % 2**64


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """What each seat last said where digests were compared."""
    said: dict[int, list[int]] = {}
    gather = Comm.gather

    def record(self: Comm, row: bytes, *, width: int, phase: str) -> list[bytes]:
        if phase.startswith("verify"):
            said[self.seat] = [int.from_bytes(row[at : at + 8], "little") for at in range(0, len(row), 8)]
        return gather(self, row, width=width, phase=phase)

    monkeypatch.setattr(Comm, "gather", record)
    return said


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.DELTA])
def test_what_is_said_is_the_digest_of_all_weights(
    make: Make, rows: dict[int, list[int]], kind: Kind
) -> None:
    pairing = make(verify="full", anchor_interval=int(kind is Kind.FULL))
    for version in range(3):
        train(pairing)
        stats = pairing.commit(version)
    assert stats[0].verdict.kind is kind
    for rank, engine in enumerate(pairing.engines):
        want = 0
        for name, tensor in engine.tensors_by_name.items():
            want += splitmix_sum(tensor, f"{name}@{','.join('0' * tensor.dim())}")
        assert rows[rank] == [-want % 2**64 if seat == rank else 0 for seat in range(3)]
        assert (rows[3][rank] + rows[4][rank]) % 2**64 == want % 2**64
    assert any(rows[3])
    assert any(rows[4])


def test_off_reads_nothing_and_says_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a digest was taken")

    monkeypatch.setattr("awex_delta.protocol.verify.sum_at", never)
    monkeypatch.setattr("awex_delta.protocol.verify.sum_whole", never)
    pairing = ready(make(verify="off"))
    tamper_at_synchronize(pairing.engines[0], lambda engine: flip(engine.tensors_by_name[NORM], 1))
    stats = pairing.commit(2)
    assert {one.verified for one in stats} == {"off"}
    assert wrong(pairing)[0] == {NORM: 1}
    assert not any(phase.startswith("verify") for end in pairing.ends for phase in end.comm.trace)
    off = make(enabled=False)
    train(off)
    assert off.commit(0)[0].verified == "off"


@pytest.mark.parametrize("seat", [TRAINER, ENGINE])
@pytest.mark.parametrize("version", [2, 7])
def test_a_digest_that_cannot_be_taken_is_a_failure_of_all(make: Make, seat: int, version: int) -> None:
    pairing = ready(make(verify="full"))
    pairing.faults[seat].fail("verify")
    outcome = pairing.update(version)
    assert [type(one) for one in outcome] == [UpdateAborted] * 5
    side = "engine" if seat < 3 else "trainer"  # ranks 0 to 2 and 0 to 1
    cause = f"{side} rank {seat % 3}, seat {seat}: InjectedFault: injected in phase 'verify'"
    assert {str(one) for one in outcome} == {f"version {version} was given up in phase 'apply': {cause}"}
    assert [one.dirty for one in pairing.receivers] == [True] * 3
    assert pairing.commit(version)[0].verdict.kind is Kind.FULL
    assert wrong(pairing) == [{}] * 3


def test_many_wrong_tensors_are_counted(make: Make) -> None:
    shapes = {f"model.layers.{layer}.input_layernorm.weight": (4,) for layer in range(12)}
    pairing = make(shapes=shapes, engines=[EngineSeat(engine="e", view=DictEngine(shapes))], verify="full")
    train(pairing)
    pairing.commit(0)
    for tensor in pairing.engines[0].tensors_by_name.values():
        flip(tensor, 2)
    message = str(pairing.update(1)[0])
    assert "model.layers.0.input_layernorm.weight [0:4], " in message
    assert message.count("input_layernorm") == 8
    assert "and 4 more. " in message


def test_parts_of_one_tensor_have_digests_of_their_own(make: Make) -> None:
    """An engine whose two halves were exchanged holds the right bits in the wrong places."""
    assert digest.salt_of(f"{EMBED}@0,0") != digest.salt_of(f"{EMBED}@8,0")
    pairing = ready(make(verify="full", encoding="ulp"))
    one, other = (pairing.engines[rank].tensors_by_name[EMBED] for rank in range(2))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    message = str(pairing.update(2)[0])
    assert f"engine rank 0: {EMBED} [0:8, 0:8]; engine rank 1: {EMBED} [0:8, 0:8]" in message
    assert CUT[EMBED] == 0
