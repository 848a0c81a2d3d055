"""Does a converter from Megatron to HF names only move elements? Proved once, then used as a table.

Splitting, slicing, reordering and concatenating are relocations: each output element is one input element,
at most cast to another dtype. A proof has two halves:

* A guess. The element numbers, byte by byte, are pushed through the converter as uint8 tensors, and read
  where they come out. bf16, fp16 and fp32 hold 0 to 255 exactly, so that a cast on the way does no harm. A
  parameter whose name differs from an earlier one's only in layer or expert takes over what was found there.
* A check, of every parameter. Random bits of its dtype and size, converted, must be the same bits moved by
  the table. A converter that treats one expert otherwise than its siblings fails it, and is proved anew.
  Each rank draws other bits, so that what came from another rank is not taken for this rank's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from awex_delta.lines.storages import BITS, bits

Converter = Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]
Outputs = Sequence[tuple[str, torch.Tensor]]

_LOWEST_EXPONENT_BIT = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|\d+$")  # of a layer or an expert: `layers.3.`, `weight17`
_READ_FULLY = 1 << 18
_WINDOWS, _WINDOW_STEP = 1 << 14, 64
_CHECK_ELEMENTS = 1 << 11  # a few elements alone prove little


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """The runs that lead from the elements of one local parameter to their places in one HF tensor.

    name, shape: the HF tensor, or this rank's part of it.
    dtype: what values are cast to when they are sent.
    src, dst, length: int64 [runs]; `length[i]` elements from flat position `src[i]` of the parameter
        go to `dst[i]` of the HF tensor. Ascending in `dst`; the runs cover the HF tensor. Parameters of one
        kind share these tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: torch.Tensor
    dst: torch.Tensor
    length: torch.Tensor


def kind_of(param: str) -> str:
    """The name of a parameter with the numbers of its layer and expert struck out."""
    return _NUMBER.sub("#", param)


