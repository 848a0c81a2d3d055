"""`indices`: positions and new values as they are."""

from __future__ import annotations

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.changes import Changes
from awex_delta.wire.codec import body_room, check_count, padding
from awex_delta.wire.pieces import pieces, slices
from awex_delta.wire.spans import Read, Span

_POSITION = torch.uint32


class IndicesCodec:
    """`indices`: uint32 position in the span, and new value. Idempotent."""

    name = "indices"
    number = 1
    needs_context = False
    idempotent = True

    def size(self, changes: Changes, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.size`."""
        del numel
        return changes.num_changed * (_POSITION.itemsize + dtype.itemsize)

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.limit`. Exact."""
        del numel
        return _layout(count, dtype)[1]

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.work`."""
        del count, numel, dtype
        return 0

    def encode(
        self,
        changes: Changes,
        span: Span,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
        read: Read | None = None,
    ) -> torch.Tensor:
        """All positions, then all values, each padded to 8 bytes."""
        del read
        count = changes.num_changed
        body = body_room(self, count, span, dtype, out)[: _layout(count, dtype)[1]]
        narrow, value = _parts(body, count, dtype)
        body[narrow.nbytes : narrow.nbytes + padding(narrow.nbytes)] = 0
        body[body.numel() - padding(value.nbytes) :] = 0
        for here, (pos, new, _) in zip(slices(count), pieces(changes), strict=True):
            narrow[here] = pos - span.begin if span.begin else pos
            value[here] = new
        return body

    def decode(
        self, body: torch.Tensor, count: int, span: Span, dtype: torch.dtype, *, read: Read | None = None
    ) -> Changes:
        """See `Codec.decode`."""
        del read
        check_count(count, span)
        if body.numel() != _layout(count, dtype)[1]:
            raise CorruptFrameError(f"{body.numel()} bytes cannot hold {count} changed elements")
        narrow, value = _parts(body, count, dtype)
        pos, before = torch.empty(count, dtype=torch.int64, device="cpu"), -1
        for piece in slices(count):
            here = pos[piece].copy_(narrow[piece])
            before = _checked_last(here, before, span.numel)
            here += span.begin
        return Changes(pos=pos, value=value)


def _checked_last(pos: torch.Tensor, before: int, numel: int) -> int:
    """The last of some positions in a span, which must ascend from beyond `before` and stay below `numel`.

    Raises:
        CorruptFrameError: names the first that is out of place.
    """
    first, last = int(pos[0]), int(pos[-1])
    if before < first and last < numel and bool((pos[1:] > pos[:-1]).all()):
        return last
    bad = torch.diff(pos, prepend=torch.tensor([before], dtype=torch.int64, device="cpu")) <= 0
    place = int(pos[bad | (pos >= numel)][0])
    raise CorruptFrameError(
        f"position {place} of a span of {numel} elements is out of range, repeated or out of order"
    )


def _layout(count: int, dtype: torch.dtype) -> tuple[int, int]:
    """Where the values begin, and where the body ends."""
    positions, values = count * _POSITION.itemsize, count * dtype.itemsize
    start = positions + padding(positions)
    return start, start + values + padding(values)


def _parts(body: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions and the values of a body, as views."""
    start, _ = _layout(count, dtype)
    positions = body[: count * _POSITION.itemsize].view(_POSITION)
    return positions, body[start : start + count * dtype.itemsize].view(dtype)
