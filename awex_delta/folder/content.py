"""Does an engine hold what the trainers had? Digests by tensor, stored with a version, taken again after it.

The digest of a tensor is that of `awex_delta.wire.digest` under its HF name, its positions those in the whole
tensor: of a full version over all elements, of a delta over those that it writes, or over all where the
settings say so. It adds up over the parts that ranks own or serve, so nobody needs a whole tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from awex_delta.engines.view import EngineTensor
from awex_delta.folder.apply import Staged
from awex_delta.folder.manifest import Manifest
from awex_delta.folder.pack import Item
from awex_delta.lines.geometry import Box, row_range
from awex_delta.lines.storages import gather_from
from awex_delta.plan.pairs import Region
from awex_delta.protocol.verify import Scope
from awex_delta.wire.codec import RegionChange
from awex_delta.wire.digest import MODULUS, as_unsigned, digest, salt_of, sum_at

Digests = dict[str, int]
"""By HF name, whole numbers below 2^64."""

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSum:
    """What one rank holds of one tensor. offset: where its part begins; whole: elements of the tensor."""

    name: str
    offset: tuple[int, ...]
    numel: int
    whole: int
    sum: int


_PART_SUMS: TypeAdapter[list[PartSum]] = TypeAdapter(list[PartSum])


def flat_positions(index: torch.Tensor | None, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Positions in a box as positions in its tensor: the way back from `plan.geometry.select`.

    Args:
        index: int64 [n], flat positions in the box; None for all of them.
        box: a part of a tensor.
        shape: of that tensor.
    """
    rest = torch.arange(box.numel) if index is None else index
    bounds = row_range(box, shape)
    if bounds is not None:
        return rest + bounds[0]
    position, stride = torch.zeros_like(rest), 1
    for size, start, extent in zip(reversed(shape), reversed(box.start), reversed(box.shape), strict=True):
        position += (rest % extent + start) * stride
        rest = torch.div(rest, extent, rounding_mode="floor")
        stride *= size
    return position


def of_items(items: Iterable[Item]) -> Digests:
    """Of whole tensors that one rank writes. Collective: no."""
    return {item.entry.name: digest(item.stored, item.entry.name) for item in items}


def of_changes(
    found: Iterable[tuple[Region, RegionChange]], shapes: Mapping[str, tuple[int, ...]]
) -> Digests:
    """Of the elements in region changes, by tensor. Collective: no."""
    sums: Digests = defaultdict(int)
    for region, change in found:
        value = change.value.to(region.dtype)
        if value.numel():
            index = None if change.index is None else change.index
            position = flat_positions(index, region.target, shapes[region.name]).to(value.device)
            sums[region.name] += as_unsigned(sum_at(position, value, salt_of(region.name)))
    return {name: total % MODULUS for name, total in sums.items()}


def to_text(digests: Digests) -> dict[str, str]:
    """As manifests hold them: 16 hexadecimal digits."""
    return {name: f"{value:016x}" for name, value in digests.items()}


