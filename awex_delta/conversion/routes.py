"""From changed elements of Megatron parameters to changed elements of the plan's regions.

A parameter's route is fixed at connect: AWEX's converter is proved to relocate it (then changed
positions are mapped, and no weight is converted in an update), or it computes (then old and new are
converted and compared where one rank knows both exactly, and the tensor is sent whole otherwise).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from awex_delta.conversion.relocation import Relocation, changed_by_value, prove_relocation
from awex_delta.detection.slices import ChangeSet, Detection
from awex_delta.errors import UnsupportedError
from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.lines.geometry import Box, select
from awex_delta.plan.describe import OutputSpec, ParamSpec, dtype_name
from awex_delta.plan.pairs import Plan, Region
from awex_delta.trainers.view import TrainerView, WeightInfo
from awex_delta.wire.codec import Codec, Context, RegionChange, whole_is_smaller

Frames = dict[tuple[int, torch.dtype], list[RegionChange]]
"""Region changes by (receiver, wire dtype), in the order of the plan."""

_Place = tuple[int, torch.dtype, int]  # receiver, wire dtype, number of the region in their frame
_OWNED_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one local parameter travels. relocations is None where the converter computes."""

    info: WeightInfo
    outputs: tuple[OutputSpec, ...]
    relocations: tuple[Relocation, ...] | None

    def check(self, converted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refuse tensors that are not those of connect: a receiver posts memory for what was agreed.

        Raises:
            UnsupportedError: a name, shape or dtype is another one now.

        Collective: no.
        """
        agreed = [(output.name, output.shape, output.dtype) for output in self.outputs]
        found = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in converted]
        if found != agreed:
            raise UnsupportedError(f"{self.info.key} converts to {found} now, and to {agreed} at connect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Changed elements of one HF tensor part: ascending flat positions, new values, codes if known."""

    index: torch.Tensor
    value: torch.Tensor
    code: torch.Tensor | None


def find_routes(view: TrainerView, trainer_rank: int) -> dict[str, Route]:
    """Prove, for each local tensor, whether its converter relocates.

    Args:
        view: the trainer.
        trainer_rank: this rank among the trainers.

    Memory: a few int8 planes of one parameter at a time. Collective: no.
    """
    return {info.key: _find_route(view, info, trainer_rank) for info in view.weights()}


def _find_route(view: TrainerView, info: WeightInfo, trainer_rank: int) -> Route:
    def convert(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        return view.convert(info.key, tensor)

    relocations = prove_relocation(convert, info.shape, info.dtype) if info.sparse else None
    alone = info.owners == (trainer_rank,)
    outputs = tuple(
        OutputSpec(
            name=name,
            shape=tuple(output.shape),
            dtype=dtype_name(output.dtype),
            sparse=info.sparse and (relocations is not None or alone),
        )
        for name, output in convert(torch.empty(info.shape, dtype=info.dtype, device="meta"))
    )
    return Route(info=info, outputs=outputs, relocations=relocations)


def param_specs(routes: Mapping[str, Route], *, with_ranges: bool) -> tuple[ParamSpec, ...]:
    """What this rank tells the others about its parameters.

    Args:
        routes: from `find_routes`.
        with_ranges: say which ranges of each HF tensor this rank owns, for encodings that use it.
    """
    return tuple(
        ParamSpec(
            key=key,
            numel=torch.Size(route.info.shape).numel(),
            owners=route.info.owners,
            owned_start=route.info.owned_start,
            owned_stop=route.info.owned_stop,
            outputs=tuple(_with_ranges(route)) if with_ranges else route.outputs,
        )
        for key, route in routes.items()
    )


def convert_all(view: TrainerView, routes: Mapping[str, Route]) -> dict[str, torch.Tensor]:
    """All HF tensors of this rank, by name, converted from the live weights. Collective: no.

    Raises:
        UnsupportedError: a tensor is not that of connect.
    """
    converted: dict[str, torch.Tensor] = {}
    for key, route in routes.items():
        outputs = view.convert(key, view.tensor(key).detach())
        route.check(outputs)
        converted.update(outputs)
    return converted


def _with_ranges(route: Route) -> Iterator[OutputSpec]:
    for place, output in enumerate(route.outputs):
        owned: tuple[tuple[int, int], ...] = ()
        if route.relocations is not None and output.dtype == dtype_name(torch.bfloat16):
            owned = route.relocations[place].ranges(route.info.owned_start, route.info.owned_stop)
        yield output.model_copy(update={"owned": owned})


def _read(flat: torch.Tensor, relocation: Relocation, region: Region, start: int, stop: int) -> torch.Tensor:
    """The weights at positions `start` to `stop` of a region, from the flat local parameter."""
    shape, box = region.source_shape or (1,), region.source.slices or (slice(0, 1),)
    row = math.prod(shape[1:])
    inner = region.numel // (box[0].stop - box[0].start)  # elements of the region in a row
    first, last = box[0].start + start // inner, box[0].start - (-stop // inner)
    if inner == row:  # rows lie together
        begin = box[0].start * row
        return relocation.take(flat, begin + start, begin + stop)
    rows = relocation.take(flat, first * row, last * row).view(last - first, *shape[1:])
    skipped = (first - box[0].start) * inner
    return rows[(slice(None), *box[1:])].reshape(-1)[start - skipped : stop - skipped]


class Router:
    """Turns what detection found into the region changes of this rank's frames."""

    def __init__(self, view: TrainerView, routes: Mapping[str, Route], plan: Plan, seat: int) -> None:
        """Bind routes to the regions that transfer rank `seat` sends."""
        self._view = view
        self._routes = routes
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self._regions: dict[tuple[int, torch.dtype], tuple[Region, ...]] = {}
        for (sender, receiver, dtype), regions in plan.regions.items():
            if sender == seat:
                self._regions[receiver, dtype] = regions
                for place, region in enumerate(regions):
                    self._places[region.name].append((receiver, dtype, place))

    def frames(self, detection: Detection, codec: Codec) -> Frames:
        """The content of every frame that this rank sends in a delta.

        Args:
            detection: what changed.
            codec: what will pack it: regions that it would make larger than they are go whole.

        Collective: no.
        """
        frames: Frames = {
            key: [_nothing(region) for region in regions] for key, regions in self._regions.items()
        }
        for changes in detection.changes:
            self._add_sparse(frames, changes)
        for key, route in self._routes.items():
            if any(not output.sparse and output.name in self._places for output in route.outputs):
                converted = self._view.convert(key, self._view.tensor(key))
                route.check(converted)
                self._add_whole(frames, dict(converted))
            else:
                self._widen(frames, key, route, codec)
            if codec.needs_context and route.relocations is not None:
                self._add_context(frames, key, route.relocations)
        return frames

    def _add_context(self, frames: Frames, key: str, relocations: Sequence[Relocation]) -> None:
        """Let the codec read the weights of regions whose changes are known by their steps."""
        flat = self._view.tensor(key).detach().reshape(-1)
        for relocation in relocations:
            for receiver, dtype, place in self._places.get(relocation.name, ()):
                change, region = frames[receiver, dtype][place], self._regions[receiver, dtype][place]
                if change.code is not None:
                    context = Context(owned=region.owned, read=partial(_read, flat, relocation, region))
                    frames[receiver, dtype][place] = replace(change, context=context)

    def _widen(self, frames: Frames, key: str, route: Route, codec: Codec) -> None:
        """Send regions of one parameter whole where that is smaller, and this rank knows all their values.

        It does where it owns the whole parameter or every element changed. A rank that owns a part must
        not speak for the rest.
        """
        info, outputs = route.info, dict[str, torch.Tensor]()
        owns_all = (info.owned_start, info.owned_stop) == (0, torch.Size(info.shape).numel())
        for name in (output.name for output in route.outputs):
            for receiver, dtype, place in self._places.get(name, ()):
                change = frames[receiver, dtype][place]
                if change.index is None or not whole_is_smaller(codec, change, dtype):
                    continue
                if change.value.numel() == change.numel:
                    frames[receiver, dtype][place] = RegionChange(numel=change.numel, value=change.value)
                elif owns_all:
                    outputs = outputs or dict(self._view.convert(key, self._view.tensor(key)))
                    frames[receiver, dtype][place] = self._whole(outputs[name], receiver, dtype, place)

    def _add_sparse(self, frames: Frames, changes: ChangeSet) -> None:
        route = self._routes[changes.key]
        if route.relocations is None:
            if all(output.sparse for output in route.outputs):
                self._add_by_value(frames, changes)
            return  # otherwise the chosen sender sends it whole
        flat = self._view.tensor(changes.key).detach().reshape(-1)
        value = flat.index_select(0, changes.index)
        for relocation in route.relocations:
            index, pick = relocation.map(changes.index)
            found = Changed(index=index, value=value[pick].to(relocation.dtype), code=changes.code[pick])
            self._put(frames, relocation.name, found)

    def _add_by_value(self, frames: Frames, changes: ChangeSet) -> None:
        new = self._view.tensor(changes.key).detach()
        if bool((changes.code == UNSTATED).any()):  # the old weight is not exactly known
            self._add_whole(frames, dict(self._view.convert(changes.key, new)))
            return
        old = new.clone()
        flat = old.view(-1)
        flat[changes.index] = apply_code(flat[changes.index], -changes.code)
        for name, index, output in changed_by_value(
            lambda tensor: self._view.convert(changes.key, tensor), old, new
        ):
            self._put(frames, name, Changed(index=index, value=output.reshape(-1)[index], code=None))

    def owned(self) -> Iterator[tuple[Region, RegionChange]]:
        """All elements that this rank speaks for, changed or not, a bounded number at a time. Collective: no.

        Over all ranks they are each element of every engine once, current without any gathering.
        """
        for key, route in self._routes.items():
            if not any(output.name in self._places for output in route.outputs):
                continue
            tensor = self._view.tensor(key).detach()
            if route.relocations is None:
                for name, output in self._view.convert(key, tensor):
                    for receiver, dtype, place in self._places.get(name, ()):
                        region = self._regions[receiver, dtype][place]
                        yield region, self._whole(output, receiver, dtype, place)
                continue
            flat, stop = tensor.reshape(-1), route.info.owned_stop
            for start in range(route.info.owned_start, stop, _OWNED_PIECE):
                end = min(start + _OWNED_PIECE, stop)
                index = torch.arange(start, end, device=flat.device)
                for relocation in route.relocations:
                    yield from self._moved(relocation, index, flat[start:end])

    def _moved(
        self, relocation: Relocation, index: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[Region, RegionChange]]:
        """Elements of a parameter, at their places in the regions that one HF tensor is cut into."""
        there, pick = relocation.map(index)
        found = Changed(index=there, value=value[pick].to(relocation.dtype), code=None)
        for (receiver, dtype, place), change in self._spread(relocation.name, found):
            yield self._regions[receiver, dtype][place], change

    def _put(self, frames: Frames, name: str, found: Changed) -> None:
        for (receiver, dtype, place), change in self._spread(name, found):
            frames[receiver, dtype][place] = change

    def _spread(self, name: str, found: Changed) -> Iterator[tuple[_Place, RegionChange]]:
        """Cut elements of one HF tensor along the regions. Receivers of the same part get one object."""
        cuts: dict[Box, RegionChange] = {}
        for receiver, dtype, place in self._places.get(name, ()):
            region = self._regions[receiver, dtype][place]
            if region.source not in cuts:
                cut = select(found.index, region.source_shape, region.source)
                cuts[region.source] = RegionChange(
                    numel=region.numel,
                    index=cut.inner,
                    value=found.value[cut.pick],
                    code=None if found.code is None else found.code[cut.pick],
                )
            yield (receiver, dtype, place), cuts[region.source]

    def _add_whole(self, frames: Frames, outputs: Mapping[str, torch.Tensor]) -> None:
        for name, output in outputs.items():
            for receiver, dtype, place in self._places.get(name, ()):
                frames[receiver, dtype][place] = self._whole(output, receiver, dtype, place)

    def _whole(self, output: torch.Tensor, receiver: int, dtype: torch.dtype, place: int) -> RegionChange:
        region = self._regions[receiver, dtype][place]
        value = output.detach()[region.source.slices].reshape(-1)
        return RegionChange(numel=region.numel, value=value)


def _nothing(region: Region) -> RegionChange:
    """No change in `region`."""
    return RegionChange(
        numel=region.numel,
        index=torch.empty(0, dtype=torch.int64),
        value=torch.empty(0, dtype=region.dtype),
    )
