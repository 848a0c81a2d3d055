"""What Prometheus scrapes. Labels are names of pairs, URLs of engines, and a few fixed words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from awex_delta.gateway.models import EngineReadiness, UpdateAnswer

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_MAX_WORDS = 32  # of a pair that a side may choose, such as names of phases; more are counted as "other"

Family: TypeAlias = Counter | Gauge | Histogram
One = TypeVar("One", Counter, Gauge, Histogram)


class Metrics:
    """The numbers of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        verb, kind = ("pair", "verb"), ("pair", "kind")
        self._updates = counter("awex_delta_updates", "Committed updates.", (*kind, "reason"))
        self._failures = counter("awex_delta_failures", "Calls that failed at a side.", verb)
        self._refused = counter("awex_delta_refused", "Calls that did not fit the state of their pair.", verb)
        self._bytes = counter("awex_delta_wire_bytes", "Payload that trainers sent.", kind)
        self._not_finite = counter(
            "awex_delta_not_finite_values", "NaN and infinite values that trainers sent.", ("pair",)
        )
        self._share = gauge(
            "awex_delta_changed_share",
            "Share of the owned elements that the last update with a detection sent as changed.",
            ("pair",),
        )
        self._phases = Histogram(
            "awex_delta_phase_seconds",
            "Time of the slowest trainer rank.",
            ("pair", "phase"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._version = gauge("awex_delta_version", "The last committed version.", ("pair",))
        self._ready = gauge(
            "awex_delta_engine_ready",
            "1 where an engine may serve the pair's version, as last heard of.",
            ("pair", "engine"),
        )
        self._series: dict[str, set[tuple[Family, tuple[str, ...]]]] = {}

    def updated(self, answer: UpdateAnswer) -> None:
        """Count a committed update."""
        pair = answer.pair
        self._of(self._updates, pair, answer.kind, self._word(self._updates, pair, answer.reason)).inc()
        self._of(self._bytes, pair, answer.kind).inc(answer.bytes)
        self._of(self._not_finite, pair).inc(answer.not_finite)
        self._of(self._version, pair).set(answer.version)
        if answer.changed_share is not None:
            self._of(self._share, pair).set(answer.changed_share)
        for phase, seconds in answer.phases.items():
            self._of(self._phases, pair, self._word(self._phases, pair, phase)).observe(seconds)

    def failed(self, pair: str, verb: str) -> None:
        """Count a call that failed at a side."""
        self._of(self._failures, pair, verb).inc()

    def refused(self, pair: str, verb: str) -> None:
        """Count a call that was refused."""
        self._of(self._refused, pair, verb).inc()

    def engines(self, pair: str, engines: Iterable[EngineReadiness]) -> None:
        """Note which engines are ready."""
        self._show(pair, {engine.url: int(engine.ready) for engine in engines})

    def unready(self, pair: str, engines: Iterable[str]) -> None:
        """Take engines for not ready, from before an update until it is known to have committed."""
        self._show(pair, dict.fromkeys(engines, 0))

    def _show(self, pair: str, ready: Mapping[str, int]) -> None:
        """Show all engines of a pair, and none that is no longer among them."""
        for url in self._last_labels(self._ready, pair) - ready.keys():
            self._ready.remove(pair, url)
            self._series[pair].remove((self._ready, (url,)))
        for url, value in ready.items():
            self._of(self._ready, pair, url).set(value)

    def forget(self, pair: str) -> None:
        """Show a pair no longer."""
        for family, labels in self._series.pop(pair, ()):
            family.remove(pair, *labels)

    def _of(self, family: One, pair: str, *labels: str) -> One:
        """One series, noted so that it can be forgotten with its pair."""
        self._series.setdefault(pair, set()).add((family, labels))
        return family.labels(pair, *labels)

    def _word(self, family: Family, pair: str, word: str) -> str:
        """What a side chose as a label, unless it chose too many."""
        known = self._last_labels(family, pair)
        return word if word in known or len(known) < _MAX_WORDS else "other"

    def _last_labels(self, family: Family, pair: str) -> set[str]:
        return {labels[-1] for one, labels in self._series.get(pair, ()) if one is family}

    def text(self) -> bytes:
        """All numbers, as Prometheus reads them."""
        return generate_latest(self._registry)
