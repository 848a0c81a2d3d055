"""How each local parameter travels: its changed elements by proved runs, or whole HF tensors.

Fixed at connect. If AWEX's converter is proved to relocate a parameter, changed positions are mapped and
no weight is converted in a delta. If it computes, what it makes is sent whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from awex_delta.conversion.relocation import Prover, Relocation
from awex_delta.errors import UnsupportedError
from awex_delta.trainers.view import TrainerView, WeightInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One HF tensor that a local parameter converts to.

    shape: the shape of this rank's part of it.
    sparse: owners send their own changes; otherwise AWEX's chosen sender sends it whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one local parameter travels.

    relocations: one for each output; None if the parameter travels whole.
    """

    info: WeightInfo
    outputs: tuple[Output, ...]
    relocations: tuple[Relocation, ...] | None

    def check(self, converted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refuse tensors that differ from those at connect: receivers allocate memory for what was agreed.

        Raises:
            UnsupportedError: a name, shape or dtype has changed since connect.
        """
        agreed = [(output.name, output.shape, output.dtype) for output in self.outputs]
        found = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in converted]
        if found != agreed:
            raise UnsupportedError(f"{self.info.key} converts to {found} now, and to {agreed} at connect")


def find_routes(view: TrainerView) -> dict[str, Route]:
    """Prove, for each local tensor, whether its converter relocates. Rank-local, on the CPU.

    Returns:
        By key, in the order of `view.weights()`.
    """
    prover = Prover()
    return {info.key: _find_route(view, info, prover) for info in view.weights()}


def convert_all(view: TrainerView, routes: Mapping[str, Route]) -> dict[str, torch.Tensor]:
    """All HF tensors of this rank, by name, converted from the live weights.

    Raises:
        UnsupportedError: a name, shape or dtype has changed since connect.
    """
    converted: dict[str, torch.Tensor] = {}
    for key, route in routes.items():
        outputs = view.convert(key, view.tensor(key).detach())
        route.check(outputs)
        converted.update(outputs)
    return converted


def _find_route(view: TrainerView, info: WeightInfo, prover: Prover) -> Route:
    convert = partial(view.convert, info.key)
    relocations = prover.prove(info.param, convert, info.shape, info.dtype) if info.sparse else None
    if relocations is None:
        converted = convert(torch.empty(info.shape, dtype=info.dtype, device="meta"))
        found = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in converted]
    else:
        found = [(one.name, one.shape, one.dtype) for one in relocations]
    outputs = tuple(
        Output(name=name, shape=shape, dtype=dtype, sparse=relocations is not None)
        for name, shape, dtype in found
    )
    return Route(info=info, outputs=outputs, relocations=relocations)
