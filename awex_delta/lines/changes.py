"""Changed elements of one line: where they are, how far they moved, and what they are now."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Elements of one line that changed, in ascending order. All tensors lie on one device.

    pos: int64 [n], strictly ascending positions in the line.
    code: int8 [n], steps in units in the last place of bf16, -128 where none is stated; None if no step
        is known. Never 0: an element that did not change is not listed.
    value: [n], the new values in the dtype of the line; None if they have not been read.
    """

    pos: torch.Tensor
    code: torch.Tensor | None = None
    value: torch.Tensor | None = None

    @classmethod
    def none(cls) -> Changes:
        """No element changed."""
        return cls(pos=_NOWHERE, code=_NOWHERE.to(torch.int8))

    @property
    def num_changed(self) -> int:
        """How many elements are listed."""
        return self.pos.numel()

    def part(self, first: int, last: int) -> Changes:
        """The changes from number `first` up to number `last`, as views."""
        return Changes(
            pos=self.pos[first:last],
            code=None if self.code is None else self.code[first:last],
            value=None if self.value is None else self.value[first:last],
        )


def joined(parts: list[Changes]) -> Changes:
    """One list of changes from several that follow each other in the line.

    Args:
        parts: ascending; either all of them have codes or none, and the same for values.
    """
    if len(parts) == 1:
        return parts[0]
    codes = [part.code for part in parts if part.code is not None]
    values = [part.value for part in parts if part.value is not None]
    if not parts:
        return Changes.none()
    return Changes(
        pos=torch.cat([part.pos for part in parts]),
        code=torch.cat(codes) if codes else None,
        value=torch.cat(values) if values else None,
    )
