"""The memory behind a line: live tensors, read and written at positions of it, one call for each storage.

Elements move as integers of their width, so that NaN payloads and the sign of zero survive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from awex_delta.errors import CorruptFrameError, LayoutError
from awex_delta.lines.boxes import spread

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their width in bytes."""

_Dims = list[tuple[int, int]]


def unreadable(tensor: torch.Tensor) -> str:
    """Why the elements of a tensor cannot be read where they are; empty if they can.

    Reading memory that was freed under a live tensor ends the process, so this looks at no element.
    """
    if tensor.layout is not torch.strided:
        return f"it is {tensor.layout}, not strided"
    if tensor.is_meta:
        return "it lies on the meta device, which holds no elements"
    last = tensor.numel()
    if last and not tensor.is_contiguous():
        last = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last) * tensor.itemsize if last else 0
    held = tensor.untyped_storage().nbytes()
    return "" if held >= needed else f"its storage was freed ({held} of {needed} bytes are there)"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of its width, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.detach().view(BITS[tensor.element_size()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """A storage that tensors next to each other in the line share, as flat integers.

    stop: where the tensors end in the line.
    dtype: that of the tensors.
    """

    stop: int
    cells: torch.Tensor
    dtype: torch.dtype


class Storages:
    """Live tensors in the order of a line.

    Whoever describes a line puts tensors of one storage together: each change of storage costs one more call.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Look at the tensors; nothing is copied.

        Args:
            tensors: in the order of the line; any shapes and strides, on one device, no two elements in one
                memory cell.

        Raises:
            LayoutError: the tensors lie on several devices.
        """
        devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        if len(devices) > 1:
            raise LayoutError(f"the tensors of one rank lie on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop()
        self._memories, self._memory_of = _memories(tensors)
        self._dtypes = {tensor.dtype for tensor in tensors}
        starts = torch.tensor(
            [0, *(tensor.numel() for tensor in tensors)], dtype=torch.int64, device="cpu"
        ).cumsum(0)
        first = torch.tensor([tensor.storage_offset() for tensor in tensors], dtype=torch.int64, device="cpu")
        stops = torch.tensor([memory.stop for memory in self._memories], dtype=torch.int64, device="cpu")
        sizes = torch.tensor([m.cells.numel() for m in self._memories], dtype=torch.int64, device="cpu")
        memory_of = torch.tensor(self._memory_of, dtype=torch.int64, device="cpu")
        backward = (memory_of.diff() == 0) & (first.diff() < 0)
        sizes[memory_of[1:][backward]] = -1
        # Tables lie where positions do: they are uploaded once. No size is told of a storage whose tensors
        # follow each other in another order in the line.
        self._starts, self._first, self._stops, self._sizes = (
            table.to(self.device) for table in (starts, first, stops, sizes)
        )
        self._dims = _dims_table(tensors, self.device)
        self.numel = int(starts[-1])

    def gather(self, pos: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Read single elements.

        Args:
            pos: int64 [n] on the device of the tensors, ascending positions in the line.
            dtype: what elements of another dtype are cast to.

        Returns:
            [n] in `dtype` on the same device, a copy.
        """
        out = torch.empty(pos.numel(), dtype=dtype, device=self.device)
        raw = bits(out)
        for memory, cells, here in self._at(pos):
            if memory.dtype is dtype:
                torch.index_select(memory.cells, 0, cells, out=raw[here])
            else:
                out[here] = memory.cells.index_select(0, cells).view(memory.dtype).to(dtype)
        return out

    def gather_rows(self, first: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Read rows of elements, each of which lies in one tensor.

        Args:
            first: int64 [r] on the device of the tensors, r > 0, positions at which rows begin, those in one
                tensor after those in the tensors before it.
            width: elements of each row.
            dtype: what elements of another dtype are cast to.

        Returns:
            [r, width] in `dtype` on the same device, a copy.
        """
        if self._dims is not None or self._dtypes != {dtype}:
            pos = first[:, None] + torch.arange(width, dtype=torch.int64, device=first.device)
            return self.gather(pos.view(-1), dtype).view(-1, width)
        found, cells, edges = self._found(first)
        counts = edges.diff()
        # Rows as large as their storage are all of it, unless two are the same, as those of a tied head are.
        apart = (first.diff() >= width).all()
        whole = (apart & (counts * width == self._sizes[found])).tolist()
        parts = torch.split(cells, counts.tolist())
        rows = [
            memory.cells if is_whole else memory.cells.unfold(0, width, 1).index_select(0, part).view(-1)
            for memory, is_whole, part in zip(self._memories[found], whole, parts, strict=True)
            if is_whole or part.numel()
        ]
        return torch.cat(rows).view(-1, width).view(dtype)

    def scatter(self, pos: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite single elements, bit for bit.

        Args:
            pos: int64 [n] on the device of the tensors, ascending positions in the line.
            value: [n] on the same device, in the dtype of the tensors.

        Raises:
            LayoutError: a tensor has another dtype.
            CorruptFrameError: there are not as many values as positions.
        """
        if value.shape != pos.shape:
            raise CorruptFrameError(f"{value.numel()} values for {pos.numel()} positions")
        raw = bits(value)
        for memory, cells, here in self._at(pos):
            if memory.dtype is not value.dtype:
                raise LayoutError(f"cannot write {value.dtype} values into a {memory.dtype} tensor")
            memory.cells.scatter_(0, cells, raw[here])

    def _at(self, pos: torch.Tensor) -> Iterator[tuple[_Memory, torch.Tensor, slice]]:
        """Each storage that positions lie in, their cells in it, and which of the positions these are.

        Waits for a device twice.
        """
        if not pos.numel():
            return
        found, cells, edges = self._found(pos)
        for memory, (start, stop) in zip(self._memories[found], pairwise(edges.tolist()), strict=True):
            if start < stop:
                yield memory, cells[start:stop], slice(start, stop)

    def _found(self, pos: torch.Tensor) -> tuple[slice, torch.Tensor, torch.Tensor]:
        """The storages from the first position to the last, the cells of all in them, and where among the
        positions those of each storage begin, int64 [storages + 1]. Waits for a device once."""
        first, last = (torch.searchsorted(self._starts, pos[[0, -1]], right=True) - 1).tolist()
        if not 0 <= first <= last < len(self._memory_of):
            raise CorruptFrameError(f"a position lies beyond a line of {self.numel} elements")
        found = slice(self._memory_of[first], self._memory_of[last] + 1)
        stops = torch.searchsorted(pos, self._stops[found])
        return found, self._cells(pos, first, last + 1), torch.cat([stops.new_zeros(1), stops])

    def _cells(self, pos: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Offsets in the storages, int64 [n], of positions in the tensors `first` up to `last`."""
        starts = self._starts[first : last + 1]
        counts = torch.searchsorted(pos, starts).diff()
        if self._dims is None:
            shift = self._first[first:last] - starts[:-1]
            return spread(shift, counts, pos.numel()).add_(pos)
        tensor = torch.repeat_interleave(counts, output_size=pos.numel()) + first
        rest = pos - self._starts.index_select(0, tensor)
        cells = self._first.index_select(0, tensor)
        for size, stride in self._dims:
            here = size.index_select(0, tensor)
            cells += rest % here * stride.index_select(0, tensor)
            rest = torch.div(rest, here, rounding_mode="floor")
        return cells


def _memories(tensors: Sequence[torch.Tensor]) -> tuple[list[_Memory], list[int]]:
    """The storages in the order of the line, and which of them each tensor lies in."""
    found: list[_Memory] = []
    memory_of, stop = [], 0
    storages = [tensor.untyped_storage() for tensor in tensors]
    places = [(storage.data_ptr(), tensor.dtype) for storage, tensor in zip(storages, tensors, strict=True)]
    for place, (tensor, storage) in enumerate(zip(tensors, storages, strict=True)):
        memory_of.append(len(found))
        stop += tensor.numel()
        if places[place : place + 1] == places[place + 1 : place + 2]:
            continue
        cells = torch.empty(0, dtype=BITS[tensor.element_size()], device=tensor.device)
        cells.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
        found.append(_Memory(stop=stop, cells=cells, dtype=tensor.dtype))
    return found, memory_of


def _dims_table(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Sizes and strides of all tensors by dimension, the last one first; None if all are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    dims = [_collapsed(tensor) for tensor in tensors]
    depth = max(map(len, dims))
    padded = torch.tensor(
        [[*one, *[(1, 0)] * (depth - len(one))] for one in dims], dtype=torch.int64, device="cpu"
    ).to(device)
    return [(padded[:, place, 0].contiguous(), padded[:, place, 1].contiguous()) for place in range(depth)]


def _collapsed(tensor: torch.Tensor) -> _Dims:
    """Size and stride of each dimension, the last one first; contiguous neighbours become one dimension."""
    found: _Dims = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        elif size != 1:
            found.append((size, stride))
    return found or [(1, 1)]
