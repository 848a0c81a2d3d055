"""What each rank tells all others when they connect: JSON, validated, never unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from awex_delta.errors import ConnectError, LayoutError

Shape = tuple[Annotated[int, Field(ge=0)], ...]

WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
"""Dtypes that may travel. Anything else (fp8, int8 and other quantised weights) is refused at connect."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OutputSpec(_Spec):
    """One HF tensor that a Megatron parameter converts to.

    sparse: owners send their own changes; otherwise AWEX's chosen sender sends it whole.
    owned: half-open ranges of flat positions that this rank owns, where an encoding asks for them.
    """

    name: str
    shape: Shape
    dtype: str
    sparse: bool
    owned: tuple[tuple[int, int], ...] = ()


class ParamSpec(_Spec):
    """One local Megatron parameter: who owns which flat range of it, and what it converts to."""

    key: str
    numel: int
    owners: tuple[int, ...]
    owned_start: int
    owned_stop: int
    outputs: tuple[OutputSpec, ...]


class TrainerSpec(_Spec):
    """A trainer rank. `agreed` must be equal on every rank of both sides."""

    role: Literal["trainer"] = "trainer"
    rank: int
    run_id: str
    agreed: dict[str, Any]
    architecture: str
    rank_info: dict[str, int | str | bool]
    vocab_size: int
    tied_embeddings: bool
    params: tuple[ParamSpec, ...]


class TensorSpec(_Spec):
    """One HF tensor, or part of one, on an engine rank."""

    name: str
    dtype: str
    shape: Shape
    global_shape: Shape
    global_offset: Shape
    tied_to: str | None


class EngineSpec(_Spec):
    """An engine rank. Ranks that share `engine` hold one copy of the model together."""

    role: Literal["engine"] = "engine"
    rank: int
    engine: str
    agreed: dict[str, Any]
    tensors: tuple[TensorSpec, ...]


_ANY_SPEC: TypeAdapter[TrainerSpec | EngineSpec] = TypeAdapter(
    Annotated[TrainerSpec | EngineSpec, Field(discriminator="role")]
)


class World(_Spec):
    """The specs of all ranks, by rank. The same on every rank."""

    engines: tuple[EngineSpec, ...]
    trainers: tuple[TrainerSpec, ...]

    @property
    def run_id(self) -> str:
        """The trainer's life: rank 0's word."""
        return self.trainers[0].run_id


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse_world(values: Sequence[Any], num_engine_ranks: int) -> World:
    """Validate what all ranks sent.

    Args:
        values: JSON values by transfer rank, engines first.
        num_engine_ranks: how many of them are engines.

    Raises:
        ConnectError: a value is malformed, stands at the wrong seat, or ranks disagree about what
            must be equal everywhere.

    Collective: no.
    """
    specs: list[TrainerSpec | EngineSpec] = []
    for seat, value in enumerate(values):
        try:
            specs.append(_ANY_SPEC.validate_python(value, strict=False))
        except ValidationError as error:
            raise ConnectError(f"seat {seat} sent a malformed description: {error.errors()[:3]}") from error
    engines = tuple(spec for spec in specs[:num_engine_ranks] if isinstance(spec, EngineSpec))
    trainers = tuple(spec for spec in specs[num_engine_ranks:] if isinstance(spec, TrainerSpec))
    if len(engines) != num_engine_ranks or len(engines) + len(trainers) != len(values):
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
    for engine in engines:
        for tensor in engine.tensors:
            if tensor.dtype not in WIRE_DTYPES:
                raise LayoutError(
                    f"engine {engine.engine!r} (rank {engine.rank}) holds {tensor.name} as {tensor.dtype}: "
                    "quantised or unknown weights cannot be updated in place; serve one of "
                    f"{', '.join(sorted(WIRE_DTYPES))}"
                )
