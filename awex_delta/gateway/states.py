"""What a pair may do next: a table of states and events, and nothing else. Pure.

    DISCONNECTED ── CONNECT ──> CONNECTING ── DONE ──> CONNECTED ── UPDATE ──> UPDATING
         ^                          │                   ^     ^                 │    │
         └────────── FAIL ──────────┘                   │     └───── DONE ──────┘   FAIL
                                                      UPDATE ...... FAILED <─────────┘

A pair that is CONNECTED, FAILED or DISCONNECTED may connect (again) and disconnect.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class PairState(StrEnum):
    """Where a pair stands."""

    DISCONNECTED = "disconnected"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    UPDATING = "updating"
    FAILED = "failed"
    """The last update did not commit, or could not be begun: update again, or connect again."""
    DISCONNECTING = "disconnecting"


class Event(StrEnum):
    """What a caller asks for, and how it ended."""

    CONNECT = "connect"
    UPDATE = "update_weights"
    DISCONNECT = "disconnect"
    DONE = "done"
    FAIL = "fail"


class Refused(Exception):
    """A request that does not fit the state of its pair. Nothing was done."""


_IDLE = (PairState.DISCONNECTED, PairState.CONNECTED, PairState.FAILED)

NEXT: Mapping[tuple[PairState, Event], PairState] = MappingProxyType(
    {
        **{(state, Event.CONNECT): PairState.CONNECTING for state in _IDLE},
        **{(state, Event.DISCONNECT): PairState.DISCONNECTING for state in _IDLE},
        (PairState.CONNECTED, Event.UPDATE): PairState.UPDATING,
        (PairState.FAILED, Event.UPDATE): PairState.UPDATING,
        (PairState.CONNECTING, Event.DONE): PairState.CONNECTED,
        (PairState.CONNECTING, Event.FAIL): PairState.DISCONNECTED,
        (PairState.UPDATING, Event.DONE): PairState.CONNECTED,
        (PairState.UPDATING, Event.FAIL): PairState.FAILED,
        (PairState.DISCONNECTING, Event.DONE): PairState.DISCONNECTED,
        (PairState.DISCONNECTING, Event.FAIL): PairState.FAILED,
    }
)
"""Every step that is allowed; what is not listed is refused."""

_REMEDY: Mapping[PairState, str] = {
    PairState.DISCONNECTED: "connect it first",
    PairState.CONNECTING: "wait until it has connected",
    PairState.UPDATING: "wait until the update has ended; GET /pairs/NAME tells",
    PairState.DISCONNECTING: "wait until it has disconnected",
}


def transition(state: PairState, event: Event) -> PairState:
    """The state after an event. Raises Refused if it does not fit the state; that says what would."""
    after = NEXT.get((state, event))
    if after is None:
        remedy = _REMEDY.get(state, "nothing is under way")
        raise Refused(f"{event.value} is not possible while the pair is {state.value}: {remedy}")
    return after


class Admission(StrEnum):
    """What becomes of a request for an update."""

    RUN = "run"
    REPEAT = "repeat"
    """It was committed already: give the same answer again."""


def admit_update(state: PairState, committed: int | None, version: int) -> Admission:
    """Whether an update to `version` runs, or is the repetition of the last one.

    Args:
        state: of the pair.
        committed: the last version that was committed since the pair connected; None before the first.
        version: the one asked for. More than one above `committed` is allowed: the update is full then.

    Raises Refused if the state allows no update, or the version lies behind.
    """
    transition(state, Event.UPDATE)
    if committed is None or version > committed:
        return Admission.RUN
    if version == committed and state is PairState.CONNECTED:
        return Admission.REPEAT
    following = f"Give {committed + 1}, or disconnect" if committed + 1 < 2**63 else "Disconnect"
    raise Refused(
        f"version {version} is out of order: {committed} is committed. {following} and connect again "
        "to count from another"
    )
