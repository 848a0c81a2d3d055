"""A span of a pair's line, and how the values in it are read.

A pair's line numbers the elements that one sender owns and one receiver stores, in the sender's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

MAX_SPAN = 1 << 32
"""The most elements in the span of one frame, so that positions in it fit 32 bits."""

Read = Callable[[int, int], torch.Tensor]
"""`read(start, stop)`: the values at these positions of a pair's line, flat, in its dtype, on the CPU.

The sender reads the values after the step, the receiver those of the base, which it holds.
"""

Old = Callable[[torch.Tensor], torch.Tensor]
"""`old(pos)`: the bf16 values that a receiver holds at some positions of a pair's line, on their device."""


class Span(NamedTuple):
    """The elements of a pair's line from `begin` up to `end`."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.end - self.begin
