"""What a position in a line means: named tensors, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Tensors that lie one after the other in a line, each row by row.

    names: the names of the tensors, in order.
    starts: int64 [n + 1] on the CPU, where each tensor begins; the last entry is where the line ends.
    """

    names: tuple[str, ...]
    starts: torch.Tensor

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> Space:
        """The line of tensors with these names and numbers of elements."""
        pairs = list(sizes)
        numels = torch.tensor([0, *(numel for _, numel in pairs)], dtype=torch.int64, device="cpu")
        return cls(names=tuple(name for name, _ in pairs), starts=numels.cumsum(0))

    @property
    def numel(self) -> int:
        """Elements of the line."""
        return int(self.starts[-1])

    def begins(self) -> dict[str, int]:
        """Where each tensor begins, by name, in the order of the line."""
        return dict(zip(self.names, self.starts.tolist(), strict=False))

    def counts(self, pos: torch.Tensor) -> torch.Tensor:
        """How many of some positions lie in each tensor.

        Args:
            pos: int64 [k], ascending.

        Returns:
            int64 [n] on the CPU.
        """
        return torch.searchsorted(pos, self.starts.to(pos.device)).cpu().diff()

    def names_at(self, pos: torch.Tensor) -> list[str]:
        """Names of the tensors in which ascending positions lie, each once, in the order of the line."""
        return [self.names[place] for place in self.counts(pos).nonzero().view(-1).tolist()]
