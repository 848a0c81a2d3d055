"""What verification costs beside detection: digests of the elements that changed, and of all weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from awex_delta.detection.slices import ChangeSet, Detection, OwnedSlice
from awex_delta.lines.storages import gather_from, scatter_into
from awex_delta.wire.codec import RegionChange
from awex_delta.wire.digest import WORTH_COMPILING, salt_of, sum_at, sum_whole
from awex_delta.wire.guard import Guard, guard_of, old_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """A detection, the trainer's weights that it was made on, and an engine's, by key.

    live: the engine's, before the step until they are written.
    sent: the changes, as frames hold them.
    """

    live: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    found: Detection
    sent: Sequence[RegionChange]

    @classmethod
    def of(cls, slices: Sequence[OwnedSlice], found: Detection, before: torch.Tensor) -> Self:
        """Of one training step. Compiles what is to be measured.

        Args:
            slices: the weights after the step, one slice after the other.
            found: the changes in them.
            before: all weights before the step.
        """
        weights = {owned.key: owned.weight for owned in slices}
        parts = torch.split(before, [owned.weight.numel() for owned in slices])
        sent = [
            RegionChange(
                numel=weights[changes.key].numel(),
                index=changes.index,
                value=gather_from(weights[changes.key], changes.index),
                code=changes.code,
            )
            for changes in found.changes
        ]
        live = {key: part.clone() for key, part in zip(weights, parts, strict=True)}
        digests = cls(live=live, weights=weights, found=found, sent=sent)
        digests.of_all()
        return digests

    def of_trainer(self) -> tuple[Guard, list[int]]:
        """What a trainer adds to detection in a delta of values: digests of what it replaces and sends."""
        guard = guard_of(self.sent, compiled=self._compiled)
        return guard, self._sums([change.value for change in self.sent])

    def write(self) -> None:
        """What an engine does without digests: it writes."""
        for change, changes in zip(self.sent, self.found.changes, strict=True):
            scatter_into(self.live[changes.key], changes.index, change.value)

    def write_verified(self, guard: Guard) -> tuple[list[int], list[int]]:
        """The same with digests of its live weights at the same places, before and after."""
        place, totals = 0, []
        for changes in self.found.changes:
            totals.append(self._of_base(changes, guard, place))
            place += changes.index.numel()
        self.write()
        written = [gather_from(self.live[changes.key], changes.index) for changes in self.found.changes]
        base: list[int] = torch.stack(totals).tolist()
        return base, self._sums(written)

    def timed(self) -> dict[str, Callable[[], object]]:
        """What is to be timed for `over_detect`.

        Raises:
            RuntimeError: a trainer's digests and an engine's differ.
        """
        guard, sent = self.of_trainer()
        if self.write_verified(guard) != (guard.digests.tolist(), sent):
            raise RuntimeError("a trainer's digests and an engine's of the same values differ")
        return {
            "digest": self.of_trainer,
            "write": self.write,
            "write_verified": lambda: self.write_verified(guard),
            "digest_all": self.of_all,
        }

    def of_all(self) -> int:
        """One digest of all weights, as each side takes in a full sync."""
        totals = [sum_whole(w, salt_of(k), compiled=self._compiled) for k, w in self.weights.items()]
        return int(torch.stack(totals).sum())

    @property
    def _compiled(self) -> bool:
        return sum(weight.numel() for weight in self.weights.values()) >= WORTH_COMPILING

    def _of_base(self, changes: ChangeSet, guard: Guard, place: int) -> torch.Tensor:
        live = self.live[changes.key]
        return old_digest(
            changes.index,
            lambda here: gather_from(live, changes.index[here]),
            lambda here: guard.stated(place + here.start, place + here.stop),
            compiled=self._compiled,
        )

    def _sums(self, values: Sequence[torch.Tensor]) -> list[int]:
        totals = [
            sum_at(changes.index, value, salt_of(changes.key), compiled=self._compiled)
            for changes, value in zip(self.found.changes, values, strict=True)
        ]
        sums: list[int] = torch.stack(totals).tolist()
        return sums


def over_detect(seconds: Mapping[str, float]) -> dict[str, float]:
    """What digests cost, in detections.

    Args:
        seconds: of `detect`, and of all that `Digests.timed` gives.

    Returns:
        digest_over_detect: a trainer's digests of what changed and of what that replaces.
        digest_engine_over_detect: what an engine's add to its writing.
        digest_all_over_detect: one digest of all weights.
    """
    return {
        "digest_over_detect": seconds["digest"] / seconds["detect"],
        "digest_engine_over_detect": (seconds["write_verified"] - seconds["write"]) / seconds["detect"],
        "digest_all_over_detect": seconds["digest_all"] / seconds["detect"],
    }
