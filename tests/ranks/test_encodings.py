"""Every encoding through whole pairings: exact, safe to retry, and never onto another base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from awex_delta.errors import UpdateAborted
from awex_delta.lines.changes import Changes
from awex_delta.protocol import staging
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.wire import codec
from awex_delta.wire.frame import FrameIdentity
from awex_delta.wire.registry import CODECS
from awex_delta.wire.spans import Old
from tests.pairing import EngineSeat, Pairing
from tests.ranks.conftest import BIAS, DOWN, EMBED, ROUTER, train, wrong
from tests.ranks.seams import Scatter, pack_by, write_by

Make = Callable[..., Pairing]
ENCODINGS = [*CODECS, "auto"]
TRAINER, ENGINE = 4, 1
BIG: dict[str, tuple[int, ...]] = {EMBED: (96, 64), DOWN: (64, 96)}


def whole_engine() -> list[EngineSeat]:
    return [EngineSeat(engine="e", view=DictEngine(BIG))]


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_versions_stay_bit_identical(make: Make, encoding: str, lr: float) -> None:
    pairing = make(encoding=encoding, lr=lr, anchor_interval=4, buffers={BIAS: (4,)}, fp32={ROUTER: (4, 8)})
    for version in range(7):
        train(pairing)
        stats = pairing.commit(version)
        assert stats[0].verdict.kind is (Kind.FULL if version in (0, 5) else Kind.DELTA)
        assert wrong(pairing) == [{}, {}, {}]


def test_fewer_bytes_with_each_encoding(make: Make) -> None:
    spent = []
    for encoding in ("indices", "gaps", "ulp", "ulp_zstd"):
        pairing = make(encoding=encoding, shapes=BIG, engines=whole_engine(), lr=1e-5)
        for version in range(2):
            train(pairing)
            stats = pairing.commit(version)
        assert wrong(pairing) == [{}]
        spent.append(stats[0].total_wire_bytes / stats[0].total_changed)
    overhead = 2 * (120 + 8 + 8 * 16) / stats[0].total_changed
    assert spent[0] <= 6 + overhead
    assert spent[1] <= 3.1 + overhead
    assert spent[2] <= 1.6 + overhead
    assert spent == sorted(spent, reverse=True)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_a_step_that_changes_everything(make: Make, encoding: str, num_trainers: int) -> None:
    """A delta, where the encoding is small enough to pay even then; otherwise a full sync."""
    pairing = make(encoding=encoding, shapes=BIG, engines=whole_engine(), lr=0.5, num_trainers=num_trainers)
    for version in range(3):
        train(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}]
    dense = encoding in ("indices", "gaps")
    assert stats[0].verdict.reason is (Reason.TOO_DENSE if dense else Reason.NONE)
    if dense or num_trainers == 1:
        assert stats[0].total_wire_bytes <= stats[0].full_bytes + 250


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("phase", "seat"), [("encode", TRAINER), ("stage", ENGINE), ("apply", ENGINE)])
def test_the_same_version_can_be_sent_again(make: Make, encoding: str, phase: str, seat: int) -> None:
    pairing = make(encoding=encoding, lr=1e-5)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    pairing.faults[seat].fail(phase)
    assert {type(one) for one in pairing.update(2)} == {UpdateAborted}
    stats = pairing.commit(2)
    assert stats[0].verdict.reason is Reason.PREVIOUS_ABORTED
    assert wrong(pairing) == [{}] * 3
    train(pairing)
    assert pairing.commit(3)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_apply_that_stops_half_way_is_repaired_by_the_retry(
    make: Make, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    pairing = make(encoding=encoding, lr=1e-5)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    before = wrong(pairing)[2]

    def half(scatter: Scatter, pos: torch.Tensor, value: torch.Tensor) -> None:
        scatter(pos[::2].contiguous(), value[::2])
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        write_by(patch, pairing.engines[2], half)
        outcome = pairing.update(2)
    assert {type(one) for one in outcome} == {UpdateAborted}
    assert "the device is gone" in str(outcome[0])
    assert 0 < sum(wrong(pairing)[2].values()) < sum(before.values())
    assert not pairing.receivers[2].ready
    pairing.commit(2)
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_another_base_is_never_written_to(make: Make, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """An engine that lost its weights gets a full sync; a frame of another base is stale before a write."""
    pairing = make(encoding=encoding, lr=1e-5)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    pairing.receivers[2].invalidate()
    assert pairing.commit(2)[0].verdict.reason is Reason.ENGINE_STALE
    assert wrong(pairing) == [{}] * 3
    train(pairing)
    held = [{n: t.clone() for n, t in engine.tensors_by_name.items()} for engine in pairing.engines]

    def other_base(identity: FrameIdentity, pack: Callable[[FrameIdentity], torch.Tensor]) -> torch.Tensor:
        return pack(replace(identity, base_version=1) if identity.sender == 3 else identity)

    with monkeypatch.context() as patch:
        pack_by(patch, other_base)
        outcome = pairing.update(3)
    assert {type(one) for one in outcome} == {UpdateAborted}
    assert "StaleFrameError: frame belongs elsewhere: base_version=1 (expected 2)" in str(outcome[0])
    for engine, old in zip(pairing.engines, held, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in engine.tensors_by_name.items())
    pairing.commit(3)
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_are_computed_before_the_first_write(
    make: Make, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Staging alone leaves the engine as it was, and staging twice gives the same values."""
    pairing = make(encoding=encoding, lr=1e-5)
    train(pairing)
    pairing.commit(0)
    train(pairing)
    engine = pairing.engines[2]
    before = {n: t.clone() for n, t in engine.tensors_by_name.items()}
    seen: list[str] = []

    def twice(changes: Changes, old: Old) -> Changes:
        kept = None if changes.value is None else changes.value.clone()
        first = codec.settle(changes, old)
        second = codec.settle(replace(changes, value=kept), old)
        assert first.value is not None
        assert second.value is not None
        assert torch.equal(first.value, second.value)
        assert first.code is None
        seen.append("settle")
        return second

    def check_untouched(scatter: Scatter, pos: torch.Tensor, value: torch.Tensor) -> None:
        if "write" not in seen:
            assert all(torch.equal(t, before[n]) for n, t in engine.tensors_by_name.items())
        seen.append("write")
        scatter(pos, value)

    monkeypatch.setattr(staging, "settle", twice)
    write_by(monkeypatch, engine, check_untouched)
    pairing.commit(1)
    assert seen.count("settle") == 2 + 2 * 2  # each trainer rank to the whole engine and to both parts
    assert seen.count("write") == 2
    assert wrong(pairing) == [{}] * 3


