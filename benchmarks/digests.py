"""What verification costs beside detection: digests of the elements that changed, and of all weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.lines.changes import Changes
from awex_delta.lines.compiling import WORTH_COMPILING
from awex_delta.lines.storages import Storages
from awex_delta.wire.digest import sum_at, sum_whole

_SALT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Changes of one line, and an engine's weights.

    live: bf16 [n], the engine's, before the step until the changes are written.
    pos, code, value: the changes, as `Changes` holds them.
    stated: bool [changes], whether the old bits follow from the code.
    """

    live: torch.Tensor
    pos: torch.Tensor
    code: torch.Tensor
    value: torch.Tensor
    stated: torch.Tensor

    @classmethod
    def of(cls, before: torch.Tensor, changes: Changes) -> Self:
        """Of one training step. Compiles what is to be measured.

        Args:
            before: bf16 [n], all weights before the step.
            changes: what was found, with codes and values.
        """
        assert changes.code is not None
        assert changes.value is not None
        digests = cls(
            live=before.clone(),
            pos=changes.pos,
            code=changes.code,
            value=changes.value,
            stated=changes.code != UNSTATED,
        )
        digests.of_all()
        return digests

    def of_trainer(self) -> tuple[int, int]:
        """What a trainer adds to detection in a delta of values: digests of what it replaces and sends."""
        old = apply_code(self.value, -self.code)  # means nothing where no step is stated
        return self._sums(old, self.value)

    def write(self) -> None:
        """What an engine does without digests: it writes."""
        Storages([self.live]).scatter(self.pos, self.value)

    def write_verified(self) -> tuple[int, int]:
        """The same with digests of its live weights at the same places, before and after."""
        line = Storages([self.live])
        old = line.gather(self.pos, self.live.dtype)
        self.write()
        return self._sums(old, line.gather(self.pos, self.live.dtype))

    def timed(self) -> dict[str, Callable[[], object]]:
        """What is to be timed for `over_detect`.

        Raises:
            RuntimeError: a trainer's digests and an engine's differ.
        """
        if self.write_verified() != self.of_trainer():
            raise RuntimeError("a trainer's digests and an engine's of the same values differ")
        return {
            "digest": self.of_trainer,
            "write": self.write,
            "write_verified": self.write_verified,
            "digest_all": self.of_all,
        }

    def of_all(self) -> int:
        """One digest of all weights, as each side takes in a full sync."""
        return int(sum_whole(self.live, _SALT, compiled=self._compiled))

    @property
    def _compiled(self) -> bool:
        return self.live.numel() >= WORTH_COMPILING

    def _sums(self, old: torch.Tensor, new: torch.Tensor) -> tuple[int, int]:
        replaced = sum_at(self.pos, old, _SALT, counts=self.stated, compiled=self._compiled)
        return int(replaced), int(sum_at(self.pos, new, _SALT, compiled=self._compiled))


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
