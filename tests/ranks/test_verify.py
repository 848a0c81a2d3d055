"""Digests find what is wrong with live weights, name it, and let nothing commit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from awex_delta.errors import UpdateAborted, VerificationError
from awex_delta.protocol import verify as verify_module
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.wire.digest import sum_at
from tests.pairing import EngineSeat, Outcome, Pairing
from tests.ranks.conftest import BIAS, CUT, DOWN, EMBED, NORM, Q_PROJ, ROUTER, SHAPES, train, truth, wrong
from tests.ranks.seams import Scatter, write_by

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


def expect_refusal(outcome: list[Outcome], version: int, named: dict[int, list[str]]) -> None:
    """All ranks refuse alike, and name exactly these tensors, by engine rank."""
    assert [type(one) for one in outcome] == [VerificationError] * len(outcome)
    engines = "; ".join(f"engine rank {rank}: {', '.join(names)}" for rank, names in named.items())
    said = f"version {version} was given up: live weights differ from the trainer's after the writes, "
    assert {str(one) for one in outcome} == {f"{said}{engines}. The next update is a full sync"}


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


OTHER_DOWN = "model.layers.1.mlp.down_proj.weight"


class FaultyWrites:
    """Does the first write to one tensor wrong; `done` tells that it came."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.done = False
        sizes = [torch.Size(shape).numel() for shape in FULLER.values()]
        starts = dict(zip(FULLER, [0, *np.cumsum(sizes).tolist()], strict=False))
        self.start, self.size = starts[DOWN], torch.Size(SHAPES[DOWN]).numel()
        self.other = starts[OTHER_DOWN]

    def __call__(self, scatter: Scatter, pos: torch.Tensor, value: torch.Tensor) -> None:
        mine = (pos >= self.start) & (pos < self.start + self.size)
        if self.done or not mine.any():
            scatter(pos, value)
            return
        self.done = True
        scatter(pos[~mine], value[~mine])
        inside, value = pos[mine] - self.start, value[mine]
        if self.fault == "offset":
            moved, order = ((inside + 1) % self.size).sort()
            scatter(self.start + moved, value[order])
        elif self.fault == "tensor":
            scatter(self.other + inside, value)
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
    faulty = FaultyWrites(fault)
    with monkeypatch.context() as patch:
        write_by(patch, pairing.engines[ENGINE], faulty)
        outcome = pairing.update(2)
    assert faulty.done
    damaged = wrong(pairing)[ENGINE]
    assert set(damaged) == ({DOWN, OTHER_DOWN} if fault == "tensor" else {DOWN})
    message = str(outcome[0])
    assert [type(one) for one in outcome] == [VerificationError] * 4
    assert f"engine rank 1: {DOWN}" in message
    assert "engine rank 0" not in message
    assert not any(name in message for name in FULLER if name not in damaged)
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
    expect_refusal(pairing.update(2), 2, {2: [Q_PROJ]})
    expect_recovery(pairing, 2)


def test_two_touched_elements_that_change_places_are_found_at_once(make: Make) -> None:
    pairing = ready(make(lr=3e-5))
    new = truth(pairing)[Q_PROJ].view(-1)
    first, *others = touched(pairing, Q_PROJ)
    second = next(place for place in others if new[place] != new[first])
    tamper_at_synchronize(
        pairing.engines[2], lambda engine: swap(engine.tensors_by_name[Q_PROJ], first, second)
    )
    expect_refusal(pairing.update(2), 2, {2: [Q_PROJ]})
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
        expect_refusal(outcome, 2, {2: [Q_PROJ]})
        expect_recovery(pairing, 2)
        return
    assert [type(one) for one in outcome] == [UpdateAborted] * len(outcome)
    said = str(outcome[0])
    assert "engine rank 2, seat 2: DriftError: live weights are not those of version 1 any more" in said
    named = said.partition("or more of: ")[2].partition(". Something else")[0].split(", ")
    assert Q_PROJ in named
    assert set(named) <= set(SHAPES)
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
    expect_refusal(pairing.update(4), 4, {1: [DOWN]})
    expect_recovery(pairing, 4)


def test_full_finds_it_in_every_delta(make: Make) -> None:
    pairing = ready(make(verify="full", lr=0.0))
    flip(pairing.engines[0].tensors_by_name[NORM], 2)
    flip(pairing.engines[2].tensors_by_name[EMBED], 100)
    expect_refusal(pairing.update(2), 2, {0: [NORM], 2: [EMBED]})
    expect_recovery(pairing, 2)


@pytest.mark.parametrize(("name", "verify"), [(BIAS, "touched"), (ROUTER, "touched"), (ROUTER, "full")])
def test_tensors_that_travel_whole(make: Make, name: str, verify: str) -> None:
    pairing = ready(make(verify=verify, buffers={BIAS: (4,)}, fp32={ROUTER: (4, 8)}))
    tamper_at_synchronize(pairing.engines[0], lambda engine: flip(engine.tensors_by_name[name], 3, bit=0))
    expect_refusal(pairing.update(2), 2, {0: [name]})
    expect_recovery(pairing, 2)


