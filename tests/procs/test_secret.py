"""Ranks in processes of their own that share a secret, at a store on IPv6 where the machine has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from awex_delta.errors import ConnectError
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.serving import LOOPBACK

SHAPES = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,)}
SETTINGS = DeltaSettings(
    anchor_interval=0, timeout_seconds=30.0, connect_timeout_seconds=30.0, allow_any_world_size=True
)
"""Patient: no test waits for any of this."""

pytestmark = pytest.mark.timeout(120)

Outcome = tuple[str, list[str], dict[str, torch.Tensor]]


def _rank(me: Rank, port: int, sources: tuple[str, ...]) -> Outcome:
    """An engine rank, or the trainer: how its first connect failed, the kinds of updates, the weights."""
    torch.set_num_threads(1)
    place = Rendezvous(num_engine_ranks=2, num_trainer_ranks=1, host=LOOPBACK, port=port)
    trainer, engine = TorchAdamWTrainer.create(SHAPES, lr=1e-5, settings=SETTINGS), DictEngine(SHAPES)

    def end(source: str) -> Sender | Receiver:
        settings = replace(SETTINGS, secret_source=source)
        if me.rank == 2:
            return Sender(trainer, place, 0, settings)
        return Receiver(engine, place, me.rank, f"engine{me.rank}", settings)

    first = end(sources[me.rank])
    said = ""
    try:
        first.connect()
    except ConnectError as error:
        said = str(error)
    second = first if sources[me.rank] == sources[0] else end(sources[0])
    kinds = []
    for version in range(2):
        trainer.train_step()
        kinds.append(second.update_weights(version).verdict.kind.value)
    weights = {info.param: trainer.tensor(info.key) for info in trainer.weights()}
    second.close()
    return said, kinds, weights if me.rank == 2 else engine.tensors_by_name


def test_a_process_with_another_secret_is_refused_until_it_has_the_right_one(tmp_path: Path) -> None:
    for name, text in (("right", "the-secret-of-all-ranks"), ("wrong", "the-secret-of-one-rank")):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(text)
    right, wrong = (f"file:{tmp_path / name}" for name in ("right", "wrong"))
    store = host_store(LOOPBACK)
    outcome: list[Outcome] = run_ranks(_rank, 3, store.port, (right, wrong, right))
    (first, _, held), (second, _, also_held), (trainer, kinds, weights) = outcome
    assert first.startswith("engine rank 0, seat 0: engine rank 1 did not prove the secret")
    assert trainer.startswith("trainer rank 0, seat 2: engine rank 1 did not prove the secret")
    assert "engine rank 0, trainer rank 0 did not prove" in second
    assert kinds == ["full", "delta"]
    for name, weight in weights.items():
        assert torch.equal(held[name], weight)
        assert torch.equal(also_held[name], weight)
