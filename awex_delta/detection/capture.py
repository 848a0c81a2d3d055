"""What changed since a commit, by looking at every step while old and new weights are both there. Rank-local.

When `step()` of an optimizer returns, its fp32 masters are new and the model's weights are still the old
ones; the framework rounds the one into the other right afterwards. Rounding and comparing at that moment
finds exactly what changed, for any optimizer: 6 bytes are read for each element, and only what changed is
kept. If an optimizer steps the model's weights themselves, they are copied before its step and compared
after it.

What is captured covers the whole way from a commit to now only if nothing else wrote to the weights. So the
weights are summed up as an update asks, and the sums have to be those of the last update plus those of the
moves that were captured since (`detection.moves`): a step that no hook saw, a checkpoint that was loaded or a
value that was written by hand makes the update full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from awex_delta.detection.accumulate import AccumulatedBaseline, Follower
from awex_delta.detection.invert import failed
from awex_delta.detection.journal import is_capturing
from awex_delta.detection.moves import MOST, best, factors, moves, sums
from awex_delta.detection.optimizers import SteppedParams, local
from awex_delta.detection.pieces import Piece, Runs, Scratch, in_order, nonzero, pieces
from awex_delta.detection.slices import Detection, OwnedSlice, OwnedSlices, bf16_slices
from awex_delta.errors import UnsupportedError
from awex_delta.lines.changes import Changes
from awex_delta.lines.compiling import WORTH_COMPILING
from awex_delta.protocol.verdict import Reason

# Elements at a time without a compiler: each takes some int32 temporaries.
_EAGER_PIECE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The slices of one optimizer in pieces; in each of them all masters lie apart from weights, or none.

    compiled: whether compiling pays.
    """

    pieces: Sequence[Piece]
    compiled: bool

    @property
    def ranges(self) -> Sequence[tuple[tuple[str, ...], int, int]]:
        """What the pieces are of: keys of slices, and the range in them."""
        return [
            (tuple(owned.key for owned in piece.slices), piece.first, piece.last) for piece in self.pieces
        ]

    def __call__(self, function: Callable[..., Any], *given: torch.Tensor) -> Any:
        """`moves` or `sums` of one piece."""
        factor = factors(given[0].device)[: given[0].numel()]
        return best(function, *given, factor, compiled=self.compiled)(*given, factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seal:
    """What the weights of one optimizer have to be, as far as their sums say.

    ranges: of the pieces; only sums of equal ranges are compared.
    sums: int32 [pieces, 2].
    """

    ranges: Sequence[tuple[tuple[str, ...], int, int]]
    sums: torch.Tensor

    def moved(self, cut: _Cut, moved: torch.Tensor) -> _Seal:
        """What they have to be after a step. moved: int32 [pieces, 2], of the same pieces or not."""
        return replace(self, sums=self.sums + moved) if self.ranges == cut.ranges else self

    def broken_by(self, now: _Seal) -> str:
        """Names weights that are not what they have to be; empty if all are. Waits for the device."""
        if self.ranges != now.ranges:
            return "other elements are owned than at the last commit"
        wrong = (self.sums != now.sums).any(1).nonzero().view(-1).tolist()
        keys = [key for number in wrong for key in self.ranges[number][0]]
        return f"{keys[0]}, or one of {len(keys) - 1} beside it" if len(keys) > 1 else "".join(keys)


class StepCapture(Follower):
    """Compares old and new weights at every step, and adds what changed to each of its baselines."""

    def __init__(
        self, owned_slices: OwnedSlices, watched: Sequence[SteppedParams], *, compiled: bool | None = None
    ) -> None:
        """Look at every later step of the optimizers.

        Args:
            owned_slices: every owned slice, as it stands now. Only weight and master are looked at.
            watched: what steps them: optimizers of any class that call their step hooks.
            compiled: as in `invert.detect_changes`; None decides by the elements of each optimizer.
        """
        super().__init__()
        self._owned_slices = owned_slices
        self._watched = {stepped.optimizer: stepped for stepped in watched}
        self._compiled = compiled
        self._seals: dict[torch.optim.Optimizer, _Seal] = {}
        self._held: dict[torch.optim.Optimizer, list[torch.Tensor]] = {}  # only while it steps
        self._scratch = Scratch()
        for optimizer in self._watched:
            self._handles += [
                optimizer.register_step_pre_hook(partial(self._guarded, self._before)),
                optimizer.register_step_post_hook(partial(self._guarded, self._after)),
            ]

    def look(self, *, without: AccumulatedBaseline | None = None) -> Sequence[OwnedSlice]:
        """Check that every change of the weights was captured; baselines that miss some learn of it.

        Args:
            without: a baseline that commits now. For it, weights are read only if no sums of them are kept:
                what was written since it was asked breaks these sums, and shows when it is asked again.

        Returns:
            The slices, as they stand now.
        """
        slices = bf16_slices(self._owned_slices())
        for optimizer in self._watched:
            if without is not None and optimizer in self._seals:
                continue
            expected = self._seals.pop(optimizer, None)  # of no use if anything below fails
            with torch.no_grad():
                cut = self._cut(slices, optimizer)
                found = [scalar for piece in cut.pieces for scalar in cut(sums, self._weights(piece))]
            now = self._seals[optimizer] = _Seal(ranges=cut.ranges, sums=_pairs(found))
            unseen = "" if expected is None else expected.broken_by(now)
            if unseen:
                self._tell(Detection(reason=Reason.UNSEEN_CHANGE, detail=unseen))
        return slices

    def _cut(self, slices: Sequence[OwnedSlice], optimizer: torch.optim.Optimizer) -> _Cut:
        params = self._watched[optimizer].live()
        apart, together = list[OwnedSlice](), list[OwnedSlice]()
        for owned in slices:
            if owned.key in params:
                (apart if _is_apart(owned, params) else together).append(owned)
        compiled = self._compiled
        if compiled is None:
            compiled = sum(owned.stop - owned.start for owned in (*apart, *together)) >= WORTH_COMPILING
        size = MOST if compiled else _EAGER_PIECE
        return _Cut(pieces=[*pieces(apart, size), *pieces(together, size)], compiled=compiled)

    def _guarded(self, hook: Callable[..., None], optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Run a hook if a baseline follows; what it raises makes the next update full."""
        if is_capturing():
            return  # what a replay of the graph writes goes unseen by hooks, and breaks the seal
        if not self._is_followed():
            self._seals.pop(optimizer, None)
            return
        try:
            with torch.no_grad():
                hook(optimizer, self._cut(bf16_slices(self._owned_slices()), optimizer))
        except Exception as error:  # noqa: BLE001 - training goes on, and the next update is full
            self._seals.pop(optimizer, None)
            self._tell(failed(error))

    def _before(self, optimizer: torch.optim.Optimizer, cut: _Cut) -> None:
        """Keep the weights that the step itself will overwrite, until it is over."""
        params = self._watched[optimizer].live()
        own = [piece for piece in cut.pieces if not _is_apart(piece.slices[0], params)]
        self._held[optimizer] = [self._weights(piece).clone() for piece in own]

    def _after(self, optimizer: torch.optim.Optimizer, cut: _Cut) -> None:
        params, held = self._watched[optimizer].live(), iter(self._held.pop(optimizer, ()))
        moved, parts = list[torch.Tensor](), list[tuple[Piece, Changes]]()
        for piece in cut.pieces:
            if _is_apart(piece.slices[0], params):
                code, *both = cut(moves, self._weights(piece), self._masters(piece))
            else:
                code, *both = cut(moves, next(held), self._weights(piece))
            moved += both
            index = nonzero(code)
            pos = Runs.of(piece.ranges()).to(index.device).in_line(index)
            parts.append((piece, Changes(pos=pos, code=code.index_select(0, index))))
        self._seals[optimizer] = self._seals[optimizer].moved(cut, _pairs(moved))
        self._tell(Detection(changes=in_order(parts)))

    def _masters(self, piece: Piece) -> torch.Tensor:
        away = next((why for owned in piece.slices if (why := owned.unreadable("main"))), "")
        if away:  # a step leaves alone what had no gradient, wherever that is
            raise UnsupportedError(away)
        return self._scratch.tensor(piece, "main")

    def _weights(self, piece: Piece) -> torch.Tensor:
        return self._scratch.tensor(piece, "weight")


def _is_apart(owned: OwnedSlice, params: Mapping[str, torch.Tensor]) -> bool:
    """Whether what is stepped lies in other memory than the weight, so that a step leaves the old weight."""
    if owned.main is None:
        return False
    stepped = local(params[owned.key])
    return stepped.untyped_storage().data_ptr() != owned.weight.untyped_storage().data_ptr()


def _pairs(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two scalars of each piece, int32 [pieces, 2]."""
    none = torch.zeros(0, dtype=torch.int32, device="cpu")
    return (torch.stack(list(scalars)) if scalars else none).view(-1, 2)
