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
import logging
import subprocess
from collections.abc import Callable, Iterator, Mapping

import torch

from awex_delta.errors import NumericsError
from awex_delta.lines.storages import BITS

MODULUS = 1 << 64
"""Digests are whole numbers below this, and are added modulo it."""

_GOLDEN = 0x9E3779B97F4A7C15 - MODULUS  # torch has no arithmetic on uint64: the same bits, as int64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - MODULUS, 0x94D049BB133111EB - MODULUS)
_SHIFTS = (30, 27, 31)

# Elements at a time: eager on a CPU as many as stay in its cache; else enough to hide the cost of a call.
_EAGER_PIECE = 1 << 16
_DEVICE_PIECE = 1 << 22
_COMPILED_PIECE = 1 << 18
_MIN_COMPILED = 1 << 12  # a compiled call has its price, too: below this, eager is as fast
_MOST_TOGETHER = 64  # small tensors: at most 2^22 elements, of which positions are made
WORTH_COMPILING = 1 << 24
"""Compiling takes seconds, once in a process: fewer elements than this never earn them back."""

_COMPILER_FAILURES = (RuntimeError, OSError, ImportError, subprocess.SubprocessError)
_Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_log = logging.getLogger(__name__)


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


def digests(tensors: Mapping[str, torch.Tensor], *, compiled: bool = False) -> dict[str, int]:
    """`digest` of each tensor under its name. Small ones are hashed together, so that calls grow with bytes.

    Args:
        tensors: by name, on one device.
        compiled: see `digest`.
    """
    found: dict[str, torch.Tensor] = {}
    small: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() >= _EAGER_PIECE:
            found[name] = sum_whole(tensor, salt_of(name), compiled=compiled)
        else:
            small.setdefault(tensor.dtype, []).append(name)
    for names in small.values():
        for first in range(0, len(names), _MOST_TOGETHER):
            some = names[first : first + _MOST_TOGETHER]
            found |= dict(zip(some, _sums_together({name: tensors[name] for name in some}), strict=True))
    totals = torch.stack(list(found.values())).tolist() if found else []
    return {name: total % MODULUS for name, total in zip(found, totals, strict=True)}


