"""What an engine rank received and has not written yet: checked, complete, every value known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from awex_delta.errors import DriftError
from awex_delta.plan.pairs import Region
from awex_delta.protocol.agreement import Decision
from awex_delta.protocol.session import Session
from awex_delta.wire.codec import Context, RegionChange
from awex_delta.wire.digest import pays_to_compile
from awex_delta.wire.frame import Unpacked, check_complete, unpack_bucket
from awex_delta.wire.guard import Guard, old_digest
from awex_delta.wire.spans import Window

_MAX_NAMED = 8  # tensors that an error names


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
        old: Callable[[Region, torch.Tensor], torch.Tensor],
    ) -> None:
        """Stage for one rank.

        Args:
            session: connected.
            decision: what the frames must belong to.
            settle: puts values in place of steps, from the live weights; may write into the change.
            context: what this rank knows of a region at the base.
            old: reads live weights of a region, at int64 positions.
        """
        self._session = session
        self._decision = decision
        self._settle = settle
        self._context = context
        self._old = old
        self.has_drifted = False
        self._ends: dict[tuple[int, torch.dtype], int] = {}  # by sender: elements that came
        self._staged: list[StagedChange] = []

    def of(self, dtype: torch.dtype) -> Callable[[int, torch.Tensor], None]:
        """What takes (sender, frame) in the round of `dtype`. Collective: no."""
        return lambda sender, frame: self.add(sender, dtype, frame)

    def add(self, sender: int, dtype: torch.dtype, frame: torch.Tensor) -> None:
        """Check one frame and keep what it says; nothing aliases `frame` afterwards.

        Raises:
            WireError: the frame is damaged, foreign, or not the sender's next one.
            DriftError: live weights that the frame would replace are not those of the base.

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
        if found.guard is not None:
            self._check_base(found, found.guard, regions)
        staged = [
            self._stage(regions[window.region], window, change, frame)
            for window, change in zip(found.windows, found.changes, strict=True)
            if change.value.numel()
        ]
        self._staged += staged
        self._ends[sender, dtype] = found.end

    def _check_base(self, found: Unpacked, guard: Guard, regions: Sequence[Region]) -> None:
        """Compare what is going to be replaced with what the sender knows of it."""
        first, totals = 0, []
        for window, change in zip(found.windows, found.changes, strict=True):
            totals.append(self._old_digest(regions[window.region], window, change, guard, first))
            first += 0 if change.index is None else change.index.numel()
        live = [int(total) for total in totals]
        pairs = zip(live, guard.digests.tolist(), found.windows, strict=True)
        drifted = {regions[window.region].name: None for here, told, window in pairs if here != told}
        if drifted:
            self.has_drifted = True
            names = ", ".join([*drifted][:_MAX_NAMED]) + (", ..." if len(drifted) > _MAX_NAMED else "")
            raise DriftError(
                f"live weights are not those of version {self._decision.base} any more: {names}. Something "
                "else wrote to them; the next update is a full sync"
            )

    def _old_digest(
        self, region: Region, window: Window, change: RegionChange, guard: Guard, first: int
    ) -> torch.Tensor:
        index = change.index
        if index is None:
            return torch.zeros((), dtype=torch.int64)
        return old_digest(
            index,
            lambda here: self._old(region, index[here] + window.start).cpu(),
            lambda here: guard.stated(first + here.start, first + here.stop),
            compiled=pays_to_compile(index.device, self._session.plan.full_bytes),
        )

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
