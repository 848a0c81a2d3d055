"""Codecs: the changed elements of many regions as one run of bytes, and back.

A region is the part of one HF tensor that one sender and one receiver share. A codec sees all sparse
regions of a frame at once, so that a frame costs a few tensor operations and not a few a region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.numerics.ulp import UNSTATED, apply_code

INT32_LIMIT = 2**31
INT64_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What sender and receiver both know of a region, for encodings that make use of it.

    owned: half-open ranges of positions whose weights the sender knows, ascending and disjoint. The same
        on both sides.
    read: `read(start, stop)` gives the flat weights bf16 [stop - start] at these positions: on the
        sender those after the step, on the receiver the base. An alias where that is possible.
    offset: where position 0 lies for `read`.
    """

    owned: tuple[tuple[int, int], ...]
    read: Callable[[int, int], torch.Tensor]
    offset: int = 0

    def window(self, start: int, stop: int) -> Context:
        """The part of the region from `start` to `stop` as a region of its own. Collective: no."""
        clipped = ((max(a, start) - start, min(b, stop) - start) for a, b in self.owned)
        owned = tuple((a, b) for a, b in clipped if a < b)
        return Context(owned=owned, read=self.read, offset=self.offset + start)

    def weights(self, start: int, stop: int) -> torch.Tensor:
        """The flat weights at positions `start` to `stop` of this region or window. Collective: no."""
        return self.read(self.offset + start, self.offset + stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChange:
    """What changed in one region.

    numel: elements in the region.
    value: wire dtype [n], the new values. Of a received change with codes, only where the code is -128.
    index: int64 [n], strictly ascending flat positions in the region; None when the whole region is
        sent (then n == numel).
    code: int8 [n], steps in units in the last place of bf16, -128 where none is stated; None where
        there are no codes (whole regions, other dtypes, encodings that send every value).
    context: for encodings that use it; None where nothing is known.
    """

    numel: int
    value: torch.Tensor
    index: torch.Tensor | None = None
    code: torch.Tensor | None = None
    context: Context | None = None


def settle(change: RegionChange, old: torch.Tensor) -> RegionChange:
    """Turn the steps of a received change into values.

    Args:
        change: as decoded, its tensors on the device of `old`.
        old: bf16 [n], what the receiver holds at `change.index`; read before any of it is written.

    Returns:
        The change with every value in place and no codes.

    Collective: no.
    """
    if change.code is None:
        return change
    value = torch.where(change.code == UNSTATED, change.value, apply_code(old, change.code))
    return replace(change, value=value, code=None)


class Codec(Protocol):
    """One encoding of sparse regions. Pure: bytes depend on the arguments alone."""

    @property
    def name(self) -> str:
        """What the settings call it."""

    @property
    def number(self) -> int:
        """What the frame header calls it."""

    @property
    def needs_context(self) -> bool:
        """True when it makes use of `RegionChange.context`."""

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """About the bytes that one sparse region takes, to compare with sending it whole."""

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that `count` changes in regions of `numel` elements together can take."""

    def encode(self, changes: Sequence[RegionChange], dtype: torch.dtype) -> torch.Tensor:
        """Pack sparse regions (index is not None) into uint8 [n] on the CPU."""

    def decode(
        self,
        body: torch.Tensor,
        counts: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
        contexts: Sequence[Context | None] = (),
    ) -> list[RegionChange]:
        """Unpack what `encode` packed.

        Args:
            body: uint8 [n], beginning at a multiple of 8 in its storage.
            counts: changed elements of each region.
            numels: elements of each region.
            dtype: wire dtype of the values.
            contexts: of each region, for an encoding that needs them.

        Raises:
            CorruptFrameError: the body does not fit the counts, or a position is out of place.
        """


def whole_is_smaller(codec: Codec, change: RegionChange, dtype: torch.dtype) -> bool:
    """True where the values of the whole region take fewer bytes than its encoded changes.

    Args:
        codec: the encoding that is compared.
        change: a sparse region.
        dtype: wire dtype.

    Collective: no.
    """
    whole = change.numel * dtype.itemsize
    worst = change.value.numel() * (INT64_BYTES + dtype.itemsize)  # no encoding needs more
    return worst > whole and codec.size(change, dtype) > whole


def check_positions(index: torch.Tensor, counts: Sequence[int], numels: Sequence[int]) -> None:
    """Refuse positions that are negative, beyond their region, repeated or out of order.

    Args:
        index: int32 or int64 [sum of counts], the positions of all regions one after the other.
        counts, numels: changed elements and size of each region.

    Raises:
        CorruptFrameError: names the first bad region.
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
    descents = (index[1:] <= index[:-1]).nonzero().view(-1) + 1
    inner = descents[~torch.isin(descents, first)]
    if inner.numel() or bool(((index[first] < 0) | (index[last] >= limit)).any()):
        raise CorruptFrameError(_misplaced(index, counts, numels))


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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as uint8, without a copy where it lies on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() < 2:  # its stride may be anything
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8)


