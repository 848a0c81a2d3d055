"""What changed since a commit, by looking at every step while old and new weights are both there. Rank-local.

When `step()` of an optimizer returns, its fp32 masters are new and the model's weights are still the old
ones; the framework rounds the one into the other right afterwards. Rounding and comparing at that moment
finds exactly what changed, for any optimizer: 6 bytes are read for each element, and only what changed is
kept. If an optimizer steps the model's weights themselves, they are copied before its step and compared
after it.

What is captured covers the whole way from a commit to now only if nothing else wrote to the weights. So the
words of the weights are summed up as each step begins, and again when an update asks, and the sums have to
be what the step before left behind: a step that no hook saw, a checkpoint that was loaded or a value that
was written by hand makes the next update full.
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
from awex_delta.detection.optimizers import SteppedParams, local
from awex_delta.detection.pieces import Piece, Runs, Scratch, in_order, nonzero, pieces
from awex_delta.detection.slices import Detection, OwnedSlice, OwnedSlices, bf16_slices
from awex_delta.errors import UnsupportedError
from awex_delta.lines.bits import step_code
from awex_delta.lines.changes import Changes
from awex_delta.protocol.verdict import Reason

# Elements at a time: a piece takes two bytes for each, eight more if small slices are copied together.
_PIECE = 1 << 20
_LANES = 4  # bf16 values in a word of 64 bits
_HALF = 32  # bits
_MAX_WORDS = _PIECE // _LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seal:
    """What the weights of one optimizer have to be, as far as sums of their words say.

    ranges: keys of the slices of each piece, and the range in them; sums are compared of equal ranges alone.
    sums: int64 [pieces].
    """

    ranges: Sequence[tuple[tuple[str, ...], int, int]]
    sums: torch.Tensor

    @classmethod
    def of(cls, cut: Sequence[Piece], sums: Sequence[torch.Tensor]) -> _Seal:
        ranges = [(tuple(owned.key for owned in piece.slices), piece.first, piece.last) for piece in cut]
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        return cls(ranges=ranges, sums=torch.stack(list(sums)) if sums else none)

    def broken_by(self, now: _Seal) -> str:
        """Names weights that are not what they have to be; empty if all are. Waits for the device."""
        if self.ranges != now.ranges:
            return "other elements are owned than at the last commit"
        wrong = (self.sums != now.sums).nonzero().view(-1).tolist()
        keys = [key for number in wrong for key in self.ranges[number][0]]
        return f"{keys[0]}, or one of {len(keys) - 1} beside it" if len(keys) > 1 else "".join(keys)


class StepCapture(Follower):
    """Compares old and new weights at every step, and adds what changed to each of its baselines."""

    def __init__(self, owned_slices: OwnedSlices, watched: Sequence[SteppedParams]) -> None:
        """Look at every later step of the optimizers.

        Args:
            owned_slices: every owned slice, as it stands now. Only weight and master are looked at.
            watched: what steps them: optimizers of any class that call their step hooks.
        """
        super().__init__()
        self._owned_slices = owned_slices
        self._watched = {stepped.optimizer: stepped for stepped in watched}
        self._seals: dict[torch.optim.Optimizer, _Seal] = {}
        self._held: dict[torch.optim.Optimizer, list[torch.Tensor]] = {}  # only while it steps
        self._scratch, self._words = Scratch(), _Words()
        for optimizer in self._watched:
            self._handles += [
                optimizer.register_step_pre_hook(partial(self._guarded, self._before)),
                optimizer.register_step_post_hook(partial(self._guarded, self._after)),
            ]

    def look(self, *, without: AccumulatedBaseline | None = None) -> Sequence[OwnedSlice]:
        """Check that every change of the weights was captured; baselines that miss some learn of it.

        Args:
            without: a baseline that commits now. It learns of it, too: weights changed since it was asked.

        Returns:
            The slices, as they stand now.
        """
        slices = bf16_slices(self._owned_slices())
        for optimizer, stepped in self._watched.items():
            expected = self._seals.pop(optimizer, None)  # of no use if anything below fails
            with torch.no_grad():
                cut = _cut(slices, stepped.live())
                now = _Seal.of(cut, [self._words.sum(self._weights(piece)) for piece in cut])
            self._seals[optimizer] = now
            unseen = "" if expected is None else expected.broken_by(now)
            if unseen:
                self._tell(_doubt(unseen), also=without)
        return slices

    def _guarded(self, hook: Callable[..., None], optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Run a hook if a baseline follows; what it raises makes the next update full."""
        if is_capturing():
            return  # what a replay of the graph writes goes unseen by hooks, and breaks the seal
        if not self._is_followed():
            self._seals.pop(optimizer, None)
            return
        try:
            with torch.no_grad():
                hook(optimizer, _cut(bf16_slices(self._owned_slices()), self._watched[optimizer].live()))
        except Exception as error:  # noqa: BLE001 - training goes on, and the next update is full
            self._seals.pop(optimizer, None)
            self._tell(failed(error))

    def _before(self, optimizer: torch.optim.Optimizer, cut: Sequence[Piece]) -> None:
        """Keep the weights that the step itself will overwrite, until it is over."""
        params = self._watched[optimizer].live()
        own = [piece for piece in cut if not _is_apart(piece.slices[0], params)]
        self._held[optimizer] = [self._weights(piece).clone() for piece in own]

    def _after(self, optimizer: torch.optim.Optimizer, cut: Sequence[Piece]) -> None:
        params, held = self._watched[optimizer].live(), iter(self._held.pop(optimizer, ()))
        sums, moves, parts = list[torch.Tensor](), list[torch.Tensor](), list[tuple[Piece, Changes]]()
        for piece in cut:
            if _is_apart(piece.slices[0], params):
                old, new = self._weights(piece), self._words.of(self._masters(piece), "rounded")
            else:
                old, new = next(held), self._weights(piece)
            sums.append(self._words.sum(old))
            place = nonzero(old != new)
            before, after = old.index_select(0, place), new.index_select(0, place)
            moves.append(self._words.moved(place, before, after))
            parts.append((piece, _changes(piece, place, before, after)))
        expected, now = self._seals[optimizer], _Seal.of(cut, sums)
        self._seals[optimizer] = replace(now, sums=now.sums + torch.stack(moves)) if moves else now
        unseen = expected.broken_by(now)
        self._tell(_doubt(unseen) if unseen else Detection(changes=in_order(parts)))

    def _masters(self, piece: Piece) -> torch.Tensor:
        away = next((why for owned in piece.slices if (why := owned.unreadable("main"))), "")
        if away:  # a step leaves alone what had no gradient, wherever that is
            raise UnsupportedError(away)
        return self._scratch.tensor(piece, "main")

    def _weights(self, piece: Piece) -> torch.Tensor:
        return self._words.of(self._scratch.tensor(piece, "weight"), "weight")


