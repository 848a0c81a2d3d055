"""Do two sides hold the same bits? Tensor by tensor, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from awex_delta.lines.storages import bits
from awex_delta.observe.compare.checkpoints import Checkpoint, Entry
from awex_delta.observe.compare.engine_digests import DigestedState

Side = Checkpoint | DigestedState


class Outcome(StrEnum):
    """What comparing one tensor found. Only the first is equality."""

    SAME = "same"
    DIFFERENT = "different"
    DTYPE = "other dtype"
    SHAPE = "other shape"
    MISSING = "missing"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One tensor.

    numel: elements on the trainer's side; of an extra tensor those on the engine's.
    num_different: elements with other bits; None where only digests were compared.
    first: index of the first of them.
    detail: both dtypes, both shapes, or that one side ties the tensor.
    """

    name: str
    outcome: Outcome
    numel: int
    num_different: int | None = None
    first: tuple[int, ...] | None = None
    detail: str = ""


def compare(trainer: Checkpoint, engine: Side) -> Iterator[Compared]:
    """Compare every tensor that either side has, in the trainer's order, then the engine's own.

    A tied lm_head that only one side stores is compared with the other side's embedding.
    """
    for name, entry in trainer.entries.items():
        other = engine.find(name)
        if other is None:
            yield Compared(name=name, outcome=Outcome.MISSING, numel=entry.numel)
        else:
            yield _compare_one(trainer, engine, name, name, other)
    for name, entry in engine.entries.items():
        if name in trainer.entries:
            continue
        own = trainer.find(name)
        if own is None:
            yield Compared(name=name, outcome=Outcome.EXTRA, numel=entry.numel)
        else:
            yield _compare_one(trainer, engine, name, own, name)


def _compare_one(trainer: Checkpoint, engine: Side, name: str, left: str, right: str) -> Compared:
    """left, right: the tensor's own name on each side, which differ where one ties it."""
    mine, theirs = trainer.entries[left], engine.entries[right]
    tied = f"tied to {left if left != name else right}" if left != right else ""
    if mine.shape != theirs.shape:
        return _refused(name, Outcome.SHAPE, mine, theirs)
    if mine.dtype != theirs.dtype:
        return _refused(name, Outcome.DTYPE, mine, theirs)
    if isinstance(engine, DigestedState):
        same = trainer.digest(left, salted_as=right) == engine.digest(right)
        outcome = Outcome.SAME if same else Outcome.DIFFERENT
        return Compared(name=name, outcome=outcome, numel=mine.numel, detail=tied)
    num_different, first, start = 0, None, 0
    for here, there in zip(trainer.pieces(left), engine.pieces(right), strict=True):
        wrong = (bits(here.contiguous()) != bits(there.contiguous())).nonzero().view(-1)
        if wrong.numel() and first is None:
            place = torch.unravel_index(wrong[0] + start, mine.shape)
            first = tuple(int(index) for index in place)
        num_different += wrong.numel()
        start += here.numel()
    return Compared(
        name=name,
        outcome=Outcome.DIFFERENT if num_different else Outcome.SAME,
        numel=mine.numel,
        num_different=num_different,
        first=first,
        detail=tied,
    )


def _refused(name: str, outcome: Outcome, mine: Entry, theirs: Entry) -> Compared:
    return Compared(name=name, outcome=outcome, numel=mine.numel, detail=f"trainer {mine}, engine {theirs}")
