"""Weights, masters and moments that are away from one trainer rank: nobody crashes, engines stay exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils import swap_tensors

from awex_delta.errors import UnsupportedError, WeightsAwayError
from awex_delta.folder.writer import DiskWriter
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.ema import EmaShadow
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import Outcome, Pairing
from tests.ranks.conftest import BIAS, EMBED, SHAPES, train, wrong

Make = Callable[..., Pairing]


@contextmanager
def freed(tensor: torch.Tensor) -> Iterator[None]:
    """The storage of a tensor given back for a while, as offloading does it, and then filled as it was."""
    storage = tensor.untyped_storage()
    held, size = tensor.detach().clone(), storage.nbytes()
    storage.resize_(0)
    try:
        yield
    finally:
        storage.resize_(size)
        tensor.detach().copy_(held)


@contextmanager
def elsewhere(tensor: torch.Tensor) -> Iterator[None]:
    """The same tensor on a device without elements: there is no second real one."""
    swap: Callable[[torch.Tensor, torch.Tensor], None] = swap_tensors
    other = torch.empty_like(tensor, device="meta")
    swap(tensor, other)
    try:
        yield
    finally:
        swap(tensor, other)


def trainer(pairing: Pairing, rank: int) -> TorchAdamWTrainer:
    found = pairing.trainers[rank]
    assert isinstance(found, TorchAdamWTrainer)
    return found


def assert_all_away(outcomes: list[Outcome], *words: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, WeightsAwayError)
        assert all(word in str(outcome) for word in ("trainer rank 1", *words)), outcome


@pytest.mark.parametrize("away", [freed, elsewhere])
@pytest.mark.parametrize("key", [f"0/{EMBED}", f"0/{BIAS}"])
@pytest.mark.parametrize("method", ["adamw", "snapshot"])
def test_weights_of_one_rank(make: Make, away: Callable[..., Iterator[None]], key: str, method: str) -> None:
    pairing = make(buffers={BIAS: (4,)}, method=method)
    weight = trainer(pairing, 1)._weights[key]
    with away(weight):  # type: ignore[attr-defined]
        assert_all_away(pairing.update(0), key, "bring offloaded weights back")
    for version in range(3):
        train(pairing)
        if version == 2:
            with away(weight):  # type: ignore[attr-defined]
                assert_all_away(pairing.update(2), key)
                assert all(r.ready and r.version == 1 for r in pairing.receivers)
        stats = pairing.commit(version)
        assert {s.verdict.kind for s in stats} == {Kind.DELTA if version else Kind.FULL}, stats[0].verdict
        assert wrong(pairing) == [{}, {}, {}]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", ["main", "exp_avg", "exp_avg_sq"])
def test_state_of_one_rank(make: Make, name: str, accumulate: bool) -> None:
    pairing = make(accumulate=accumulate)
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    train(pairing)
    owner = trainer(pairing, 1)
    master = owner._stepped.live()[f"0/{EMBED}"]
    tensor = master if name == "main" else owner.optimizer.state[master][name]
    with freed(tensor):
        stats = pairing.commit(2)
        assert {s.verdict.reason for s in stats} <= {Reason.STATE_AWAY, Reason.DETECTION_FAILED}
        assert f"0/{EMBED}: {name}: its storage was freed" in stats[0].verdict.detail
        assert wrong(pairing) == [{}, {}, {}]
    kinds = []
    for version in range(3, 6):
        train(pairing)
        kinds.append(pairing.commit(version)[0].verdict.kind)
        assert wrong(pairing) == [{}, {}, {}]
    assert kinds[1:] == [Kind.DELTA] * 2


def test_weights_that_are_away_are_not_held_by_whoever_looked_at_them(make: Make, tmp_path: Path) -> None:
    view = TorchAdamWTrainer.create(SHAPES, lr=1e-5)
    settings = DeltaSettings(transport="disk", disk_url=str(tmp_path))
    pairing = make()
    with closing(DiskWriter(view, Rendezvous.alone(), 0, settings)) as writer:
        with freed(view._weights[f"0/{EMBED}"]), pytest.raises(WeightsAwayError):
            writer.update_weights(0)
        with freed(trainer(pairing, 1)._weights[f"0/{EMBED}"]):
            assert_all_away(pairing.update(0))
        for one in (writer, *pairing.senders):
            assert one._outgoing is not None
            assert not one._outgoing._live  # not of the ranks whose weights are there, either
            assert not one._session._causes


def test_state_that_went_between_the_proposal_and_the_commit(make: Make) -> None:
    pairing = make()
    train(pairing)
    pairing.commit(0)
    train(pairing)
    owner = trainer(pairing, 1)
    state = owner.optimizer.state[owner._stepped.live()[f"0/{EMBED}"]]
    sound = owner.detect

    def detect_and_lose() -> object:
        detection = sound()
        for key in list(owner.optimizer.state):
            owner.optimizer.state[key]["step"].untyped_storage().resize_(0)
        return detection

    owner.detect = detect_and_lose  # type: ignore[method-assign, assignment]
    assert {s.verdict.kind for s in pairing.commit(1)} == {Kind.DELTA}
    assert wrong(pairing) == [{}, {}, {}]
    assert state["step"].untyped_storage().nbytes() == 0
    owner.detect = sound  # type: ignore[method-assign]
    stats = pairing.commit(2)
    assert stats[0].verdict.reason is Reason.DETECTION_FAILED
    assert "step counter" in stats[0].verdict.detail
    assert wrong(pairing) == [{}, {}, {}]


def test_a_state_under_another_tensor(make: Make) -> None:
    pairing = make()
    for version in range(2):
        train(pairing)
        pairing.commit(version)
    for rank in range(2):
        optimizer, master = (
            trainer(pairing, rank).optimizer,
            trainer(pairing, rank)._stepped.live()[f"0/{EMBED}"],
        )
        optimizer.state[torch.zeros(3)] = optimizer.state.pop(master)
    train(pairing)
    stats = pairing.commit(2)
    assert {s.verdict.kind for s in stats} == {Kind.FULL}
    assert wrong(pairing) == [{}, {}, {}]


def test_an_average_of_masters_that_are_away() -> None:
    view = TorchAdamWTrainer.create(SHAPES, lr=1e-5, buffers={BIAS: (4,)})
    with (
        freed(view._stepped.live()[f"0/{EMBED}"]),
        pytest.raises(UnsupportedError, match=f"{EMBED}: main: .*freed"),
    ):
        EmaShadow(view, alpha=0.5)
    shadow = EmaShadow(view, alpha=1.0)
    for key, tensor in (
        (f"0/{EMBED}", view._stepped.live()[f"0/{EMBED}"]),
        (f"0/{BIAS}", view._weights[f"0/{BIAS}"]),
    ):
        view.train_step()
        with freed(tensor), pytest.raises(UnsupportedError, match=f"{key}.*freed.*then average"):
            shadow.average(1)
        shadow.average(1)
        for name in SHAPES:
            assert shadow.tensor(f"0/{name}").equal(view.tensor(f"0/{name}"))
        shadow._version = None


def test_an_average_in_inference_mode_goes_on_outside_of_it() -> None:
    view = TorchAdamWTrainer.create(SHAPES, lr=1e-5, buffers={BIAS: (4,)})
    with torch.inference_mode():
        shadow = EmaShadow(view, alpha=1.0)
        shadow.average(1)
    view.train_step()
    shadow.average(2)
    for name in SHAPES:
        assert shadow.tensor(f"0/{name}").equal(view.tensor(f"0/{name}"))
