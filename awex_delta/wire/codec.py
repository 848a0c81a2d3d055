"""Codecs: the changed elements of many regions as one run of bytes, and back.

A region is the part of one HF tensor that one sender and one receiver share. A codec sees all sparse
regions of a frame at once, so that a frame costs a few tensor operations and not a few a region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED, apply_code

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
    start: what to take from each position; not 0 only in a window, whose positions alias its region's.
    """

    numel: int
    value: torch.Tensor
    index: torch.Tensor | None = None
    code: torch.Tensor | None = None
    context: Context | None = None
    start: int = 0


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

    @property
    def idempotent(self) -> bool:
        """True when every value is sent whole: decoding twice, or on another base, gives the same."""

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """About the bytes that one sparse region takes, to compare with sending it whole."""

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that `count` changes in regions of `numel` elements together can take."""

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that packing or unpacking them takes beside the body and what is staged.

        That is on top of `pieces.SCRATCH_BYTES`, which do not grow.
        """

    def encode(
        self, changes: Sequence[RegionChange], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pack sparse regions (index is not None).

        Args:
            changes: one entry a region.
            dtype: wire dtype of the values.
            out: uint8, `limit` bytes or more on the CPU, beginning at a multiple of 8 in its storage; None
                for new memory.

        Returns:
            uint8 [n], the begin of `out`.
        """

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

        Returns:
            One entry a region. Only values may alias the body.

        Raises:
            CorruptFrameError: the body does not fit the counts, or a position is out of place.
        """


def body_limit(codec: Codec, changes: Sequence[RegionChange], dtype: torch.dtype) -> int:
    """The most bytes of the body of sparse regions. Collective: no."""
    count = sum(change.value.numel() for change in changes)
    return codec.limit(count, sum(change.numel for change in changes), dtype) if count else 0


def body_room(
    codec: Codec, changes: Sequence[RegionChange], dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """`out`, or as much new memory as the body of these changes can need. Collective: no."""
    return torch.empty(body_limit(codec, changes, dtype), dtype=torch.uint8) if out is None else out


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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as uint8, without a copy where it lies on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() < 2:  # its stride may be anything
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8)


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
