"""Steps as half bytes: nearly all of them are a few units in the last place.

    step, 4 bit     zigzag, two in each byte, first in the lower half; 15 says that it is in the next stream
    step, 8 bit     zigzag; 255 is -128: no step, the new value is sent

Zigzag orders by size: 0, -1, 1, -2, 2 .. -128 are 0, 1, 2, 3, 4 .. 255. Two steps a byte also help the
compression of `wire.streams`, whose Huffman codes spend whole bits on a symbol.
"""

from __future__ import annotations

import numpy as np
import torch

from awex_delta.wire.pieces import places_of
from awex_delta.wire.streams import StreamReader

ESCAPE = 15


def step_streams(code: torch.Tensor) -> list[torch.Tensor]:
    """Pack steps.

    Args:
        code: int8 [n], any values.

    Returns:
        uint8 [(n + 1) // 2] and uint8 [steps beyond ±7].
    """
    zigzag = ((code << 1) ^ (code >> 7)).view(torch.uint8)
    wide = zigzag.numpy()[zigzag.numpy() >= ESCAPE]
    half = torch.nn.functional.pad(zigzag.clamp_(max=ESCAPE), (0, code.numel() % 2)).numpy()
    both = half.view(np.uint16)  # little-endian, as is all that travels
    return [torch.from_numpy((both | both >> 4).astype(np.uint8)), torch.from_numpy(wide)]


def step_limits(total: int) -> list[int]:
    """The most bytes of each stream, for `total` steps."""
    return [(total + 1) // 2, total]


def read_steps(pairs: StreamReader, wide: StreamReader, count: int) -> torch.Tensor:
    """Undo `step_streams`, for the next `count` steps: an even number, but for the last ones.

    Returns:
        int8 [count].

    Raises:
        CorruptFrameError: the streams end before.
    """
    both = pairs.read((count + 1) // 2, torch.uint8).numpy().astype(np.uint16)
    zigzag = torch.from_numpy(((both | both << 4) & 0x0F0F).view(np.uint8)[:count])
    escaped = places_of(zigzag, ESCAPE)
    zigzag[escaped] = wide.read(escaped.numel(), torch.uint8)
    return (zigzag >> 1).view(torch.int8) ^ -(zigzag & 1).view(torch.int8)
