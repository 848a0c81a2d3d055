"""`indices`: positions and new values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.wire.codec import Context, RegionChange, body_room, padding
from awex_delta.wire.pieces import pieces, slices

INT32_LIMIT = 2**31


class IndicesCodec:
    """`indices`: int32 position (int64 where a region needs it) and new value. Idempotent."""

    name = "indices"
    number = 1
    needs_context = False
    idempotent = True

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """See `Codec.size`."""
        return change.value.numel() * (_index_dtype([change.numel]).itemsize + dtype.itemsize)

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`. Exact, but where several regions exceed int32 together and none alone."""
        streams = count * _index_dtype([numel]).itemsize, count * dtype.itemsize
        return sum(stream + padding(stream) for stream in streams)

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.work`."""
        del count, numel, dtype
        return 0

    def encode(
        self, changes: Sequence[RegionChange], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Positions of all regions, then values of all regions, each padded to 8 bytes."""
        total, narrow = sum(c.value.numel() for c in changes), _index_dtype([c.numel for c in changes])
        value_start, end = _layout(total, narrow, dtype)
        body = body_room(self, changes, dtype, out)[:end]
        for start, stop in (
            (total * narrow.itemsize, value_start),
            (value_start + total * dtype.itemsize, end),
        ):
            body[start:stop] = 0
        index, value = _streams(body, total, narrow, dtype)
        first = 0
        for piece in pieces(changes):
            here = piece.index
            index[first : first + here.numel()] = here
            value[first : first + here.numel()] = piece.value
            first += here.numel()
        return body

    def decode(
        self,
        body: torch.Tensor,
        counts: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
        contexts: Sequence[Context | None] = (),
    ) -> list[RegionChange]:
        """See `Codec.decode`."""
        del contexts
        total, narrow = sum(counts), _index_dtype(numels)
        if body.numel() != _layout(total, narrow, dtype)[1]:
            raise CorruptFrameError(f"{body.numel()} bytes cannot hold {total} changed elements")
        found, value = _streams(body, total, narrow, dtype)
        check_positions(found, counts, numels)
        index = torch.empty(total, dtype=torch.int64).copy_(found)
        split_index, split_value = torch.split(index, list(counts)), torch.split(value, list(counts))
        return [
            RegionChange(numel=numel, index=i, value=v)
            for numel, i, v in zip(numels, split_index, split_value, strict=True)
        ]


def check_positions(index: torch.Tensor, counts: Sequence[int], numels: Sequence[int]) -> None:
    """Refuse positions that are negative, beyond their region, repeated or out of order.

    Args:
        index: int32 or int64 [sum of counts], the positions of all regions one after the other.
        counts, numels: changed elements and size of each region.

    Raises:
        CorruptFrameError: names the first bad region.

    Collective: no.
    """
    if not index.numel():
        return
    ends = list(accumulate(counts))
    edges = [
        (end - count, end, numel) for count, end, numel in zip(counts, ends, numels, strict=True) if count
    ]
    first = torch.tensor([begin for begin, _, _ in edges])
    last = torch.tensor([end - 1 for _, end, _ in edges])
    limit = torch.tensor([numel for _, _, numel in edges])
    # Ascending within a region, so that its first and its last position bound all of them.
    inside = not bool(((index[first] < 0) | (index[last] >= limit)).any())
    if not inside or not all(_ascends(index, piece, first) for piece in slices(index.numel() - 1)):
        raise CorruptFrameError(_misplaced(index, counts, numels))


def _ascends(index: torch.Tensor, piece: slice, first: torch.Tensor) -> bool:
    """False where a position follows one that is not smaller, unless it is the first of its region."""
    before, after = index[piece], index[piece.start + 1 : piece.stop + 1]
    descents = (after <= before).nonzero().view(-1) + (piece.start + 1)
    return bool(torch.isin(descents, first).all())


def _misplaced(index: torch.Tensor, counts: Sequence[int], numels: Sequence[int]) -> str:
    """Names the first position out of place; slow, for a frame that is refused anyway."""
    parts = torch.split(index, list(counts))
    for region, (part, numel) in enumerate(zip(parts, numels, strict=True)):
        bad = (part < 0) | (part >= numel)
        bad[1:] |= part[1:] <= part[:-1]
        if bool(bad.any()):
            where = int(part[bad][0])
            place = f"position {where} in region {region} of {numel} elements"
            return f"{place} is out of range, repeated or out of order"
    return "positions are out of place"


def _index_dtype(numels: Sequence[int]) -> torch.dtype:
    return torch.int32 if max(numels, default=0) <= INT32_LIMIT else torch.int64


def _layout(total: int, narrow: torch.dtype, dtype: torch.dtype) -> tuple[int, int]:
    """Where the values begin, and where the body ends."""
    index_bytes, value_bytes = total * narrow.itemsize, total * dtype.itemsize
    value_start = index_bytes + padding(index_bytes)
    return value_start, value_start + value_bytes + padding(value_bytes)


def _streams(
    body: torch.Tensor, total: int, narrow: torch.dtype, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    value_start, _ = _layout(total, narrow, dtype)
    index = body[: total * narrow.itemsize].view(narrow)
    return index, body[value_start : value_start + total * dtype.itemsize].view(dtype)
