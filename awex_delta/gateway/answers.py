"""What the gateway concludes from what its sides answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from awex_delta.gateway.client import SideFailure
from awex_delta.gateway.models import EngineReadiness, UpdateAnswer
from awex_delta.gateway.side_models import PairOnSide, SideAnswer, SideState

Value = TypeVar("Value")


class SidesFailed(Exception):
    """Some sides did not do what they were asked. said: why, by URL. status: HTTP status of the answer."""

    def __init__(self, begin: str, said: Mapping[str, str], *, status: int = 502) -> None:
        told = "; ".join(f"{url} {text[:400]}" for url, text in list(said.items())[:4])
        super().__init__(f"{begin}: {told}" if told else begin)
        self.said = dict(said)
        self.status = status


def all_of(answers: Mapping[str, Value | SideFailure], otherwise: str) -> dict[str, Value]:
    """The answers, if every side gave one. Raises SidesFailed, which begins with `otherwise`."""
    failed = failures(answers)
    if failed:
        raise SidesFailed(otherwise, failed)
    return {url: one for url, one in answers.items() if not isinstance(one, SideFailure)}


def failures(answers: Mapping[str, Value | SideFailure]) -> dict[str, str]:
    """What those sides said that failed, by URL."""
    return {url: one.text for url, one in answers.items() if isinstance(one, SideFailure)}


def holds(state: SideState, pair: str, connection: str) -> bool:
    """Whether a side is in this connection of a pair."""
    held = state.pairs.get(pair)
    return held is not None and held.connected and held.connection == connection


def require_idle(states: Mapping[str, SideState], pair: str, connection: str, begin: str) -> None:
    """Refuse to begin an update that some rank would not take part in, for which all others would wait.

    Raises SidesFailed if a side is not in this connection, or busy. It begins with `begin`.
    """
    said = {}
    for url, state in states.items():
        if not holds(state, pair, connection):
            said[url] = "does not hold this connection (was it restarted?): POST /connect again"
        elif state.busy:
            said[url] = f"is busy with {state.busy}"
    if said:
        raise SidesFailed(begin, said)


def readiness(pair: str, version: int | None, url: str, state: SideState | SideFailure) -> EngineReadiness:
    """Whether one engine may serve the pair's version, None before the first, and why not."""
    if isinstance(state, SideFailure):
        return EngineReadiness(url=url, ready=False, version=None, why=state.text)
    held = state.pairs.get(pair)
    if held is None:
        return EngineReadiness(url=url, ready=False, version=None, why="it has not joined this pair")
    return _readiness(version, url, held)


def readiness_after(version: int, url: str, answer: SideAnswer) -> EngineReadiness:
    """The same, from what the engine answered to an update or a publication of `version`."""
    return _readiness(version, url, answer.pair)


def _readiness(version: int | None, url: str, held: PairOnSide) -> EngineReadiness:
    why = held.why
    if not why and held.connected and held.version != version:
        pair = (
            "the pair has committed none since it connected"
            if version is None
            else f"the pair's is {version}"
        )
        why = f"it holds version {held.version}, {pair}"
    return EngineReadiness(url=url, ready=not why, version=held.version, why=why)


def summary(pair: str, version: int, trainers: Sequence[SideAnswer]) -> UpdateAnswer:
    """What a committed update did, by the trainers' answers. Raises SidesFailed if none of them says it."""
    counts = [answer.counts for answer in trainers if answer.counts is not None]
    if not counts:
        raise SidesFailed(f"version {version}: no trainer says what it did", {})
    first = counts[0]
    names = dict.fromkeys(phase for one in counts for phase in one.seconds)
    return UpdateAnswer(
        pair=pair,
        version=version,
        kind=first.kind,
        reason=first.reason,
        verdict=first.verdict,
        bytes=first.total_wire_bytes,
        full_bytes=first.full_bytes,
        changed_share=first.total_changed / first.total_owned if first.total_owned else None,
        not_finite=first.total_not_finite,
        seconds=max(sum(one.seconds.values()) for one in counts),
        phases={phase: max(one.seconds.get(phase, 0.0) for one in counts) for phase in names},
    )
