"""The schedule: every ordered pair meets once, and both sides agree on when."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from awex_delta.errors import ConfigError
from awex_delta.plan.schedule import Meeting, is_power_of_two, meetings_of, padded_world_size

POWERS = [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_ordered_pair_meets_exactly_once(world_size: int) -> None:
    met = Counter(
        (m.sender, m.receiver)
        for rank in range(world_size)
        for m in meetings_of(rank, world_size, allow_any=True)
        if m.sender == rank
    )
    assert met == Counter(permutations(range(world_size), 2))


@pytest.mark.parametrize("world_size", range(1, 65))
def test_sender_and_receiver_meet_in_the_same_slot(world_size: int) -> None:
    def slots(role: str) -> dict[tuple[int, int], Meeting]:
        return {
            (m.sender, m.receiver): m
            for rank in range(world_size)
            for m in meetings_of(rank, world_size, allow_any=True)
            if getattr(m, role) == rank
        }

    assert slots("sender") == slots("receiver")


@pytest.mark.parametrize("world_size", POWERS)
def test_a_rank_serves_one_meeting_at_a_time_and_needs_log2_rounds(world_size: int) -> None:
    for rank in range(world_size):
        meetings = meetings_of(rank, world_size)
        slots = [(m.round, m.sub_round, m.phase) for m in meetings]
        assert slots == sorted(set(slots))
        assert len({m.round for m in meetings}) == world_size.bit_length() - 1


def test_senders_do_not_all_begin_with_the_same_receiver() -> None:
    first = [next(m for m in meetings_of(rank, 16) if m.sender == rank).receiver for rank in range(8)]
    assert sorted(first) == list(range(8, 16))


def test_the_schedule_cannot_deadlock_when_every_rank_walks_it_in_order() -> None:
    queues = {rank: list(meetings_of(rank, 12, allow_any=True)) for rank in range(12)}
    done = 0
    while any(queues.values()):
        heads = Counter(queue[0] for queue in queues.values() if queue)
        ready = [meeting for meeting, count in heads.items() if count == 2]
        assert ready, "no pair waits for each other"
        for meeting in ready:
            queues[meeting.sender].pop(0)
            queues[meeting.receiver].pop(0)
            done += 1
    assert done == 12 * 11


@pytest.mark.parametrize("world_size", [-4, 0, 3, 5, 6, 7, 9, 12, 48])
def test_other_worlds_are_refused_with_the_remedy(world_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"world_size={world_size} .*world_size_policy"):
        meetings_of(0, world_size)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank={rank} "):
        meetings_of(rank, 4)


def test_powers_of_two() -> None:
    assert [n for n in range(-2, 70) if is_power_of_two(n)] == POWERS
    assert [padded_world_size(n) for n in (1, 2, 3, 4, 5, 8, 9, 63, 64, 65)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        64,
        64,
        128,
    ]
