"""Descriptions as bytes: a JSON header and columns of numbers and names, compressed. Nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from awex_delta.errors import UNREADABLE, ConnectError

Ints = NDArray[np.int64]
Shapes = tuple[tuple[int, ...], ...]

MAX_BYTES = 1 << 31
"""The longest description, uncompressed. A model of a hundred thousand tensors needs a hundredth of it."""

MAX_PACKED = 1 << 28
"""The longest description, compressed."""

_MAX_DIMS, _MAX_NUMEL = 8, 1 << 48  # of a tensor: with more, sums of positions might not fit int64

_LEVEL = 3


def pack(header: Mapping[str, Any], numbers: Mapping[str, Ints], names: Mapping[str, Sequence[str]]) -> bytes:
    """One description as bytes; equal descriptions give equal bytes."""
    texts = {key: json.dumps(list(column)).encode() for key, column in sorted(names.items())}
    numbers = dict(sorted(numbers.items()))
    head = {
        "header": dict(header),
        "numbers": {key: int(column.size) for key, column in numbers.items()},
        "names": {key: len(text) for key, text in texts.items()},
    }
    lines = [json.dumps(head, sort_keys=True).encode(), b"\n", *texts.values()]
    lines += [np.ascontiguousarray(column, np.int64).tobytes() for column in numbers.values()]
    return zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(lines))


def unpack(blob: bytes) -> tuple[dict[str, Any], dict[str, Ints], dict[str, tuple[str, ...]]]:
    """Undo `pack`.

    Raises:
        ConnectError: the bytes are damaged, too long, or do not hold what their header says.
    """
    try:
        if zstandard.frame_content_size(blob) > MAX_BYTES:
            raise ConnectError(f"a description takes more than {MAX_BYTES} bytes")
        head, _, rest = zstandard.ZstdDecompressor().decompress(blob).partition(b"\n")
        found = json.loads(head)
        names, numbers, start = {}, {}, 0
        for key, length in found["names"].items():
            names[key] = _texts(json.loads(rest[start : start + _size(length)]))
            start += length
        for key, size in found["numbers"].items():
            numbers[key] = np.frombuffer(rest, np.int64, _size(size), start).copy()
            start += 8 * size
        if start != len(rest):
            raise ConnectError(f"a description has {len(rest)} bytes, and its header speaks of {start}")
        return dict(found["header"]), numbers, names
    except (zstandard.ZstdError, *UNREADABLE) as error:
        raise ConnectError(f"a description cannot be read: {error!r}") from error


def pack_shapes(shapes: Shapes) -> Ints:
    """Shapes as one column: the number of dimensions before each."""
    return np.array([size for shape in shapes for size in (len(shape), *shape)], np.int64)


def unpack_shapes(column: Ints) -> Shapes:
    """Undo `pack_shapes`.

    Raises:
        ConnectError: a number is negative, the column ends inside a shape, or a shape has too many dimensions
            or elements.
    """
    values, shapes, place = column.tolist(), list[tuple[int, ...]](), 0
    if values and min(values) < 0:
        raise ConnectError("a shape has a negative size")
    while place < len(values):
        end = place + 1 + values[place]
        if end > len(values):
            raise ConnectError("a column of shapes ends inside a shape")
        shapes.append(tuple(values[place + 1 : end]))
        if len(shapes[-1]) > _MAX_DIMS or math.prod(shapes[-1]) > _MAX_NUMEL:
            raise ConnectError(f"a shape has {len(shapes[-1])} dimensions, or more than 2^48 elements")
        place = end
    return tuple(shapes)


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ConnectError(f"a column has the size {value!r}")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or any(type(value) is not str for value in values):
        raise ConnectError("a column of names holds something else than names")
    return tuple(values)
