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
"""Elements that are left until the next change of a class that has none."""

ESCAPE = 255

Loop = TypeVar("Loop", bound=Callable[..., Any])


_BITS, _KINDS, _CODES, _INTS, _RANGES = "uint16[::1]", "uint8[::1]", "int8[::1]", "int64[::1]", "int64[:,::1]"


def _compiled(result: str, *arguments: str) -> Callable[[Loop], Loop]:
    """Machine code at import, kept beside the module for the next process; other threads run meanwhile."""

    def compile_loop(loop: Loop) -> Loop:
        signature = f"{result}({', '.join(arguments)})"
        compiled: Loop = numba.njit(signature, nogil=True, cache=True)(loop)
        return compiled

    return compile_loop


_ONE, _SEVEN, _MASK = np.uint64(1), np.uint64(7), np.uint64(255)
_LANE = np.uint64(256)


@_compiled("void", _BITS, _CODES, _KINDS, _INTS)
def classify(
    new: NDArray[np.uint16], code: NDArray[np.int8], kind: NDArray[np.uint8], num: NDArray[np.int64]
) -> None:
    """Exponents before a step.

    Args:
        new, code: patterns after it, and the step.
        kind: the exponent before it.
        num: [256], counts how often each occurs.
    """
    for i in range(new.size):
        pattern = np.int64(np.int16(new[i]))
        order = (pattern ^ ((pattern >> 15) & 0x7FFF)) - code[i]
        old = (order ^ ((order >> 15) & 0x7FFF)) & 0xFFFF
        kind[i] = (old >> 7) & 255
        num[kind[i]] += 1


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


@_compiled("boolean", _BITS, "int64", _RANGES, _INTS, _INTS, _KINDS, _CODES, _INTS, _INTS, _INTS, _CODES)
def count_gaps(
    bits: NDArray[np.uint16],
    base: int,
    segments: NDArray[np.int64],
    at: NDArray[np.int64],
    changed: NDArray[np.int64],
    kind: NDArray[np.uint8],
    code: NDArray[np.int8],
    since: NDArray[np.int64],
    slot: NDArray[np.int64],
    gaps: NDArray[np.int64],
    steps: NDArray[np.int8],
) -> bool:
    """Walk a block of weights on the sender.

    Args:
        bits: patterns of positions base .. base + len(bits).
        segments: [k, 2], the ranges to walk, ascending.
        at: [2], the first segment and the first change that are not done; moved on.
        changed, kind, code: positions to be found, ascending, their old exponents and their steps.
        since: [1024], unchanged elements of each class since its last change, in four lanes.
        slot: [256], where the next gap of a class goes.
        gaps, steps: by slot, the unchanged elements of its class before a change, and its step.

    Returns:
        False where a change lies outside the segments.
    """
    segment, change = at[0], at[1]
    end = base + bits.size
    while segment < segments.shape[0] and segments[segment, 0] < end:
        place, stop = max(segments[segment, 0], base), min(segments[segment, 1], end)
        while place < stop:
            until = stop
            if change < changed.size:
                if changed[change] < place:
                    return False
                until = min(stop, changed[change])
            _count(bits, place - base, until - base, since)
            place = until
            if place < stop:
                own = np.int64(kind[change])
                where = slot[own]
                slot[own] = where + 1
                steps[where] = code[change]
                gaps[where] = since[own] + since[own + 256] + since[own + 512] + since[own + 768]
                since[own] = since[own + 256] = since[own + 512] = since[own + 768] = 0
                change += 1
                place += 1
        if segments[segment, 1] > end:
            break
        segment += 1
    at[0], at[1] = segment, change
    return True


