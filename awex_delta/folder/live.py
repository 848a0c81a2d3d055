"""Live tensors that a version is written into, by their places in the canonical line of the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from awex_delta.engines.view import EngineTensor
from awex_delta.errors import LayoutError
from awex_delta.folder.manifest import HfSpace, Manifest
from awex_delta.lines.boxes import Boxes, BoxMap
from awex_delta.lines.space import Space
from awex_delta.lines.storages import Storages
from awex_delta.plan.describe import WIRE_DTYPES, dtype_name
from awex_delta.plan.overlaps import cut_overlaps, padded


class Table(NamedTuple):
    """Boxes from a writer's line to the folder's."""

    boxes: Boxes
    map: BoxMap


class LiveLine:
    """The live tensors of one dtype, one after the other.

    Attributes:
        tensors: int64 [n], the number of each of the `parts` in the folder's line.
        line: where each begins.
        boxes: from the folder's line to this one.
        map, back: there and back; `map` for positions on the CPU, `back` for those where the tensors are.
    """

    def __init__(
        self, dtype: torch.dtype, parts: Sequence[tuple[int, EngineTensor]], starts: torch.Tensor
    ) -> None:
        """Make the tables of parts of one dtype, given with the number of each in the folder's line.

        starts: where tensors begin there.
        """
        self.dtype = dtype
        self.parts = [part for _, part in parts]
        self.tensors = torch.tensor([place for place, _ in parts], dtype=torch.int64, device="cpu")
        self.line = Space.of((part.name, part.view.numel()) for part in self.parts)
        self.storages = Storages([part.view for part in self.parts])
        self.boxes = _boxes(self.parts, starts[self.tensors], self.line.starts)
        self.map, self.back = BoxMap(self.boxes), BoxMap(self.boxes.turned())
        self._begins = self.boxes.source.sort().values
        self._ends = self.boxes.source_ends.sort().values

    def touches(self, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Which ranges of the folder's line, int64 [k] each, may hold some of these tensors: bool [k]."""
        begun = torch.searchsorted(self._begins, end)
        return begun > torch.searchsorted(self._ends, begin, right=True)


class Live:
    """One rank's live tensors.

    Attributes:
        space: the folder's line.
        parts: the tensors with storage of their own; `stored_names` are the folder's names for them.
        lines: by dtype.
        tables: where lines of writers lead, by the checksum of their tables.
    """

    def __init__(self, manifest: Manifest, parts: Sequence[EngineTensor]) -> None:
        """Find the place of each tensor of a rank, or of its parts of them.

        Raises LayoutError if a tensor has another name, shape or dtype on the two sides.
        """
        self.space: HfSpace = manifest.hf
        self.parts = [part for part in parts if part.tied_to is None]
        places, tied = self.space.places, manifest.tied
        names = [p.name if p.name in places else tied.get(p.name, p.name) for p in self.parts]
        absent = sorted(p.name for p, name in zip(self.parts, names, strict=True) if name not in places)
        if absent:
            raise LayoutError(f"{manifest.label} does not hold {absent[:6]}, which the engine serves")
        self.stored_names: Mapping[str, str] = {
            part.name: name for part, name in zip(self.parts, names, strict=True)
        }
        by_dtype: dict[torch.dtype, list[tuple[int, EngineTensor]]] = {}
        for part, name in zip(self.parts, names, strict=True):
            place = places[name]
            dtype, shape = self.space.dtypes[place], self.space.shapes[place]
            if shape != part.global_shape or WIRE_DTYPES[dtype] is not part.view.dtype:
                raise LayoutError(
                    f"{part.name}: the folder holds {dtype} {list(shape)}, the engine serves "
                    f"{dtype_name(part.view.dtype)} {list(part.global_shape)}; load the engine with the "
                    "trainer's model and dtype"
                )
            by_dtype.setdefault(part.view.dtype, []).append((place, part))
        starts = self.space.line.starts
        self.lines = {dtype: LiveLine(dtype, found, starts) for dtype, found in by_dtype.items()}
        self.tables: dict[str, Table] = {}


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> list[EngineTensor]:
    """Plain whole tensors as what a version is written into."""
    return [
        EngineTensor(
            name=name, view=tensor, global_shape=tuple(tensor.shape), global_offset=(0,) * tensor.dim()
        )
        for name, tensor in tensors.items()
    ]


def _boxes(parts: Sequence[EngineTensor], wholes: torch.Tensor, starts: torch.Tensor) -> Boxes:
    """From the folder's line to one of parts that begin at `starts`, of tensors that begin at `wholes`."""
    dims = max((part.view.dim() for part in parts), default=0)
    shapes = [part.global_shape for part in parts]
    cut = cut_overlaps(
        (padded([(0,) * len(shape) for shape in shapes], dims, 0), padded(shapes, dims, 1)),
        (
            padded([part.global_offset for part in parts], dims, 0),
            padded([tuple(part.view.shape) for part in parts], dims, 1),
        ),
    )
    overlap = torch.from_numpy(cut.overlap)
    return Boxes(
        source=torch.from_numpy(cut.sent) + wholes[overlap],
        source_pitch=torch.from_numpy(cut.sent_pitch),
        target=torch.from_numpy(cut.stored) + starts[overlap],
        target_pitch=torch.from_numpy(cut.stored_pitch),
        rows=torch.from_numpy(cut.rows),
        width=torch.from_numpy(cut.width),
    )
