"""The loops of `wire.context`, compiled by numba: one pass over all weights, and one over all gaps.

Exponent classes are numbered by the eight exponent bits of a bf16 pattern. Whoever calls checks sizes; the
loops stay inside what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

NEVER = 2**62
"""Stands for the elements before the next change of a class if it has no more changes."""

ESCAPE = 255

Loop = TypeVar("Loop", bound=Callable[..., Any])


_BITS, _BYTES, _CODES, _INTS, _TABLE = "uint16[::1]", "uint8[::1]", "int8[::1]", "int64[::1]", "int64[:,::1]"
_GAPS = "uint32[::1]"


def _compiled(result: str, *arguments: str) -> Callable[[Loop], Loop]:
    """Machine code at import, kept beside the module for the next process; other threads run meanwhile."""

    def compile_loop(loop: Loop) -> Loop:
        signature = f"{result}({', '.join(arguments)})"
        compiled: Loop = numba.njit(signature, nogil=True, cache=True)(loop)
        return compiled

    return compile_loop


_ONE, _SEVEN, _MASK = np.uint64(1), np.uint64(7), np.uint64(255)
_LANE = np.uint64(256)
_UNSTATED = -128


@_compiled("int64", "int64")
def _flipped(pattern: Any) -> Any:
    """A pattern as an integer of the same order, and back; see `lines.bits`. Both of 16 bits, signed."""
    return pattern ^ ((pattern >> 15) & 0x7FFF)


@_compiled("int64", "int64", "int64")
def _exponent(new: Any, code: Any) -> Any:
    """The exponent bits before a step, from the pattern after it."""
    return (_flipped(_flipped(np.int64(np.int16(new))) - code) >> 7) & 255


@_compiled("void", _BITS, _CODES, _INTS)
def classify(new: NDArray[np.uint16], code: NDArray[np.int8], num: NDArray[np.int64]) -> None:
    """Count the exponents before steps that are stated.

    Args:
        new, code: patterns after it, and the step.
        num: [256], counts how often each occurs.
    """
    for i in range(new.size):
        if code[i] != _UNSTATED:
            num[_exponent(new[i], code[i])] += 1


@_compiled("void", _BITS, "int64", "int64", _INTS)
def _count(bits: NDArray[np.uint16], start: int, stop: int, since: NDArray[np.int64]) -> None:
    """Count exponents in four lanes, so that successive elements do not wait for each other's count."""
    j, end = np.uint64(start), np.uint64(stop)
    while j + np.uint64(4) <= end:
        since[(bits[j] >> _SEVEN) & _MASK] += 1
        since[_LANE + ((bits[j + _ONE] >> _SEVEN) & _MASK)] += 1
        since[_LANE + _LANE + ((bits[j + np.uint64(2)] >> _SEVEN) & _MASK)] += 1
        since[_LANE + _LANE + _LANE + ((bits[j + np.uint64(3)] >> _SEVEN) & _MASK)] += 1
        j += np.uint64(4)
    while j < end:
        since[(bits[j] >> _SEVEN) & _MASK] += 1
        j += _ONE


@_compiled("void", _BITS, "int64", _INTS, _BITS, _CODES, _INTS, _INTS, _INTS, _GAPS, _CODES)
def count_gaps(
    bits: NDArray[np.uint16],
    base: int,
    changed: NDArray[np.int64],
    new: NDArray[np.uint16],
    code: NDArray[np.int8],
    since: NDArray[np.int64],
    slot: NDArray[np.int64],
    sums: NDArray[np.int64],
    gaps: NDArray[np.uint32],
    steps: NDArray[np.int8],
) -> None:
    """Walk a block of weights on the sender.

    Args:
        bits: patterns of positions base .. base + len(bits).
        changed, new, code: positions of the changes among them, ascending, their patterns and their steps.
            What states no step is left out.
        since: [1024], unchanged elements of each class since its last change, in four lanes; counted on.
        slot: [256], where the next gap of a class goes; moved on.
        sums: [256], the sum of the gaps of each class; added to.
        gaps, steps: by slot, the unchanged elements of its class before a change, and its step.
    """
    place = 0
    for change in range(changed.size):
        until = changed[change] - base
        _count(bits, place, until, since)
        place = until + 1
        if code[change] == _UNSTATED:
            continue
        own = _exponent(new[change], code[change])
        where = slot[own]
        slot[own] = where + 1
        steps[where] = code[change]
        gap = since[own] + since[own + 256] + since[own + 512] + since[own + 768]
        gaps[where] = gap
        sums[own] += gap
        since[own] = since[own + 256] = since[own + 512] = since[own + 768] = 0
    _count(bits, place, bits.size, since)


