"""What each rank tells the others when they connect: columns, compressed. Equal layouts travel once.

A description has two parts. The *layout* is what replicas have in common: names, shapes, dtypes, and for a
trainer where the elements of its parameters go. The rest belongs to the rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from awex_delta.errors import ConnectError
from awex_delta.plan.columns import Ints, Shapes, pack, pack_shapes, unpack, unpack_shapes

WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
"""Dtypes that may travel. Anything else (fp8, int8 and other quantised weights) is refused at connect."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def numels(shapes: Shapes) -> Ints:
    """Elements of tensors of these shapes, int64 [n]."""
    return np.array([math.prod(shape) for shape in shapes], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerColumns:
    """The layout of a trainer rank: P local parameters, and the O HF tensors that they convert to.

    keys, numels: key and number of elements of each parameter, [P].
    params: the parameter that each HF tensor is made of, by number, int64 [O], ascending.
    names, shapes, dtypes: what each HF tensor, or this rank's part of it, is called and looks like, [O].
    sparse: bool [O], True for an HF tensor whose owners send its changes, False for one that travels whole.
    runs: int64 [4, R]. Each column is a run: the HF tensor by number, position in its parameter, position in
        the HF tensor, number of elements. Together the runs of a sparse HF tensor cover it.
    """

    keys: tuple[str, ...]
    numels: Ints
    params: Ints
    names: tuple[str, ...]
    shapes: Shapes
    dtypes: tuple[str, ...]
    sparse: np.ndarray[Any, np.dtype[np.bool_]]
    runs: Ints

    def dump(self) -> bytes:
        """As bytes."""
        numbers = {
            "numels": self.numels,
            "params": self.params,
            "shapes": pack_shapes(self.shapes),
            "sparse": self.sparse.astype(np.int64),
            "runs": self.runs.reshape(-1),
        }
        return pack({}, numbers, {"keys": self.keys, "names": self.names, "dtypes": self.dtypes})

    @classmethod
    def load(cls, blob: bytes) -> TrainerColumns:
        """Undo `dump`. Raises ConnectError if the columns do not fit each other."""
        _, numbers, names = unpack(blob)
        check_columns(
            numbers, names, {"numels", "params", "shapes", "sparse", "runs"}, {"keys", "names", "dtypes"}
        )
        if numbers["runs"].size % 4:
            raise ConnectError("a column of runs ends inside a run")
        found = cls(
            keys=names["keys"],
            numels=numbers["numels"],
            params=numbers["params"],
            names=names["names"],
            shapes=unpack_shapes(numbers["shapes"]),
            dtypes=names["dtypes"],
            sparse=numbers["sparse"].astype(bool),
            runs=numbers["runs"].reshape(4, -1),
        )
        found._check()
        return found

    def _check(self) -> None:
        lengths = {len(self.names), len(self.shapes), len(self.dtypes), self.params.size, self.sparse.size}
        fits = lengths == {len(self.names)} and len(self.keys) == self.numels.size
        output, src, dst, length = self.runs
        fits = fits and inside(self.params, len(self.keys)) and inside(output, len(self.names))
        fits = fits and bool((self.numels >= 0).all())
        if fits and output.size:  # nothing is added up, which might overflow
            fits = bool((length > 0).all() and (src >= 0).all() and (dst >= 0).all())
            fits = fits and bool((src <= self.numels[self.params[output]] - length).all())
            fits = fits and bool((dst <= numels(self.shapes)[output] - length).all())
        if not fits:
            raise ConnectError("the columns of a trainer's layout do not fit each other")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineColumns:
    """The layout of an engine rank: the T tensors that it holds, in the order of its line.

    names, dtypes, shapes: what each tensor, or this rank's part of it, is called and looks like.
    global_shapes, global_offsets: the whole HF tensor, and where the part begins in it.
    tied_to: name of the tensor that it is an alias of, or empty if it has storage of its own.
    places: number of each tensor by its name.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: Shapes
    global_shapes: Shapes
    global_offsets: Shapes
    tied_to: tuple[str, ...]
    places: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {name: place for place, name in enumerate(self.names)})

    def dump(self) -> bytes:
        """As bytes."""
        numbers = {
            "shapes": pack_shapes(self.shapes),
            "global_shapes": pack_shapes(self.global_shapes),
            "global_offsets": pack_shapes(self.global_offsets),
        }
        return pack({}, numbers, {"names": self.names, "dtypes": self.dtypes, "tied_to": self.tied_to})

    @classmethod
    def load(cls, blob: bytes) -> EngineColumns:
        """Undo `dump`. Raises ConnectError if the columns do not fit each other."""
        _, numbers, names = unpack(blob)
        check_columns(
            numbers, names, {"shapes", "global_shapes", "global_offsets"}, {"names", "dtypes", "tied_to"}
        )
        shapes = {key: unpack_shapes(column) for key, column in numbers.items()}
        if {len(column) for column in (*shapes.values(), *names.values())} != {len(names["names"])}:
            raise ConnectError("the columns of an engine's layout do not fit each other")
        return cls(
            names=names["names"],
            dtypes=names["dtypes"],
            shapes=shapes["shapes"],
            global_shapes=shapes["global_shapes"],
            global_offsets=shapes["global_offsets"],
            tied_to=names["tied_to"],
        )

    def stored(self) -> list[int]:
        """Numbers of the tensors that have storage of their own. They make the engine's line."""
        return [place for place, alias in enumerate(self.tied_to) if not alias]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerSpec:
    """A trainer rank.

    agreed: what must be equal on every rank of both sides.
    context: whether this rank has what it takes to use an encoding that reads the weights.
    owners: for each parameter the trainer ranks that own it in parts, ascending; empty if none does.
    owned: int64 [2, P], the half-open range of each parameter that this rank owns.
    offsets, wholes: where its part of each HF tensor begins, and the shape of the whole tensor, [O]; empty
        where AWEX's rules say so from `rank_info`.
    """

    rank: int
    run_id: str
    agreed: Mapping[str, Any]
    context: bool
    architecture: str
    rank_info: Mapping[str, int | str | bool]
    vocab_size: int
    tied_embeddings: bool
    owners: tuple[tuple[int, ...], ...]
    owned: Ints
    layout: TrainerColumns
    offsets: Shapes = ()
    wholes: Shapes = ()

    role: Literal["trainer"] = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineSpec:
    """An engine rank. Ranks that share `engine` hold one copy of the model together; see `TrainerSpec`."""

    rank: int
    engine: str
    agreed: Mapping[str, Any]
    context: bool
    layout: EngineColumns

    role: Literal["engine"] = "engine"


Spec = TrainerSpec | EngineSpec


def inside(index: Ints, size: int) -> bool:
    """True if every entry of `index` is at least 0 and below `size`."""
    return bool(((index >= 0) & (index < size)).all())


def check_columns(
    numbers: Mapping[str, Ints], names: Mapping[str, tuple[str, ...]], ints: set[str], texts: set[str]
) -> None:
    """Refuse a description with other columns.

    Raises:
        ConnectError: columns are missing, or there are more.
    """
    if set(numbers) != ints or set(names) != texts:
        raise ConnectError(
            f"a description has the columns {sorted({*numbers, *names})}, not {sorted(ints | texts)}"
        )