def test_auto_changes_encoding_with_the_measured_link(make: Make) -> None:
    """Each rank chooses for itself, by a fact that only it knows; frames say how they are packed."""
    pairing = make(encoding="auto", shapes=BIG, engines=whole_engine(), lr=1e-5)
    spent = []
    for version, rates in enumerate([(None, None), (20e9, 20e9), (1e7, 1e7), (20e9, 1e7)]):
        train(pairing)
        for sender, rate in zip(pairing.senders, rates, strict=True):
            sender._bytes_per_second = rate
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}]
        spent.append(stats[0].total_wire_bytes / max(stats[0].total_changed, 1))
    assert spent[1] > 5.9
    assert spent[2] < 2
    assert spent[2] + 1 < spent[3] < spent[1] - 1


def test_the_link_is_measured_in_transfers_that_are_large_enough(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = make(encoding="auto", num_trainers=1, engines=whole_engine(), shapes=BIG)
    train(pairing)
    pairing.commit(0)
    assert pairing.senders[0]._bytes_per_second is None
    monkeypatch.setattr("awex_delta.protocol.sender.MIN_SAMPLE_BYTES", 1)
    train(pairing)
    stats = pairing.commit(5)[1]
    assert stats.verdict.kind is Kind.FULL
    assert pairing.senders[0]._bytes_per_second == stats.wire_bytes / stats.seconds["transfer"]
