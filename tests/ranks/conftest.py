"""A small world of thread ranks: two trainers that own halves, one cut engine and one whole engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from tests.pairing import EngineSeat, Pairing, differing, torch_pairing

EMBED = "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
BIAS = "model.layers.0.mlp.gate.expert_bias"

SHAPES = {EMBED: (16, 8), Q_PROJ: (12, 8), DOWN: (8, 24), NORM: (8,)}
CUT = {EMBED: 0, Q_PROJ: 0, DOWN: 1}
"""How a tensor-parallel engine shares the weights: rows, rows, columns; the norm is replicated."""

SETTINGS = DeltaSettings(
    anchor_interval=0, timeout_seconds=20.0, connect_timeout_seconds=20.0, allow_any_world_size=True
)
"""Patient: no busy machine makes a healthy rank late, and who waits where nobody should is seen."""

SOON = 3.0
"""Seconds until a rank that hangs is given up, in tests that wait for that."""


def engine_seats(extra: dict[str, tuple[int, ...]] | None = None) -> list[EngineSeat]:
    """Engine `cut` on two ranks and engine `whole` on one."""
    extra = extra or {}
    shapes, dtypes = {**SHAPES, **extra}, dict.fromkeys(extra, torch.float32)
    cut = [DictEngine(shapes, dtypes=dtypes, cut=CUT, rank=rank, num_ranks=2) for rank in range(2)]
    return [
        *(EngineSeat(engine="cut", view=view) for view in cut),
        EngineSeat(engine="whole", view=DictEngine(shapes, dtypes=dtypes)),
    ]


def truth(pairing: Pairing) -> dict[str, torch.Tensor]:
    """The trainer's whole weights by HF name, read from its own tensors."""
    trainer = pairing.trainers[0]
    return {info.param: trainer.tensor(info.key) for info in trainer.weights()}


def wrong(pairing: Pairing) -> list[dict[str, int]]:
    """By engine rank, the tensors whose bits differ from the trainer's."""
    return [differing(engine, truth(pairing)) for engine in pairing.engines]


def train(pairing: Pairing) -> None:
    """One identical optimizer step on every trainer rank."""
    for trainer in pairing.trainers:
        trainer.train_step()  # type: ignore[attr-defined]


@pytest.fixture
def make() -> Iterator[Callable[..., Pairing]]:
    """Build pairings that are closed when the test ends."""
    built: list[Pairing] = []

    def build(**options: Any) -> Pairing:
        fields = [name for name in options if name in SETTINGS.__slots__]
        settings = replace(SETTINGS, **{name: options.pop(name) for name in fields})
        extra: dict[str, tuple[int, ...]] = {**options.get("buffers", {}), **options.get("fp32", {})}
        options.setdefault("lr", 1e-5)  # few enough changes for a delta to be smaller than a full sync
        seats = options.pop("engines", None) or engine_seats(extra)
        shapes = options.pop("shapes", SHAPES)
        pairing = torch_pairing(shapes, engines=seats, settings=settings, **options)
        built.append(pairing)
        return pairing

    yield build
    for pairing in built:
        pairing.close()


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Build anything that has to be closed when the test ends: `build(Kind, ...)`."""
    built: list[Any] = []

    def construct(kind: type[Any], *args: Any, **options: Any) -> Any:
        built.append(kind(*args, **options))
        return built[-1]

    yield construct
    for one in built:
        one.close()
