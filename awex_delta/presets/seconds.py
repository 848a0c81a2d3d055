"""When a delta pays: its expected seconds against those of a full sync, by link speed and share changed.

A model of three terms, each from figures measured on CPUs: detection reads memory, encoding and decoding
take time on each change, and the fullest link carries the bytes. It leans towards the full sync, which is
charged for its bytes alone, while the terms of a delta are added although an update overlaps them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from awex_delta.errors import ConfigError
from awex_delta.presets.forecast import ENCODINGS, RunPlan
from awex_delta.wire.choice import expected_bytes, expected_seconds
from awex_delta.wire.registry import CODECS

LINKS = ("1gbit", "10gbit", "25gbit", "100gbit", "400gbit")
"""Link speeds for which a plan says the seconds, unless it is asked for others."""

MEMORY_BYTES_PER_SECOND = 2e12
"""Memory bandwidth of a trainer rank's device, unless it is given: that of an A100 with 80 GB."""

_DETECTION_BYTES = 15  # read and written for an owned element: docs/en/numerics.md
_DETECTION_SHARE = 0.38  # of that bandwidth: `awex-delta bench detect`
_BF16 = 2
_LINK = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit|tbit)", re.IGNORECASE)
_BITS = {"mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeconds:
    """One update over links of one speed, at one share of changed elements. All times are seconds.

    link: speed of each rank's link in each direction, as it was asked for.
    full: a full sync, its bytes alone.
    deltas: by encoding.
    best: the encoding that takes least.
    break_even: below this share of changed elements a delta of the best encoding takes less than a full
        sync; 0.0 if detection alone takes as long.
    """

    link: str
    changed_share: float
    full: float
    deltas: dict[str, float]
    best: str
    break_even: float


def parse_link(text: str) -> float:
    """Bytes that a link of this speed, such as 25gbit, carries in a second. Raises ConfigError."""
    found = _LINK.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"--link {text}: no speed. Remedy: write it in mbit, gbit or tbit, such as 25gbit")
    return float(found[1]) * _BITS[found[2].lower()] / 8


def seconds_by_link(
    plan: RunPlan,
    links: Sequence[str] = LINKS,
    memory_bytes_per_second: float = MEMORY_BYTES_PER_SECOND,
) -> tuple[LinkSeconds, ...]:
    """Expected seconds of full syncs and deltas.

    Args:
        plan: of the run.
        links: speeds, such as 25gbit.
        memory_bytes_per_second: memory bandwidth of a trainer rank's device.

    Raises:
        ConfigError: a speed is none.
    """
    shares = dict.fromkeys(row.changed_share for row in plan.traffic)
    if not memory_bytes_per_second > 0:
        raise ConfigError(
            f"--memory {memory_bytes_per_second / 1e9:g}: no bandwidth. Remedy: write GB/s, such as 2000"
        )
    speeds = {link: parse_link(link) for link in links}
    sent = plan.owned_elements * plan.num_replicas
    received = plan.engine_memory.weights // _BF16
    fullest = max(sent, received)  # elements through one rank's link
    detection = plan.owned_elements * _DETECTION_BYTES / (_DETECTION_SHARE * memory_bytes_per_second)

    def delta(encoding: str, share: float, speed: float) -> float:
        each = expected_seconds(CODECS[encoding], share) + expected_bytes(encoding, share) / speed
        return detection + fullest * share * each

    def best(share: float, speed: float) -> str:
        return min(ENCODINGS, key=lambda encoding: delta(encoding, share, speed))

    def break_even(speed: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(40):
            share = (low + high) / 2
            if delta(best(share, speed), share, speed) < fullest * _BF16 / speed:
                low = share
            else:
                high = share
        return low if low > 1e-9 else 0.0

    return tuple(
        LinkSeconds(
            link=link,
            changed_share=share,
            full=fullest * _BF16 / speed,
            deltas={encoding: delta(encoding, share, speed) for encoding in ENCODINGS},
            best=best(share, speed),
            break_even=break_even(speed),
        )
        for link, speed in speeds.items()
        for share in shares
    )


def assumptions(memory_bytes_per_second: float = MEMORY_BYTES_PER_SECOND) -> str:
    """What the seconds assume, for people."""
    return (
        "Assumed: each rank has a link of this speed in each direction, and the fullest one decides; a full "
        f"sync takes its bytes alone; detection moves {_DETECTION_BYTES} bytes per owned element at "
        f"{_DETECTION_SHARE:.0%} of {memory_bytes_per_second / 1e9:,.0f} GB/s; encoding and decoding run on "
        "one CPU core per rank, as measured (docs/en/wire.md); the terms are added, although an update "
        "overlaps them; changes are spread evenly. Not counted: agreements, digests, latency."
    )
