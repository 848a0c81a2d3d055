"""What the gateway and the sides tell each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from awex_delta.gateway.models import (
    MAX_SENTENCE_CHARS,
    STRICT,
    Amount,
    Count,
    Index,
    Life,
    Name,
    PairConfig,
    Seconds,
    Sentence,
    Version,
    Word,
)
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Reason

Verb = Literal["connect", "update_weights", "publish", "disconnect"]


class Attempt(BaseModel):
    """What every call of the gateway says: for which pair, and in which of its connections."""

    model_config = STRICT

    pair: Name
    connection: Life


class SideConnect(Attempt):
    """Meet the other side."""

    config: PairConfig
    meeting: Rendezvous
    first_rank: Index
    engine: Name


class SideUpdate(Attempt):
    """Take part in one update. `attempt` grows with each; the same one again gets the same answer."""

    version: Version
    attempt: Version


class SidePublish(Attempt):
    """The trainer has committed this version."""

    version: Version


class SideDisconnect(Attempt):
    """Leave."""


class Counts(BaseModel):
    """What an update did, as this side knows it (`UpdateStats`)."""

    kind: Literal["full", "delta"]
    reason: Word
    verdict: Sentence
    total_wire_bytes: Amount
    total_changed: Amount
    total_owned: Amount
    total_not_finite: Amount = 0
    full_bytes: Amount
    seconds: Annotated[dict[Word, Seconds], Field(max_length=32)]

    @classmethod
    def of(cls, stats: UpdateStats) -> Counts:
        """From what `update_weights` returned."""
        return cls(
            kind=stats.verdict.kind.value,
            reason=Reason(stats.verdict.reason).name,
            verdict=str(stats.verdict)[:MAX_SENTENCE_CHARS],
            total_wire_bytes=stats.total_wire_bytes,
            total_changed=stats.total_changed,
            total_owned=stats.total_owned,
            total_not_finite=stats.total_not_finite,
            full_bytes=stats.full_bytes,
            seconds=dict(stats.seconds),
        )


class PairOnSide(BaseModel):
    """What a side holds of one pair."""

    connection: Life
    connected: bool
    version: Version | None
    ready: bool
    why: Sentence
    """Why it is not ready."""


class SideAnswer(BaseModel):
    """A call did what it was to do."""

    pair: PairOnSide
    counts: Counts | None = None
    """What an update did; None if this side cannot tell whether it was committed, or does not count."""


class SideState(BaseModel):
    """Who a side is, and what it does."""

    id: Life | None = None
    """Names this process's side, which may have several URLs; None if it does not say."""
    role: Literal["trainer", "engine"]
    kind: Annotated[str, StringConstraints(max_length=256)]
    num_ranks: Count
    num_pairs: Count | None = None
    """How many pairs it can be in at once; None for any number."""
    brings_meeting: bool
    """It was made with a `Rendezvous` of its own."""
    busy: Annotated[str, StringConstraints(max_length=256)]
    """What it does now, such as "update_weights of pair a"; empty if it is idle."""
    pairs: dict[Name, PairOnSide]
