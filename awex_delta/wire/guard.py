"""What a frame says of its base: digests of the bits that its changes replace, where the sender knows them.

An encoding that sends whole values repairs what drifted at an engine, unseen. So such a frame has a guard,
and an engine compares before anything is written:

    digest, 64 bit      one a window of the frame: of the old bits of the changes in it
    unstated, 32 bit    changes that no digest covers, as detection states no step for them: ascending
                        places among all sparse changes of the frame, together padded to 8 bytes

Positions count from the start of the window, and there is no salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.wire.codec import Codec, RegionChange, as_bytes, padding
from awex_delta.wire.digest import sum_at

# Changes at a time: so much torch does on one thread of a CPU, and waits for no other; a GPU takes more.
_PIECE, _DEVICE_PIECE = 1 << 15, 1 << 20
_MIN_CHANGES_FOR_UNSTATED = 16  # a change that states no step costs 4 bytes: more of them, and it is too dear

Part = Callable[[slice], torch.Tensor]
"""What belongs to a range of changes of one window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The guard of one frame.

    digests: int64 [windows] on the CPU; 0 for a window that is sent whole or empty.
    unstated: int64 [n] on the CPU, ascending.
    """

    digests: torch.Tensor
    unstated: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return guard_limit(self.digests.numel(), self.unstated.numel())

    def stated(self, first: int, last: int) -> torch.Tensor:
        """Which of the sparse changes at places `first` to `last` the digests cover: bool. Collective: no."""
        begin, end = torch.searchsorted(self.unstated, torch.tensor([first, last])).tolist()
        stated = torch.ones(last - first, dtype=torch.bool)
        stated[self.unstated[begin:end] - first] = False
        return stated


def guard_limit(num_windows: int, num_unstated: int) -> int:
    """Bytes of a guard. Collective: no."""
    unstated = 4 * num_unstated
    return 8 * num_windows + unstated + padding(unstated)


def unstated_counts(codec: Codec, changes: Sequence[RegionChange]) -> list[int] | None:
    """By region, the changes that a guard would leave out; None where frames of these changes gain by none.

    They gain by one where values are sent whole, and most old ones are known. Encodings that send steps need
    none: from another base they make other values, which read back wrong. Waits for a device once.

    Collective: no.
    """
    sparse = [change for change in changes if change.index is not None and change.value.numel()]
    if not sparse or not codec.idempotent or not all(_has_steps(change) for change in sparse):
        return None
    totals = [_num_unstated(change) for change in changes]
    counts: list[int] = _on_cpu(totals).tolist()
    gains = sum(counts) * _MIN_CHANGES_FOR_UNSTATED <= sum(change.value.numel() for change in sparse)
    return counts if gains else None


def _has_steps(change: RegionChange) -> bool:
    """False where no step leads back to the old bits, such as from values that a converter cast."""
    return change.code is not None and change.value.dtype is torch.bfloat16


def _num_unstated(change: RegionChange) -> torch.Tensor:
    """int64 scalar, left on the device of the change where it is sparse."""
    if change.index is None or change.code is None:
        return torch.zeros((), dtype=torch.int64)
    return (change.code == UNSTATED).sum()


def guard_of(changes: Sequence[RegionChange], *, compiled: bool = False) -> Guard:
    """The guard of a frame, from the sender's side.

    Args:
        changes: one entry a window, as they are packed; bf16, with codes where they are sparse.
        compiled: see `awex_delta.wire.digest`.

    Collective: no.
    """
    digests, unstated, place = [], [torch.empty(0, dtype=torch.int64)], 0
    for change in changes:
        if change.index is None or change.code is None:
            digests.append(torch.zeros((), dtype=torch.int64))
            continue
        value, code = change.value, change.code
        digests.append(
            old_digest(
                change.index,
                lambda here, value=value, code=code: apply_code(value[here], -code[here]),  # type: ignore[misc]
                lambda here, code=code: code[here] != UNSTATED,  # type: ignore[misc]
                start=change.start,
                compiled=compiled,
            )
        )
        for part in torch.split(code, _piece(code)):
            unstated.append((part == UNSTATED).nonzero().view(-1).cpu() + place)
            place += part.numel()
    return Guard(digests=_on_cpu(digests), unstated=torch.cat(unstated))


def old_digest(
    index: torch.Tensor, old: Part, stated: Part, *, start: int = 0, compiled: bool = False
) -> torch.Tensor:
    """The digest of the old bits of one window, left on their device.

    Args:
        index: int64 [n], positions.
        old: gives the old bf16 values of a range of changes, on the device of `index`.
        stated: gives bool on that device: the changes that count.
        start: of the window, among those positions.
        compiled: see `awex_delta.wire.digest`.

    Returns:
        int64 scalar.

    Collective: no.
    """
    total = torch.zeros((), dtype=torch.int64, device=index.device)
    step = _piece(index)
    for first in range(0, index.numel(), step):
        here = slice(first, min(first + step, index.numel()))
        places = index[here] - start if start else index[here]
        total += sum_at(places, old(here), 0, counts=stated(here), compiled=compiled)
    return total


def guard_bytes(guard: Guard) -> torch.Tensor:
    """A guard as the frame holds it: uint8 [n]. Collective: no."""
    section = torch.zeros(guard.num_bytes, dtype=torch.uint8)
    digests, unstated = as_bytes(guard.digests), as_bytes(guard.unstated.to(torch.uint32))
    section[: digests.numel()] = digests
    section[digests.numel() : digests.numel() + unstated.numel()] = unstated
    return section


def read_guard(section: torch.Tensor, num_windows: int, num_unstated: int, num_changes: int) -> Guard:
    """Undo `guard_bytes`.

    Args:
        section: uint8 [guard_limit of the two counts].
        num_windows, num_unstated: as the frame's header and table say.
        num_changes: sparse changes of the frame.

    Raises:
        CorruptFrameError: a place is out of order, or beyond the changes.

    Collective: no.
    """
    begin = 8 * num_windows
    unstated = section[begin : begin + 4 * num_unstated].view(torch.uint32).to(torch.int64)
    if num_unstated and (bool((unstated.diff() <= 0).any()) or int(unstated[-1]) >= num_changes):
        raise CorruptFrameError("a guard leaves out changes out of order, or beyond those of its frame")
    return Guard(digests=section[:begin].view(torch.int64).clone(), unstated=unstated)


def _piece(changes: torch.Tensor) -> int:
    return _PIECE if changes.device.type == "cpu" else _DEVICE_PIECE


def _on_cpu(totals: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 scalars, of which some may lie on a device, as one tensor; waits for it once."""
    devices = {total.device for total in totals} - {torch.device("cpu")} or {torch.device("cpu")}
    target = devices.pop()
    if not totals:
        return torch.empty(0, dtype=torch.int64)
    return torch.stack([total.to(target) for total in totals]).cpu()