@_compiled("int64", _GAPS, "int64")
def count_escapes(gaps: NDArray[np.uint32], shift: int) -> int:
    """How many gaps of one class do not fit a byte without their lower bits."""
    escaped = 0
    for gap in gaps:
        if np.int64(gap) >> shift >= ESCAPE:
            escaped += 1
    return escaped


@_compiled("void", _GAPS, "int64", _INTS, _BYTES, _BYTES, _GAPS)
def split_gaps(
    gaps: NDArray[np.uint32],
    shift: int,
    at: NDArray[np.int64],
    high: NDArray[np.uint8],
    low: NDArray[np.uint8],
    wide: NDArray[np.uint32],
) -> None:
    """Cut the gaps of one class into a byte and lower bits.

    Args:
        gaps: by slot.
        shift: how many lower bits they have.
        at: [2], the next bit and the next escape; moved on.
        high: what is left of each gap without them, or ESCAPE.
        low: the lower bits of all classes, least significant first; zero where nothing was written.
        wide: the upper parts that escaped, of all classes.
    """
    bit, escaped = at[0], at[1]
    for slot in range(gaps.size):
        gap = np.int64(gaps[slot])
        top = gap >> shift
        if top >= ESCAPE:
            high[slot] = ESCAPE
            wide[escaped] = top
            escaped += 1
        else:
            high[slot] = top
        rest, bits = gap & ((1 << shift) - 1), shift
        while bits > 0:
            taken = min(bits, 8 - (bit & 7))
            low[bit >> 3] |= (rest & ((1 << taken) - 1)) << (bit & 7)
            rest >>= taken
            bits -= taken
            bit += taken
    at[0], at[1] = bit, escaped


SLOT, LAST, NIBBLE, WIDE_STEP, WIDE_GAP, BIT, SHIFT = range(7)
"""Columns of `cursors`: the next slot of a class, the end of its slots, where its next step, escapes and
lower bits are, and how many lower bits its gaps have."""


@_compiled("void", _BYTES, _BYTES, _TABLE, _INTS)
def find_escapes(
    high: NDArray[np.uint8], pairs: NDArray[np.uint8], cursors: NDArray[np.int64], totals: NDArray[np.int64]
) -> None:
    """Fill in WIDE_STEP and WIDE_GAP, where the escapes of each class begin, from its SLOT, LAST and NIBBLE.

    Args:
        high, pairs: by slot and by nibble, as `find_changes` takes them.
        cursors: [256, 7].
        totals: [2], how many steps and gaps escape.
    """
    steps, gaps = 0, 0
    for own in range(cursors.shape[0]):
        cursors[own, WIDE_STEP], cursors[own, WIDE_GAP] = steps, gaps
        for place in range(cursors[own, LAST] - cursors[own, SLOT]):
            nibble = cursors[own, NIBBLE] + place
            steps += (pairs[nibble >> 1] >> ((nibble & 1) << 2)) & 15 == 15
            gaps += high[cursors[own, SLOT] + place] == ESCAPE
    totals[0], totals[1] = steps, gaps


