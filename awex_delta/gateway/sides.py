"""One side of a pair, behind the same four verbs whatever it is: a trainer rank or an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from awex_delta.engines.sglang.driver import SglangDriver
from awex_delta.engines.view import EngineView
from awex_delta.engines.vllm.driver import VllmDriver
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Joining
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats

Role = Literal["trainer", "engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a side is to join a pair.

    pair: its name.
    joining: where all ranks meet and with which settings. A trainer has no use for what it says of an engine.
    loop: the loop that serves this side's HTTP.
    """

    pair: str
    joining: Joining
    loop: asyncio.AbstractEventLoop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one side holds of a pair. why: why it is not ready; empty if it is."""

    version: int | None
    why: str


class End(Protocol):
    """One side of one pair. Every method but `holding` blocks, and runs in the side's worker thread."""

    def connect(self) -> None:
        """Meet the other side."""

    def update_weights(self, version: int) -> UpdateStats | None:
        """Take part in one update. None if this side cannot tell whether it was committed."""

    def publish(self, version: int) -> None:
        """The trainer has committed `version`: say so, if `update_weights` could not."""

    def holding(self) -> Holding:
        """What it holds now; called from any thread."""

    def close(self) -> None:
        """Leave the pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What a router serves.

    role, kind: "trainer" or "engine", and what stands behind it.
    num_ranks: how many of its ranks take part in an update.
    brings_meeting: its ends were made with a `Rendezvous` of their own, so the gateway's is not used.
    num_pairs: how many pairs it can be in at once; None for any number.
    open: makes this side's end of a pair; opens nothing.
    view: gives the live weights; None if they are not in this process.
    """

    role: Role
    kind: str
    num_ranks: int
    brings_meeting: bool
    num_pairs: int | None
    open: Callable[[Order], End]
    view: Callable[[], EngineView] | None = None


class SenderEnd(End):
    """A trainer rank. after_close: run once the sender has left, such as the removal of hooks."""

    def __init__(self, sender: Sender, after_close: Callable[[], None] | None = None) -> None:
        self._sender = sender
        self._after_close = after_close

    def connect(self) -> None:
        self._sender.connect()

    def update_weights(self, version: int) -> UpdateStats:
        return self._sender.update_weights(version)

    def publish(self, version: int) -> None:
        """Nothing is left to say."""

    def holding(self) -> Holding:
        """The trainer is the source: it is always ready."""
        return Holding(version=self._sender.version, why="")

    def close(self) -> None:
        self._sender.disconnect()
        if self._after_close is not None:
            self._after_close()


class ReceiverEnd(End):
    """An engine rank in this process."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def connect(self) -> None:
        self._receiver.connect()

    def update_weights(self, version: int) -> UpdateStats:
        return self._receiver.update_weights(version)

    def publish(self, version: int) -> None:
        """Nothing is left to say."""

    def holding(self) -> Holding:
        if self._receiver.dirty:
            return Holding(version=None, why=DIRTY)
        version = self._receiver.version
        return Holding(version=version, why=NO_FULL_SYNC if version is None else "")

    def close(self) -> None:
        self._receiver.disconnect()


class VllmEnd(End):
    """A vLLM deployment, whose workers hold the receivers."""

    def __init__(self, driver: VllmDriver, joining: Joining) -> None:
        self._driver = driver
        self._joining = joining
        self._version: int | None = None
        self._in_doubt = False

    def connect(self) -> None:
        self._driver.connect(self._joining.model_dump(mode="json"))

    def update_weights(self, version: int) -> None:
        # vLLM raises if a worker did not commit; counts stay in the workers.
        self._in_doubt = True
        self._driver.update_weights(version)
        self._version, self._in_doubt = version, False

    def publish(self, version: int) -> None:
        """vLLM published it in `finish_weight_update`."""

    def holding(self) -> Holding:
        if self._driver.stopped:
            return Holding(version=None, why="requests stand still since a call that failed or still runs")
        if self._in_doubt:
            return Holding(version=None, why="an update failed, and requests go on with the weights it left")
        return Holding(version=self._version, why=NO_FULL_SYNC if self._version is None else "")

    def close(self) -> None:
        self._driver.disconnect()


class SglangEnd(End):
    """An SGLang engine. Only the trainer knows whether an update was committed."""

    def __init__(self, driver: SglangDriver) -> None:
        self._driver = driver

    def connect(self) -> None:
        self._driver.connect()

    def update_weights(self, version: int) -> None:
        self._driver.update_weights(version)

    def publish(self, version: int) -> None:
        self._driver.publish(version)

    def holding(self) -> Holding:
        if self._driver.in_doubt:
            return Holding(version=None, why="an update was begun, and the trainer has not confirmed it")
        version = self._driver.version
        return Holding(version=version, why=NO_FULL_SYNC if version is None else "")

    def close(self) -> None:
        self._driver.disconnect()


NO_FULL_SYNC = "it has had no full sync in this pair yet"
DIRTY = "it holds weights that were written but never committed"
