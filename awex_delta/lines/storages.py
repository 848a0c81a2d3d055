"""Reading and writing elements of live tensors, bit for bit, whatever their strides are."""

from __future__ import annotations

import torch

from awex_delta.errors import CorruptFrameError, LayoutError

# An element is moved as an integer of its width, so that NaN payloads and the sign of zero survive.
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def scatter_into(view: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite single elements of a live tensor, bit for bit, whatever its strides are.

    Positions count the elements of `view` row by row, also when it is a column slice or a transpose,
    where `view.reshape(-1)` would be a copy and the write would be lost.

    Args:
        view: destination, bf16, fp16 or fp32.
        index: int32 or int64 [n] on the device of `view`, ascending and in range: a frame that says
            otherwise is refused where it is unpacked.
        values: [n], dtype and device of `view`.

    Raises:
        LayoutError: `values` has another dtype than `view`, or that dtype cannot be written.
        CorruptFrameError: there are not as many values as positions.

    Collective: no.
    """
    if view.dtype not in _BITS or values.dtype != view.dtype:
        raise LayoutError(f"cannot write {values.dtype} values into a {view.dtype} tensor")
    if values.shape != index.shape:
        raise CorruptFrameError(f"{values.numel()} values for {index.numel()} positions")
    if index.numel() == 0:
        return
    bits = _BITS[view.dtype]
    cells = view.detach().view(bits)
    offsets = index.long()
    if cells.is_contiguous():
        flat = cells.view(-1)
    else:
        flat, offsets = _span(cells), _strided_offsets(cells, offsets)
    flat.scatter_(0, offsets, values.detach().view(bits))


def gather_from(view: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Read single elements of a live tensor, at the positions that `scatter_into` writes.

    Args:
        view: bf16, fp16 or fp32, any strides.
        index: int64 [n] on the device of `view`, in range.

    Returns:
        [n], dtype of `view`, a copy.

    Collective: no.
    """
    cells = view.detach().view(_BITS[view.dtype])
    if cells.is_contiguous():
        return cells.view(-1).index_select(0, index).view(view.dtype)
    return _span(cells).index_select(0, _strided_offsets(cells, index)).view(view.dtype)


def read_range(view: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Read consecutive elements of a live tensor, counted row by row whatever its strides are.

    Args:
        view: any strides.
        start, stop: half-open range of positions.

    Returns:
        [stop - start], dtype of `view`; an alias where that is possible, otherwise a copy of little more.

    Collective: no.
    """
    whole = view.detach()
    if whole.is_contiguous() or whole.dim() < 2:
        return whole.reshape(-1)[start:stop]
    row = whole[0].numel()
    first = start // row
    edge = (first + 1) * row
    if start < stop <= edge:  # no more than what is asked for: a row can be large
        return read_range(whole[first], start - first * row, stop - first * row)
    if start < stop <= start + row:
        return torch.cat([read_range(view, start, edge), read_range(view, edge, stop)])
    rows = whole[first : -(-stop // row)].reshape(-1)
    return rows[start - first * row : stop - first * row]


def write_range(view: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Overwrite consecutive elements of a live tensor, at the positions that `read_range` reads.

    Args:
        view: destination, any strides.
        start: position of the first element.
        values: [n], dtype and device of `view`.

    Collective: no.
    """
    whole = view.detach()
    if whole.dim() == 0:
        whole = whole.view(1)
    if whole.is_contiguous() or whole.dim() == 1:
        flat = whole.view(-1) if whole.is_contiguous() else whole
        flat[start : start + values.numel()].copy_(values)
        return
    row = whole[0].numel()
    while values.numel():
        place, within = divmod(start, row)
        if within or values.numel() < row:
            taken = min(row - within, values.numel())
            write_range(whole[place], within, values[:taken])
        else:
            num_rows = values.numel() // row
            taken = num_rows * row
            whole[place : place + num_rows].copy_(values[:taken].view(num_rows, *whole.shape[1:]))
        start, values = start + taken, values[taken:]


def _span(cells: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element of a strided tensor, as one flat alias."""
    last = sum((size - 1) * stride for size, stride in zip(cells.shape, cells.stride(), strict=True))
    return cells.as_strided((last + 1,), (1,))


def _strided_offsets(cells: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Memory offsets, from the first element, of row-major positions in a strided tensor."""
    offsets = torch.zeros_like(index)
    for size, stride in zip(reversed(cells.shape), reversed(cells.stride()), strict=True):
        offsets += index.remainder(size) * stride
        index = index.div(size, rounding_mode="floor")
    return offsets
