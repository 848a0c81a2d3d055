"""Groups that somebody else destroys, wraps, or names alike, and how many operations they carry at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from awex_delta.errors import PeerError
from awex_delta.protocol import comm
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.ranks import ThreadRanks, results
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import EngineSeat, Pairing, differing
from tests.ranks.conftest import SETTINGS, SHAPES, train, wrong
from tests.ranks.test_faults import check_recovery, errors, ready

Make = Callable[..., Pairing]


def test_a_framework_may_destroy_all_groups_of_the_process(make: Make) -> None:
    """As it does to begin anew, or to give memory back; before connecting, and between updates."""
    pairing = make()

    def destroy(_: int) -> None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()

    for version in range(3):
        results(pairing.threads.run(destroy))
        train(pairing)
        kind = Kind.DELTA if version else Kind.FULL
        assert pairing.commit(version)[0].verdict.kind is kind
        assert wrong(pairing) == [{}] * 3
    results(pairing.threads.run(destroy))
    results(pairing.threads.run(lambda seat: pairing.ends[seat].close()))


class Dead:
    """A group whose every use raises."""

    supports_coalescing = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _fail(self, *_: object, **__: object) -> Any:
        raise self._error

    allgather = broadcast = send = recv = shutdown = _fail


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Invalid process group specified"),
        RuntimeError("the communicator was aborted"),
        dist.DistBackendError("NCCL communicator was aborted"),
        dist.DistNetworkError("connection reset"),
        KeyError("group"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("version", [2, 5])  # a delta, and a full sync
def test_whatever_a_dead_group_raises_ends_the_epoch(make: Make, error: Exception, version: int) -> None:
    pairing = ready(make())
    epoch = pairing.ends[0].comm.epoch
    pairing.ends[1].comm._group = Dead(error)
    outcome = pairing.update(version)
    assert errors(outcome) == [PeerError] * 5
    assert type(error).__name__ in str(outcome[1])
    assert outcome[1].__cause__ is error  # type: ignore[union-attr]
    check_recovery(pairing, version, Reason.PREVIOUS_ABORTED)
    assert {end.comm.epoch for end in pairing.ends} == {epoch + 1}
    for end in pairing.ends:
        end.comm._group = Dead(error)
    results(pairing.threads.run(lambda seat: pairing.ends[seat].close()))


def test_debugging_switches_of_torch_change_nothing(make: Make) -> None:
    """torch's check of collectives counts sends, too, of which three ranks have different numbers."""
    switch: Any = dist
    switch.set_debug_level(switch.DebugLevel.DETAIL)
    try:
        pairing = ready(make())
        pairing.commit(2)
        assert wrong(pairing) == [{}] * 3
    finally:
        switch.set_debug_level(switch.DebugLevel.OFF)


def test_two_pairings_of_one_process_may_have_the_same_name() -> None:
    """Two stores, and ranks of both in one thread each, as in two trainings of one notebook."""
    stores = host_store(), host_store()
    pairings: list[tuple[Receiver, Sender]] = []
    engines, trainers = [], []
    for number, store in enumerate(stores):
        rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=store.port)
        engines.append(DictEngine(SHAPES))
        trainers.append(TorchAdamWTrainer.create(SHAPES, seed=number, lr=1e-5, settings=SETTINGS))
        pairings.append(
            (
                Receiver(engines[-1], rendezvous, 0, "engine", SETTINGS),
                Sender(trainers[-1], rendezvous, 0, SETTINGS),
            )
        )
    threads = ThreadRanks(2)
    for version, kind in enumerate([Kind.FULL, Kind.DELTA]):
        for trainer in trainers:
            trainer.train_step()

        def update(seat: int, version: int = version) -> list[Kind]:
            return [pairing[seat].update_weights(version).verdict.kind for pairing in pairings]

        assert results(threads.run(update)) == [[kind, kind]] * 2
        for engine, trainer in zip(engines, trainers, strict=True):
            truth = {info.param: trainer.tensor(info.key) for info in trainer.weights()}
            assert differing(engine, truth) == {}
    threads.run(lambda seat: [pairing[seat].close() for pairing in pairings])
    threads.close()


class Counting:
    """A group that counts the operations between two that were begun and waited for."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.begun = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, *args: Any) -> Any:
        return self._count(self._group.send(*args))

    def recv(self, *args: Any) -> Any:
        return self._count(self._group.recv(*args))

    def _count(self, work: Any) -> Any:
        self.begun += 1
        self.most = max(self.most, self.begun)
        outer = self

        class Work:
            def wait(self, timeout: Any) -> None:
                work.wait(timeout)
                outer.begun -= 1

        return Work()


@pytest.mark.parametrize(("operations", "bucket_bytes", "most"), [(9, 1 << 20, 9), (1 << 10, 1 << 10, 15)])
def test_a_full_sync_has_a_bounded_number_of_operations_in_flight(
    make: Make, monkeypatch: pytest.MonkeyPatch, operations: int, bucket_bytes: int, most: int
) -> None:
    """A sender has three receivers at most; 1,024 bytes are five half tensors."""
    monkeypatch.setattr(comm, "MAX_OPERATIONS", operations)
    shapes = {f"model.layers.{layer}.mlp.down_proj.weight": (8, 24) for layer in range(40)}
    cut = [DictEngine(shapes, cut=dict.fromkeys(shapes, 1), rank=rank, num_ranks=2) for rank in range(2)]
    whole = EngineSeat(engine="whole", view=DictEngine(shapes))
    pairing = make(
        shapes=shapes,
        engines=[*(EngineSeat(engine="cut", view=view) for view in cut), whole],
        bucket_bytes=bucket_bytes,
    )
    results(pairing.threads.run(lambda seat: pairing.ends[seat].connect()))
    groups = [Counting(end.comm._group) for end in pairing.ends]
    for end, group in zip(pairing.ends, groups, strict=True):
        end.comm._group = group
    train(pairing)
    pairing.commit(0)
    assert wrong(pairing) == [{}] * 3
    assert [group.begun for group in groups] == [0] * 5
    assert all(0 < group.most <= most for group in groups), [group.most for group in groups]
