"""What verification costs beside detection: digests of the elements that changed, and of all weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from awex_delta.digest import WORTH_COMPILING, salt_of, sum_at, sum_whole
from awex_delta.engines.tensors import gather_from
from awex_delta.types import Detection, OwnedSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """A detection and the weights that it was made on, by key. sent: the new values, as frames hold them."""

    weights: Mapping[str, torch.Tensor]
    found: Detection
    sent: Sequence[torch.Tensor]

    @classmethod
    def of(cls, slices: Sequence[OwnedSlice], found: Detection) -> Self:
        """Of one training step. Compiles what is to be measured."""
        weights = {owned.key: owned.weight for owned in slices}
        digests = cls(
            weights=weights, found=found, sent=[gather_from(weights[c.key], c.index) for c in found.changes]
        )
        digests.of_all()
        return digests

    def of_changes(self) -> bool:
        """What a delta takes by default: a trainer's digests of the values that it sends, and an engine's of
        its live weights at the same places, read back. True where they agree."""
        live = [gather_from(self.weights[changes.key], changes.index) for changes in self.found.changes]
        return self._sums(self.sent) == self._sums(live)

    def of_all(self) -> int:
        """One digest of all weights, as each side takes in a full sync."""
        totals = [sum_whole(w, salt_of(k), compiled=self._compiled) for k, w in self.weights.items()]
        return int(torch.stack(totals).sum())

    @property
    def _compiled(self) -> bool:
        return sum(weight.numel() for weight in self.weights.values()) >= WORTH_COMPILING

    def _sums(self, values: Sequence[torch.Tensor]) -> list[int]:
        totals = [
            sum_at(changes.index, value, salt_of(changes.key), compiled=self._compiled)
            for changes, value in zip(self.found.changes, values, strict=True)
        ]
        sums: list[int] = torch.stack(totals).tolist()
        return sums
