"""All descriptions together, and what has to be equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from awex_delta.errors import ConnectError, LayoutError
from awex_delta.plan.describe import WIRE_DTYPES, EngineSpec, Spec, TrainerSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The descriptions of all ranks, by rank."""

    engines: tuple[EngineSpec, ...]
    trainers: tuple[TrainerSpec, ...]

    @property
    def run_id(self) -> str:
        """Identity of the trainer's life, as trainer rank 0 gives it."""
        return self.trainers[0].run_id


def make_world(specs: Sequence[Spec], num_engine_ranks: int) -> World:
    """Put the descriptions of all ranks together.

    Args:
        specs: by transfer rank, engines first.
        num_engine_ranks: how many of them are engines.

    Raises:
        ConnectError: a rank stands at the wrong seat, or ranks disagree about what must be equal everywhere.
    """
    engines = tuple(spec for spec in specs[:num_engine_ranks] if isinstance(spec, EngineSpec))
    trainers = tuple(spec for spec in specs[num_engine_ranks:] if isinstance(spec, TrainerSpec))
    if len(engines) != num_engine_ranks or len(engines) + len(trainers) != len(specs):
        raise ConnectError("trainer and engine ranks sit on each other's seats: check ranks and world sizes")
    for side, ranks in (("engine", [e.rank for e in engines]), ("trainer", [t.rank for t in trainers])):
        if ranks != list(range(len(ranks))):
            raise ConnectError(f"{side} ranks are {ranks}, expected 0..{len(ranks) - 1}, each once")
    _check_agreed(engines, trainers)
    return World(engines=engines, trainers=trainers)


def _check_agreed(engines: Sequence[EngineSpec], trainers: Sequence[TrainerSpec]) -> None:
    reference = trainers[0].agreed
    specs: list[EngineSpec | TrainerSpec] = [*engines, *trainers]
    for spec in specs:
        for name in sorted(reference.keys() | spec.agreed.keys()):
            ours, theirs = reference.get(name), spec.agreed.get(name)
            if ours != theirs:
                raise ConnectError(
                    f"{name}: trainer rank 0 has {ours!r}, {spec.role} rank {spec.rank} has {theirs!r}; "
                    "both sides need the same setting"
                )
    for trainer in trainers:
        if trainer.architecture != trainers[0].architecture:
            raise ConnectError(
                f"trainer rank {trainer.rank} trains {trainer.architecture}, "
                f"rank 0 {trainers[0].architecture}"
            )
    placed = {bool(trainer.wholes): trainer.rank for trainer in trainers if trainer.layout.names}
    if len(placed) > 1:
        raise ConnectError(
            f"trainer rank {placed[True]} says which parts of HF tensors it holds, rank {placed[False]} does "
            "not: attach all trainer ranks in the same way"
        )
    for engine in engines:
        for name, dtype in zip(engine.layout.names, engine.layout.dtypes, strict=True):
            if dtype not in WIRE_DTYPES:
                raise LayoutError(
                    f"engine {engine.engine!r} (rank {engine.rank}) holds {name} as {dtype}: "
                    "quantised or unknown weights cannot be updated in place; serve one of "
                    f"{', '.join(sorted(WIRE_DTYPES))}"
                )
