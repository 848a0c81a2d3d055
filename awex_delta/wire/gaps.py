"""Positions as gaps of one byte, values as they are or as steps: `gaps`, `ulp` and `ulp_zstd`.

A gap is the number of unchanged elements between a changed element and the one before it in its region,
or the begin of the region. Gaps and values of all regions of a frame share their streams:

    gap, 8 bit      one for each changed element; 255 says that the gap is in the next stream
    gap, 16 bit     65535 says that it is in the next one
    gap, 32 bit     and so on
    gap, 64 bit
    steps           two streams, see `wire.steps`; not in `gaps`, nor for other dtypes than bf16
    value           one for each changed element without a step

The streams lie in the body as `wire.streams` says. A step needs the exact base to make a value of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.numerics.ulp import UNSTATED
from awex_delta.wire.codec import Context, RegionChange, as_bytes, check_counts, padding
from awex_delta.wire.steps import stated_steps, step_limits, step_streams
from awex_delta.wire.streams import entropy_bytes, join_streams, split_streams

Level = tuple[torch.dtype, int]
"""Dtype of a gap stream, and the value in it that refers to the next stream."""

LEVELS: tuple[Level, ...] = ((torch.uint8, 2**8 - 1), (torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1))
"""The gap streams but the last, whose int64 holds any gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCodec:
    """The encodings that send gaps.

    steps: send steps where they are stated; otherwise every new value, which is idempotent.
    compress: pack each stream by zstd.
    levels: see LEVELS.
    """

    name: str
    number: int
    steps: bool
    compress: bool
    levels: tuple[Level, ...] = LEVELS

    @property
    def needs_context(self) -> bool:
        """See `Codec.needs_context`."""
        return False

    def size(self, change: RegionChange, dtype: torch.dtype) -> int:
        """See `Codec.size`. Where streams are packed, the entropy that they come close to."""
        count = change.value.numel()
        gap_bytes = _position_entropy(count, change.numel) if self.compress else count
        if not self._has_steps(dtype):
            return gap_bytes + count * dtype.itemsize
        code = _codes(change)
        num_unstated = int((code == UNSTATED).sum())
        if self.compress:
            step_bytes = entropy_bytes(code.view(torch.uint8))
        else:
            step_bytes = sum(stream.numel() for stream in step_streams(code))
        return gap_bytes + step_bytes + num_unstated * dtype.itemsize

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`. A gap that escapes a level is at least as long as the level's limit."""
        streams = [count * self.levels[0][0].itemsize]
        for (_, limit), width in zip(self.levels, [*_widths(self.levels)[1:]], strict=True):
            streams.append(min(count, numel // limit) * width)
        streams += step_limits(count) if self._has_steps(dtype) else []
        streams.append(count * dtype.itemsize)
        return sum(16 + stream + padding(stream) for stream in streams)

    def encode(self, changes: Sequence[RegionChange], dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.encode`."""
        changes = [change for change in changes if change.value.numel()]
        if not changes:
            return torch.empty(0, dtype=torch.uint8)
        streams = gap_streams(changes, self.levels)
        value = torch.cat([change.value.to(dtype) for change in changes])
        if self._has_steps(dtype):
            code = torch.cat([_codes(change) for change in changes])
            streams += step_streams(code)
            value = value[code == UNSTATED]
        return join_streams([as_bytes(stream) for stream in (*streams, value)], compress=self.compress)

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
        check_counts(counts, numels)
        if not total:
            if body.numel():
                raise CorruptFrameError(f"{body.numel()} bytes for no changed element")
            return _split_regions(numels, counts, torch.empty(0, dtype=torch.int64), None, None, dtype)
        widths = _widths(self.levels)
        limits = [total * width for width in widths]
        limits += step_limits(total) if self._has_steps(dtype) else []
        streams = split_streams(body, [*limits, total * dtype.itemsize])
        index = gap_positions(streams[: len(self.levels) + 1], self.levels, counts, numels)
        value = _viewed(streams[-1], dtype)
        code = None
        if self._has_steps(dtype):
            code = stated_steps(streams[len(widths) : -1], total)
            value = _spread(value, code, total)
        elif value.numel() != total:
            raise CorruptFrameError(f"{value.numel()} values for {total} changed elements")
        return _split_regions(numels, counts, index, value, code, dtype)

    def _has_steps(self, dtype: torch.dtype) -> bool:
        return self.steps and dtype is torch.bfloat16


def gap_streams(changes: Sequence[RegionChange], levels: Sequence[Level]) -> list[torch.Tensor]:
    """The positions of sparse regions, none of them empty, as streams of gaps.

    Returns:
        One tensor a level, of its dtype, and one int64 tensor.

    Collective: no.
    """
    index = torch.cat([change.index for change in changes if change.index is not None])
    ends = accumulate(change.value.numel() for change in changes[:-1])
    first = torch.tensor([0, *ends], device=index.device)
    gap = torch.empty_like(index)
    torch.sub(index[1:], index[:-1], out=gap[1:]).sub_(1)
    gap[first] = index[first]
    del index  # eight bytes a change, as has each of the steps below
    streams = []
    for dtype, limit in levels:
        wide = gap[(gap >= limit).nonzero().view(-1)]
        streams.append(gap.clamp_(max=limit).to(dtype))
        gap = wide
    return [*streams, gap]


def gap_positions(
    streams: Sequence[torch.Tensor], levels: Sequence[Level], counts: Sequence[int], numels: Sequence[int]
) -> torch.Tensor:
    """Undo `gap_streams`.

    Args:
        streams: uint8 [n] each, the bytes of one stream a level and of the int64 one.
        levels: as they were encoded.
        counts, numels: changed elements and size of each region; empty regions are allowed.

    Returns:
        int64 [sum of counts], the positions of all regions one after the other, each in its region.

    Raises:
        CorruptFrameError: the streams do not fit each other, or a position lies beyond its region.

    Collective: no.
    """
    gap = _viewed(streams[-1], torch.int64).clone()
    if bool(((gap < 0) | (gap >= max(numels))).any()):
        raise CorruptFrameError("a gap is negative or larger than every region")
    for (dtype, limit), stream in zip(reversed(levels), reversed(streams[:-1]), strict=True):
        wide, gap = gap, _viewed(stream, dtype).to(torch.int64)
        escaped = (gap == limit).nonzero().view(-1)
        if escaped.numel() != wide.numel():
            raise CorruptFrameError(f"{wide.numel()} wide gaps for {escaped.numel()} escapes")
        gap[escaped] = wide
    if gap.numel() != sum(counts):
        raise CorruptFrameError(f"{gap.numel()} gaps for {sum(counts)} changed elements")
    gap.add_(1)
    index = torch.cumsum(gap, 0, out=gap)  # one beyond each position, were all regions one
    filled = [(count, numel) for count, numel in zip(counts, numels, strict=True) if count]
    ends = index[torch.tensor(list(accumulate(count for count, _ in filled))) - 1].tolist()
    begin = 0
    for part, end, (_, numel) in zip(torch.split(index, [c for c, _ in filled]), ends, filled, strict=True):
        if end - begin > numel:
            raise CorruptFrameError(f"position {end - begin - 1} is beyond a region of {numel} elements")
        part.sub_(begin + 1)
        begin = end
    return index


def _widths(levels: Sequence[Level]) -> list[int]:
    """Bytes of an entry in each gap stream."""
    return [dtype.itemsize for dtype, _ in levels] + [torch.int64.itemsize]


def _position_entropy(count: int, numel: int) -> int:
    """Bytes to say which `count` of `numel` elements are meant, were all sets equally likely."""
    share = count / max(numel, 1)
    if share in (0, 1):
        return 0
    return math.ceil(-numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8)


def _codes(change: RegionChange) -> torch.Tensor:
    if change.code is None or change.value.dtype is not torch.bfloat16:
        return torch.full(change.value.shape, UNSTATED, dtype=torch.int8, device=change.value.device)
    return change.code


def _spread(value: torch.Tensor, code: torch.Tensor, total: int) -> torch.Tensor:
    """Whole values at the elements that have no step."""
    unstated = (code == UNSTATED).nonzero().view(-1)
    if unstated.numel() != value.numel():
        raise CorruptFrameError(f"{value.numel()} values for {unstated.numel()} elements without a step")
    spread = value.new_zeros(total)
    spread[unstated] = value
    return spread


def _viewed(stream: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if stream.numel() % dtype.itemsize:
        raise CorruptFrameError(f"a stream of {stream.numel()} bytes holds no whole number of {dtype}")
    return stream.view(dtype)


def _split_regions(
    numels: Sequence[int],
    counts: Sequence[int],
    index: torch.Tensor,
    value: torch.Tensor | None,
    code: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[RegionChange]:
    value = torch.empty(0, dtype=dtype) if value is None else value
    sizes = list(counts)
    codes = [None] * len(sizes) if code is None else torch.split(code, sizes)
    parts = zip(numels, torch.split(index, sizes), torch.split(value, sizes), codes, strict=True)
    return [RegionChange(numel=numel, index=i, value=v, code=c) for numel, i, v, c in parts]
