"""One rank's end of a pair's line: the memory in which the elements of the line lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from awex_delta.lines.boxes import Boxes, BoxMap
from awex_delta.lines.storages import Storages, bits


class LineEnd:
    """Reads and writes elements by their positions in the pair's line."""

    def __init__(self, boxes: Boxes, storages: Callable[[], Storages], dtype: torch.dtype) -> None:
        """Nothing is read yet.

        Args:
            boxes: from the pair's line to this rank's own line.
            storages: gives the memory behind this rank's own line, as it is when it is called.
            dtype: that of the pair's line. Values in memory of another dtype are cast when they are read.
        """
        self._map = BoxMap(boxes)
        self._storages = storages
        self._dtype = dtype

    def gather(self, pos: torch.Tensor) -> torch.Tensor:
        """The values at some positions.

        Args:
            pos: int64 [n], ascending, on any device.

        Returns:
            [n] on the device of `pos`, a copy.
        """
        storages = self._storages()
        there, pick = self._map.map(pos.to(storages.device))
        values = torch.empty(pos.numel(), dtype=self._dtype, device=storages.device)
        found = storages.gather(there, self._dtype)
        bits(values).scatter_(0, pick, bits(found))
        return values.to(pos.device)

    def scatter(self, pos: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite the values at some positions.

        Args:
            pos: int64 [n], ascending, on any device.
            value: [n] in the dtype of the line, on any device.

        Raises:
            LayoutError: memory has another dtype.
        """
        storages = self._storages()
        there, pick = self._map.map(pos.to(storages.device))
        storages.scatter(there, value.to(storages.device).index_select(0, pick))

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The values at positions `start` up to `stop`: [stop - start] on the CPU."""
        return self.gather(torch.arange(start, stop, device=self._storages().device)).cpu()

    def rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All elements, as rows that lie next to each other in the pair's line and in memory.

        Yields:
            Where rows begin in the pair's line, int64 [r], and values [r, w], on the device of the memory.
        """
        storages = self._storages()
        for there, pos, width in self._map.rows(storages.device):
            yield pos, storages.gather_rows(there, width, self._dtype)
