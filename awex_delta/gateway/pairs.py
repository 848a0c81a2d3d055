"""What the gateway knows and does about one pair: it asks all sides, and moves the pair's state."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

from awex_delta.errors import ConfigError
from awex_delta.gateway.answers import (
    SidesFailed,
    all_of,
    failures,
    holds,
    readiness,
    readiness_after,
    require_idle,
    summary,
)
from awex_delta.gateway.client import SideFailure, Sides
from awex_delta.gateway.guard import Rejection
from awex_delta.gateway.joining import StoreHost, join_problem, side_connects
from awex_delta.gateway.metrics import Metrics
from awex_delta.gateway.models import ConnectRequest, PairAnswer, Problem, UpdateAnswer
from awex_delta.gateway.side_models import (
    Attempt,
    SideAnswer,
    SideDisconnect,
    SidePublish,
    SideState,
    SideUpdate,
    Verb,
)
from awex_delta.gateway.states import Admission, Event, PairState, Refused, admit_update, transition
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.resolve import resolve

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_STATE_SECONDS = 5.0
_SLACK_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a pair. Replaced as a whole, so that a reader never sees half a move.

    request: its sides and settings.
    since: when it came into its state, on a clock that never goes back.
    connection: the identity that its sides were told; empty if there is none.
    version: the last one committed since it connected.
    last_update: the last one that committed, in any connection.
    attempt: number of the last update that was begun.
    failure: why the last request failed.
    """

    request: ConnectRequest
    state: PairState = PairState.DISCONNECTED
    since: float = field(default_factory=time.monotonic)
    connection: str = ""
    version: int | None = None
    last_update: UpdateAnswer | None = None
    attempt: int = 0
    failure: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all sides, trainers first."""
        return (*self.request.trainers, *self.request.engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What all pairs of a gateway use.

    sides: how sides are asked.
    stores: hosts the store in which sides meet.
    metrics: where updates are counted.
    locks: one for each URL while somebody holds it, since a side does one thing at a time, in whatever pair.
    update_seconds: longest wait for all sides in one update or connect.
    """

    sides: Sides
    stores: StoreHost
    metrics: Metrics
    locks: WeakValueDictionary[str, asyncio.Lock]
    update_seconds: float


