"""Steps as half bytes: nearly all of them are a few units in the last place.

    step, 4 bit     zigzag, two a byte, the first in the lower half; 15 says that it is in the next stream
    step, 8 bit     zigzag; 255 is -128: no step, the new value is sent

Zigzag orders by size: 0, -1, 1, -2, 2 .. -128 are 0, 1, 2, 3, 4 .. 255. Two steps a byte also help the
compression of `wire.streams`, whose Huffman codes spend whole bits on a symbol.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from awex_delta.errors import CorruptFrameError

ESCAPE = 15


def step_streams(code: torch.Tensor) -> list[torch.Tensor]:
    """Pack steps.

    Args:
        code: int8 [n], any values.

    Returns:
        uint8 [(n + 1) // 2] and uint8 [steps beyond ±7].

    Collective: no.
    """
    zigzag = ((code << 1) ^ (code >> 7)).view(torch.uint8)
    wide = zigzag[zigzag >= ESCAPE]
    half = zigzag.clamp_(max=ESCAPE)
    pairs = half[0::2].clone()
    pairs[: half.numel() // 2] |= half[1::2] << 4
    return [pairs, wide]


def step_limits(total: int) -> list[int]:
    """The most bytes of each stream, for `total` steps."""
    return [(total + 1) // 2, total]


def stated_steps(streams: Sequence[torch.Tensor], total: int) -> torch.Tensor:
    """Undo `step_streams`.

    Args:
        streams: the two of them.
        total: number of steps.

    Returns:
        int8 [total].

    Raises:
        CorruptFrameError: the streams do not fit each other or `total`.

    Collective: no.
    """
    pairs, wide = streams
    if pairs.numel() != (total + 1) // 2:
        raise CorruptFrameError(f"{pairs.numel()} pairs of steps for {total} changed elements")
    zigzag = torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1)[:total]
    escaped = (zigzag == ESCAPE).nonzero().view(-1)
    if escaped.numel() != wide.numel():
        raise CorruptFrameError(f"{wide.numel()} wide steps for {escaped.numel()} escapes")
    zigzag[escaped] = wide
    return (zigzag >> 1).view(torch.int8) ^ -(zigzag & 1).view(torch.int8)
