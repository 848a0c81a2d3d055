"""An additive 64-bit digest of tensors: a sum modulo 2^64 over elements of a mixed hash of (position, bits).

The hash of an element is what splitmix64 draws at its position: the finalizer of splitmix64 (a bijection
in which every bit of the input moves about half of the output) over `salt + GOLDEN * position + bits`.
The sum does not depend on order, so parts that several ranks hold are hashed where they lie and added up,
and the digest of single elements can be taken anywhere. Integer arithmetic that wraps around is the same
on every device, so digests are too.

It finds accidents; it is no signature: who knows the salt can make two tensors of one digest.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from awex_delta.errors import NumericsError
from awex_delta.lines.compiling import SHORTEST_COMPILED, WORTH_COMPILING, compiled_or_none
from awex_delta.lines.storages import BITS, bits

MODULUS = 1 << 64
"""Digests are whole numbers below this, and are added modulo it."""

_GOLDEN = 0x9E3779B97F4A7C15 - MODULUS  # torch has no arithmetic on uint64: the same bits, as int64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - MODULUS, 0x94D049BB133111EB - MODULUS)
_SHIFTS = (30, 27, 31)

# Elements at a time: eager on a CPU as many as stay in its cache; else enough to hide the cost of a call.
_EAGER_PIECE = 1 << 16
_DEVICE_PIECE = 1 << 22
_COMPILED_PIECE = 1 << 18
_ROW = 1 << 12  # a whole tensor is hashed as rows of so many elements
_Sum = Callable[..., torch.Tensor]


def pays_to_compile(device: torch.device, full_bytes: int) -> bool:
    """Whether digests on `device` should run compiled, if a full sync has so many bytes.

    A GPU is fast enough without, and an engine that runs on one may be using the compiler.
    """
    return device.type == "cpu" and full_bytes >= 2 * WORTH_COMPILING  # bf16


def salt_of(name: str) -> int:
    """What sets the elements of one tensor apart from those of all others: 64 bits of a hash of its name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def digest(tensor: torch.Tensor, name: str, *, compiled: bool = False) -> int:
    """The digest of a whole tensor; positions count its elements row by row.

    Args:
        tensor: any shape, strides and device, whose elements have 1, 2, 4 or 8 bytes.
        name: sets it apart from other tensors.
        compiled: compile the loop, which pays if a process hashes `WORTH_COMPILING` elements or more.

    Returns:
        A whole number below 2^64.

    Raises:
        NumericsError: the dtype has no such width.
    """
    return as_unsigned(sum_whole(tensor, salt_of(name), compiled=compiled))


def state_digest(tensors: Mapping[str, torch.Tensor], *, compiled: bool = False) -> int:
    """The digest of a state dict: the sum of its tensors' digests under their own names.

    Args:
        tensors: by HF name; each whole.
        compiled: see `digest`.
    """
    return sum(digest(tensor, name, compiled=compiled) for name, tensor in tensors.items()) % MODULUS


