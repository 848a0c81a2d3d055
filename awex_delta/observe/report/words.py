"""Numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "\N{EN DASH}"
"""Where there is no number."""

_UNIT = "\N{NO-BREAK SPACE}"


def percent(share: float) -> str:
    """A share with three significant digits: 0.0123 is 1.23 %."""
    value = 100 * share
    if value == 0 or value >= 99.95:
        return f"{value:.0f}{_UNIT}%"
    digits = f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
    return f"{digits}{_UNIT}%"


def size(num_bytes: float) -> str:
    """Bytes in decimal units: 1675776 is 1.68 MB."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g}{_UNIT}{unit}"


def seconds(value: float) -> str:
    """A duration: 85 ms, 1.24 s, 2 min 5 s."""
    if value < 1:
        return f"{1000 * value:.3g}{_UNIT}ms"
    if value < 120:
        return f"{value:.3g}{_UNIT}s"
    return f"{int(value // 60)}{_UNIT}min {value % 60:.0f}{_UNIT}s"


def numbers(values: Sequence[int], limit: int = 12) -> str:
    """Ascending numbers, neighbours drawn together with a dash; after `limit` entries how many more."""
    runs: list[tuple[int, int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}{NONE}{b}" for a, b in runs[:limit]]
    rest = sum(b - a + 1 for a, b in runs[limit:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def short(name: str, limit: int = 26) -> str:
    """A name that fits beside a picture: the middle of a longer one is left out."""
    return (
        name
        if len(name) <= limit
        else f"{name[: limit // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{name[-limit // 2 :]}"
    )
