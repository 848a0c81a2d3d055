"""What an engine rank received and has not written yet: checked, complete, every value known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from awex_delta.plan.agreement import Decision
from awex_delta.plan.regions import Region
from awex_delta.session import Session
from awex_delta.wire.codec import Context, RegionChange
from awex_delta.wire.frame import check_complete, unpack_bucket
from awex_delta.wire.spans import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChange:
    """What one frame says about one region.

    start: where a whole change begins in the region; 0 for a sparse one, whose positions say it all.
    change: sparse, with positions in the region; or whole, the values from `start` on.
    """

    region: Region
    start: int
    change: RegionChange


class Staging:
    """Takes the frames of one delta as they arrive. Writes nothing."""

    def __init__(
        self,
        session: Session,
        decision: Decision,
        settle: Callable[[Region, RegionChange], RegionChange],
        context: Callable[[Region], Context],
    ) -> None:
        """Stage for one rank.

        Args:
            session: connected.
            decision: what the frames must belong to.
            settle: puts values in place of steps, from the live weights; may write into the change.
            context: what this rank knows of a region at the base.
        """
        self._session = session
        self._decision = decision
        self._settle = settle
        self._context = context
        self._ends: dict[tuple[int, torch.dtype], int] = {}  # by sender: elements that came
        self._staged: list[StagedChange] = []

    def of(self, dtype: torch.dtype) -> Callable[[int, torch.Tensor], None]:
        """What takes (sender, frame) in the round of `dtype`. Collective: no."""
        return lambda sender, frame: self.add(sender, dtype, frame)

    def add(self, sender: int, dtype: torch.dtype, frame: torch.Tensor) -> None:
        """Check one frame and keep what it says; nothing aliases `frame` afterwards.

        Raises:
            WireError: the frame is damaged, foreign, or not the sender's next one.

        Collective: no.
        """
        seat = self._session.comm.seat
        regions = self._session.plan.between(sender, seat, dtype)
        found = unpack_bucket(
            frame,
            self._session.frame_identity(self._decision, sender, seat, dtype),
            self._session.codecs,
            [region.numel for region in regions],
            begin=self._ends.get((sender, dtype), 0),
            contexts=[self._context(region) for region in regions] if self._session.uses_context else (),
        )
        staged = [
            self._stage(regions[window.region], window, change, frame)
            for window, change in zip(found.windows, found.changes, strict=True)
            if change.value.numel()
        ]
        self._staged += staged
        self._ends[sender, dtype] = found.end

    def finish(self) -> list[StagedChange]:
        """All that was staged.

        Raises:
            MissingFrameError: the last frames of a sender did not come.

        Collective: no.
        """
        for (sender, dtype), end in self._ends.items():
            regions = self._session.plan.between(sender, self._session.comm.seat, dtype)
            check_complete(end, [region.numel for region in regions])
        return self._staged

    def _stage(
        self, region: Region, window: Window, change: RegionChange, frame: torch.Tensor
    ) -> StagedChange:
        storage = change.value.untyped_storage()
        if storage.data_ptr() == frame.untyped_storage().data_ptr():
            change = replace(change, value=change.value.clone())
        if change.index is None:
            return StagedChange(region=region, start=window.start, change=change)
        change.index.add_(window.start)
        found = replace(change, numel=region.numel)
        return StagedChange(region=region, start=0, change=self._settle(region, found))
