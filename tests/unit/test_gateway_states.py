"""The states of a pair: every step of the table, and every step that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.gateway.states import NEXT, Admission, Event, PairState, Refused, admit_update, transition

# Written out by hand: state, event, state after it.
STEPS = """
disconnected connect connecting
connected connect connecting
failed connect connecting
connecting done connected
connecting fail disconnected
connected update_weights updating
failed update_weights updating
updating done connected
updating fail failed
disconnected disconnect disconnecting
connected disconnect disconnecting
failed disconnect disconnecting
disconnecting done disconnected
disconnecting fail failed
"""
TABLE = {(a, e): b for a, e, b in (line.split() for line in STEPS.split("\n") if line)}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", PairState)
def test_every_step_is_as_written_or_refused(state: PairState, event: Event) -> None:
    after = TABLE.get((state.value, event.value))
    if after is None:
        with pytest.raises(Refused, match=f"not possible while the pair is {state.value}"):
            transition(state, event)
    else:
        assert transition(state, event).value == after


def test_the_table_cannot_be_changed() -> None:
    table: dict[tuple[PairState, Event], PairState] = NEXT  # type: ignore[assignment]
    with pytest.raises(TypeError):
        table[PairState.CONNECTED, Event.DONE] = PairState.FAILED


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_whatever_is_asked_a_pair_that_works_ends_and_one_that_rests_can_begin(events: list[Event]) -> None:
    state = PairState.DISCONNECTED
    for event in events:
        try:
            state = transition(state, event)
        except Refused:
            continue
    working = state in (PairState.CONNECTING, PairState.UPDATING, PairState.DISCONNECTING)
    ends = {event for event in (Event.DONE, Event.FAIL) if (state, event) in NEXT}
    begins = {event for event in (Event.CONNECT, Event.DISCONNECT) if (state, event) in NEXT}
    assert (len(ends), len(begins)) == ((2, 0) if working else (0, 2))


@pytest.mark.parametrize(
    ("state", "committed", "version", "admission"),
    [
        (PairState.CONNECTED, None, 0, Admission.RUN),
        (PairState.CONNECTED, None, 900, Admission.RUN),
        (PairState.CONNECTED, 3, 4, Admission.RUN),
        (PairState.CONNECTED, 3, 7, Admission.RUN),
        (PairState.CONNECTED, 3, 3, Admission.REPEAT),
        (PairState.CONNECTED, 0, 0, Admission.REPEAT),
        (PairState.FAILED, 3, 4, Admission.RUN),
        (PairState.FAILED, None, 0, Admission.RUN),
    ],
)
def test_admitted(state: PairState, committed: int | None, version: int, admission: Admission) -> None:
    assert admit_update(state, committed, version) is admission


@pytest.mark.parametrize(
    ("state", "committed", "version", "said"),
    [
        (PairState.CONNECTED, 3, 2, "3 is committed. Give 4, or disconnect and connect again to count from"),
        (PairState.CONNECTED, 2**63 - 1, 2, "807 is committed. Disconnect and connect again to count from"),
        (PairState.FAILED, 3, 3, "out of order: 3 is committed"),
        (PairState.UPDATING, 3, 4, "while the pair is updating: wait"),
        (PairState.UPDATING, 3, 3, "while the pair is updating: wait"),
        (PairState.DISCONNECTED, None, 0, "connect it first"),
        (PairState.CONNECTING, None, 0, "wait until it has connected"),
        (PairState.DISCONNECTING, 3, 4, "wait until it has disconnected"),
    ],
)
def test_refused(state: PairState, committed: int | None, version: int, said: str) -> None:
    with pytest.raises(Refused, match=said):
        admit_update(state, committed, version)