def digests(tensors: Iterable[tuple[str, torch.Tensor]], *, full_bytes: int = 0) -> dict[str, int]:
    """`digest` of each tensor under its name. Small ones of one size are hashed together.

    Args:
        tensors: names and tensors, on one device; of small ones a few are held at a time.
        full_bytes: of a full sync, see `pays_to_compile`.
    """
    found: dict[str, torch.Tensor] = {}
    alike: dict[tuple[torch.dtype, int], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        compiled = pays_to_compile(tensor.device, full_bytes)
        if tensor.numel() >= _EAGER_PIECE:
            found[name] = sum_whole(tensor, salt_of(name), compiled=compiled)
            continue
        some = alike[tensor.dtype, tensor.numel()]
        some[name] = tensor.detach().reshape(-1)
        if len(some) * tensor.numel() >= _COMPILED_PIECE:
            found |= _sums_of_rows(some, compiled=compiled)
            some.clear()
    for some in alike.values():  # few
        found |= _sums_of_rows(some, compiled=False)
    totals = torch.stack(list(found.values())).tolist() if found else []
    return {name: total % MODULUS for name, total in zip(found, totals, strict=True)}


def _sums_of_rows(rows: Mapping[str, torch.Tensor], *, compiled: bool) -> dict[str, torch.Tensor]:
    if not rows:
        return {}
    value = torch.stack(list(rows.values()))
    keys = torch.tensor([signed(salt_of(name)) for name in rows], dtype=torch.int64, device=value.device)
    return dict(zip(rows, _row_sums(keys, value, compiled=compiled).unbind(), strict=True))


def sum_whole(tensor: torch.Tensor, salt: int, *, start: int = 0, compiled: bool = False) -> torch.Tensor:
    """The digest of all elements of a tensor, left on its device.

    Args:
        tensor: see `digest`; read in pieces, with at most 128 MiB beside it (2 MiB on a CPU, eager).
        salt: of `salt_of`.
        start: the position of its first element, if it is part of another one.
        compiled: see `digest`.

    Returns:
        int64 scalar: the digest as a signed number (`as_unsigned` undoes that).
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in _flat_pieces(tensor.detach(), _piece(tensor.device, compiled=compiled)):
        edge = part.numel() // _ROW * _ROW
        for rows in (part[:edge].view(-1, _ROW), part[None, edge:]):
            stop = start + rows.numel()
            if start < stop:
                first = torch.arange(start, stop, rows.shape[1], dtype=torch.int64, device=rows.device)
                total += sum_at(first, rows, salt, compiled=compiled)
            start = stop
    return total


def sum_at(
    index: torch.Tensor,
    value: torch.Tensor,
    salt: int,
    *,
    counts: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """The digest of single elements, or of rows of elements, left on their device.

    Args:
        index: int64 [n], the position of each element, or of the first element of each row.
        value: [n], or rows [n, w], elements of 1, 2, 4 or 8 bytes, on the same device.
        salt: of `salt_of`.
        counts: bool [n], False for an element that is left out; None counts all. Rows count all.
        compiled: see `digest`.

    Returns:
        int64 scalar, as `sum_whole`.
    """
    key = _scalar(salt, value.device)
    if value.dim() > 1:
        return _row_sums(torch.add(key, index, alpha=_GOLDEN), value, compiled=compiled).sum()
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    function = _faster(_mix_and_sum, value) if compiled else None
    start = 0
    for raw in _flat_pieces(value.detach(), _piece(value.device, compiled=function is not None)):
        here = slice(start, start + raw.numel())
        # torch would compile once more for each of the sizes 0 and 1
        mix = function if function and raw.numel() > 1 else _mix_and_sum_in_place
        total += mix(index[here], raw, key, None if counts is None else counts[here])
        start += raw.numel()
    return total


def sums_by_group(
    index: torch.Tensor, value: torch.Tensor, salts: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """The digests of single elements or rows in groups, left on their device.

    Args:
        index, value: see `sum_at`.
        salts: int64 [g], the salt of each group.
        group: int64 [n], which group each element or row belongs to.

    Returns:
        int64 [g], as `sum_whole`.
    """
    keys = torch.add(salts[group], index, alpha=_GOLDEN)
    rows = value if value.dim() > 1 else value[:, None]
    return torch.zeros_like(salts).index_add_(0, group, _row_sums(keys, rows))


def _row_sums(keys: torch.Tensor, value: torch.Tensor, *, compiled: bool = False) -> torch.Tensor:
    """The digest of each row of elements, int64 [n].

    keys: int64 [n], the salt plus golden times the position of the first element.
    value: [n, w].
    """
    raw = _as_integers(value)
    # the compiler multiplies too narrowly if it makes these itself
    steps = torch.arange(raw.shape[1], dtype=torch.int64, device=raw.device).mul_(_GOLDEN)
    function = _faster(_mix_rows, raw) if compiled else None
    height = max(1, _piece(raw.device, compiled=function is not None) // max(1, raw.shape[1]))
    sums = []
    for key, part in zip(torch.split(keys, height), torch.split(raw, height), strict=True):
        # torch would compile once more for each of the sizes 0 and 1
        mix = function if function and min(part.shape) > 1 else _mix_rows_in_place
        sums.append(mix(key, steps, part))
    return torch.cat(sums)


def signed(value: int) -> int:
    """A whole number below 2^64 as the int64 of the same bits."""
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value


def as_unsigned(total: torch.Tensor) -> int:
    """A digest that was left on a device, as a whole number below 2^64. Waits for the device."""
    return int(total) % MODULUS


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() not in BITS or tensor.is_complex():
        raise NumericsError(f"no digest of {tensor.dtype}: give one whose elements have 1, 2, 4 or 8 bytes")
    return bits(tensor)


def _flat_pieces(tensor: torch.Tensor, piece: int) -> Iterator[torch.Tensor]:
    """The bits of a tensor, row by row, as flat integers; of a strided one some rows are copied at a time."""
    tensor = _as_integers(tensor)
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), piece)
        return
    rows = max(1, piece * tensor.shape[0] // tensor.numel())
    for block in torch.split(tensor, rows):
        yield from torch.split(block.reshape(-1), piece)


def _piece(device: torch.device, *, compiled: bool) -> int:
    """Elements that are hashed at a time."""
    if compiled:
        return _COMPILED_PIECE
    return _EAGER_PIECE if device.type == "cpu" else _DEVICE_PIECE


def _scalar(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(signed(value), device=device, dtype=torch.int64)


def _mix_and_sum(
    index: torch.Tensor, bits: torch.Tensor, key: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    """The sum of one splitmix64 output for each element that counts. index int64 [n], bits integers [n], key
    an int64 scalar, counts bool [n]."""
    mixed = _mixed(key + index * _GOLDEN + bits)
    return mixed.sum() if counts is None else (mixed * counts).sum()


def _mix_and_sum_in_place(
    index: torch.Tensor, bits: torch.Tensor, key: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    """As `_mix_and_sum`, as eager execution does it fastest."""
    mixed = _mixed_in_place(torch.add(key, index, alpha=_GOLDEN).add_(bits))
    return mixed.sum() if counts is None else mixed.mul_(counts).sum()


def _mix_rows(keys: torch.Tensor, steps: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Sums of splitmix64 outputs, int64 [n]. keys int64 [n], steps int64 [w], bits integers [n, w]."""
    return _mixed(keys[:, None] + steps + bits).sum(1)


def _mix_rows_in_place(keys: torch.Tensor, steps: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """As `_mix_rows`, as eager execution does it fastest."""
    return _mixed_in_place(torch.add(keys[:, None], steps).add_(bits)).sum(1)


def _mixed(state: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        state = (state ^ ((state >> shift) & _low_bits(64 - shift))) * multiplier
    return state


def _mixed_in_place(state: torch.Tensor) -> torch.Tensor:
    """As `_mixed`, with one temporary."""
    shifted = torch.empty_like(state)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        torch.bitwise_right_shift(state, shift, out=shifted)  # arithmetic: its sign bits are cut off
        state ^= shifted.bitwise_and_(_low_bits(64 - shift))
        if multiplier is not None:
            state *= multiplier
    return state


def _low_bits(count: int) -> int:
    return (1 << count) - 1


def _faster(function: _Sum, value: torch.Tensor) -> _Sum | None:
    """`function`, compiled for the device of `value`; None if that fails or does not pay."""
    return _compiled(function, value.device.type) if value.numel() >= SHORTEST_COMPILED else None


@functools.cache
def _compiled(function: _Sum, device_type: str) -> _Sum | None:
    """Compiled once in a process; None if that fails."""
    index = torch.arange(_EAGER_PIECE, dtype=torch.int64, device=device_type)
    bits = index.to(torch.int16)
    calls: list[tuple[torch.Tensor | None, ...]] = [
        (index, bits, index[0], counts) for counts in (None, index > 0)
    ]
    if function is _mix_rows:
        calls = [(index[:16], index[:_ROW], bits.view(16, _ROW))]
    return compiled_or_none(function, calls, what="state digests run")
