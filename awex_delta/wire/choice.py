"""Which encoding is fastest: work a change, measured once, against the bytes that it saves on this link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from awex_delta.wire.codec import Codec

AUTO = "auto"
"""The setting under which the sender chooses for each update."""

WORK_SECONDS: Mapping[str, float] = {
    "indices": 11e-9,
    "gaps": 20e-9,
    "ulp": 43e-9,
    "ulp_zstd": 51e-9,
    "ulp_context": 150e-9,
}
"""Encoding and decoding one change on one core of a server, in its processor time (docs/en/wire.md)."""

MIN_SAMPLE_BYTES = 1 << 20
"""What a transfer must carry to say something about the link; less measures latency."""


def expected_bytes(name: str, share: float) -> float:
    """Bytes a changed bf16 element takes, where changes are spread evenly.

    Args:
        name: a key of WORK_SECONDS.
        share: changed elements over all elements, in (0, 1].
    """
    if name == "indices":
        return 6.0
    gap = 1 + 2 * (1 - share) ** 255  # one byte, and two more beyond 254
    if name == "gaps":
        return gap + 2
    if name == "ulp":
        return gap + 0.53
    rest = 1 - share
    bits = -math.log2(share) - (rest * math.log2(rest) / share if rest else 0.0)
    packed = bits / 8 + 0.26
    return packed * 0.75 if name == "ulp_context" else packed


def cheapest(codecs: Sequence[Codec], share: float, bytes_per_second: float | None) -> Codec:
    """The encoding whose work and transfer take the least time.

    Args:
        codecs: those to choose from; one alone needs no other argument.
        share: changed elements over owned elements.
        bytes_per_second: what this rank's last large transfer ran at; None before the first: then the
            encoding of the least work.
    """
    known = [codec for codec in codecs if codec.name in WORK_SECONDS]
    if len(codecs) == 1 or not known:
        return codecs[0]
    if not share or not bytes_per_second:
        return min(known, key=lambda codec: WORK_SECONDS[codec.name])
    rate = bytes_per_second
    return min(known, key=lambda codec: WORK_SECONDS[codec.name] + expected_bytes(codec.name, share) / rate)