class Prover:
    """Proves that converters relocate, for one parameter after the other, on the CPU and in one thread.

    Memory: random bits of the size of the largest parameter so far; while a parameter is proved that is not
    like an earlier one, one byte more for each element; and what the converter itself makes.
    """

    def __init__(self, rank: int) -> None:
        """Nothing is known yet. `rank` is this trainer rank: no two ranks draw the same random bits."""
        self._known: dict[tuple[str, tuple[int, ...], torch.dtype], tuple[Relocation, ...]] = {}
        self._bits = _RandomBits(rank)

    def prove(
        self, param: str, convert: Converter, like: torch.Tensor, outputs: Outputs
    ) -> tuple[Relocation, ...] | None:
        """Prove that a converter relocates one parameter, and return where to.

        Args:
            param: name of the parameter, from which its kind is taken.
            convert: local tensor -> HF names and tensors. Called with CPU tensors of the parameter's shape:
                of its dtype for the check, and uint8 if nothing can be taken over.
            like: a meta tensor of the parameter's shape and dtype.
            outputs: what it converts to.

        Returns:
            One relocation for each HF tensor. None when the converter computes (scales, adds, normalises,
            quantises) or writes into what it is given, and when it cuts the parameter into so many runs that
            the table would be as large as the parameter, as a transpose does.

        Raises:
            Exception: what the converter raises for a tensor of the parameter's own dtype.
        """
        size, dtype = tuple(like.shape), like.dtype
        if any(one not in _LOWEST_EXPONENT_BIT for one in (dtype, *(output.dtype for _, output in outputs))):
            return None
        kind = (kind_of(param), size, dtype)
        taken = _taken_over(self._known.get(kind, ()), outputs)
        if taken and self._holds(convert, taken, size, dtype):
            return taken
        found = _guess(convert, outputs, size)
        if found is None:
            convert(self._bits.window(math.prod(size), dtype).view(size))  # its own errors are no arithmetic
            return None
        if not self._holds(convert, found, size, dtype):
            return None
        self._known[kind] = found  # the latest: after an odd layer, others need not be proved in full
        return found

    def _holds(
        self, convert: Converter, guess: tuple[Relocation, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> bool:
        """Random values of the real dtype go where the guess says, bit for bit."""
        numel = math.prod(shape)
        for _ in range(1 + _CHECK_ELEMENTS // max(1, numel)):
            values = self._bits.window(numel, dtype)
            outputs = convert(values.view(shape))
            if not self._bits.intact(dtype) or not _moved(values, guess, outputs):
                return False
        return True


class _RandomBits:
    """Random finite values of each dtype, whose bits tell positions apart; zeros and subnormals among them.

    No fresh ones are drawn for each parameter: each looks at the same bits through a window of its own.
    """

    def __init__(self, seed: int) -> None:
        self._values: dict[torch.dtype, torch.Tensor] = {}
        self._versions: dict[torch.dtype, int] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._num_windows = 0

    def window(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` values that no recent window has shown at the same places."""
        needed = numel + _WINDOWS * _WINDOW_STEP
        if dtype not in self._values or self._values[dtype].numel() < needed or not self.intact(dtype):
            self._values.pop(dtype, None)  # frees the memory first
            self._values[dtype] = self._draw(needed, dtype)
            self._versions[dtype] = _num_writes(self._values[dtype])
        start = _WINDOW_STEP * (self._num_windows % _WINDOWS)
        self._num_windows += 1
        return self._values[dtype][start : start + numel]

    def intact(self, dtype: torch.dtype) -> bool:
        """False once somebody has written into a window."""
        return _num_writes(self._values[dtype]) == self._versions[dtype]

    def _draw(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        words = torch.empty(-(-numel * dtype.itemsize // 8), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=self._generator)
        # An even exponent is never that of NaN, whose payload a cast may change.
        words.view(BITS[dtype.itemsize]).bitwise_and_(~(1 << _LOWEST_EXPONENT_BIT[dtype]))
        values = words.view(dtype)
        # Small parameters must meet both zeros too: adding zero makes 0.0 of -0.0.
        early = _WINDOWS * _WINDOW_STEP
        places = torch.randint(early, (early // 64,), generator=self._generator, device="cpu")
        values[places[::2]], values[places[1::2]] = 0.0, -0.0
        return values


def _num_writes(tensor: torch.Tensor) -> int:
    """How often somebody has written into the tensor or a view of it."""
    return tensor._version  # noqa: SLF001 - torch has no other name for it


def _taken_over(known: Sequence[Relocation], outputs: Outputs) -> tuple[Relocation, ...]:
    """What is known of an earlier parameter, under the names of this one; empty if it does not fit."""
    if [(one.shape, one.dtype) for one in known] != [(tuple(out.shape), out.dtype) for _, out in outputs]:
        return ()
    return tuple(replace(one, name=name) for one, (name, _) in zip(known, outputs, strict=True))


def _guess(convert: Converter, outputs: Outputs, shape: tuple[int, ...]) -> tuple[Relocation, ...] | None:
    """Read from converted element numbers where elements go; None if what comes out are no element numbers.

    In a big tensor only the first number of each row is read: the check finds rows that are not whole.
    """
    numel = math.prod(shape)
    steps = [output.shape[-1] if output.numel() > _READ_FULLY else 1 for _, output in outputs]
    ids = [
        torch.zeros(output.numel() // step, dtype=torch.int64, device="cpu")
        for (_, output), step in zip(outputs, steps, strict=True)
    ]
    weight = 1
    while weight == 1 or weight < numel:
        if not _add_bytes(ids, steps, convert, outputs, shape, weight):
            return None
        weight *= 256
    found: list[Relocation] = []
    for (name, output), step, numbers in zip(outputs, steps, ids, strict=True):
        runs = _read_runs(numbers, step, numel)
        if runs is None:
            return None
        src, dst, length = runs
        found.append(
            Relocation(
                name=name, shape=tuple(output.shape), dtype=output.dtype, src=src, dst=dst, length=length
            )
        )
    return tuple(found)


def _add_bytes(
    ids: Sequence[torch.Tensor],
    steps: Sequence[int],
    convert: Converter,
    outputs: Outputs,
    shape: tuple[int, ...],
    weight: int,
) -> bool:
    """Add to `ids` what the converter makes of a byte of all element numbers; False if that is unreadable."""
    try:
        converted = convert(_number_bytes(math.prod(shape), weight).view(shape))
    except (RuntimeError, TypeError):
        return False  # arithmetic that uint8 does not have, such as a norm
    if [(name, out.shape) for name, out in converted] != [(name, out.shape) for name, out in outputs]:
        return False
    for numbers, step, (_, output) in zip(ids, steps, converted, strict=True):
        numbers.add_(output.reshape(-1)[::step].to(torch.int64), alpha=weight)
    return True


def _number_bytes(numel: int, weight: int) -> torch.Tensor:
    """One byte of each of the numbers 0 .. numel-1, the one with the place value `weight`: uint8 [numel]."""
    digits = torch.arange(min(256, -(-numel // weight)), dtype=torch.uint8, device="cpu")
    block = digits.repeat_interleave(min(weight, numel))
    while block.numel() < numel:  # in steps, since many short repeats are slow
        block = block.repeat(min(256, -(-numel // block.numel())))
    return block[:numel]


def _read_runs(ids: torch.Tensor, step: int, numel: int) -> tuple[torch.Tensor, ...] | None:
    """src, dst, length from the number of every `step`-th element; None if out of range or too many."""
    if bool(((ids < 0) | (ids >= numel)).any()):
        return None
    begins = torch.ones(ids.numel(), dtype=torch.bool, device="cpu")
    begins[1:] = ids[1:] != ids[:-1] + step
    first = begins.nonzero().squeeze(1)
    if first.numel() > numel // 128 + 64:
        return None
    src, dst = ids[begins], first * step
    length = torch.diff(dst, append=dst.new_full((min(1, dst.numel()),), ids.numel() * step))
    return None if bool((src + length > numel).any()) else (src, dst, length)


def _moved(values: torch.Tensor, guess: Sequence[Relocation], outputs: Outputs) -> bool:
    """Outputs look as the guess says, and hold the bits of flat `values`, cast and moved as it says."""
    agreed = [(one.name, one.shape, one.dtype) for one in guess]
    if [(name, tuple(out.shape), out.dtype) for name, out in outputs] != agreed:
        return False
    for one, (_, output) in zip(guess, outputs, strict=True):
        after = bits(output.reshape(-1))
        for src, dst, length in torch.stack((one.src, one.dst, one.length)).T.tolist():
            before = bits(values[src : src + length].to(one.dtype))
            if not torch.equal(before, after[dst : dst + length]):
                return False
    return True
