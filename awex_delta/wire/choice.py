"""Which encoding is fastest: its work on each change, measured once, against the bytes that it saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from awex_delta.wire.codec import Codec

AUTO = "auto"
"""The setting under which the sender chooses for each update."""

_WORK_SECONDS: Mapping[str, float] = {
    "indices": 11e-9,
    "gaps": 20e-9,
    "ulp": 43e-9,
    "ulp_zstd": 51e-9,
    "ulp_context": 50e-9,
}
_WALK_SECONDS = 2.2e-9

MIN_SAMPLE_BYTES = 1 << 20
"""What a transfer must carry to say something about the link; less measures latency."""


def expected_seconds(codec: Codec, share: float) -> float:
    """The work on a changed element: its encoding and decoding on one core of a server (docs/en/wire.md).

    An encoding that needs context walks all weights on both sides, so its work grows as fewer change.

    Args:
        codec: one of the registry.
        share: changed elements over all elements, in (0, 1].
    """
    return _WORK_SECONDS[codec.name] + (_WALK_SECONDS / share if codec.needs_context else 0.0)


def expected_bytes(name: str, share: float) -> float:
    """Bytes that a changed bf16 element takes if changes are spread evenly.

    Args:
        name: of an encoding of the registry.
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
        codecs: those to choose from. If there is only one, the other arguments are not used.
        share: changed elements over owned elements.
        bytes_per_second: the speed of this rank's last large transfer. Other senders used the link at the
            same time, so it is this rank's part of the link. None before the first such transfer: then the
            encoding with the least work is taken.
    """
    known = [codec for codec in codecs if codec.name in _WORK_SECONDS]
    if len(codecs) == 1 or not known:
        return codecs[0]
    if not share or not bytes_per_second:
        return min(known, key=lambda codec: expected_seconds(codec, share or 1.0))

    def seconds(codec: Codec) -> float:
        return expected_seconds(codec, share) + expected_bytes(codec.name, share) / bytes_per_second

    return min(known, key=seconds)
