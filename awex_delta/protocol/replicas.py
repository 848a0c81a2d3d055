"""Do copies of one tensor on several trainer ranks have the same bits? Told with what ends a full sync.

A rank hashes its tensors of which others hold copies. The first of n such ranks counts its digest n - 1
times, the others count theirs -1 times, so that all counts add up to zero if copies are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from awex_delta.errors import LockstepError, listed
from awex_delta.protocol.session import Session
from awex_delta.wire.digest import digests

logger = logging.getLogger(__name__)

_MODULUS = 1 << 63  # what ranks tell in an agreement stays below this

Copies = Mapping[str, tuple[int, ...]]
"""By HF name, the trainer ranks that hold the same part of it."""


def hash_copies(
    session: Session, copies: Copies, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[Mapping[str, int], str]:
    """Digests of this rank's parts of HF tensors that others hold too, and why that failed on this rank.

    Args:
        session: of this rank.
        copies: see `parity`; empty if nothing is compared, which reads nothing.
        tensors: this rank's HF tensors, by name.
    """
    if not copies:
        return {}, ""
    mine = (one for one in tensors if one[0] in copies)
    found, failure = session.attempt(None, lambda: digests(mine, full_bytes=session.met.full_bytes))
    return found or {}, failure


def parity(rank: int, copies: Copies, sums: Mapping[str, int]) -> int:
    """What one trainer rank contributes, modulo 2^63.

    Args:
        rank: of the trainer.
        copies: of the tensors of this rank, see `plan.shards.copies_of_rank`.
        sums: digests of its parts of them, by HF name.
    """
    first = {name: rank == copies[name][0] for name in sums}
    return sum((len(copies[n]) - 1 if first[n] else -1) * total for n, total in sums.items()) % _MODULUS


def warn_of_drift(
    session: Session,
    version: int,
    facts: Sequence[Mapping[str, int]],
    copies: Copies,
    sums: Mapping[str, int],
) -> None:
    """Log, on trainer rank 0, the tensors of which trainer ranks hold different bits, with the ranks.

    Args:
        session: of this rank.
        version: of the update.
        facts: of the agreement that ended it, with the `parity` of each trainer rank.
        copies, sums: see `parity`; empty on an engine rank.

    Raises:
        LockstepError: a rank sent no digests.
        PeerError: a rank did not answer.

    Collective: yes, over all transfer ranks, if the parities do not add up to zero; else none.
    """
    if not sum(fact.get("parity", 0) for fact in facts) % _MODULUS:
        return
    mine = {name: [sums[name], *ranks] for name, ranks in copies.items() if name in sums}
    rows = session.comm.gather_json(mine, phase="copies of the trainer")
    rendezvous = session.comm.rendezvous
    try:
        different = sorted(_different(rows[rendezvous.num_engine_ranks :]))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LockstepError(f"a trainer rank sent no digests of its copies: {error!r}") from error
    if session.comm.seat == rendezvous.trainer_seat(0):
        logger.warning(
            "version %d: trainer ranks hold different bits of %d tensors that should be equal: %s. Engines "
            "all got those of one rank. Find out why ranks drift: each step can make the difference larger",
            version,
            len(different),
            listed(different),
        )


def _different(trainers: Sequence[Mapping[str, Sequence[int]]]) -> Iterator[str]:
    for rank, row in enumerate(trainers):
        for name, (mine, *ranks) in row.items():
            if ranks[0] == rank and any(trainers[other][name][0] != mine for other in ranks):
                yield f"{name} (trainer ranks {', '.join(map(str, ranks))})"
