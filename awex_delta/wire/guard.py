"""What a frame says of its base: a digest of the bits that its changes replace, if the sender knows them.

An encoding that sends whole values would repair weights that drifted at an engine, and nobody would notice.
So its frames have a guard, which the engine compares before anything is written. The digest sums hashes of
(position in the pair's line, old bits), see `wire.digest`, and lies in the header. At the end of the frame
stands what it leaves out:

    unstated, 32 bit    places, among the changes of the frame, of those for which detection states no step:
                        their old bits are not known
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.lines.changes import Changes
from awex_delta.wire.codec import Codec, as_bytes
from awex_delta.wire.digest import as_unsigned, sum_at
from awex_delta.wire.pieces import places_of
from awex_delta.wire.spans import Old

# Changes at a time: torch does so few on one thread of a CPU, and waits for no other; a GPU takes more.
_PIECE, _DEVICE_PIECE = 1 << 15, 1 << 20
# A change that states no step costs 4 bytes: if more than one in 16 states none, a guard is too dear.
_MIN_CHANGES_FOR_UNSTATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The guard of one frame.

    digest: below 2^64.
    unstated: int64 [n] on the CPU, ascending places among the changes of the frame.
    """

    digest: int
    unstated: torch.Tensor

    def holds(self, pos: torch.Tensor, old: Old, *, compiled: bool = False) -> bool:
        """Whether an engine holds what the changes of the frame replace.

        Args:
            pos: int64 [n], the positions of all changes of the frame, as decoded.
            old: reads what the engine holds.
            compiled: see `awex_delta.wire.digest`.
        """

        def stated(here: slice) -> torch.Tensor:
            first, last = torch.searchsorted(
                self.unstated, torch.tensor([here.start, here.stop], dtype=torch.int64, device="cpu")
            ).tolist()
            counted = torch.ones(here.stop - here.start, dtype=torch.bool, device="cpu")
            counted[self.unstated[first:last] - here.start] = False
            return counted.to(pos.device)

        return _digest(pos, lambda here: old(pos[here]), stated, compiled=compiled) == self.digest


def guard_limit(num_unstated: int) -> int:
    """The bytes that a guard adds to the end of a frame."""
    return torch.uint32.itemsize * num_unstated


def num_unstated(codec: Codec, changes: Changes) -> int | None:
    """How many changes guards would leave out; None if frames of these changes have no guard.

    A guard is worth its bytes if values are sent whole and most old values are known. Encodings that send
    steps need none: on another base they give wrong values, which verification finds.
    Waits for a device once.

    Args:
        codec: what will pack them.
        changes: of one pair, with values.
    """
    code, value = changes.code, changes.value
    if not codec.idempotent or code is None or value is None or not changes.num_changed:
        return None
    if value.dtype is not torch.bfloat16:  # no step leads back to what a converter cast
        return None
    count = int((code == UNSTATED).sum())
    return count if count * _MIN_CHANGES_FOR_UNSTATED <= changes.num_changed else None


def guard_of(changes: Changes, *, compiled: bool = False) -> Guard:
    """The guard of a frame, from the sender's side.

    Args:
        changes: of one frame; bf16, with values and codes.
        compiled: see `awex_delta.wire.digest`.

    Raises:
        ValueError: values or codes are missing.
    """
    code, value = changes.code, changes.value
    if code is None or value is None:
        raise ValueError("a guard needs values and codes")
    digest = _digest(
        changes.pos,
        lambda here: apply_code(value[here], -code[here]),
        lambda here: code[here] != UNSTATED,
        compiled=compiled,
    )
    return Guard(digest=digest, unstated=places_of(code.cpu(), UNSTATED))


def guard_bytes(guard: Guard) -> torch.Tensor:
    """The end of a frame with this guard: uint8 [n]."""
    return as_bytes(guard.unstated.to(torch.uint32))


def read_guard(digest: int, section: torch.Tensor, num_changes: int) -> Guard:
    """Undo `guard_bytes`.

    Args:
        digest: as the header has it.
        section: uint8 [4 n].
        num_changes: how many changes the frame has.

    Raises:
        CorruptFrameError: a place is out of order, or beyond the changes.
    """
    unstated = section.clone().view(torch.uint32).to(torch.int64)
    if unstated.numel() and (bool((unstated.diff() <= 0).any()) or int(unstated[-1]) >= num_changes):
        raise CorruptFrameError(
            "changes that a guard leaves out are out of order, or beyond those of its frame"
        )
    return Guard(digest=digest, unstated=unstated)


def _digest(
    pos: torch.Tensor,
    old: Callable[[slice], torch.Tensor],
    stated: Callable[[slice], torch.Tensor],
    *,
    compiled: bool,
) -> int:
    """The digest of old bits, a range of changes at a time. old: bf16; stated: bool, which of them count."""
    total = torch.zeros((), dtype=torch.int64, device=pos.device)
    step = _PIECE if pos.device.type == "cpu" else _DEVICE_PIECE
    for first in range(0, pos.numel(), step):
        here = slice(first, min(first + step, pos.numel()))
        total += sum_at(pos[here], old(here), 0, counts=stated(here), compiled=compiled)
    return as_unsigned(total)
