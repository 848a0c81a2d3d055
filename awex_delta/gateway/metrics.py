"""What Prometheus scrapes. Labels are names of pairs, URLs of engines, and a few fixed words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from awex_delta.gateway.models import EngineReadiness, UpdateAnswer

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The numbers of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._updates = Counter(
            "awex_delta_updates",
            "Committed updates.",
            ("pair", "kind", "reason"),
            registry=registry,
        )
        self._failures = Counter(
            "awex_delta_failures",
            "Calls that failed at a side.",
            ("pair", "verb"),
            registry=registry,
        )
        self._refused = Counter(
            "awex_delta_refused",
            "Calls that did not fit the state of their pair.",
            ("pair", "verb"),
            registry=registry,
        )
        self._bytes = Counter(
            "awex_delta_wire_bytes",
            "Payload that trainers sent.",
            ("pair", "kind"),
            registry=registry,
        )
        self._share = Gauge(
            "awex_delta_changed_share",
            "Share of the owned elements that the last update with a detection sent as changed.",
            ("pair",),
            registry=registry,
        )
        self._phases = Histogram(
            "awex_delta_phase_seconds",
            "Time of the slowest trainer rank.",
            ("pair", "phase"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._version = Gauge(
            "awex_delta_version", "The last committed version.", ("pair",), registry=registry
        )
        self._ready = Gauge(
            "awex_delta_engine_ready",
            "1 where an engine may serve the pair's version, as last heard of.",
            ("pair", "engine"),
            registry=registry,
        )
        self._shown: dict[str, frozenset[str]] = {}

    def updated(self, answer: UpdateAnswer) -> None:
        """Count a committed update."""
        pair = answer.pair
        self._updates.labels(pair, answer.kind, answer.reason).inc()
        self._bytes.labels(pair, answer.kind).inc(answer.bytes)
        self._version.labels(pair).set(answer.version)
        if answer.changed_share is not None:
            self._share.labels(pair).set(answer.changed_share)
        for phase, seconds in answer.phases.items():
            self._phases.labels(pair, phase).observe(seconds)

    def failed(self, pair: str, verb: str) -> None:
        """Count a call that failed at a side."""
        self._failures.labels(pair, verb).inc()

    def refused(self, pair: str, verb: str) -> None:
        """Count a call that was refused."""
        self._refused.labels(pair, verb).inc()

    def engines(self, pair: str, engines: Iterable[EngineReadiness]) -> None:
        """Note which engines are ready."""
        self._show(pair, {engine.url: int(engine.ready) for engine in engines})

    def unready(self, pair: str, engines: Iterable[str]) -> None:
        """Take engines for not ready, from before an update until it is known to have committed."""
        self._show(pair, dict.fromkeys(engines, 0))

    def _show(self, pair: str, ready: Mapping[str, int]) -> None:
        """All engines of a pair; one that is no longer among them is no longer shown."""
        for gone in self._shown.get(pair, frozenset()) - ready.keys():
            self._ready.remove(pair, gone)
        self._shown[pair] = frozenset(ready)
        for url, value in ready.items():
            self._ready.labels(pair, url).set(value)

    def text(self) -> bytes:
        """All numbers, as Prometheus reads them."""
        return generate_latest(self._registry)