@_compiled("void", _BITS, "int64", _RANGES, *[_INTS] * 5, _CODES, _INTS, _CODES)
def find_changes(
    bits: NDArray[np.uint16],
    base: int,
    segments: NDArray[np.int64],
    at: NDArray[np.int64],
    left: NDArray[np.int64],
    slot: NDArray[np.int64],
    last: NDArray[np.int64],
    gaps: NDArray[np.int64],
    steps: NDArray[np.int8],
    places: NDArray[np.int64],
    codes: NDArray[np.int8],
) -> None:
    """Walk a block of weights on the receiver; undoes `count_gaps`.

    Args:
        bits, base, segments: as there, of the base.
        at: [2], the first segment that is not done, and how many changes were found; moved on. It stops
            where there are no more `places`, with one more than there are, also when called again.
        left: [256], unchanged elements of each class before its next change; NEVER where there is none.
        slot, last: [256], the slot of the next change of each class, and the end of its slots.
        gaps, steps: by slot.
        places, codes: position and step of each change found.
    """
    segment, found = at[0], at[1]
    end = base + bits.size
    while segment < segments.shape[0] and segments[segment, 0] < end:
        start, stop = max(segments[segment, 0], base) - base, min(segments[segment, 1], end) - base
        for j in range(np.uint64(start), np.uint64(stop)):
            own = (np.uint64(bits[j]) >> _SEVEN) & _MASK
            before = left[own] - 1
            left[own] = before
            if before < 0:
                if found >= places.size:
                    at[1] = places.size + 1
                    return
                where = slot[own]
                places[found], codes[found] = base + np.int64(j), steps[where]
                found += 1
                slot[own] = where + 1
                left[own] = gaps[where + 1] if where + 1 < last[own] else NEVER
        if segments[segment, 1] > end:
            break
        segment += 1
    at[0], at[1] = segment, found


@_compiled("void", _INTS, _CODES, "int64", _INTS, "int64")
def insert_unstated(
    places: NDArray[np.int64],
    codes: NDArray[np.int8],
    found: int,
    aside: NDArray[np.int64],
    unstated: int,
) -> None:
    """Merge ascending positions from `aside` into the first `found` of `places`, in place, from the end."""
    i, j = found - 1, aside.size - 1
    for k in range(found + aside.size - 1, -1, -1):
        if j < 0:
            return
        if i >= 0 and places[i] > aside[j]:
            places[k], codes[k] = places[i], codes[i]
            i -= 1
        else:
            places[k], codes[k] = aside[j], unstated
            j -= 1


@_compiled("int64", _INTS, _INTS, _INTS, _KINDS, _KINDS, _INTS)
def split_gaps(
    gaps: NDArray[np.int64],
    ends: NDArray[np.int64],
    shifts: NDArray[np.int64],
    high: NDArray[np.uint8],
    low: NDArray[np.uint8],
    wide: NDArray[np.int64],
) -> int:
    """Cut gaps into a byte and lower bits.

    Args:
        gaps: by slot.
        ends: [k], where the slots of each class end.
        shifts: [k], how many lower bits its gaps have.
        high: [n], what is left of each gap without them, or ESCAPE.
        low: the lower bits, least significant first; of the right size, and zero.
        wide: [n], the upper parts that escaped.

    Returns:
        How many escaped.
    """
    slot, bit, escaped = 0, 0, 0
    for kind in range(ends.size):
        shift = shifts[kind]
        while slot < ends[kind]:
            gap = gaps[slot]
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
            slot += 1
    return escaped


@_compiled("int64", _KINDS, _INTS, _INTS, _KINDS, _INTS, _INTS)
def join_gaps(
    high: NDArray[np.uint8],
    ends: NDArray[np.int64],
    shifts: NDArray[np.int64],
    low: NDArray[np.uint8],
    wide: NDArray[np.int64],
    gaps: NDArray[np.int64],
) -> int:
    """Undo `split_gaps`.

    Returns:
        How many escapes were met; more than there are is -1, and then the gaps mean nothing.
    """
    slot, bit, escaped = 0, 0, 0
    for kind in range(ends.size):
        shift = shifts[kind]
        while slot < ends[kind]:
            top = np.int64(high[slot])
            if top == ESCAPE:
                if escaped == wide.size:
                    return -1
                top = wide[escaped]
                escaped += 1
            rest, done = np.int64(0), 0
            while done < shift:
                taken = min(shift - done, 8 - (bit & 7))
                rest |= ((np.int64(low[bit >> 3]) >> (bit & 7)) & ((1 << taken) - 1)) << done
                done += taken
                bit += taken
            gaps[slot] = (top << shift) | rest
            slot += 1
    return escaped
