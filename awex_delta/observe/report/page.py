"""The page itself: HTML with its style and pictures inside, no script, nothing fetched from elsewhere.

Whatever comes from the run is escaped. Exact numbers stand in `<data value=...>` beside what a person reads.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

from awex_delta._version import __version__
from awex_delta.observe.report import words
from awex_delta.observe.report.figures import Picture, pictures
from awex_delta.observe.report.summary import (
    Summary,
    causes,
    duration_of,
    parts_of,
    ratio_of,
    share_of,
    summarize,
)
from awex_delta.observe.report.svg import NUM_HEATS
from awex_delta.observe.runlog.reader import RunHistory
from awex_delta.observe.runlog.writer import UpdateLine

# A browser fetches and runs nothing for this page, even if something in it asked for it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(history: RunHistory) -> str:
    """The whole page for a run."""
    summary, updates = summarize(history.updates), history.updates
    header = history.headers[-1]
    subject = header.model or history.file
    title = f"Weight updates of {subject}" if subject else "Weight updates"
    made = f"Made by awex-delta {__version__} from {history.file or 'a run log'}"
    body = [
        f"<header><h1>{escape(title)}</h1>{_about(history)}</header>",
        _lead(summary),
        _merits(summary),
        *(f'<p class="note">{escape(note)}</p>' for note in history.notes),
        *(_figure(picture, _outside(updates)) for picture in pictures(updates)),
        _causes(updates),
        "<section><h2>Numbers</h2>",
        _updates_table(updates),
        _parts_table(updates),
        _digests_table(updates),
        _facts("Settings", header.settings),
        _facts("Environment", header.environment),
        "</section>",
        f"<footer>{escape(made)}.</footer>",
    ]
    return _document(title, "\n".join(part for part in body if part))


def escape(value: object) -> str:
    """Any value as text inside an element or an attribute."""
    return html.escape(str(value))


def _document(title: str, body: str) -> str:
    style = files("awex_delta.observe.report").joinpath("report.css").read_text(encoding="utf-8")
    heats = "".join(
        f"--heat-{i}: color-mix(in oklab, var(--deep) {round(100 * i / (NUM_HEATS - 1))}%, var(--pale)); "
        for i in range(NUM_HEATS)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}:root {{ {heats}}}\n</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _about(history: RunHistory) -> str:
    header = history.headers[-1]
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(history.headers[0].started))
    lives = f", started {len(history.headers)} times" if len(history.headers) > 1 else ""
    words_ = [f"{name} {value}" for name, value in header.topology.items()]
    ranks = f"{header.num_ranks} trainer rank{'s' if header.num_ranks > 1 else ''}"
    return f'<p class="about">{escape(" · ".join([*words_, ranks, f"since {started}{lives}"]))}</p>'


def _lead(summary: Summary) -> str:
    if not summary.num_updates:
        return '<p class="lead">No update was attempted.</p>'
    text = f"{summary.num_deltas} of {summary.num_updates} updates were deltas."
    if summary.ratio is not None:
        text += (
            f" Together, all updates took {words.percent(summary.ratio)} of the bytes of full syncs alone."
        )
    if summary.num_fallbacks or summary.num_aborted:
        text += (
            f" {summary.num_fallbacks} fell back to a full sync that no schedule asked for, "
            f"and {summary.num_aborted} did not commit; the reasons stand below."
        )
    elif summary.num_expected_full:
        text += " Every full sync was one that the schedule asks for."
    return f'<p class="lead">{escape(text)}</p>'


def _merits(summary: Summary) -> str:
    unplanned = summary.num_fallbacks + summary.num_aborted
    rows = [
        ("Sent", "total_wire_bytes", words.size),
        ("A delta, of a full sync", "delta_ratio", words.percent),
        ("Changed by a step, median", "delta_share", words.percent),
        ("A delta, median", "delta_seconds", words.seconds),
        ("A full sync, median", "full_seconds", words.seconds),
    ]
    merits = [(name, key, _data(getattr(summary, key), as_words), "") for name, key, as_words in rows]
    merits.append(("Fallbacks and failures", "unplanned", _data(unplanned, str), "bad" if unplanned else ""))
    cells = "".join(
        f'<div id="{key}" class="{mark}"><dt>{name}</dt><dd>{value}</dd></div>'
        for name, key, value, mark in merits
    )
    return f'<dl class="figures-of-merit">{cells}</dl>'


def _data(value: float | None, as_words: Callable[[Any], str]) -> str:
    """A number for a program in one for a person."""
    return words.NONE if value is None else f'<data value="{value!r}">{escape(as_words(value))}</data>'


def _figure(picture: Picture, outside: str) -> str:
    """outside: said below the map, which has no place for tensors that belong to no layer."""
    scale = more = ""
    if picture.scale:
        low, high = map(escape, picture.scale)
        scale = f'<span class="scale">{low}<i role="presentation"></i>{high}</span><br>'
        more = f" {escape(outside)}"
    return (
        f'<section id="{picture.name}"><h2>{escape(picture.title)}</h2><figure>'
        f'<div class="wide">{picture.wide}</div><div class="narrow">{picture.narrow}</div>'
        f"<figcaption>{scale}{escape(picture.caption)}{more}</figcaption></figure></section>"
    )


def _outside(updates: Sequence[UpdateLine]) -> str:
    """Tensors that belong to no layer, in a sentence."""
    shares = [
        f"{kind} {words.percent(changed / owned)}"
        for (layer, kind), (changed, owned) in parts_of(updates).items()
        if layer is None and owned
    ]
    return f"Outside the layers: {', '.join(shares)}." if shares else ""


def _causes(updates: Sequence[UpdateLine]) -> str:
    found = causes(updates)
    if not found:
        return ""
    rows = []
    for cause in found:
        what = "did not commit" if cause.kind == "aborted" else "full"
        detail = f"<br><code>{escape(cause.detail)}</code>" if cause.detail else ""
        seats = f" (seat {', '.join(map(str, cause.seats))})" if cause.seats else ""
        mark = "" if cause.expected else ' class="warn"'
        rows.append(
            [
                f"<span{mark}>{what}</span>",
                f"<code>{escape(cause.reason)}</code> {escape(cause.text + seats)}{detail}",
                _data(len(cause.versions), str),
                escape(words.numbers(cause.versions)),
            ]
        )
    table = _table(["update", "reason", "#times", "versions"], rows, "causes")
    return f"<section><h2>Anchors and fallbacks</h2>{table}</section>"


def _updates_table(updates: Sequence[UpdateLine]) -> str:
    rows = []
    for line in updates:
        first, *rest = (
            _data(line.version, str),
            _data(line.total_changed, _grouped),
            _data(share_of(line) if line.total_owned else None, words.percent),
            _data(line.total_wire_bytes, _grouped),
            _data(ratio_of(line) if line.full_bytes else None, words.percent),
            _data(duration_of(line) if line.seconds else None, words.seconds),
        )
        why = "" if line.kind == "delta" else f" <code>{escape(line.reason)}</code>"
        rows.append([first, escape(line.kind) + why, *rest])
    head = ["#version", "update", "#changed", "#share", "#bytes", "#of full", "#time"]
    return _details(f"All {len(updates)} updates", _table(head, rows, "updates"))


def _grouped(value: int) -> str:
    return f"{value:,}"


def _parts_table(updates: Sequence[UpdateLine]) -> str:
    rows = [
        [
            words.NONE if layer is None else str(layer),
            f"<code>{escape(kind)}</code>",
            _data(changed, _grouped),
            _data(owned, _grouped),
            _data(changed / owned if owned else None, words.percent),
        ]
        for (layer, kind), (changed, owned) in parts_of(updates).items()
    ]
    if not rows:
        return ""
    table = _table(["#layer", "kind", "#changed", "#elements", "#share"], rows, "parts")
    return _details("Changes by layer and kind, summed over all deltas", table)


def _digests_table(updates: Sequence[UpdateLine]) -> str:
    rows = [
        [str(line.version), escape(name), f"<code>{escape(digest)}</code>"]
        for line in updates
        for name, digest in line.digests.items()
    ]
    return _details("Digests", _table(["#version", "of", "digest"], rows, "digests")) if rows else ""


def _facts(title: str, facts: dict[str, float | int | str | bool | None]) -> str:
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return _details(title, f'<dl class="plain">{pairs}</dl>') if pairs else ""


def _details(title: str, inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str) -> str:
    """A table of HTML cells; columns whose heading begins with # hold numbers."""
    marks = [' class="number"' if text.startswith("#") else "" for text in head]
    heads = "".join(
        f'<th scope="col"{mark}>{text.removeprefix("#")}</th>' for text, mark in zip(head, marks, strict=True)
    )
    lines = "".join(
        "<tr>" + "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table id="{name}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{lines}</tbody></table></div>"
    )
