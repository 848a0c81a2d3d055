"""How each local parameter travels: its changed elements by proved runs, or whole HF tensors.

Fixed at connect. If AWEX's converter is proved to relocate a parameter, changed positions are mapped and
no weight is converted in a delta. If it computes, what it makes is sent whole. So is what a converter makes
together with other ranks, by a collective: all of them call it, at one place of every update.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_delta.conversion.alone import Alone
from awex_delta.conversion.relocation import Outputs, Prover, Relocation
from awex_delta.errors import AwexDeltaError, UnsupportedError
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
    together: the converter calls a collective of the training framework.
    """

    info: WeightInfo
    outputs: tuple[Output, ...]
    relocations: tuple[Relocation, ...] | None
    together: bool

    def check(self, converted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refuse tensors that differ from those at connect: receivers allocate memory for what was agreed.

        Raises:
            UnsupportedError: a name, shape or dtype has changed since connect.
        """
        agreed = [(output.name, output.shape, output.dtype) for output in self.outputs]
        found = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in converted]
        if found != agreed:
            raise UnsupportedError(f"{self.info.key} converts to {found} now, and to {agreed} at connect")


def find_routes(view: TrainerView, rank: int) -> dict[str, Route]:
    """Prove, for each local tensor, whether its converter relocates. Rank-local, on the CPU.

    Args:
        view: the trainer.
        rank: this trainer rank.

    Returns:
        By key, in the order of `view.weights()`.

    Raises:
        UnsupportedError: a converter fails, or talks to other ranks, but not when it is asked for shapes
            alone.
    """
    prover = Prover(rank)
    return {info.key: _find_route(view, info, prover) for info in view.weights()}


class Conversion:
    """What the live weights of this rank convert to, in one update after the other."""

    def __init__(self, view: TrainerView, routes: Mapping[str, Route]) -> None:
        """Nothing is converted yet."""
        self._view = view
        self._together: dict[str, Outputs] = {}
        self.routes = routes

    def convert_together(self) -> None:
        """Make what converters make by collectives, and keep it until `release`.

        Collective: over the groups that these converters use, for one parameter after the other in the order
        of `view.weights()`. To be called on all trainer ranks, at one place of every update.
        """
        for key, route in self.routes.items():
            if route.together:
                self._together[key] = self._view.convert(key, self._view.tensor(key).detach())

    def of(self, route: Route) -> Outputs:
        """What the weight of one route converts to; without a collective.

        Raises:
            UnsupportedError: a name, shape or dtype has changed since connect.
        """
        key = route.info.key
        if route.together:
            outputs = self._together[key]
        else:
            outputs = self._view.convert(key, self._view.tensor(key).detach())
        route.check(outputs)
        return outputs

    def all(self) -> dict[str, torch.Tensor]:
        """All HF tensors of this rank, by name; see `of`."""
        return {name: tensor for route in self.routes.values() for name, tensor in self.of(route)}

    def some(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The HF tensors of this rank that are among `names`, one parameter after the other; see `of`."""
        for route in self.routes.values():
            if any(output.name in names for output in route.outputs):
                yield from (one for one in self.of(route) if one[0] in names)

    def release(self) -> None:
        """Let go of what was made by collectives."""
        self._together = {}


def _find_route(view: TrainerView, info: WeightInfo, prover: Prover) -> Route:
    def convert(tensor: torch.Tensor) -> Outputs:
        with alone:
            return view.convert(info.key, tensor)

    alone = Alone(info.param)
    like = torch.empty(info.shape, dtype=info.dtype, device="meta")
    try:
        shapes = convert(like)
        together = alone.communicates
        provable = info.sparse and not together
        relocations = prover.prove(info.param, convert, like, shapes) if provable else None
    except AwexDeltaError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the converter of {info.param} {info.shape} fails: {type(error).__name__}: {error}"
        ) from error
    if relocations is None:
        found = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in shapes]
    else:
        found = [(one.name, one.shape, one.dtype) for one in relocations]
    outputs = tuple(
        Output(name=name, shape=shape, dtype=dtype, sparse=relocations is not None)
        for name, shape, dtype in found
    )
    return Route(info=info, outputs=outputs, relocations=relocations, together=together)