def test_full_syncs_compare_everything(make: Make) -> None:
    pairing = ready(make(anchor_interval=1))
    tamper_at_synchronize(pairing.engines[1], lambda engine: flip(engine.tensors_by_name[DOWN], 5))
    expect_refusal(pairing.update(2), 2, {1: [DOWN]})
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
    expect_refusal(pairing.update(3), 3, {0: [head if separate else EMBED]})


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


def splitmix_sum(bits: np.ndarray, salt: int) -> int:
    """An independent digest of a line: splitmix64 in numpy's uint64, one output an element."""
    bits = bits.astype(np.int64).astype(np.uint64)
    with np.errstate(over="ignore"):
        state = np.arange(bits.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt) + bits
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return sum(int(one) for one in state) % 2**64


def line_of(pairing: Pairing, trainer: int, engine: int) -> np.ndarray:
    """Bits of what one trainer rank owns and one engine rank holds: in order of the trainer's parameters."""
    parts = {part.name: part for part in pairing.engines[engine].tensors()}
    found = []
    for info in pairing.trainers[trainer].weights():
        part = parts[info.param]
        held = np.zeros(info.shape, bool)
        held[tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.view.shape, strict=True))] = True
        held.reshape(-1)[: info.owned_start] = False
        held.reshape(-1)[info.owned_stop :] = False
        found.append(pairing.trainers[trainer].tensor(info.key).view(torch.int16).numpy()[held])
    return np.concatenate(found)


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
    total = [0, 0, 0]
    for trainer in range(2):
        plan = pairing.senders[trainer]._session.met.plan
        for engine in range(3):
            salt = plan.pairs[engine, torch.bfloat16].digest
            want = splitmix_sum(line_of(pairing, trainer, engine), salt)
            assert rows[3 + trainer][engine] == want != 0
            total[engine] += want
    for seat in range(3):
        assert rows[seat] == [-total[seat] % 2**64 if seat == rank else 0 for rank in range(3)]


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.DELTA])
def test_engines_of_one_layout_have_equal_sums_that_a_trainer_takes_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, rows: dict[int, list[int]], kind: Kind
) -> None:
    def sums_at(num_engines: int) -> Counter[str]:
        """Of how many elements each trainer rank takes the digest, in one update."""
        seats = [EngineSeat(engine=f"e{one}", view=DictEngine(SHAPES)) for one in range(num_engines)]
        pairing = ready(make(engines=seats, anchor_interval=int(kind is Kind.FULL)))
        counts: Counter[str] = Counter()
        names: dict[int, str] = {}
        lock = threading.Lock()

        def counted(*arguments: Any, **options: Any) -> torch.Tensor:
            with lock:
                counts[names[threading.get_ident()]] += arguments[1].numel()
            return sum_at(*arguments, **options)

        places = [*(f"engine {one}" for one in range(num_engines)), "trainer 0", "trainer 1"]
        pairing.threads.run(lambda seat: names.__setitem__(threading.get_ident(), places[seat]))
        with monkeypatch.context() as patch:
            patch.setattr(verify_module, "sum_at", counted)
            stats = pairing.commit(2)
        assert stats[0].verdict.kind is kind
        assert wrong(pairing) == [{}] * num_engines
        for trainer in (rows[num_engines], rows[num_engines + 1]):
            assert set(trainer) == {trainer[0]} != {0}
        assert all(counts[f"engine {one}"] > 0 for one in range(num_engines))
        return Counter({place: count for place, count in counts.items() if "trainer" in place})

    once = sums_at(1)
    assert set(once) == {"trainer 0", "trainer 1"}
    assert sums_at(3) == once


def test_off_reads_nothing_and_says_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a digest was taken")

    monkeypatch.setattr(verify_module, "sum_at", never)
    monkeypatch.setattr(verify_module, "sums_by_group", never)
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
    named = ", ".join(list(shapes)[:8])
    outcome = pairing.update(1)
    assert {type(one) for one in outcome} == {VerificationError}
    assert f"engine rank 0: {named} and 4 more. " in str(outcome[0])
    assert "layers.8" not in str(outcome[0])


def test_parts_of_one_tensor_have_digests_of_their_own(make: Make) -> None:
    """An engine whose two halves were exchanged holds the right bits in the wrong places."""
    pairing = ready(make(verify="full", encoding="ulp"))
    one, other = (pairing.engines[rank].tensors_by_name[EMBED] for rank in range(2))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    outcome = pairing.update(2)
    assert {type(one) for one in outcome} == {VerificationError}
    assert f"engine rank 0: {EMBED}; engine rank 1: {EMBED}. " in str(outcome[0])
    assert CUT[EMBED] == 0
