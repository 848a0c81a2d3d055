"""The recursive halving schedule: in which order pairs of ranks meet.

A world of W = 2**n ranks is split in halves n times. In round i every partition of W >> i ranks is
cut in two, and each rank of one half meets each rank of the other: first the lower half sends and
the upper receives, then the reverse. Within a round the pairs rotate (rank j of the lower half meets
rank j + k of the upper in sub-round k), so senders never queue at one receiver. Over all rounds each
ordered pair of ranks meets exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

from awex_delta.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One direction of one pair: `sender` transmits to `receiver`.

    Meetings follow each other by round, then by sub-round, then by phase.

    round, sub_round: place in the recursion and in the rotation.
    phase: 0 when the lower half sends, 1 when the upper half does.
    """

    round: int
    sub_round: int
    phase: int
    sender: int
    receiver: int


def is_power_of_two(value: int) -> bool:
    """True for 1, 2, 4, 8, ... and for nothing below 1."""
    return value >= 1 and value & (value - 1) == 0


def padded_world_size(world_size: int) -> int:
    """The smallest power of two that holds `world_size` ranks."""
    return 1 << max(world_size - 1, 0).bit_length()


def meetings_of(rank: int, world_size: int, *, allow_any: bool = False) -> tuple[Meeting, ...]:
    """Every meeting of `rank`, in the order in which it takes part.

    Args:
        rank: transfer rank, 0 <= rank < world_size.
        world_size: ranks of both sides together.
        allow_any: pad the world with phantom ranks up to a power of two; meetings with a phantom
            are left out, so every real ordered pair still meets exactly once.

    Raises:
        ConfigError: the world is not a positive power of two and `allow_any` is off, or the rank is
            outside it.
    """
    if world_size < 1 or not (allow_any or is_power_of_two(world_size)):
        raise ConfigError(
            f"world_size={world_size} is not a positive power of two: change the number of trainer or "
            "engine ranks, or set world_size_policy to 'any'"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} is outside the world of {world_size} ranks: give one in [0, {world_size})"
        )
    size = padded_world_size(world_size)
    found: list[Meeting] = []
    for round_index in range(size.bit_length() - 1):
        half = size >> (round_index + 1)
        base = rank // (2 * half) * (2 * half)
        place = rank - base
        for shift in range(half):
            if place < half:
                lower, upper = rank, base + half + (place + shift) % half
            else:
                lower, upper = base + (place - shift) % half, rank
            if max(lower, upper) >= world_size:
                continue  # a phantom
            for phase, (sender, receiver) in enumerate(((lower, upper), (upper, lower))):
                found.append(
                    Meeting(round=round_index, sub_round=shift, phase=phase, sender=sender, receiver=receiver)
                )
    return tuple(found)