def added(texts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The digests of all ranks together."""
    sums: Digests = defaultdict(int)
    for text in texts:
        for name, value in text.items():
            sums[name] += int(value, 16)
    return to_text({name: value % MODULUS for name, value in sorted(sums.items())})


def sums_of(manifest: Manifest, parts: Sequence[EngineTensor], staged: Sequence[Staged]) -> list[PartSum]:
    """One rank's live tensors after a version was written, read back from where they are served.

    Args:
        manifest: of the version; where it has no digests nothing is read.
        parts: all live tensors of the rank.
        staged: what was written; only the positions are used.

    Collective: no.
    """
    if not manifest.digest:
        return []
    if manifest.scope == Scope.FULL.value:
        live = [part for part in parts if part.tied_to is None]
        return [_part_sum(part, _whole_sum(part, _stored_name(manifest, part))) for part in live]
    sums: dict[str, int] = {
        part.name: 0
        for part in parts
        if part.tied_to is None and _stored_name(manifest, part) in manifest.digest
    }
    by_name = {part.name: part for part in parts}
    for one in staged:
        sums[one.overlap.part.name] += _staged_sum(one)
    return [_part_sum(by_name[name], value % MODULUS) for name, value in sums.items()]


def differing(manifest: Manifest, ranks: Sequence[Sequence[PartSum]]) -> list[str]:
    """Tensors whose digest is not the trainers'; those of which not every part is here are left out.

    Args:
        manifest: of the version.
        ranks: what every rank of one engine holds; ranks may hold the same part.
    """
    return sorted(name for name, equal in _compare(manifest, ranks) if equal is False)


def matching(manifest: Manifest, ranks: Sequence[Sequence[PartSum]]) -> set[str]:
    """Tensors whose digest is the trainers', on every rank that holds a part. Arguments of `differing`."""
    return {name for name, equal in _compare(manifest, ranks) if equal}


def _compare(manifest: Manifest, ranks: Sequence[Sequence[PartSum]]) -> Iterator[tuple[str, bool | None]]:
    """Each tensor, and whether its digest is the trainers'; None where that cannot be told."""
    parts: dict[str, dict[tuple[int, ...], PartSum]] = defaultdict(dict)
    contradicted: set[str] = set()
    for one in (one for rank in ranks for one in rank):
        known = parts[one.name].setdefault(one.offset, one)
        if known.sum != one.sum:
            contradicted.add(one.name)
    for name, places in parts.items():
        held = list(places.values())
        stored = name if name in manifest.digest else manifest.tied.get(name, "")
        complete = sum(one.numel for one in held) == held[0].whole
        if name in contradicted:
            yield name, False
        elif not complete or stored not in manifest.digest:
            yield name, None
        else:
            yield name, f"{sum(one.sum for one in held) % MODULUS:016x}" == manifest.digest[stored]


def dump_sums(sums: Sequence[PartSum]) -> Any:
    """As JSON, for the other ranks."""
    return _PART_SUMS.dump_python(list(sums), mode="json")


def load_sums(value: Any) -> list[PartSum]:
    """Read back. Raises pydantic.ValidationError."""
    return _PART_SUMS.validate_python(value)


def _stored_name(manifest: Manifest, part: EngineTensor) -> str:
    return part.name if part.name in manifest.digest else manifest.tied.get(part.name, part.name)


def _part_sum(part: EngineTensor, total: int) -> PartSum:
    whole = torch.Size(part.global_shape).numel()
    return PartSum(name=part.name, offset=part.global_offset, numel=part.view.numel(), whole=whole, sum=total)


def _staged_sum(one: Staged) -> int:
    """What is live at the positions that were written."""
    target, entry = one.overlap.target, one.overlap.entry
    if one.index is None:
        return _box_sum(target, one.overlap.box, entry.shape, salt_of(entry.name))
    position = flat_positions(one.index, one.overlap.box, entry.shape).to(target.device)
    live = gather_from(target, one.index.to(target.device))
    return as_unsigned(sum_at(position, live, salt_of(entry.name)))


def _whole_sum(part: EngineTensor, stored_name: str) -> int:
    if part.view.shape == part.global_shape:
        return digest(part.view, stored_name)
    box = Box(start=part.global_offset, shape=tuple(part.view.shape))
    return _box_sum(part.view, box, part.global_shape, salt_of(stored_name))


def _box_sum(view: torch.Tensor, box: Box, shape: tuple[int, ...], salt: int) -> int:
    """All elements of a box, a bounded number at a time."""
    total = 0
    for piece, live in _pieces(view, box):
        position = flat_positions(None, piece, shape).to(live.device)
        total += as_unsigned(sum_at(position, live.reshape(-1), salt))
    return total % MODULUS


def _pieces(view: torch.Tensor, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    rows = max(1, _PIECE * box.shape[0] // max(box.numel, 1))
    for first in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - first)
        piece = Box(start=(box.start[0] + first, *box.start[1:]), shape=(count, *box.shape[1:]))
        yield piece, view[first : first + count]