class IndicesCodec:
    """`indices`: int32 position (int64 where a region needs it) and new value. Idempotent."""

    name = "indices"
    number = 1
    needs_context = False

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """See `Codec.size`."""
        return change.value.numel() * (_index_dtype([change.numel]).itemsize + dtype.itemsize)

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`. Exact, but where several regions exceed int32 together and none alone."""
        streams = count * _index_dtype([numel]).itemsize, count * dtype.itemsize
        return sum(stream + padding(stream) for stream in streams)

    def encode(self, changes: Sequence[RegionChange], dtype: torch.dtype) -> torch.Tensor:
        """Positions of all regions, then values of all regions, each padded to 8 bytes."""
        if not changes:
            return torch.empty(0, dtype=torch.uint8)
        narrow = _index_dtype([change.numel for change in changes])
        index = torch.cat([change.index for change in changes if change.index is not None]).to(narrow)
        value = torch.cat([change.value for change in changes]).to(dtype)
        return torch.cat([pad_to_word(as_bytes(stream)) for stream in (index, value)])

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
        total = sum(counts)
        index_dtype = _index_dtype(numels)
        index_bytes = total * index_dtype.itemsize
        value_bytes = total * dtype.itemsize
        value_start = index_bytes + padding(index_bytes)
        if body.numel() != value_start + value_bytes + padding(value_bytes):
            raise CorruptFrameError(f"{body.numel()} bytes cannot hold {total} changed elements")
        narrow = body[:index_bytes].view(index_dtype)
        check_positions(narrow, counts, numels)
        index = narrow.to(torch.int64)
        value = body[value_start : value_start + value_bytes].view(dtype)
        split_index, split_value = torch.split(index, list(counts)), torch.split(value, list(counts))
        return [
            RegionChange(numel=numel, index=i, value=v)
            for numel, i, v in zip(numels, split_index, split_value, strict=True)
        ]


def _index_dtype(numels: Sequence[int]) -> torch.dtype:
    return torch.int32 if max(numels, default=0) <= INT32_LIMIT else torch.int64


def check_counts(counts: Sequence[int], numels: Sequence[int]) -> None:
    """Refuse more changes than a region has elements.

    Raises:
        CorruptFrameError: a region states more.
    """
    if any(count > numel for count, numel in zip(counts, numels, strict=True)):
        raise CorruptFrameError("more elements changed in a region than it has")


def padding(length: int) -> int:
    """Bytes to add so that what follows begins at a multiple of 8."""
    return -length % 8


def pad_to_word(stream: torch.Tensor) -> torch.Tensor:
    """uint8 [n] followed by zeros up to a multiple of 8 bytes."""
    missing = padding(stream.numel())
    return torch.cat([stream, stream.new_zeros(missing)]) if missing else stream
