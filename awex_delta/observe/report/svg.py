"""Matplotlib figures as inline SVG whose colours are the page's, so that one picture serves light and dark.

A figure is drawn in stand-in colours that nothing else uses; in the SVG each becomes a CSS variable.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE, ACCENT, WARN = (f"#01010{i}" for i in range(6))
NUM_HEATS, NUM_PHASES = 16, 8
HEATS = tuple(f"#0102{i:02x}" for i in range(NUM_HEATS))
PHASES = tuple(f"#0103{i:02x}" for i in range(NUM_PHASES))

_VARIABLES: Mapping[str, str] = {
    **dict(
        zip(
            (INK, MUTED, GRID, SURFACE, ACCENT, WARN),
            ("ink", "muted", "rule", "surface", "accent", "warn"),
            strict=True,
        )
    ),
    **{colour: f"heat-{i}" for i, colour in enumerate(HEATS)},
    **{colour: f"phase-{i}" for i, colour in enumerate(PHASES)},
}
_STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: the page's font, and found by a search
    "svg.hashsalt": "awex-delta",  # the same run makes the same page
    "font.size": 8,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 1.4,
    "text.parse_math": False,  # names come from the run
}  # fmt: skip


def styled() -> AbstractContextManager[None]:
    """The style of all figures, in force while they are drawn; matplotlib's own comes back afterwards."""
    return rc_context(dict(_STYLE))


class Canvas:
    """One figure while it is drawn on `axes`, under `styled()`.

    wide: False for the variant that phones show.
    """

    def __init__(self, *, wide: bool, height: float = 2.4) -> None:
        """Open a figure of 7.6 inches if wide, else 3.6; `height` is in inches."""
        self.wide = wide
        self._figure = Figure(figsize=(7.6 if wide else 3.6, height), layout="constrained")
        self.axes: Axes = self._figure.subplots()

    def svg(self, name: str, alt: str) -> str:
        """Close the figure, whose name is unique on the page and keeps the identifiers of figures apart.

        alt: what the picture shows, for those who do not see it.
        """
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        self._figure.savefig(buffer, format="svg", metadata=nothing)
        return _adopt(buffer.getvalue(), name, alt)


def _adopt(text: str, name: str, alt: str) -> str:
    """A file's SVG as part of a page."""
    text = text[text.index("<svg") :].strip()
    text = re.sub("|".join(_VARIABLES), lambda match: f"var(--{_VARIABLES[match[0]]})", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    box = re.search(r'viewBox="[^"]+"', text)
    head = f'<svg role="img" aria-label="{html.escape(alt)}" {box[0] if box else ""} xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)
