"""The exponents that occur in a frame of `wire.context`, and where each has its place in the streams."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from awex_delta.errors import CorruptFrameError
from awex_delta.wire.steps import step_limits
from awex_delta.wire.streams import StreamReader

GROUP = 4096
"""A group has at least so many changes, unless the frame has fewer."""

MAX_SHIFT = 27
"""Leaves five bits of the longest gap, which has 32."""

NUM_CLASSES = 256

Ints = NDArray[np.int64]


def load_loops() -> Any:
    """The compiled loops, compiled or loaded when first needed: most programs never need them."""
    return importlib.import_module("awex_delta.wire.walk")


def group_limit(count: int) -> int:
    """The most groups of `count` changes."""
    return count // GROUP + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The exponents that occur among the changes, ascending: where their slots end, and their shifts."""

    kinds: Ints
    counts: Ints
    shifts: Ints

    @property
    def ends(self) -> Ints:
        """Where the slots of each exponent end."""
        return np.cumsum(self.counts)

    def groups(self) -> list[slice]:
        """The slots of each group: whole exponents, GROUP changes or more. The rest joins the last group."""
        groups, begin = [], 0
        for end in self.ends.tolist():
            if end - begin >= GROUP:
                groups.append(slice(begin, end))
                begin = end
        total = int(self.counts.sum())
        if begin < total and groups:
            groups[-1] = slice(groups[-1].start, total)
        elif begin < total:
            groups.append(slice(0, total))
        return groups

    @property
    def low_bytes(self) -> int:
        """Bytes that the lower bits of all gaps take."""
        return (int((self.counts * self.shifts).sum()) + 7) // 8

    @property
    def table(self) -> Ints:
        """The table as a frame holds it, int64 [exponents]."""
        return self.kinds | self.shifts << 8 | self.counts << 16

    def slots(self) -> list[slice]:
        """The slots of each exponent."""
        ends = self.ends.tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts.tolist(), strict=True)]

    def cursors(self) -> Ints:
        """Where each of the 256 exponents begins, [256, 7], as `walk` takes it, still without its escapes."""
        table, bit, pairs = np.zeros((NUM_CLASSES, 7), np.int64), 0, 0
        kinds = iter(zip(self.kinds.tolist(), self.slots(), self.shifts.tolist(), strict=True))
        for group in self.groups():
            end = group.start
            while end < group.stop:
                kind, slots, shift = next(kinds)
                end = slots.stop
                table[kind] = slots.start, end, 2 * pairs + slots.start - group.start, 0, 0, bit, shift
                bit += (end - slots.start) * shift
            pairs += step_limits(group.stop - group.start)[0]
        return table


def read_classes(stream: StreamReader, total: int) -> Classes:
    """Read the table of a frame with `total` changes.

    Raises:
        CorruptFrameError: exponents do not ascend, or a shift or a count is impossible.
    """
    table = stream.read_all(torch.int64).numpy()
    kinds, shifts, counts = table & 255, (table >> 8) & 255, table >> 16
    ordered = (
        bool((np.diff(kinds) > 0).all()) and bool((counts > 0).all()) and bool((shifts <= MAX_SHIFT).all())
    )
    if not ordered or any(count > total for count in counts.tolist()) or int(counts.sum()) > total:
        raise CorruptFrameError(
            "the table of exponents is out of order, or lists impossible shifts or counts"
        )
    return Classes(kinds=kinds, counts=counts, shifts=shifts)
