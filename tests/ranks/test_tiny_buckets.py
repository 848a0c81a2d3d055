"""Whole updates in very many frames: bit for bit, whatever the weights are, and cut where they should be."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_delta.errors import UpdateAborted
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.wire.frame import FrameIdentity
from awex_delta.wire.registry import CODECS
from tests.pairing import EngineSeat, Pairing
from tests.ranks.conftest import BIAS, DOWN, EMBED, NORM, Q_PROJ, ROUTER, SETTINGS, train, wrong
from tests.ranks.seams import pack_by

Make = Callable[..., Pairing]
Frames = list[torch.Tensor]
TINY = {"indices": 256, "gaps": 288, "ulp": 320, "ulp_zstd": 320, "ulp_context": 640, "auto": 320}
SHAPES: dict[str, tuple[int, ...]] = {EMBED: (16, 9), Q_PROJ: (12, 8), DOWN: (8, 24), NORM: (7,)}
BITS = torch.int16


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> dict[int, Frames]:
    """By transfer rank, every frame that is packed."""
    seen: dict[int, Frames] = defaultdict(list)

    def noted(identity: FrameIdentity, pack: Callable[[FrameIdentity], torch.Tensor]) -> torch.Tensor:
        seen[identity.sender].append(pack(identity))
        return seen[identity.sender][-1]

    pack_by(monkeypatch, noted)
    return seen


@pytest.mark.parametrize("encoding", [*CODECS, "auto"])
def test_versions_stay_bit_identical_in_tiny_frames(
    make: Make, frames: dict[int, Frames], encoding: str
) -> None:
    pairing = make(
        encoding=encoding,
        bucket_bytes=TINY[encoding],
        buffers={BIAS: (40,)},
        fp32={ROUTER: (4, 80)},
    )
    for version in range(4):
        train(pairing)
        stats = pairing.commit(version)
        assert stats[0].verdict.kind is (Kind.DELTA if version else Kind.FULL)
        assert wrong(pairing) == [{}, {}, {}]
        assert not version or stats[0].total_wire_bytes == sum(
            frame.numel() for rank in frames.values() for frame in rank
        )
        assert sum(len(rank) for rank in frames.values()) > 12 or not version
        assert all(frame.numel() <= TINY[encoding] for rank in frames.values() for frame in rank)
        frames.clear()


class Edited(TorchAdamWTrainer):
    """A trainer whose weights are written by the test, not by its optimizer."""

    @classmethod
    def with_any_bits(cls, rank: int, method: str = "snapshot") -> TorchAdamWTrainer:
        generator = torch.Generator().manual_seed(1)
        weights = {name: any_bits(shape, generator) for name, shape in SHAPES.items()}
        masters = {name: weight.float().requires_grad_() for name, weight in weights.items()}
        settings = replace(SETTINGS, method=method)
        optimizer = torch.optim.SGD(list(masters.values()), lr=1.0)
        return cls(
            weights=weights, masters=masters, optimizer=optimizer, settings=settings, dp_rank=rank, dp_size=2
        )


def any_bits(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """NaNs of any payload, infinities, subnormals, both zeros and numbers."""
    patterns = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=BITS)
    special = torch.tensor([0, -0x8000, 0x7F81, 0x7FC3, -0x7E, -0x80, 1, -0x7FFF, 0x7F80], dtype=BITS)
    chosen = special[torch.randint(len(special), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.5, patterns, chosen).view(torch.bfloat16)


@pytest.fixture
def edited() -> Iterator[Make]:
    built: list[Pairing] = []

    def build(encoding: str, bucket_bytes: int) -> Pairing:
        settings = replace(
            SETTINGS,
            method="snapshot",
            encoding=encoding,
            bucket_bytes=bucket_bytes,
            verify="full",
        )
        cut = {EMBED: 0, Q_PROJ: 0, DOWN: 1}
        seats = [
            EngineSeat(engine="cut", view=DictEngine(SHAPES, cut=cut, rank=rank, num_ranks=2))
            for rank in range(2)
        ]
        seats.append(EngineSeat(engine="whole", view=DictEngine(SHAPES)))
        built.append(Pairing([Edited.with_any_bits(rank) for rank in range(2)], seats, settings))
        return built[-1]

    yield build
    for pairing in built:
        pairing.close()


def edit(pairing: Pairing, share: float, seed: int) -> int:
    """Other bits for some elements, on every trainer alike; how many."""
    count = 0
    for trainer in pairing.trainers:
        generator, count = torch.Generator().manual_seed(seed), 0
        for info in trainer.weights():
            weight = trainer.tensor(info.key).view(BITS)
            hit = torch.rand(info.shape, generator=generator) < share
            other = any_bits(info.shape, generator).view(BITS)
            near = weight + torch.randint(-3, 4, info.shape, generator=generator, dtype=BITS)
            new = torch.where(torch.rand(info.shape, generator=generator) < 0.7, near, other)
            new = torch.where(hit, new, weight)
            count += int((new != weight).sum())
            weight.copy_(new)
    return count


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("encoding", CODECS)
def test_any_bits_travel_in_every_encoding(edited: Make, encoding: str, tiny: bool) -> None:
    """NaN payloads alone and among others, -0.0 to 0.0, subnormals, elements that change back."""
    pairing = edited(encoding, TINY[encoding] if tiny else 64 << 20)
    pairing.commit(0)
    assert wrong(pairing) == [{}, {}, {}]
    for version, share in enumerate([0.1, 0.003, 0.0, 0.3, 0.02], start=1):
        count = edit(pairing, share, seed=version)
        stats = pairing.commit(version)
        assert stats[0].verdict.kind is Kind.DELTA
        assert stats[-1].total_changed == count
        assert wrong(pairing) == [{}, {}, {}]
    held = {info.key: pairing.trainers[0].tensor(info.key).clone() for info in pairing.trainers[0].weights()}
    assert edit(pairing, 0.2, seed=99)
    for trainer in pairing.trainers:
        for key, old in held.items():
            trainer.tensor(key).copy_(old)
    assert pairing.commit(6)[-1].total_changed == 0
    assert wrong(pairing) == [{}, {}, {}]


@pytest.mark.parametrize("encoding", CODECS)
@pytest.mark.parametrize("value", [0x7F81, -0x7E, -0x8000, 1])
def test_a_single_element_keeps_its_bits(edited: Make, encoding: str, value: int) -> None:
    """A mask that meets one value is filled by a number; a NaN must not become another one on the way."""
    pairing = edited(encoding, 64 << 20)
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{NORM}").fill_(0)
    pairing.commit(0)
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{NORM}").view(BITS)[2] = value
    assert pairing.commit(1)[-1].total_changed == 1
    assert wrong(pairing) == [{}, {}, {}]
    assert pairing.engines[2].tensors_by_name[NORM].view(BITS).tolist() == [0, 0, value, 0, 0, 0, 0]


@pytest.mark.parametrize("encoding", ["indices", "gaps", "ulp"])
def test_exactly_one_bucket_and_one_byte_more(make: Make, frames: dict[int, Frames], encoding: str) -> None:
    """The bound of a delta fits into one frame, and a byte less does not."""

    def frames_at(bucket_bytes: int) -> Frames:
        engine = [EngineSeat(engine="e", view=DictEngine({DOWN: (64, 96)}))]
        options = {"shapes": {DOWN: (64, 96)}, "num_trainers": 1, "engines": engine}
        pairing = make(encoding=encoding, bucket_bytes=bucket_bytes, **options)
        frames.clear()
        for version in range(2):
            train(pairing)
            stats = pairing.commit(version)
            assert wrong(pairing) == [{}]
        assert stats[0].total_wire_bytes == sum(frame.numel() for frame in frames[1])
        return frames[1]

    (one,) = frames_at(64 << 20)
    low, high = one.numel() - 1, 16 * one.numel()
    while high - low > 1:  # the smallest bucket that is not cut
        middle = (low + high) // 2
        low, high = (low, middle) if len(frames_at(middle)) == 1 else (middle, high)
    assert [len(frames_at(size)) for size in (high, high - 1)] == [1, 2]


def test_a_bucket_that_holds_no_element_ends_the_update_everywhere(make: Make) -> None:
    pairing = make(encoding="ulp", bucket_bytes=200)
    train(pairing)
    pairing.commit(0)
    train(pairing)
    outcome = pairing.update(1)
    assert {type(one) for one in outcome} == {UpdateAborted}
    assert "weight_update_bucket_bytes=200 cannot hold one changed element" in str(outcome[0])
    assert all(receiver.ready for receiver in pairing.receivers)


class Alive:
    """Frames of one rank whose memory is held somewhere. most: of earlier ones, as a new one was begun."""

    def __init__(self) -> None:
        self.most = self.count = 0
        self._storages: list[weakref.ref[Any]] = []

    def before(self) -> None:
        """A thread that is done with a frame may take a moment to let it go."""
        for _ in range(200):
            held = sum(storage() is not None for storage in self._storages)
            if held <= 1:
                break
            time.sleep(0.01)
        self.most = max(self.most, held)

    def after(self, frame: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self._storages.append(weakref.ref(frame.untyped_storage()))
        return frame


def watch_senders(monkeypatch: pytest.MonkeyPatch, seats: Iterable[int]) -> list[Alive]:
    watched = {seat: Alive() for seat in seats}

    def counted(identity: FrameIdentity, pack: Callable[[FrameIdentity], torch.Tensor]) -> torch.Tensor:
        alive = watched[identity.sender]
        alive.before()
        return alive.after(pack(identity))

    pack_by(monkeypatch, counted)
    return list(watched.values())


def watch_receiver(receiver: Any) -> Alive:
    alive, receive = Alive(), receiver.comm.receive

    def counted(num_bytes: int, peer: int, *, phase: str) -> torch.Tensor:
        if num_bytes == 8:  # a size; no frame is so short
            announced: torch.Tensor = receive(num_bytes, peer, phase=phase)
            return announced
        alive.before()
        return alive.after(receive(num_bytes, peer, phase=phase))

    receiver.comm.receive = counted
    return alive


@pytest.mark.parametrize("encoding", ["indices", "ulp_zstd"])
def test_two_frames_exist_at_once_on_each_rank(
    make: Make, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    pairing = make(encoding=encoding, bucket_bytes=TINY[encoding], fp32={ROUTER: (4, 80)})
    train(pairing)
    pairing.commit(0)
    watched = [*watch_senders(monkeypatch, [3, 4]), *map(watch_receiver, pairing.receivers)]
    train(pairing)
    assert pairing.commit(1)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]
    assert sum(one.count for one in watched[:2]) == sum(one.count for one in watched[2:]) > 12
    assert max(one.most for one in watched) <= 1  # and the new one makes two


@pytest.mark.parametrize("broken", ["pack", "damage"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_frame_that_fails_among_many_ends_the_update_everywhere(
    make: Make, monkeypatch: pytest.MonkeyPatch, broken: str, place: int
) -> None:
    """Nobody waits for frames that do not come, nothing is written, and the next update is right."""
    pairing = make(bucket_bytes=256, fp32={ROUTER: (4, 80)})
    train(pairing)
    pairing.commit(0)
    held = [{n: t.clone() for n, t in engine.tensors_by_name.items()} for engine in pairing.engines]
    packed: Frames = []

    def fails(identity: FrameIdentity, pack: Callable[[FrameIdentity], torch.Tensor]) -> torch.Tensor:
        frame = pack(identity)
        if identity.sender != 3:
            return frame
        packed.append(frame)
        if len(packed) == place + 1 and broken == "pack":
            raise MemoryError("no room for a frame")
        if len(packed) == place + 1:
            frame[-1] ^= 1
        return frame

    train(pairing)
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        pack_by(patch, fails)
        outcome = pairing.update(1)
    assert time.monotonic() - begin < 10
    assert {type(one) for one in outcome} == {UpdateAborted}
    assert ("no room for a frame" if broken == "pack" else "checksum differs") in str(outcome[0])
    assert len(packed) > place + 1
    for engine, old in zip(pairing.engines, held, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in engine.tensors_by_name.items())
    pairing.commit(1)
    assert wrong(pairing) == [{}, {}, {}]