class _Words:
    """bf16 values four to a word of 64 bits, in which they are compared and summed up."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(-(1 << 62), 1 << 62, (2, _MAX_WORDS), generator=generator, device="cpu")
        self._factors = 2 * drawn + 1

    def of(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Values as words, int64, until the next call for the same name.

        Args:
            values: [n], at most `_PIECE`, contiguous; bf16, or fp32, which is rounded as a cast does it.
            name: of the buffer that is used if the values cannot be read as words where they lie.
        """
        numel = values.numel()
        if values.dtype is torch.bfloat16 and numel % _LANES == 0 and values.storage_offset() % _LANES == 0:
            return values.view(torch.int64)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.device != values.device:
            buffer = self._buffers[name] = values.new_empty(_PIECE, dtype=torch.bfloat16)
        whole = -(-numel // _LANES) * _LANES
        buffer[numel:whole] = 0
        buffer[:numel].copy_(values)
        return buffer[:whole].view(torch.int64)

    def sum(self, words: torch.Tensor) -> torch.Tensor:
        """The sum of all words and of their upper halves, each times a number drawn for its place.

        Another content has the same sum with a chance of 2^-31, wherever and however it differs. Words alone
        would not do: a product passes bits on upward only, so the upper values would leave few marks.

        Returns:
            int64, on the device of the words.
        """
        word, upper = self._factors_on(words.device)[:, : words.numel()].unbind()
        return (words * word).sum() + ((words >> _HALF) * upper).sum()

    def moved(self, place: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """How much the sum grows if some words become others. place, old, new: int64 [k]."""
        word, upper = self._factors_on(place.device).index_select(1, place).unbind()
        return ((new - old) * word + ((new >> _HALF) - (old >> _HALF)) * upper).sum()

    def _factors_on(self, device: torch.device) -> torch.Tensor:
        if self._factors.device != device:
            self._factors = self._factors.to(device)
        return self._factors


def _cut(slices: Sequence[OwnedSlice], params: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The pieces of one optimizer; in each of them all masters lie apart from their weights, or none does."""
    apart, together = list[OwnedSlice](), list[OwnedSlice]()
    for owned in slices:
        if owned.key in params:
            (apart if _is_apart(owned, params) else together).append(owned)
    return [*pieces(apart, _PIECE), *pieces(together, _PIECE)]


def _is_apart(owned: OwnedSlice, params: Mapping[str, torch.Tensor]) -> bool:
    """Whether what is stepped lies in other memory than the weight, so that a step leaves the old weight."""
    if owned.main is None:
        return False
    stepped = local(params[owned.key])
    return stepped.untyped_storage().data_ptr() != owned.weight.untyped_storage().data_ptr()


def _changes(piece: Piece, place: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Changes:
    """The values that changed, from the words that did. place, before, after: int64 [k]."""
    old, new = before.view(torch.int16), after.view(torch.int16)
    lane = nonzero(old != new)
    index = place.index_select(0, lane >> 2) * _LANES + (lane & 3)
    old, new = (bits.index_select(0, lane).view(torch.bfloat16) for bits in (old, new))
    return Changes(
        pos=Runs.of(piece.ranges()).to(index.device).in_line(index),
        code=step_code(old, new),
    )


def _doubt(where: str) -> Detection:
    return Detection(reason=Reason.UNSEEN_CHANGE, detail=where)