@_compiled("int64", "int64", _TABLE, _BYTES, _BYTES, _GAPS)
def next_gap(
    own: Any,
    cursors: NDArray[np.int64],
    high: NDArray[np.uint8],
    low: NDArray[np.uint8],
    wide_gaps: NDArray[np.uint32],
) -> Any:
    """The gap at the slot of a class; NEVER if it has none."""
    if cursors[own, SLOT] >= cursors[own, LAST]:
        return NEVER
    top, shift = np.int64(high[cursors[own, SLOT]]), cursors[own, SHIFT]
    if top == ESCAPE:
        top = np.int64(wide_gaps[cursors[own, WIDE_GAP]])
        cursors[own, WIDE_GAP] += 1
    rest, done, bit = np.int64(0), np.int64(0), cursors[own, BIT]
    while done < shift:
        taken = min(shift - done, 8 - (bit & 7))
        rest |= ((np.int64(low[bit >> 3]) >> (bit & 7)) & ((1 << taken) - 1)) << done
        done += taken
        bit += taken
    cursors[own, BIT] = bit
    return (top << shift) | rest


@_compiled("int64", "int64", _TABLE, _BYTES, _BYTES)
def _next_step(
    own: Any, cursors: NDArray[np.int64], pairs: NDArray[np.uint8], wide_steps: NDArray[np.uint8]
) -> Any:
    """The step at the slot of a class."""
    nibble = cursors[own, NIBBLE]
    cursors[own, NIBBLE] = nibble + 1
    zigzag = (np.int64(pairs[nibble >> 1]) >> ((nibble & 1) << 2)) & 15
    if zigzag == 15:
        zigzag = np.int64(wide_steps[cursors[own, WIDE_STEP]])
        cursors[own, WIDE_STEP] += 1
    return (zigzag >> 1) ^ -(zigzag & 1)


@_compiled("void", _BITS, "int64", _INTS, _INTS, _TABLE, *[_BYTES] * 4, _GAPS, _INTS, _BITS)
def find_changes(
    bits: NDArray[np.uint16],
    base: int,
    at: NDArray[np.int64],
    left: NDArray[np.int64],
    cursors: NDArray[np.int64],
    high: NDArray[np.uint8],
    low: NDArray[np.uint8],
    pairs: NDArray[np.uint8],
    wide_steps: NDArray[np.uint8],
    wide_gaps: NDArray[np.uint32],
    places: NDArray[np.int64],
    new: NDArray[np.uint16],
) -> None:
    """Walk a block of weights on the receiver; undoes `count_gaps`.

    Args:
        bits, base: as for `count_gaps`, of the weights before the step.
        at: [2], how many changes were found, and which of those at the end of `places` is the next to move;
            moved on.
        left: [256], unchanged elements of each class before its next change; NEVER if there is none.
        cursors: [256, 7], what each class has next; moved on.
        high, low, pairs, wide_steps, wide_gaps: the streams.
        places, new: positions and patterns of the changes found, from the begin; at the end those that state
            no step, which move to their place as the walk passes them. What is found never reaches those
            that are still to move.
    """
    found, aside, place = at[0], at[1], 0
    while place < bits.size:
        until = bits.size
        if aside < places.size:
            until = min(until, places[aside] - base)
        for j in range(np.uint64(place), np.uint64(until)):
            kind = (np.uint64(bits[j]) >> _SEVEN) & _MASK
            before = left[kind] - 1
            left[kind] = before
            if before < 0:
                own = np.int64(kind)
                step = _next_step(own, cursors, pairs, wide_steps)
                places[found] = base + np.int64(j)
                new[found] = _flipped(np.int64(np.int16(_flipped(np.int64(np.int16(bits[j]))) + step)))
                found += 1
                cursors[own, SLOT] += 1
                left[own] = next_gap(own, cursors, high, low, wide_gaps)
        if until < bits.size:
            places[found], new[found] = places[aside], new[aside]
            found += 1
            aside += 1
        place = until + 1
    at[0], at[1] = found, aside
