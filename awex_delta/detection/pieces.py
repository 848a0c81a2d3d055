"""Owned slices cut and joined to pieces that are worth a tensor operation. Rank-local.

A model has thousands of small tensors, and each operation has a price of its own. So small slices are copied
together into a scratch piece, and large ones are looked at where they lie, a range at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from awex_delta.detection.slices import OwnedSlice
from awex_delta.lines.changes import Changes, joined

# From so many elements on, copying a slice costs more than a piece of its own.
_LARGE = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Ranges of the trainer's line whose elements are numbered anew, one range after the other.

    starts: int64 [n + 1], the number of the first element of each range, then how many elements there are.
    begins: int64 [n], where each range begins in the trainer's line.
    """

    starts: torch.Tensor
    begins: torch.Tensor

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Runs:
        """Make runs of ranges: begin in the trainer's line, and length. Ranges that touch become one."""
        starts, begins, end, expected = list[int](), list[int](), 0, -1
        for begin, numel in ranges:
            if begin != expected:
                starts.append(end)
                begins.append(begin)
            end, expected = end + numel, begin + numel
        return cls(
            starts=torch.tensor([*starts, end], dtype=torch.int64, device="cpu"),
            begins=torch.tensor(begins, dtype=torch.int64, device="cpu"),
        )

    @property
    def numel(self) -> int:
        """Elements of all ranges."""
        return int(self.starts[-1])

    def to(self, device: torch.device) -> Runs:
        """The same on another device."""
        if self.starts.device == device:
            return self
        return Runs(starts=self.starts.to(device), begins=self.begins.to(device))

    def in_line(self, index: torch.Tensor) -> torch.Tensor:
        """The positions in the trainer's line of elements that are given by their number.

        Args:
            index: int64 [k], ascending numbers.
        """
        shift = self.begins - self.starts[:-1]
        if shift.numel() > 1:
            counts = torch.searchsorted(index, self.starts).diff()
            shift = torch.repeat_interleave(shift, counts, output_size=index.numel())
        return index + shift

    def index_of(self, pos: torch.Tensor) -> torch.Tensor:
        """Undo `in_line`; the ranges have to ascend.

        Args:
            pos: int64 [k], positions in the trainer's line that belong to these elements.
        """
        run = torch.searchsorted(self.begins, pos, right=True) - 1
        return pos - (self.begins - self.starts[:-1])[run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some slices as a whole, or a range of one slice: what is looked at together.

    slices: in the order of the trainer's line.
    first, last: the range in the only slice; else 0, and the number of elements of all slices.
    """

    slices: Sequence[OwnedSlice]
    first: int
    last: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.last - self.first

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges of the trainer's line that hold its elements, as `Runs.of` takes them."""
        if len(self.slices) == 1:
            return [(self.slices[0].begin + self.first, self.numel)]
        return [(owned.begin, owned.stop - owned.start) for owned in self.slices]


class Scratch:
    """Memory into which the tensors of small slices are copied, used again for every piece."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def tensor(self, piece: Piece, name: str) -> torch.Tensor:
        """One tensor of all slices of a piece, until the next call for the same name.

        Args:
            piece: its slices have this tensor, each of the length of the slice, and all of one dtype.
            name: `main`, `weight`, `exp_avg` or `exp_avg_sq`.

        Returns:
            [n], an alias of live memory if the piece is of one slice. Weights are bf16: those that the model
            keeps in fp32 are rounded into the scratch piece.
        """
        parts = [getattr(owned, name) for owned in piece.slices]
        dtype = torch.bfloat16 if name == "weight" else parts[0].dtype
        if len(parts) == 1:
            whole: torch.Tensor = parts[0].detach()[piece.first : piece.last]
            if whole.dtype is dtype:
                return whole
            parts = [whole]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < piece.numel:
            buffer = self._buffers[name] = parts[0].new_empty(piece.numel, dtype=dtype)
        return torch.cat(parts, out=buffer[: piece.numel])


def pieces(slices: Iterable[OwnedSlice], size: int) -> Iterator[Piece]:
    """Cut and join slices to pieces of about `size` elements.

    Small slices are joined even if large ones lie between them, so pieces may interleave in the line.

    Args:
        slices: none of them empty.
        size: the most elements of a piece. A piece of small slices may have up to `_LARGE` fewer.
    """
    large = min(_LARGE, size)
    waiting, total = list[OwnedSlice](), 0
    for owned in slices:
        numel = owned.stop - owned.start
        if numel >= large:
            yield from _ranges_of(owned, numel, size)
            continue
        if total + numel > size:
            yield Piece(slices=waiting, first=0, last=total)
            waiting, total = [], 0
        waiting.append(owned)
        total += numel
    if waiting:
        yield Piece(slices=waiting, first=0, last=total)


def _ranges_of(owned: OwnedSlice, numel: int, size: int) -> Iterator[Piece]:
    count = -(-numel // size)
    edges = [numel * place // count for place in range(count + 1)]
    for first, last in pairwise(edges):
        yield Piece(slices=(owned,), first=first, last=last)


def in_order(parts: Sequence[tuple[Piece, Changes]]) -> Changes:
    """The changes of several pieces as one list that ascends in the trainer's line.

    Args:
        parts: each piece with the changes in it, ascending.
    """
    whole = joined([changes for _, changes in parts])
    begins = [owned.begin + piece.first for piece, _ in parts for owned in piece.slices]
    if all(a < b for a, b in pairwise(begins)):
        return whole
    return take(whole, ascending(whole.pos))


def take(changes: Changes, index: torch.Tensor) -> Changes:
    """Some of the changes, in the order of `index`, int64 [k]."""
    return Changes(
        pos=changes.pos[index],
        code=None if changes.code is None else changes.code[index],
        value=None if changes.value is None else changes.value[index],
    )


def nonzero(marks: torch.Tensor) -> torch.Tensor:
    """The positions of what is not zero in a flat tensor: int64, ascending. Waits for the device.

    Args:
        marks: bool or int8 [n].
    """
    if marks.device.type != "cpu":
        return marks.nonzero().view(-1)
    return torch.from_numpy(_nonzero(marks.view(torch.int8).numpy()))


def _nonzero(marks: np.ndarray[Any, np.dtype[np.int8]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Pass over eight marks at a time while few are set. Several times faster than torch's `nonzero`."""
    whole = marks.size // 8 * 8
    words = marks[:whole].view(np.int64)
    some = np.flatnonzero(words != 0)
    if some.size > whole // 12:
        return np.flatnonzero(marks != 0)
    inside = np.flatnonzero(words.take(some).view(np.int8) != 0)
    tail = np.flatnonzero(marks[whole:]) + whole
    return np.concatenate([some.take(inside >> 3) * 8 + (inside & 7), tail])


def ascending(pos: torch.Tensor) -> torch.Tensor:
    """The order that sorts several ascending lists: int64 [n]."""
    if pos.device.type != "cpu":
        return pos.argsort()
    return torch.from_numpy(np.argsort(pos.numpy(), kind="stable"))  # merges ascending lists
