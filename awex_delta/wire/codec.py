"""Codecs: the changed elements in one span of a pair's line as one run of bytes, and back.

Changes have positions in the pair's line, see `wire.spans`; bytes count them from the begin of their span.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.lines.changes import Changes
from awex_delta.wire.pieces import slices
from awex_delta.wire.spans import Old, Read, Span


class Codec(Protocol):
    """One encoding of changes. Pure: bytes depend on the arguments alone."""

    @property
    def name(self) -> str:
        """What the settings call it."""

    @property
    def number(self) -> int:
        """What the frame header calls it; never 0, which says that every value of a span follows."""

    @property
    def needs_context(self) -> bool:
        """True when both ends read the weights of the whole span."""

    @property
    def idempotent(self) -> bool:
        """True when every value is sent whole: decoding twice, or on another base, gives the same."""

    def size(self, changes: Changes, numel: int, dtype: torch.dtype) -> int:
        """About the bytes that changes among `numel` elements take, to compare with sending all elements."""

    def limit(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that `count` changes among `numel` elements can take."""

    def work(self, count: int, numel: int, dtype: torch.dtype) -> int:
        """The most memory, in bytes, that encoding or decoding them takes beside the body and the changes.

        It comes on top of `pieces.SCRATCH_BYTES`, which do not depend on the number of changes.
        """

    def encode(
        self,
        changes: Changes,
        span: Span,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
        read: Read | None = None,
    ) -> torch.Tensor:
        """Pack changes.

        Args:
            changes: all in `span`, with values; on any device.
            span: at most MAX_SPAN elements.
            dtype: the dtype of the values.
            out: uint8, `limit` bytes or more on the CPU, beginning at a multiple of 8 in its storage; None
                for new memory.
            read: the values after the step, for an encoding that needs them.

        Returns:
            uint8 [n], the begin of `out`.
        """

    def decode(
        self, body: torch.Tensor, count: int, span: Span, dtype: torch.dtype, *, read: Read | None = None
    ) -> Changes:
        """Unpack what `encode` packed.

        Args:
            body: uint8 [n] on the CPU, beginning at a multiple of 8 in its storage.
            count: how many elements changed.
            span: as it was packed; at most MAX_SPAN elements.
            dtype: the dtype of the values.
            read: the values of the base, for an encoding that needs them.

        Returns:
            Changes with values. If they have codes, only the values of changes with code -128 are set,
            and the others are 0: see `settle`. Only values may alias the body.

        Raises:
            CorruptFrameError: the body does not fit the count, or a position is out of place.
        """


def settle(changes: Changes, old: Old) -> Changes:
    """Turn the codes of received changes into values, in the memory of their values.

    Args:
        changes: as decoded.
        old: reads what the receiver holds, before any of it is written.

    Returns:
        The changes with every value in place and no codes.
    """
    code, value = changes.code, changes.value
    if code is None or value is None:
        return changes
    for here in slices(changes.num_changed):
        moved = apply_code(old(changes.pos[here]), code[here])
        value[here] = torch.where(code[here] == UNSTATED, value[here], moved)
    return replace(changes, code=None)


def body_room(
    codec: Codec, count: int, span: Span, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """`out`, or as much new memory as the body of `count` changes can need."""
    return (
        torch.empty(codec.limit(count, span.numel, dtype), dtype=torch.uint8, device="cpu")
        if out is None
        else out
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as uint8, without a copy if it lies on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() < 2:  # its stride may be anything
        flat = torch.empty(flat.shape, dtype=flat.dtype, device="cpu").copy_(flat)
    return flat.view(torch.uint8)


def check_count(count: int, span: Span) -> None:
    """Refuse more changes than a span has elements; called before memory is allocated.

    Raises:
        CorruptFrameError: there are more.
    """
    if not 0 <= count <= span.numel:
        raise CorruptFrameError(f"{count} elements changed in a span of {span.numel}")


def padding(length: int) -> int:
    """Bytes to add so that what follows begins at a multiple of 8."""
    return -length % 8