def _sums_together(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
    table = [[tensor.numel(), signed(salt_of(name))] for name, tensor in tensors.items()]
    counts, salts = torch.tensor(table, dtype=torch.int64, device=flat.device).T.contiguous()
    group = torch.repeat_interleave(counts, output_size=flat.numel())
    index = torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[group]
    yield from sums_by_group(index, flat, salts, group).unbind()


def sum_whole(tensor: torch.Tensor, salt: int, *, compiled: bool = False) -> torch.Tensor:
    """The digest of all elements of a tensor, left on its device.

    Args:
        tensor: see `digest`; read in pieces, with at most 128 MiB beside it (2 MiB on a CPU, eager).
        salt: of `salt_of`.
        compiled: see `digest`.

    Returns:
        int64 scalar: the digest as a signed number (`as_unsigned` undoes that).
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    mix, piece = _mixer(tensor.device.type, compiled=compiled and tensor.numel() >= _MIN_COMPILED)
    place = torch.arange(min(piece, tensor.numel()), dtype=torch.int64, device=tensor.device)
    start = 0
    for part in _flat_pieces(tensor.detach(), piece):
        key = _scalar(salt + start * _GOLDEN, tensor.device)  # the piece begins at `start`
        total += mix(place[: part.numel()], part, key, None)
        start += part.numel()
    return total


def sum_at(
    index: torch.Tensor,
    value: torch.Tensor,
    salt: int,
    *,
    counts: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """The digest of single elements, left on their device.

    Args:
        index: int64 [n], their positions.
        value: [n], elements of 1, 2, 4 or 8 bytes, on the same device.
        salt: of `salt_of`.
        counts: bool [n], False for an element that is left out; None counts all.
        compiled: see `digest`.

    Returns:
        int64 scalar, as `sum_whole`.
    """
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    mix, piece = _mixer(value.device.type, compiled=compiled and value.numel() >= _MIN_COMPILED)
    key = _scalar(salt, value.device)
    start = 0
    for bits in _flat_pieces(value.detach(), piece):
        here = slice(start, start + bits.numel())
        total += mix(index[here], bits, key, None if counts is None else counts[here])
        start += bits.numel()
    return total


def sums_by_group(
    index: torch.Tensor, value: torch.Tensor, salts: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """The digests of single elements in groups, left on their device.

    Args:
        index, value: see `sum_at`.
        salts: int64 [g], the salt of each group.
        group: int64 [n], which group each element belongs to.

    Returns:
        int64 [g], as `sum_whole`.
    """
    totals = torch.zeros_like(salts)
    piece, start = _EAGER_PIECE if value.device.type == "cpu" else _DEVICE_PIECE, 0
    for bits in _flat_pieces(value.detach(), piece):
        here = slice(start, start + bits.numel())
        totals.index_add_(0, group[here], _mixed_in_place(index[here], bits, salts[group[here]]))
        start += bits.numel()
    return totals


def signed(value: int) -> int:
    """A whole number below 2^64 as the int64 of the same bits."""
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value


def as_unsigned(total: torch.Tensor) -> int:
    """A digest that was left on a device, as a whole number below 2^64. Waits for the device."""
    return int(total) % MODULUS


def _flat_pieces(tensor: torch.Tensor, piece: int) -> Iterator[torch.Tensor]:
    """The bits of a tensor, row by row, as flat integers; of a strided one some rows are copied at a time."""
    if tensor.element_size() not in BITS or tensor.is_complex():
        raise NumericsError(f"no digest of {tensor.dtype}: give one whose elements have 1, 2, 4 or 8 bytes")
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1).view(BITS[tensor.element_size()]), piece)
        return
    rows = max(1, piece * tensor.shape[0] // tensor.numel())
    for block in torch.split(tensor, rows):
        yield from torch.split(block.reshape(-1).view(BITS[tensor.element_size()]), piece)


def _scalar(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(signed(value), device=device, dtype=torch.int64)


def _mix_and_sum(
    index: torch.Tensor, bits: torch.Tensor, key: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    """The sum of one splitmix64 output for each element that counts. index int64 [n], bits integers [n], key
    an int64 scalar, counts bool [n]."""
    mixed = key + index * _GOLDEN + bits
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        mixed = (mixed ^ ((mixed >> shift) & _low_bits(64 - shift))) * multiplier
    return mixed.sum() if counts is None else (mixed * counts).sum()


def _mix_and_sum_in_place(
    index: torch.Tensor, bits: torch.Tensor, key: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    """As `_mix_and_sum`, as eager execution does it fastest."""
    mixed = _mixed_in_place(index, bits, key)
    return mixed.sum() if counts is None else mixed.mul_(counts).sum()


def _mixed_in_place(index: torch.Tensor, bits: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One splitmix64 output for each element, int64 [n], with two temporaries in all."""
    mixed = torch.add(key, index, alpha=_GOLDEN).add_(bits)
    shifted = torch.empty_like(mixed)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        torch.bitwise_right_shift(mixed, shift, out=shifted)  # arithmetic: its sign bits are cut off
        mixed ^= shifted.bitwise_and_(_low_bits(64 - shift))
        if multiplier is not None:
            mixed *= multiplier
    return mixed


def _low_bits(count: int) -> int:
    return (1 << count) - 1


def _mixer(device_type: str, *, compiled: bool) -> tuple[_Sum, int]:
    """What hashes and sums one piece, and the elements of a piece."""
    function = _compiled(device_type) if compiled else None
    if function is None:
        return _mix_and_sum_in_place, _EAGER_PIECE if device_type == "cpu" else _DEVICE_PIECE

    def mix(
        index: torch.Tensor, bits: torch.Tensor, key: torch.Tensor, counts: torch.Tensor | None
    ) -> torch.Tensor:
        # torch would compile once more for each of the sizes 0 and 1
        return (function if bits.numel() > 1 else _mix_and_sum_in_place)(index, bits, key, counts)

    return mix, _COMPILED_PIECE


@functools.cache
def _compiled(device_type: str) -> _Sum | None:
    """Compiled once in a process; None if that fails."""
    try:
        function = torch.compile(_mix_and_sum, dynamic=True)
        index = torch.arange(_EAGER_PIECE, device=device_type)
        for counts in (None, index > 0):  # one compilation each
            function(
                index, index.to(torch.int16), torch.tensor(1, device=device_type, dtype=torch.int64), counts
            )
    except _COMPILER_FAILURES as error:
        cause = str(error).partition("\n")[0]
        _log.warning("state digests run uncompiled, several times slower: %s", cause)
        return None
    return function
