"""Owned slices -> the elements that changed, by comparing bits with a copy of the last commit. Rank-local.

For optimizers whose step cannot be inverted. It costs what inversion is there to avoid: one bf16 copy of the
slices that this rank owns, in pinned host memory where the weights are on a GPU. The answer is exact, however
many steps ran and whatever else replaced weights; the change sets are those that inversion gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from awex_delta.detection.slices import ChangeSet, Detection, OwnedSlice
from awex_delta.errors import UnsupportedError
from awex_delta.lines.bits import step_code
from awex_delta.protocol.verdict import Reason

# Elements at a time: besides what is returned, a piece takes one byte for each, and on a GPU two more.
_PIECE = 1 << 21


class SnapshotBaseline:
    """Covers anything that happened to the weights since its commit.

    The copy is made at a commit and stays as it is after an abort, so it is always what the engines hold.
    """

    def __init__(self, owned_slices: Callable[[], Iterable[OwnedSlice]]) -> None:
        """Nothing is held before the first `committed`.

        Args:
            owned_slices: every owned slice, as it stands now. Only its weight is looked at.
        """
        self._owned_slices = owned_slices
        self._held: dict[str, torch.Tensor] = {}
        self._holds = False

    @property
    def num_bytes(self) -> int:
        """Memory of the copy: 2 bytes an owned element. Collective: no."""
        return sum(held.nbytes for held in self._held.values())

    def detect(self) -> Detection:
        """Exactly the owned elements whose bits differ from the last commit.

        Raises:
            UnsupportedError: a weight is not bf16.

        Collective: no.
        """
        if not self._holds:
            return Detection(reason=Reason.FIRST_SYNC)
        changes, num_owned = [], 0
        for owned in self._slices():
            num_owned += owned.stop - owned.start
            held = self._held.get(owned.key)
            if held is None or held.numel() != owned.weight.numel():
                detail = f"{owned.key}: other elements are owned than at the last commit"
                return Detection(reason=Reason.STEP_GAP, detail=detail, num_owned=num_owned)
            found = _compare(owned, held)
            changes += [found] if found.num_changed else []
        return Detection(changes=tuple(changes), num_owned=num_owned)

    def committed(self) -> None:
        """Copy the weights as they are now. Collective: no."""
        held = {}
        for owned in self._slices():
            copy = self._held.pop(owned.key, None)
            if copy is None or copy.numel() != owned.weight.numel():
                copy = _empty_on_host(owned.weight)
            held[owned.key] = copy.copy_(owned.weight.detach())
        self._held, self._holds = held, True

    def weights_replaced(self) -> None:
        """Nothing to do: whatever replaced them is compared, too. Collective: no."""

    def detach(self) -> None:
        """Free the copy: full until the next `committed`. Collective: no."""
        self._held, self._holds = {}, False

    def _slices(self) -> Iterable[OwnedSlice]:
        for owned in self._owned_slices():
            if owned.weight.dtype != torch.bfloat16:
                raise UnsupportedError(
                    f"{owned.key}: a snapshot needs bf16 weights, not {owned.weight.dtype}"
                )
            if owned.stop > owned.start:
                yield owned


def _empty_on_host(weight: torch.Tensor) -> torch.Tensor:
    # Pinned, so that copies to and from a device need no second copy on the host.
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.device.type == "cuda")


def _compare(owned: OwnedSlice, held: torch.Tensor) -> ChangeSet:
    index, code = [], []
    for start in range(0, held.numel(), _PIECE):
        new = owned.weight.detach()[start : start + _PIECE]
        old = held[start : start + _PIECE].to(new.device, non_blocking=True)
        changed = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
        index.append(changed + (owned.start + start))
        code.append(step_code(old.take(changed), new.take(changed)))
    return ChangeSet(key=owned.key, index=torch.cat(index), code=torch.cat(code))
