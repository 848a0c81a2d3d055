"""The pictures of a report. Each is drawn twice: for a wide page, and for a phone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from awex_delta.observe.report import words
from awex_delta.observe.report.summary import parts_of, ratio_of, share_of
from awex_delta.observe.report.svg import (
    ACCENT,
    GRID,
    HEATS,
    INK,
    MUTED,
    PHASES,
    SURFACE,
    WARN,
    Canvas,
    styled,
)
from awex_delta.observe.runlog.writer import UpdateLine

_BARS_UP_TO = 60
_PHASE_ORDER = ("detect", "propose", "prepare", "encode", "transfer", "stage", "apply")
_MAX_METRICS = 8
_DOTS_UP_TO = 200
_LEGEND: Mapping[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "borderaxespad": 0,
    "columnspacing": 1.0,
    "handlelength": 0.9,
    "handletextpad": 0.4,
}
_KIND_NAMES = {"delta": "delta", "full": "full sync"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure for the page: its name, heading, caption and both variants as SVG.

    scale: what the palest and the strongest colour of a heat map stand for.
    """

    name: str
    title: str
    caption: str
    wide: str
    narrow: str
    scale: tuple[str, str] | None = None


def pictures(updates: Sequence[UpdateLine]) -> list[Picture]:
    """All figures that the run has numbers for, in the order of the page."""
    committed = [line for line in updates if line.kind != "aborted"]
    deltas = [line for line in committed if line.kind == "delta"]
    found: list[Picture] = []
    if deltas:
        found.append(_changed(committed))
    if any(layer is not None for layer, _ in parts_of(deltas)):
        found.append(_heat(deltas))
    if committed:
        found.append(_bytes(committed))
    if any(phase in line.seconds for line in committed for phase in _PHASE_ORDER):
        found.append(_phases(committed))
    return [*found, *_metrics(committed)]


def places_of(updates: Sequence[UpdateLine]) -> tuple[list[int], str]:
    """Where updates stand on the x axis: at their version, or one after the other where versions go back."""
    versions = [line.version for line in updates]
    if all(before < after for before, after in pairwise(versions)):
        return versions, "version"
    return list(range(1, len(versions) + 1)), "update"


def _both(name: str, title: str, caption: str, draw: Callable[[bool], Canvas]) -> Picture:
    with styled():
        wide = draw(True).svg(f"{name}-wide", caption)  # noqa: FBT003 - see `draw`
        narrow = draw(False).svg(f"{name}-narrow", caption)  # noqa: FBT003
    return Picture(name=name, title=title, caption=caption, wide=wide, narrow=narrow)


def _changed(committed: Sequence[UpdateLine]) -> Picture:
    places, label = places_of(committed)
    points = [
        (x, 100 * share_of(line)) for x, line in zip(places, committed, strict=True) if line.kind == "delta"
    ]
    fulls = [x for x, line in zip(places, committed, strict=True) if line.kind == "full"]

    def draw(wide: bool) -> Canvas:
        canvas = Canvas(wide=wide)
        axes = canvas.axes
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=ACCENT, marker="o", markersize=2.4 if len(points) < _DOTS_UP_TO else 0)
        axes.set_ylim(0, 1.15 * max(ys) or 1)
        _mark_fulls(axes, fulls)
        axes.set_ylabel("changed, % of elements")
        _finish(axes, label, places)
        return canvas

    shares = [y / 100 for _, y in points]
    caption = (
        "Share of the trained elements whose bf16 bits a delta found changed: from "
        f"{words.percent(min(shares))} to {words.percent(max(shares))}, last {words.percent(shares[-1])}."
    )
    if fulls:
        caption += " Marks at the foot are full syncs, where nothing is detected."
    return _both("changed", "What changed", caption, draw)


def _mark_fulls(axes: Axes, fulls: Sequence[int]) -> None:
    foot = axes.get_xaxis_transform()
    style: dict[str, Any] = {
        "linestyle": "",
        "marker": "^",
        "markersize": 4.5,
        "color": WARN,
        "clip_on": False,
    }
    axes.plot(fulls, [0.0] * len(fulls), transform=foot, **style)


def _heat(deltas: Sequence[UpdateLine]) -> Picture:
    counts = {place: count for place, count in parts_of(deltas).items() if place[0] is not None and count[1]}
    shares = {(layer or 0, kind): changed / owned for (layer, kind), (changed, owned) in counts.items()}
    positive = [share for share in shares.values() if share]
    high = max(positive, default=0.01)
    low = min(min(positive, default=0.001), high / 2)
    caption = (
        "Share of elements that changed, over all deltas, by layer and kind of tensor: from "
        f"{words.percent(min(shares.values()))} to {words.percent(max(shares.values()))}. "
        "The scale is logarithmic; the numbers stand in a table below."
    )

    def draw(wide: bool) -> Canvas:
        return _draw_map(shares, low, high, wide=wide)

    picture = _both("heat", "Where it changed", caption, draw)
    return replace(picture, scale=(words.percent(low), words.percent(high)))


def _draw_map(shares: Mapping[tuple[int, str], float], low: float, high: float, *, wide: bool) -> Canvas:
    """Layers run across a wide page, and down a phone's."""
    layers, kinds = sorted({layer for layer, _ in shares}), list(dict.fromkeys(kind for _, kind in shares))
    rows, columns = (len(kinds), len(layers)) if wide else (len(layers), len(kinds))
    canvas = Canvas(wide=wide, height=0.8 + 0.24 * rows if wide else 2.2 + min(0.16 * rows, 7.0))
    axes = canvas.axes
    for (layer, kind), share in shares.items():
        at = (layers.index(layer), kinds.index(kind))
        x, y = at if wide else at[::-1]
        colour = _heat_of(share, low, high)
        axes.broken_barh([(x, 1)], (y, 1), facecolor=colour, edgecolor=SURFACE, linewidth=0.8)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    every = max(1, math.ceil(len(layers) / 24))
    middles = [i + 0.5 for i in range(0, len(layers), every)]
    of_layers, of_kinds = (axes.xaxis, axes.yaxis) if wide else (axes.yaxis, axes.xaxis)
    of_layers.set_ticks(middles, [str(layer) for layer in layers[::every]])
    of_layers.set_label_text("layer")
    of_kinds.set_ticks([i + 0.5 for i in range(len(kinds))], [words.short(kind) for kind in kinds])
    if not wide:
        axes.tick_params(axis="x", labelrotation=55)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    return canvas


