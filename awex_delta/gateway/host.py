"""What a side does with the gateway's calls: its ends, and the one thread that works for them.

Updates block, for seconds, and they enter collectives that two threads of one rank must never mix. So one
thread does all the work of a side, one call at a time, while the loop answers `state` and whatever else the
process serves. A call runs to its end even if its caller has gone away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from awex_delta.errors import AwexDeltaError, ConfigError
from awex_delta.gateway.guard import Rejection
from awex_delta.gateway.models import Problem
from awex_delta.gateway.side_models import (
    Attempt,
    Counts,
    PairOnSide,
    SideAnswer,
    SideConnect,
    SidePublish,
    SideState,
    SideUpdate,
)
from awex_delta.gateway.sides import End, Order, Side
from awex_delta.observe.compare.engine_digests import DigestFile, digests_of
from awex_delta.protocol.rendezvous import Joining
from awex_delta.settings.resolve import resolve

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_MAX_PAIRS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """This side's part of one pair.

    connected: it has met the other side, and has not left since.
    attempt, answer: the last update, and how it ended.
    """

    connection: str
    end: End
    connected: bool = False
    attempt: int = 0
    answer: SideAnswer | Problem | None = None

    def view(self) -> PairOnSide:
        """What the side holds, as JSON."""
        holding = self.end.holding()
        return PairOnSide(
            connection=self.connection,
            connected=self.connected,
            version=holding.version,
            ready=not holding.why,
            why=holding.why,
        )


async def to_its_end(call: Coroutine[Any, Any, Value]) -> Value:
    """Await a call of a `SideHost` in a task of its own: what it did is noted even if nobody listens."""
    return await asyncio.shield(asyncio.ensure_future(call))


class SideHost:
    """Carries out the gateway's calls, one at a time. Its methods are coroutines of one loop."""

    def __init__(self, side: Side) -> None:
        """Start the worker thread when it is first needed; it works on the device that is current now."""
        self._side = side
        self._id = secrets.token_hex(16)
        self._slots: dict[str, Slot] = {}
        self._busy = ""
        ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if ready else None
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="awex_delta",
            initializer=None if device is None else partial(torch.cuda.set_device, device),
        )

    def state(self) -> SideState:
        """Who this side is and what it holds."""
        return SideState(
            id=self._id,
            role=self._side.role,
            kind=self._side.kind,
            num_ranks=self._side.num_ranks,
            num_pairs=self._side.num_pairs,
            brings_meeting=self._side.brings_meeting,
            busy=self._busy,
            pairs={name: slot.view() for name, slot in self._slots.items()},
        )

    async def connect(self, call: SideConnect) -> SideAnswer:
        """Join a pair. The same call again changes nothing.

        Raises Rejection if busy, in another connection of this pair, in too many pairs, or if it failed.
        """
        held = self._slots.get(call.pair)
        if held is not None and held.connected:
            if held.connection == call.connection:
                return SideAnswer(pair=held.view())
            raise _conflict(f"pair {call.pair} is connected otherwise: disconnect that connection first")
        self._refuse_when_busy()
        others = [name for name, slot in self._slots.items() if slot.connected and name != call.pair]
        limit = self._side.num_pairs
        if limit is not None and len(others) >= limit:
            raise _conflict(f"this {self._side.kind} serves {', '.join(others)} already")
        if len(others) >= _MAX_PAIRS:
            raise _conflict(f"this side serves {len(others)} pairs already")
        loop = asyncio.get_running_loop()
        end = await self._run(f"connect of pair {call.pair}", lambda: _join(self._side, _order(call, loop)))
        # Once another pair may write, nobody can rely on what a pair that was left held.
        kept = {name: slot for name, slot in self._slots.items() if slot.connected}
        self._slots = {**kept, call.pair: Slot(connection=call.connection, end=end, connected=True)}
        return SideAnswer(pair=self._slots[call.pair].view())

    async def update_weights(self, call: SideUpdate) -> SideAnswer:
        """Take part in one update. The same attempt again gets the same answer.

        Raises Rejection if busy, not connected, for an attempt that lies behind, or if it failed.
        """
        slot = self._slot(call)
        if call.attempt == slot.attempt and slot.answer is not None:
            if isinstance(slot.answer, Problem):
                raise Rejection(502, slot.answer)
            return slot.answer
        self._refuse_when_busy()
        if call.attempt <= slot.attempt:
            raise _conflict(f"attempt {call.attempt} of pair {call.pair} lies behind {slot.attempt}")
        self._slots[call.pair] = slot = replace(slot, attempt=call.attempt, answer=None)
        answer: SideAnswer | Problem
        try:
            stats = await self._run(
                f"update_weights of pair {call.pair}", lambda: slot.end.update_weights(call.version)
            )
            answer = SideAnswer(pair=slot.view(), counts=None if stats is None else Counts.of(stats))
        except Rejection as error:
            self._slots[call.pair] = replace(slot, answer=error.problem)
            raise
        self._slots[call.pair] = replace(slot, answer=answer)
        return answer

    async def publish(self, call: SidePublish) -> SideAnswer:
        """Hear that the trainer has committed a version. Raises Rejection."""
        slot = self._slot(call)
        self._refuse_when_busy()
        await self._run(f"publish of pair {call.pair}", lambda: slot.end.publish(call.version))
        return SideAnswer(pair=slot.view())

    async def disconnect(self, call: Attempt) -> SideAnswer:
        """Leave a pair; the side keeps its weights. The same call again changes nothing. Raises Rejection."""
        slot = self._slots.get(call.pair)
        if slot is None:
            raise _conflict(f"pair {call.pair} was never connected here")
        if not slot.connected:
            return SideAnswer(pair=slot.view())
        if slot.connection != call.connection:
            raise _conflict(f"pair {call.pair} is connected otherwise")
        self._refuse_when_busy()
        try:
            await self._run(f"disconnect of pair {call.pair}", slot.end.close)
        finally:  # a side that could not say goodbye is gone nevertheless
            self._slots[call.pair] = slot = replace(slot, connected=False)
        return SideAnswer(pair=slot.view())

    async def digests(self) -> DigestFile:
        """Digests of the weights that this engine holds now; no call changes them meanwhile.

        Raises Rejection if busy, or if the weights are in other processes.
        """
        view = self._side.view
        if view is None:
            text = f"{self._side.kind} holds its weights in other processes: write digests_of(view) there"
            raise Rejection(501, Problem(error="unsupported", detail=text))
        self._refuse_when_busy()
        return await self._run("digests", lambda: DigestFile.model_validate(digests_of(view())))

    def close(self) -> None:
        """Let the worker thread end once it is idle."""
        self._worker.shutdown(wait=False)

    def _slot(self, call: Attempt) -> Slot:
        slot = self._slots.get(call.pair)
        if slot is None or not slot.connected or slot.connection != call.connection:
            raise _conflict(f"pair {call.pair} is not connected here in this connection: connect it again")
        return slot

    def _refuse_when_busy(self) -> None:
        if self._busy:
            raise _conflict(f"busy with {self._busy}")

    async def _run(self, what: str, work: Callable[[], Value]) -> Value:
        self._busy = what
        done = asyncio.get_running_loop().run_in_executor(self._worker, work)
        try:
            # Shielded: a caller that went away neither stops the thread nor makes the side look idle.
            return await asyncio.shield(done)
        except ConfigError as error:
            raise Rejection(422, Problem(error="ConfigError", detail=str(error))) from error
        except Exception as error:  # an engine may raise anything, and the gateway must hear of it
            if not isinstance(error, AwexDeltaError):
                logger.exception("%s failed", what)
            notes = "".join(f" ({note})" for note in _notes(error))
            text = f"{error}{notes}"[:4000]
            raise Rejection(502, Problem(error=type(error).__name__, detail=text)) from error
        finally:
            if done.done():  # what the caller notes next is noted before another call can begin
                self._busy = ""
            else:
                done.add_done_callback(self._now_idle)

    def _now_idle(self, _: object) -> None:
        self._busy = ""


def _join(side: Side, order: Order) -> End:
    end = side.open(order)
    try:
        end.connect()
    except BaseException:
        try:
            end.close()
        except Exception as error:  # noqa: BLE001 - why it could not join is what the caller must hear
            logger.warning("pair %s: could not leave after a failed connect: %s", order.pair, error)
        raise
    return end


def _notes(error: BaseException) -> list[str]:
    return error.__notes__ if hasattr(error, "__notes__") else []


def _conflict(text: str) -> Rejection:
    return Rejection(409, Problem(error="conflict", detail=text))


def _order(call: SideConnect, loop: asyncio.AbstractEventLoop) -> Order:
    return Order(
        pair=call.pair,
        joining=Joining(
            rendezvous=call.meeting,
            settings=resolve(call.config.train, call.config.rollout).settings,
            first_engine_rank=call.first_rank,
            engine=call.engine,
        ),
        loop=loop,
    )
