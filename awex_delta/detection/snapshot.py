"""Owned slices -> the elements that changed, by comparing bits with a copy of the last commit. Rank-local.

For optimizers whose step cannot be inverted. It costs what inversion is there to avoid: one bf16 copy of the
slices that this rank owns, in pinned host memory if the weights are on a GPU. The answer is exact, however
many steps ran and whatever else replaced weights; the changes are those that inversion gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from awex_delta.detection.invert import failed
from awex_delta.detection.pieces import Piece, Runs, Scratch, in_order, nonzero, pieces
from awex_delta.detection.slices import Detection, OwnedSlice, OwnedSlices, bf16_slices
from awex_delta.lines.bits import step_code
from awex_delta.lines.changes import Changes
from awex_delta.protocol.verdict import Reason

# Elements at a time: besides what is returned, a piece takes one byte for each, two more if small slices
# are copied together, and on a GPU two more.
_PIECE = 1 << 21


class SnapshotBaseline:
    """Covers anything that happened to the weights since its commit.

    The copy is made as an update is about to commit. If that one is given up after all, the next is full, and
    makes another copy.
    """

    def __init__(self, owned_slices: OwnedSlices) -> None:
        """Nothing is held before the first `committed`.

        Args:
            owned_slices: every owned slice, as it stands now. Only its weight is looked at.
        """
        self._owned_slices = owned_slices
        self._held: torch.Tensor | None = None  # in the order of the pieces
        self._ranges: list[tuple[str, int, int]] = []
        self._failure: Detection | None = None  # of the last commit's copy

    @property
    def num_bytes(self) -> int:
        """Memory of the copy: 2 bytes for each owned element."""
        return 0 if self._held is None else self._held.nbytes

    def detect(self) -> Detection:
        """Exactly the owned elements whose bits differ from the last commit.

        Raises:
            UnsupportedError: a weight is not bf16.
        """
        if self._held is None:
            return self._failure or Detection(reason=Reason.FIRST_SYNC)
        slices = bf16_slices(self._owned_slices())
        num_owned = sum(owned.stop - owned.start for owned in slices)
        for before, now in zip_longest(self._ranges, _ranges(slices)):
            if before != now:
                detail = f"{(now or before)[0]}: other elements are owned than at the last commit"
                return Detection(reason=Reason.STEP_GAP, detail=detail, num_owned=num_owned)
        with torch.no_grad():
            parts = [(piece, _compare(piece, new, old)) for piece, new, old in _beside(slices, self._held)]
        return Detection(changes=in_order(parts), num_owned=num_owned)

    def committed(self) -> None:
        """Copy the weights as they are now. Never raises: what fails makes the next update full."""
        try:
            self._failure = None
            self._copy()
        except Exception as error:  # noqa: BLE001 - the next update is full, whatever it was
            self._held, self._failure = None, failed(error)

    def _copy(self) -> None:
        slices = bf16_slices(self._owned_slices())
        num_owned = sum(owned.stop - owned.start for owned in slices)
        held, self._held = self._held, None  # of no use if anything below fails
        if held is None or held.numel() != num_owned:
            # Pinned, so that copies to and from a device need no second copy on the host.
            pinned = bool(slices) and slices[0].weight.device.type == "cuda"
            held = torch.empty(num_owned, dtype=torch.bfloat16, pin_memory=pinned, device="cpu")
        with torch.no_grad():
            for _, new, old in _beside(slices, held):
                old.copy_(new)
        self._held, self._ranges = held, _ranges(slices)

    def weights_replaced(self) -> None:
        """Nothing to do: whatever replaced them is compared, too."""

    def detach(self) -> None:
        """Free the copy: full until the next `committed`."""
        self._held = None


def _ranges(slices: Sequence[OwnedSlice]) -> list[tuple[str, int, int]]:
    return [(owned.key, owned.begin, owned.stop - owned.start) for owned in slices]


def _beside(
    slices: Sequence[OwnedSlice], held: torch.Tensor
) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """Each piece with its weights and its part of the copy."""
    scratch, place = Scratch(), 0
    for piece in pieces(slices, _PIECE):
        yield piece, scratch.tensor(piece, "weight"), held[place : place + piece.numel]
        place += piece.numel


def _compare(piece: Piece, new: torch.Tensor, held: torch.Tensor) -> Changes:
    old = held.to(new.device, non_blocking=True)
    changed = nonzero(old.view(torch.int16) != new.view(torch.int16))
    value = new.take(changed)
    return Changes(
        pos=Runs.of(piece.ranges()).to(new.device).in_line(changed),
        code=step_code(old.take(changed), value),
        value=value,
    )