class Pair:
    """One pair. Its methods are coroutines of one loop; each moves the state before it first waits."""

    def __init__(self, request: ConnectRequest, services: Services) -> None:
        """Note a pair; no side is asked yet."""
        self._services = services
        self._record = Record(request=request)
        self._work: asyncio.Task[None] | None = None
        self._forgotten = False
        self._look: tuple[Record, asyncio.Task[Mapping[str, SideState | SideFailure]]] | None = None

    @property
    def record(self) -> Record:
        """What is known now."""
        return self._record

    async def connect(self, request: ConnectRequest) -> PairAnswer:
        """Let all sides meet, unless they hold this connection already.

        Raises Rejection: 409 if the state forbids it or sides are taken, 502 if sides failed.
        """
        record = self._record
        if record.state is not PairState.DISCONNECTED and request != record.request:
            self._refuse("connect", f"pair {request.pair} has other sides or settings: disconnect it first")
        self._begin(Event.CONNECT)
        # A failed update may have left the sides with different views of the connection.
        kept = "" if record.state is PairState.FAILED or request != record.request else record.connection
        self._record = replace(self._record, request=request, connection=kept)
        await self._to_its_end("connect", self._connect)
        return await self.answer()

    async def update_weights(self, version: int) -> UpdateAnswer:
        """Bring every engine to the trainer's weights. A committed version gets its answer again.

        Raises Rejection: 409 if the state or the order forbids it, 502 if sides failed.
        """
        record = self._record
        try:
            admission = admit_update(record.state, record.version, version)
        except Refused as error:
            self._refuse("update_weights", str(error))
        if admission is Admission.REPEAT and record.last_update is not None:
            return record.last_update
        self._begin(Event.UPDATE)
        return await self._to_its_end("update_weights", partial(self._update, version))

    async def disconnect(self) -> PairAnswer:
        """Let all sides leave. A side that does not answer has left.

        Raises Rejection: 409 if the state forbids it, 502 if a side is busy.
        """
        self._begin(Event.DISCONNECT)
        await self._to_its_end("disconnect", self._disconnect)
        return await self.answer()

    async def answer(self) -> PairAnswer:
        """Where the pair stands, with what its engines say of themselves now."""
        asked = self._record
        states = await self._engine_states()
        record = self._record
        pair = record.request.pair
        engines = tuple(readiness(pair, record.version, url, state) for url, state in states.items())
        # Else a request that began or ended meanwhile knows better.
        if record is asked and not self._forgotten:
            self._services.metrics.engines(pair, engines)
        return PairAnswer(
            pair=pair,
            state=record.state,
            version=record.version,
            last_update=record.last_update,
            failure=record.failure,
            trainers=record.request.trainers,
            engines=engines,
            ready=all(engine.ready for engine in engines),
        )

    async def _engine_states(self) -> Mapping[str, SideState | SideFailure]:
        """What engines say. They are asked once for all who look at the same time: looking needs no token."""
        record = self._record
        if self._look is None or self._look[0] is not record or self._look[1].done():
            asking = self._services.sides.states(record.request.engines, seconds=_STATE_SECONDS)
            self._look = record, asyncio.ensure_future(asking)
        return await asyncio.shield(self._look[1])

    def forget(self) -> None:
        """Take a disconnected pair out of the metrics for good."""
        self._forgotten = True
        self._services.metrics.forget(self._record.request.pair)

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        if self._work is not None:
            await asyncio.wait([self._work])

    def _begin(self, event: Event) -> None:
        try:
            self._move(event, self._record.failure)
        except Refused as error:
            self._refuse(event.value, str(error))

    def _refuse(self, verb: str, text: str) -> NoReturn:
        self._services.metrics.refused(self._record.request.pair, verb)
        raise Rejection(409, Problem(error="conflict", detail=text, state=self._record.state))

    async def _to_its_end(self, verb: str, work: Callable[[], Awaitable[Value]]) -> Value:
        """Run a verb in a task of its own, which ends as it should even if nobody listens."""
        outcome: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._work = asyncio.ensure_future(self._carry_out(verb, work, outcome))
        self._work.add_done_callback(_log_failure)
        return await asyncio.shield(outcome)

    async def _carry_out(
        self, verb: str, work: Callable[[], Awaitable[Value]], outcome: asyncio.Future[Value]
    ) -> None:
        problem = Problem(error="internal", detail="the gateway failed: its log says why")
        status = 500
        try:
            async with AsyncExitStack() as held:
                for url in sorted(set(self._record.urls)):  # in one order, so that pairs never wait in a ring
                    lock = self._services.locks.setdefault(url, asyncio.Lock())
                    await held.enter_async_context(lock)
                value = await work()
            self._move(Event.DONE)
            outcome.set_result(value)
        except (SidesFailed, ConfigError) as error:
            said = error.said if isinstance(error, SidesFailed) else {}
            status = error.status if isinstance(error, SidesFailed) else 422
            problem = Problem(error="sides_failed" if said else "invalid", detail=str(error), sides=said)
            logger.warning("%s of pair %s failed: %s", verb, self._record.request.pair, error)
        finally:
            if not outcome.done():
                self._move(Event.FAIL, problem.detail)
                self._services.metrics.failed(self._record.request.pair, verb)
                last = problem.model_copy(update={"state": self._record.state})
                outcome.set_exception(Rejection(status, last))
                outcome.exception()  # read here once, for the case that nobody listens any more

    def _move(self, event: Event, failure: str = "") -> None:
        state = transition(self._record.state, event)
        self._record = replace(self._record, state=state, since=time.monotonic(), failure=failure)

    async def _connect(self) -> None:
        request, pair = self._record.request, self._record.request.pair
        found = await self._services.sides.states(self._record.urls, seconds=_STATE_SECONDS)
        states = all_of(found, f"pair {pair} cannot connect")
        connection = self._record.connection
        if connection and all(holds(state, pair, connection) for state in states.values()):
            return
        problem = join_problem(request, states)
        if problem:
            raise SidesFailed(f"pair {pair} cannot connect", problem, status=409)
        connection = secrets.token_hex(16)
        calls = side_connects(request, states, connection, self._services.stores)
        self._record = replace(self._record, connection="", version=None, attempt=0)
        self._services.metrics.unready(pair, request.engines)
        # Among them connections of a gateway that is gone, and sides that did not see the end of the last.
        all_of(await self._leave(states), f"pair {pair} cannot leave its former connection")
        wait = self._settings().connect_timeout_seconds + _SLACK_SECONDS
        answers = await self._call("connect", calls, wait)
        if failures(answers):
            joined = [url for url in calls if not isinstance(answers[url], SideFailure)]
            await self._call("disconnect", dict.fromkeys(joined, _bye(pair, connection)), wait)
        all_of(answers, f"pair {pair} did not connect")
        self._record = replace(self._record, connection=connection)

    async def _update(self, version: int) -> UpdateAnswer:
        record, pair = self._record, self._record.request.pair
        begin = f"version {version} was not begun"
        states = all_of(await self._services.sides.states(record.urls, seconds=_STATE_SECONDS), begin)
        require_idle(states, pair, record.connection, begin)
        self._services.metrics.unready(pair, record.request.engines)
        attempt = record.attempt + 1
        self._record = replace(self._record, attempt=attempt)
        call = SideUpdate(pair=pair, connection=record.connection, version=version, attempt=attempt)
        settings = self._settings()
        wait = settings.timeout_seconds + settings.connect_timeout_seconds + _SLACK_SECONDS
        answers = await self._call("update_weights", dict.fromkeys(record.urls, call), wait)
        done = all_of(answers, f"version {version} was not committed everywhere")
        # Engines that cannot know by themselves whether the trainer has committed.
        publish = SidePublish(pair=pair, connection=record.connection, version=version)
        unsure = [url for url in record.request.engines if done[url].pair.version != version]
        published = await self._call("publish", dict.fromkeys(unsure, publish), wait)
        latest = {
            **done,
            **all_of(published, f"version {version} is committed, but not published everywhere"),
        }
        update = summary(pair, version, [done[url] for url in record.request.trainers])
        self._record = replace(self._record, version=version, last_update=update)
        self._services.metrics.updated(update)
        engines = [readiness_after(version, url, latest[url]) for url in record.request.engines]
        self._services.metrics.engines(pair, engines)
        return update

    async def _disconnect(self) -> None:
        pair = self._record.request.pair
        found = await self._services.sides.states(self._record.urls, seconds=_STATE_SECONDS)
        states = {url: state for url, state in found.items() if isinstance(state, SideState)}
        busy = {url: f"is busy with {state.busy}" for url, state in states.items() if state.busy}
        if busy:
            raise SidesFailed(f"pair {pair} cannot disconnect", busy)
        await self._leave(states)
        self._record = replace(self._record, connection="", version=None)

    async def _leave(self, states: Mapping[str, SideState]) -> dict[str, SideAnswer | SideFailure]:
        """Close what any connection of this pair left open."""
        pair = self._record.request.pair
        held = {url: state.pairs[pair] for url, state in states.items() if pair in state.pairs}
        calls: dict[str, Attempt] = {u: _bye(pair, h.connection) for u, h in held.items() if h.connected}
        return await self._call("disconnect", calls, self._settings().timeout_seconds)

    async def _call(
        self, verb: Verb, calls: Mapping[str, Attempt], grace_seconds: float
    ) -> dict[str, SideAnswer | SideFailure]:
        return await self._services.sides.call(
            verb, calls, seconds=self._services.update_seconds, grace_seconds=grace_seconds
        )

    def _settings(self) -> DeltaSettings:
        config = self._record.request.config
        return resolve(config.train, config.rollout).settings


def _log_failure(work: asyncio.Task[None]) -> None:
    """What nobody foresaw; the caller was told that the log says why."""
    if not work.cancelled() and work.exception() is not None:
        logger.error("the gateway failed", exc_info=work.exception())


def _bye(pair: str, connection: str) -> Attempt:
    return SideDisconnect(pair=pair, connection=connection)
