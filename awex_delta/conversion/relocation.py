"""Does a converter from Megatron to HF names only move elements? Proved once, then used as a table.

Splitting, slicing, reordering and concatenating are relocations: each output element is one input
element, at most cast to another dtype. To read the permutation back, the ids of the input elements are
written in base 127, and each plane of digits is pushed through the converter as an int8 tensor. int8
values survive a cast to bf16, fp16 or fp32, so that the digits come out as they went in, elsewhere.

Memory of one proof: about 16 bytes an element of the one parameter that is proved, freed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Converter = Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]

_BASE = 127
_READ_FULLY = 1 << 18
_HOLDS_DIGITS = (torch.bfloat16, torch.float16, torch.float32)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """Where the elements of one local parameter go in one HF tensor, as runs.

    name, shape: the HF tensor, or this rank's part of it.
    dtype: what values are cast to when they are sent.
    src, dst, length: int64 [runs]; `length[i]` elements from flat position `src[i]` of the parameter
        go to `dst[i]` of the HF tensor. Ascending in `dst`; the runs cover the HF tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: torch.Tensor
    dst: torch.Tensor
    length: torch.Tensor

    def map(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """Find where changed elements go.

        Args:
            index: int64 [n], ascending flat positions in the local parameter, no position twice.

        Returns:
            Ascending flat positions int64 [k] in the HF tensor, and for each the place in `index` whose
            element goes there (int64 [k], or a slice). An element that goes to another HF tensor, or to
            none, is left out.

        Collective: no.
        """
        src, dst, length = (table.to(index.device) for table in (self.src, self.dst, self.length))
        first = torch.searchsorted(index, src)
        count = torch.searchsorted(index, src + length) - first
        if self.src.numel() == 1:
            begin, shift = int(first), int(self.dst) - int(self.src)
            here = slice(begin, begin + int(count))
            return (index[here] + shift if shift else index[here]), here
        run = torch.repeat_interleave(count)
        pick = torch.arange(run.numel(), device=index.device) + (first - count.cumsum(0) + count)[run]
        return index[pick] + (dst - src)[run], pick

    def take(self, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """What the HF tensor holds at flat positions `start` to `stop`.

        Args:
            flat: the local parameter, flat.
            start, stop: half-open range of positions in the HF tensor.

        Returns:
            [stop - start], dtype of `flat`; an alias where it lies together.

        Collective: no.
        """
        bounds = torch.tensor([start, stop - 1])
        first, last = (torch.searchsorted(self.dst, bounds, right=True) - 1).tolist()
        rows = torch.stack((self.src, self.dst, self.length))[:, max(first, 0) : last + 1].T.tolist()
        parts = []
        for src, dst, length in rows:
            begin, end = max(start - dst, 0), min(stop - dst, length)
            parts.append(flat[src + begin : src + end])
        return parts[0] if len(parts) == 1 else torch.cat([flat[:0], *parts])

    def ranges(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Where positions `start` to `stop` of the local parameter go: ascending ranges, none beside another.

        Collective: no.
        """
        begin = torch.clamp(self.src, min=start)
        end = torch.clamp(self.src + self.length, max=stop)
        shift, found = self.dst - self.src, list[tuple[int, int]]()
        for a, b in torch.stack((begin + shift, end + shift))[:, begin < end].T.tolist():
            if found and found[-1][1] == a:
                found[-1] = (found[-1][0], b)
            else:
                found.append((a, b))
        return tuple(found)


class ChangedTensor(NamedTuple):
    """Changed elements of one HF tensor: ascending flat positions int64, and the whole new tensor."""

    name: str
    positions: torch.Tensor
    tensor: torch.Tensor


def prove_relocation(
    convert: Converter, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Relocation, ...] | None:
    """Prove that a converter relocates one parameter, and return where to.

    The table is read from digit planes, and then checked: random values of the real dtype, converted,
    must have the bits of the same values moved by the table.

    Args:
        convert: local tensor -> HF names and tensors. Called with int8 and `dtype` tensors on the CPU,
            and with a meta tensor.
        shape, dtype: of the local parameter.

    Returns:
        One relocation for each HF tensor; None when the converter computes (scales, adds, normalises,
        quantises), or cuts the parameter in so many runs that the table would be of its size, such as
        by a transpose.

    Collective: no, unless `convert` is.
    """
    outputs = convert(torch.empty(tuple(shape), dtype=dtype, device="meta"))
    if any(output.dtype not in _HOLDS_DIGITS for _, output in outputs):
        return None
    planes = list(_digit_planes(math.prod(shape)))
    probes = [_try_convert(convert, plane.view(tuple(shape))) for plane in planes]
    if any(_shapes(probe) != _shapes(outputs) for probe in probes):
        return None
    found: list[Relocation] = []
    for place, (name, output) in enumerate(outputs):
        runs = _read_runs([probe[place][1] for probe in probes], math.prod(shape))
        if runs is None:
            return None
        src, dst, length = runs.unbind()
        found.append(
            Relocation(
                name=name, shape=tuple(output.shape), dtype=output.dtype, src=src, dst=dst, length=length
            )
        )
    return tuple(found) if _agrees(convert, planes, probes, found, shape, dtype) else None


def changed_by_value(convert: Converter, old: torch.Tensor, new: torch.Tensor) -> list[ChangedTensor]:
    """Convert an old and a new parameter and compare bits: the way for converters that compute.

    Args:
        convert: local tensor -> HF names and tensors.
        old, new: the whole local parameter, before and after, with every element known.

    Returns:
        One entry for each HF tensor, also when nothing in it changed.

    Collective: no, unless `convert` is.
    """
    changed: list[ChangedTensor] = []
    for (name, before), (_, after) in zip(convert(old), convert(new), strict=True):
        differs = _bits(before) != _bits(after)
        changed.append(ChangedTensor(name, differs.reshape(-1).nonzero().squeeze(1), after))
    return changed


def _digit_planes(numel: int) -> Iterator[torch.Tensor]:
    """The ids 0 .. numel-1 in base 127, lowest digit first: int8 [numel] a digit."""
    weight = 1
    while weight == 1 or weight < numel:
        digit = torch.arange(min(_BASE, -(-numel // weight)), dtype=torch.int8)
        period = digit.repeat_interleave(min(weight, max(numel, 1)))
        yield period.repeat(-(-numel // max(period.numel(), 1)))[:numel]
        weight *= _BASE


def _try_convert(convert: Converter, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    try:
        return convert(tensor)
    except (RuntimeError, TypeError):
        return ()  # arithmetic that int8 does not have, such as a norm


def _shapes(outputs: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Size]]:
    return [(name, output.shape) for name, output in outputs]


def _read_runs(digits: Sequence[torch.Tensor], numel: int) -> torch.Tensor | None:
    """src, dst, length as int64 [3, runs], read from converted digit planes; None where they spell no ids.

    Of a big tensor only the first id of each row is read. That the rows are whole is for `_agrees`.
    """
    num_out = digits[0].numel()
    step = digits[0].shape[-1] if num_out > _READ_FULLY else 1
    ids = torch.zeros(-(-num_out // max(step, 1)), dtype=torch.int64)
    for power, plane in enumerate(digits):
        ids += plane.reshape(-1)[::step].to(torch.int64) * _BASE**power
    if bool(((ids < 0) | (ids >= numel)).any()):
        return None
    begins = torch.ones(ids.numel(), dtype=torch.bool)
    begins[1:] = ids[1:] != ids[:-1] + step
    dst = begins.nonzero().squeeze(1) * step
    if dst.numel() > numel // 128 + 64:
        return None
    end = torch.cat((dst[1:], torch.tensor([num_out])[: dst.numel()]))
    src, length = ids[begins], end - dst
    return None if bool((src + length > numel).any()) else torch.stack((src, dst, length))


def _agrees(
    convert: Converter,
    planes: Sequence[torch.Tensor],
    probes: Sequence[Sequence[tuple[str, torch.Tensor]]],
    relocations: Sequence[Relocation],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> bool:
    """Every digit is where the tables say, and random values of the real dtype go there bit for bit."""
    generator = torch.Generator().manual_seed(0)
    checks = list(zip(planes, probes, strict=True))
    for _ in range(1 + 256 // max(1, planes[0].numel())):  # a few elements alone prove little
        values = torch.randn(planes[0].numel(), generator=generator).to(dtype)
        phase = int(torch.randint(5, (), generator=generator))
        values[phase::5] = -0.0  # adding zero would make it 0.0
        checks.append((values, convert(values.view(tuple(shape)))))
    return all(
        _bits(_move(relocation, before).to(after.dtype)).equal(_bits(after.reshape(-1)))
        for before, outputs in checks
        for relocation, (_, after) in zip(relocations, outputs, strict=True)
    )


def _move(relocation: Relocation, flat: torch.Tensor) -> torch.Tensor:
    """A flat parameter moved by the table."""
    runs = zip(relocation.src.tolist(), relocation.length.tolist(), strict=True)
    return torch.cat([flat[:0], *(flat[src : src + length] for src, length in runs)])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])