def _heat_of(share: float, low: float, high: float) -> str:
    if share <= low:
        return HEATS[0]
    place = math.log(share / low) / math.log(high / low)
    return HEATS[min(len(HEATS) - 1, int(place * len(HEATS)))]


def _bytes(committed: Sequence[UpdateLine]) -> Picture:
    places, label = places_of(committed)
    full_bytes = max(line.full_bytes for line in committed)
    deltas = [line for line in committed if line.kind == "delta"]

    def draw(wide: bool) -> Canvas:
        canvas = Canvas(wide=wide)
        axes = canvas.axes
        for kind, colour, marker in (("delta", ACCENT, "o"), ("full", WARN, "^")):
            shown = [(x, line) for x, line in zip(places, committed, strict=True) if line.kind == kind]
            ys = [max(line.total_wire_bytes, 1) for _, line in shown]
            style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 3.2, "color": colour}
            axes.plot([x for x, _ in shown], ys, label=_KIND_NAMES[kind], **style)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(low)), max(high, 2 * full_bytes))
        if full_bytes:
            axes.axhline(full_bytes, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
            to_percent: Any = lambda y: 100 * y / full_bytes  # noqa: E731 - one of a pair of formulas
            to_bytes: Any = lambda y: y * full_bytes / 100  # noqa: E731
            beside = axes.secondary_yaxis("right", functions=(to_percent, to_bytes))
            beside.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            beside.set_ylabel("% of a full sync")
            beside.spines[:].set_visible(False)
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: words.size(y)))
        axes.legend(**_LEGEND, ncols=2)
        _finish(axes, label, places)
        return canvas

    caption = (
        f"Payload of each update to all engines; the dashed line is a full sync, {words.size(full_bytes)}."
    )
    if deltas:
        best, worst = min(map(ratio_of, deltas)), max(map(ratio_of, deltas))
        caption += f" Deltas took {words.percent(best)} to {words.percent(worst)} of it."
    return _both("bytes", "What was sent", caption, draw)


def _phases(committed: Sequence[UpdateLine]) -> Picture:
    places, label = places_of(committed)
    other = {phase for line in committed for phase in line.seconds} - {"connect", *_PHASE_ORDER}
    phases = [p for p in (*_PHASE_ORDER, *sorted(other)) if any(line.seconds.get(p) for line in committed)]
    stacks: Mapping[str, list[float]] = {p: [line.seconds.get(p, 0.0) for line in committed] for p in phases}

    def draw(wide: bool) -> Canvas:
        canvas = Canvas(wide=wide, height=2.7)
        axes = canvas.axes
        floor = [0.0] * len(places)
        for i, (phase, values) in enumerate(stacks.items()):
            top = [a + b for a, b in zip(floor, values, strict=True)]
            style: dict[str, Any] = {"color": PHASES[i % len(PHASES)], "label": words.short(phase, 16)}
            if len(places) <= _BARS_UP_TO:
                axes.bar(places, values, 0.82, bottom=floor, **style)
            else:
                axes.fill_between(places, floor, top, step="mid", linewidth=0, **style)
            floor = top
        axes.set_ylabel("seconds")
        axes.legend(**_LEGEND, ncols=len(phases) if wide else 4)
        _finish(axes, label, places)
        return canvas

    totals = [sum(column) for column in zip(*stacks.values(), strict=True)]
    least, most = words.seconds(min(totals)), words.seconds(max(totals))
    caption = f"Seconds of each update on trainer rank 0, by phase: from {least} to {most}."
    connecting = sum(line.seconds.get("connect", 0.0) for line in committed)
    if connecting:
        caption += f" Connecting, {words.seconds(connecting)} in all, is left out."
    return _both("phases", "Where the time went", caption, draw)


def _metrics(committed: Sequence[UpdateLine]) -> list[Picture]:
    places, label = places_of(committed)
    series: dict[str, list[tuple[int, float]]] = {}
    for x, line in zip(places, committed, strict=True):
        for name, value in line.extra.items():
            if isinstance(value, float | int) and not isinstance(value, bool):
                series.setdefault(name, []).append((x, float(value)))
    return [
        _metric(f"metric-{i}", name, points, label)
        for i, (name, points) in enumerate(series.items())
        if i < _MAX_METRICS
    ]


def _metric(key: str, name: str, points: Sequence[tuple[int, float]], label: str) -> Picture:
    def draw(wide: bool) -> Canvas:
        canvas = Canvas(wide=wide, height=1.9)
        xs, ys = zip(*points, strict=True)
        dots = 2 if len(points) < _DOTS_UP_TO else 0
        canvas.axes.plot(xs, ys, color=INK, linewidth=1.1, marker="o", markersize=dots)
        _finish(canvas.axes, label, xs)
        return canvas

    first, last = points[0][1], points[-1][1]
    return _both(key, name, f"From {first:.4g} at the first update to {last:.4g} at the last.", draw)


def _finish(axes: Axes, label: str, places: Sequence[int]) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlim(min(places) - 0.6, max(places) + 0.6)
    axes.tick_params(color=GRID, length=3)
