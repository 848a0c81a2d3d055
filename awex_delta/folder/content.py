"""Does an engine hold what the trainers had? Digests by tensor, stored with a version, taken again after it.

The digest of a tensor is that of `awex_delta.wire.digest` under its HF name, its positions those in the whole
tensor: of a full version over all elements, of a delta over those that it writes, or over all if the settings
say so. It adds up over the parts that ranks own or serve, so nobody needs a whole tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from awex_delta.engines.view import EngineTensor
from awex_delta.errors import LockstepError
from awex_delta.folder.apply import Piece
from awex_delta.folder.live import Live
from awex_delta.folder.manifest import HfSpace, Manifest
from awex_delta.lines.boxes import BoxMap
from awex_delta.observe.compare.engine_digests import digest_of_part
from awex_delta.protocol.verify import Scope
from awex_delta.wire.digest import MODULUS, salt_of, signed, sums_by_group

Digests = dict[str, int]
"""By HF name, whole numbers below 2^64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSum:
    """What one rank holds of one tensor. offset: where its part begins; whole: elements of the tensor."""

    name: str
    offset: tuple[int, ...]
    numel: int
    whole: int
    sum: int


_PART_SUMS: TypeAdapter[list[PartSum]] = TypeAdapter(list[PartSum])


class Sums:
    """Digests of HF tensors, of elements at positions of the folder's line."""

    def __init__(self, space: HfSpace) -> None:
        """Begin with no element."""
        self._names = space.names
        self._starts = space.line.starts
        self._salts = torch.tensor(
            [signed(salt_of(name)) for name in space.names], dtype=torch.int64, device="cpu"
        )
        self._totals = torch.zeros_like(self._salts)
        self._counts = torch.zeros_like(self._salts)

    def add(self, table: BoxMap, found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add elements of one writer's line, of which `table` leads to the folder's.

        found: ascending positions in its line, int64 [k], and values [k], some at a time.
        """
        for pos, value in found:
            canonical, pick = table.map(pos.cpu())
            self._counts += torch.searchsorted(canonical, self._starts).diff()
            tensor = torch.searchsorted(self._starts, canonical, right=True) - 1
            inside = canonical - self._starts[tensor]
            self._totals += sums_by_group(inside, value.cpu()[pick], self._salts, tensor)

    def digests(self) -> Digests:
        """By name, of tensors of which an element was added."""
        rows = zip(self._names, self._totals.tolist(), self._counts.tolist(), strict=True)
        return {name: total % MODULUS for name, total, count in rows if count}


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


def sums_of(manifest: Manifest, live: Live, pieces: Iterable[Piece]) -> list[PartSum]:
    """One rank's live tensors after a version was written, read back from where they are served.

    Nothing is read if the manifest has no digests. Of a delta, `pieces` are what was written; only their
    positions are used.
    """
    if not manifest.digest:
        return []
    if manifest.scope == Scope.FULL.value:
        return [_part_sum(part, digest_of_part(part, live.stored_names[part.name])) for part in live.parts]
    totals = {
        dtype: torch.zeros(len(line.parts), dtype=torch.int64, device=line.storages.device)
        for dtype, line in live.lines.items()
    }
    salts = {
        dtype: torch.tensor(
            [signed(salt_of(live.stored_names[part.name])) for part in line.parts],
            dtype=torch.int64,
            device="cpu",
        )
        for dtype, line in live.lines.items()
    }
    for dtype, pos, _ in pieces:
        totals[dtype] += _live_sums(live, dtype, pos, salts[dtype])
    return [
        _part_sum(part, total % MODULUS)
        for dtype, line in live.lines.items()
        for part, total in zip(line.parts, totals[dtype].tolist(), strict=True)
        if live.stored_names[part.name] in manifest.digest
    ]


def _live_sums(live: Live, dtype: torch.dtype, pos: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
    """Digests by part of what is live at some positions."""
    line = live.lines[dtype]
    device = line.storages.device
    pos = pos.to(device)
    value = line.storages.gather(pos, dtype)
    canonical, pick = line.back.map(pos)
    part = (torch.searchsorted(line.line.starts.to(device), pos, right=True) - 1)[pick]
    begin = live.space.line.starts[line.tensors].to(device)
    return sums_by_group(canonical - begin[part], value[pick], salts.to(device), part)


def differing(manifest: Manifest, ranks: Sequence[Sequence[PartSum]]) -> list[str]:
    """Tensors whose digest is not the trainers'; those of which not every part is here are left out.

    ranks: what every rank of one engine holds; ranks may hold the same part.
    """
    return sorted(name for name, equal in _compare(manifest, ranks) if equal is False)


def matching(manifest: Manifest, ranks: Sequence[Sequence[PartSum]]) -> set[str]:
    """Tensors whose digest is the trainers', on every rank that holds a part. Arguments of `differing`."""
    return {name for name, equal in _compare(manifest, ranks) if equal}


def _compare(manifest: Manifest, ranks: Sequence[Sequence[PartSum]]) -> Iterator[tuple[str, bool | None]]:
    """Each tensor, and whether its digest is the trainers'; None if that cannot be told."""
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
    """Read back. Raises LockstepError if another rank sent something else."""
    try:
        return _PART_SUMS.validate_python(value)
    except ValidationError as error:
        raise LockstepError(f"a rank of this engine sent no digests of its parts: {error}") from error


def _part_sum(part: EngineTensor, total: int) -> PartSum:
    whole = torch.Size(part.global_shape).numel()
    return PartSum(name=part.name, offset=part.global_offset, numel=part.view.numel(), whole=whole, sum=total)
