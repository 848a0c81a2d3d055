"""What an engine rank received and has not written yet: checked, complete, every value known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from awex_delta.errors import DriftError
from awex_delta.lines.changes import Changes
from awex_delta.lines.ends import LineEnd
from awex_delta.plan.pairs import Pair
from awex_delta.plan.rank import PairKey
from awex_delta.protocol.agreement import Decision
from awex_delta.protocol.session import Session
from awex_delta.wire.codec import settle
from awex_delta.wire.digest import pays_to_compile
from awex_delta.wire.frame import Unpacked, check_complete, unpack_frame

_PIECE = 1 << 21  # the most elements that are written or read back at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """What one frame says: changes with values and no codes; if `pos` is None, all values from `start` on."""

    start: int
    value: torch.Tensor
    pos: torch.Tensor | None

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Positions and values, a piece at a time."""
        for first in range(0, self.value.numel(), _PIECE):
            value = self.value[first : first + _PIECE]
            start = self.start + first
            pos = (
                torch.arange(start, start + value.numel(), device="cpu")
                if self.pos is None
                else self.pos[first : first + _PIECE]
            )
            yield pos, value


class Staging:
    """Takes the frames of one delta as they arrive, and writes nothing before it is asked to."""

    def __init__(
        self,
        session: Session,
        decision: Decision,
        ends: Mapping[PairKey, LineEnd],
        name: Callable[[Pair, torch.Tensor], str],
    ) -> None:
        """Stage for one rank.

        Args:
            session: connected.
            decision: what the frames must belong to.
            ends: this rank's end of each of its lines.
            name: says in which tensors some positions of a line lie.
        """
        self._session = session
        self._decision = decision
        self._ends = ends
        self._name = name
        self._compiled = pays_to_compile(torch.device("cpu"), session.met.full_bytes)
        self.has_drifted = False
        self._stops: dict[PairKey, int] = {}  # how many elements of a line have come
        self._staged: dict[PairKey, list[_Staged]] = {}

    def of(self, dtype: torch.dtype) -> Callable[[int, torch.Tensor], None]:
        """A function that takes each (sender, frame) in the round of `dtype`."""
        return lambda sender, frame: self.add((sender, dtype), frame)

    def add(self, key: PairKey, frame: torch.Tensor) -> None:
        """Check one frame and keep what it says; nothing aliases `frame` afterwards.

        Raises:
            WireError: the frame is damaged, foreign, or not the sender's next one.
            DriftError: live weights that the frame would replace are not those of the base.
        """
        pair, end = self._session.met.plan.pairs[key], self._ends[key]
        found = unpack_frame(
            frame,
            self._session.frame_identity(self._decision, pair),
            self._session.codecs,
            begin=self._stops.get(key, 0),
            numel=pair.numel,
            read=end.read,
        )
        if found.changes is not None:
            self._check_base(pair, end, found, found.changes)
            staged = _settled(end, found.changes, frame)
        else:
            staged = _Staged(start=found.span.begin, value=_own(found.whole, frame), pos=None)
        if staged.value.numel():
            self._staged.setdefault(key, []).append(staged)
        self._stops[key] = found.span.end

    def finish(self) -> None:
        """Refuse to go on if the last frames of a sender did not come.

        Raises:
            MissingFrameError: names where they end.
        """
        for key, stop in self._stops.items():
            check_complete(stop, self._session.met.plan.pairs[key].numel)

    def write(self) -> int:
        """Write all that was staged. Returns the elements written."""
        written = 0
        for key, staged in self._staged.items():
            for pos, value in (piece for one in staged for piece in one.pieces()):
                self._ends[key].scatter(pos, value)
                written += value.numel()
        return written

    def keys(self) -> Iterator[PairKey]:
        """The lines for which something was staged."""
        return iter(self._staged)

    def live(self, key: PairKey) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What the live weights of one line hold at the elements that were written."""
        for pos, _ in (piece for one in self._staged[key] for piece in one.pieces()):
            yield pos, self._ends[key].gather(pos)

    def _check_base(self, pair: Pair, end: LineEnd, found: Unpacked, changes: Changes) -> None:
        """Compare what is going to be replaced with what the sender knows of it."""
        if found.guard is None or found.guard.holds(changes.pos, end.gather, compiled=self._compiled):
            return
        self.has_drifted = True
        raise DriftError(
            f"live weights are not those of version {self._decision.base} any more, in one or more of: "
            f"{self._name(pair, changes.pos)}. Something else wrote to them, or the trainer did not step as "
            f"it recorded; the next update is a full sync"
        )


def _settled(end: LineEnd, changes: Changes, frame: torch.Tensor) -> _Staged:
    settled = settle(replace(changes, value=_own(changes.value, frame)), end.gather)
    return _Staged(start=0, value=_own(settled.value, frame), pos=settled.pos)


def _own(value: torch.Tensor | None, frame: torch.Tensor) -> torch.Tensor:
    """Values in memory of their own, so that the frame can go."""
    if value is None:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    shares = value.untyped_storage().data_ptr() == frame.untyped_storage().data_ptr()
    return value.clone() if shares else value
