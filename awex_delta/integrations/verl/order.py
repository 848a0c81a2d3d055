"""What every rank is told before one update, and how all of them try it twice."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from awex_delta.errors import ConnectError, UpdateError
from awex_delta.integrations.verl.checks import refuse
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.store import BoundedStore
from awex_delta.settings.agreed import DeltaSettings

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one worker says of itself before an update.

    life: of the trainer's process, or of the replica's server; another one after each restart.
    version: the last one that it knows to be committed, 0 before the first.
    leads: it is the first worker of a replica.
    host, port: of the store that the first trainer rank opened; port 0 for all others.
    problems: why its replica cannot be written in place.
    """

    settings: DeltaSettings
    life: str = ""
    version: int = 0
    leads: bool = False
    host: str = ""
    port: int = 0
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one worker is told before an update.

    rendezvous: of all ranks. It has another name for each set of lives, so that all of them meet anew.
    version: one more than the last that any of them knows to be committed.
    ticket: of this update alone; two orders may be for one version.
    engine, first_engine_rank, num_workers: of the replica that this worker belongs to.
    """

    rendezvous: Rendezvous
    settings: DeltaSettings
    version: int
    ticket: str
    engine: str = ""
    first_engine_rank: int = 0
    num_workers: int = 0


def orders(trainers: Sequence[Member], workers: Sequence[Member]) -> list[Order]:
    """What each trainer rank is told, then each worker of a replica, in their order.

    Raises ConfigError if a replica cannot be written in place.
    """
    refuse([problem for worker in workers for problem in worker.problems])
    lives = [member.life for member in (*trainers, *workers)]
    rendezvous = Rendezvous(
        num_engine_ranks=len(workers),
        num_trainer_ranks=len(trainers),
        host=trainers[0].host,
        port=trainers[0].port,
        name=f"verl/{hashlib.sha256(' '.join(lives).encode()).hexdigest()[:16]}",
    )
    version = 1 + max(member.version for member in (*trainers, *workers))
    order = Order(
        rendezvous=rendezvous, settings=trainers[0].settings, version=version, ticket=uuid.uuid4().hex
    )
    told = [order for _ in trainers]
    firsts = [rank for rank, worker in enumerate(workers) if worker.leads]
    for number, (first, end) in enumerate(zip(firsts, [*firsts[1:], len(workers)], strict=True)):
        replica = replace(
            order,
            engine=f"replica-{number}",
            first_engine_rank=first,
            num_workers=end - first,
        )
        told += [replica] * (end - first)
    return told


def again_once(update: Callable[[int], Value], who: str) -> Value:
    """Update, and if that fails once more, which is a full sync: all ranks do the same.

    `update` is given the number of the try, from 0. The error of the last one passes through.
    """
    try:
        return update(0)
    except (UpdateError, ConnectError) as error:
        logger.warning("%s tries once more, as a full sync: %s", who, error)
    return update(1)


class Outcomes:
    """How each try ended for trainer rank 0: the one word on it that SGLang's workers cannot give."""

    def __init__(self, order: Order) -> None:
        """Connect to the store. Raises ConnectError, PeerError."""
        # Longer than a try takes that ends in a timeout.
        seconds = order.settings.connect_timeout_seconds + 4 * order.settings.timeout_seconds
        self._store = BoundedStore(order.rendezvous, timedelta(seconds=seconds))
        self._ticket = order.ticket

    def tell(self, number: int, failure: str) -> None:
        """Say how try `number` ended, with an empty text if its version is committed."""
        self._store.put(f"{self._ticket}/{number}", failure)

    def hear(self, number: int) -> str:
        """Wait until it is told. Raises PeerError if it is not in time."""
        return self._store.wait_for(f"{self._ticket}/{number}")
