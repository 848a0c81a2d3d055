"""Converters of every kind, end to end: what the engines hold is what the converter makes of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from awex_delta.errors import ConnectError
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.pairing import EngineSeat, Pairing
from tests.ranks.conftest import SETTINGS

FUSED = "fused.weight"
Convert = Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]


def split(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    """Interleaved rows of two tensors, as a fused QKV is."""
    rows = tensor.view(-1, 3, tensor.shape[1])
    return [("two.weight", rows[:, :2].reshape(-1, tensor.shape[1])), ("one.weight", rows[:, 2].contiguous())]


def cast(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    return [("cast.weight", tensor.to(torch.float32))]


def transpose(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    return [("turned.weight", tensor.t().contiguous())]


def add_one(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    return [("plus.weight", tensor + 1)]


def normalise(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    return [("unit.weight", torch.nn.functional.normalize(tensor.float(), dim=0).to(tensor.dtype))]


def pairing_of(convert: Convert, num_trainers: int, shape: tuple[int, int]) -> Pairing:
    class Trainer(TorchAdamWTrainer):
        def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
            assert key == f"0/{FUSED}"
            return convert(tensor)

    outputs = convert(torch.zeros(shape, dtype=torch.bfloat16))
    view = DictEngine(
        {name: tuple(t.shape) for name, t in outputs}, dtypes={name: t.dtype for name, t in outputs}
    )
    trainers = [
        Trainer.create({FUSED: shape}, lr=1e-5, dp_rank=rank, dp_size=num_trainers, settings=SETTINGS)
        for rank in range(num_trainers)
    ]
    return Pairing(trainers, [EngineSeat(engine="e", view=view)], SETTINGS)


@pytest.mark.parametrize("num_trainers", [1, 2])
@pytest.mark.parametrize("convert", [split, cast, transpose, add_one, normalise])
def test_the_engine_holds_what_the_converter_makes(convert: Convert, num_trainers: int) -> None:
    pairing = pairing_of(convert, num_trainers, (48, 10))
    trainer = pairing.trainers[0]
    for version in range(4):
        for one in pairing.trainers:
            one.train_step()  # type: ignore[attr-defined]
        stats = pairing.commit(version)
        assert stats[0].verdict.kind is (Kind.DELTA if version else Kind.FULL)
        for name, want in convert(trainer.tensor(f"0/{FUSED}")):
            bits = torch.int16 if want.dtype is torch.bfloat16 else torch.int32
            got = pairing.engines[0].tensors_by_name[name]
            assert torch.equal(got.view(bits), want.contiguous().view(bits))
    pairing.close()


def test_relocation_stays_sparse_and_computation_travels_whole() -> None:
    shares = {}
    for convert, num_trainers in ((split, 2), (cast, 2), (add_one, 1), (add_one, 2)):
        pairing = pairing_of(convert, num_trainers, (12, 5))  # few: no step beyond what a code can state
        for version in range(2):
            for one in pairing.trainers:
                one.train_step()  # type: ignore[attr-defined]
            stats = pairing.commit(version)
        shares[convert.__name__, num_trainers] = stats[0].num_elements / stats[-1].total_changed
        pairing.close()
    assert shares["split", 2] == shares["cast", 2] == 1.0
    assert shares["add_one", 1] > 1.0
    assert shares["add_one", 2] > 1.0


def test_a_converter_that_fails_on_one_rank_is_named_on_all() -> None:
    pairing = pairing_of(split, 2, (48, 10))

    def fail(_: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        if not tensor.is_meta:
            raise RuntimeError("no kernel for these heads")
        return split(tensor)

    pairing.trainers[1].convert = fail  # type: ignore[method-assign, assignment]
    outcomes = pairing.update(0)
    pairing.close()
    for outcome in outcomes:
        assert isinstance(outcome, ConnectError)
        assert f"the converter of {FUSED} (48, 10) fails: RuntimeError: no kernel for these heads" in str(
            outcome
        )
        assert "trainer rank 1" in str(outcome)
