"""Descriptions on the wire: what each rank alone has to say, and layouts, of which equal ones travel once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from awex_delta.errors import ConnectError
from awex_delta.plan.columns import MAX_PACKED, Ints, Shapes, pack, pack_shapes, unpack, unpack_shapes
from awex_delta.plan.describe import (
    EngineColumns,
    EngineSpec,
    Spec,
    TrainerColumns,
    TrainerSpec,
    check_columns,
    inside,
)


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    agreed: dict[str, Any]
    context: bool
    layout: str = Field(pattern="^[0-9a-f]{32}$")
    layout_bytes: Annotated[int, Field(ge=0, le=MAX_PACKED)]


class _TrainerHeader(_Header):
    role: Literal["trainer"] = "trainer"
    run_id: str
    architecture: str
    rank_info: dict[str, int | str | bool]
    vocab_size: int
    tied_embeddings: bool
    groups: tuple[tuple[NonNegativeInt, ...], ...]


class _EngineHeader(_Header):
    role: Literal["engine"] = "engine"
    engine: str


class _FailedHeader(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["failed"] = "failed"
    error: str


_ANY_HEADER: TypeAdapter[_TrainerHeader | _EngineHeader | _FailedHeader] = TypeAdapter(
    Annotated[_TrainerHeader | _EngineHeader | _FailedHeader, Field(discriminator="role")]
)


def dump_spec(spec: Spec) -> tuple[bytes, bytes]:
    """What a rank alone has to say, and its layout, as bytes."""
    layout = spec.layout.dump()
    common: dict[str, Any] = {
        "rank": spec.rank,
        "agreed": dict(spec.agreed),
        "context": spec.context,
        "layout": layout_digest(layout),
        "layout_bytes": len(layout),
    }
    if isinstance(spec, EngineSpec):
        return pack(_EngineHeader(engine=spec.engine, **common).model_dump(mode="json"), {}, {}), layout
    groups = tuple(dict.fromkeys(spec.owners))
    place = {group: number for number, group in enumerate(groups)}
    header = _TrainerHeader(
        run_id=spec.run_id,
        architecture=spec.architecture,
        rank_info=dict(spec.rank_info),
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        groups=groups,
        **common,
    )
    numbers = {
        "group": np.array([place[group] for group in spec.owners], np.int64),
        "owned": spec.owned.reshape(-1),
        "offsets": pack_shapes(spec.offsets),
        "wholes": pack_shapes(spec.wholes),
    }
    return pack(header.model_dump(mode="json"), numbers, {}), layout


def dump_failure(error: str) -> bytes:
    """What a rank sends if it cannot describe itself."""
    return pack(_FailedHeader(error=error).model_dump(mode="json"), {}, {})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Announced:
    """What a rank alone has to say, before its layout is known.

    layout, layout_bytes: digest and length of the layout.
    """

    header: _TrainerHeader | _EngineHeader
    numbers: Mapping[str, Ints]

    @property
    def layout(self) -> str:
        """Digest of the layout."""
        return self.header.layout

    @property
    def layout_bytes(self) -> int:
        """Length of the layout."""
        return self.header.layout_bytes

    def complete(self, layouts: Mapping[str, TrainerColumns | EngineColumns]) -> Spec:
        """The whole description.

        Raises:
            ConnectError: it does not fit its layout.
        """
        header, layout = self.header, layouts[self.header.layout]
        if isinstance(header, _EngineHeader) and isinstance(layout, EngineColumns):
            return EngineSpec(
                rank=header.rank,
                engine=header.engine,
                agreed=header.agreed,
                context=header.context,
                layout=layout,
            )
        if not isinstance(header, _TrainerHeader) or not isinstance(layout, TrainerColumns):
            raise ConnectError(f"{header.role} rank {header.rank} sent the layout of the other side")
        check_columns(self.numbers, {}, {"group", "owned", "offsets", "wholes"}, set())
        group, owned = self.numbers["group"], self.numbers["owned"]
        num_params = len(layout.keys)
        if group.size != num_params or owned.size != 2 * num_params or not inside(group, len(header.groups)):
            raise ConnectError(
                f"trainer rank {header.rank}: owners of {group.size} of {num_params} parameters"
            )
        offsets, wholes = (unpack_shapes(self.numbers[name]) for name in ("offsets", "wholes"))
        if (offsets or wholes) and not _fit(layout.shapes, offsets, wholes):
            raise ConnectError(f"trainer rank {header.rank}: its parts of HF tensors do not lie inside them")
        return TrainerSpec(
            rank=header.rank,
            run_id=header.run_id,
            agreed=header.agreed,
            context=header.context,
            architecture=header.architecture,
            rank_info=header.rank_info,
            vocab_size=header.vocab_size,
            tied_embeddings=header.tied_embeddings,
            owners=tuple(header.groups[number] for number in group.tolist()),
            owned=owned.reshape(2, -1),
            layout=layout,
            offsets=offsets,
            wholes=wholes,
        )


def _fit(shapes: Shapes, offsets: Shapes, wholes: Shapes) -> bool:
    """Whether parts of these shapes lie inside their whole tensors."""
    if not len(shapes) == len(offsets) == len(wholes):
        return False
    parts = list(zip(shapes, offsets, wholes, strict=True))
    return all(len(s) == len(o) == len(w) for s, o, w in parts) and all(
        start + size <= whole for part in parts for size, start, whole in zip(*part, strict=True)
    )


def announced(seat: int, blob: bytes) -> Announced | str:
    """Read what the rank at `seat` alone has to say, or why it cannot describe itself.

    Raises:
        ConnectError: it is malformed.
    """
    try:
        found, numbers, _ = unpack(blob)
        header = _ANY_HEADER.validate_python(found)
    except (ValidationError, ConnectError) as error:
        cause = error.errors()[:3] if isinstance(error, ValidationError) else error
        raise ConnectError(
            f"seat {seat} sent a malformed description (do all ranks run the same release?): {cause}"
        ) from error
    return header.error if isinstance(header, _FailedHeader) else Announced(header=header, numbers=numbers)


def layout_digest(blob: bytes) -> str:
    """What tells one layout from another: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(blob)


def load_layout(role: str, blob: bytes, digest: str) -> TrainerColumns | EngineColumns:
    """Read a layout.

    Raises:
        ConnectError: it is malformed, or not the one that was announced.
    """
    if layout_digest(blob) != digest:
        raise ConnectError("a layout was damaged on the way")
    return TrainerColumns.load(blob) if role == "trainer" else EngineColumns.load(blob)
