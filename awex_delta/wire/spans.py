"""Which elements of a pair one frame covers: a span of the line that its regions make, and its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of one region that lies in the span of a frame.

    region: place of the region among those of the pair.
    start, stop: positions in the region.
    """

    region: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one frame covers of the elements of all regions of the pair, one after the other.

    begin, end: half-open range of elements.
    num_regions: regions of the pair.
    """

    begin: int
    end: int
    num_regions: int


def windows_of(numels: Sequence[int], begin: int, end: int) -> tuple[Window, ...]:
    """The windows of the span from `begin` to `end`; a region without elements has none.

    Args:
        numels: elements of each region of the pair.
        begin, end: half-open range of their elements, one region after the other.

    Collective: no.
    """
    found, offset = [], 0
    for region, numel in enumerate(numels):
        start, stop = max(begin - offset, 0), min(end - offset, numel)
        if start < stop:
            found.append(Window(region=region, start=start, stop=stop))
        offset += numel
    return tuple(found)
