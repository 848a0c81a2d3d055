"""Processes that answer calls, started once and used for one job after the other; none is left behind.

A process costs seconds: it imports torch, Megatron and transformers, and warms them up. So processes fork
from a server that has imported them, and one whose job ended well is kept for the next job. One that raised,
died, was late or left something behind is ended, and a new one takes its place when it is needed.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from awex_delta.errors import AwexDeltaError, ConnectError, UpdateError

Actions = Mapping[str, Callable[..., Any]]

_START_SECONDS = 120.0
_TIDY_SECONDS = 20.0
_LEAVE_SECONDS = 3.0
_MOST_IDLE = 12
_LAST_LINES = 15
_LOG_BYTES = 1 << 16


class FleetError(AwexDeltaError):
    """A process died, did not answer in time, or failed in a way that nobody foresaw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call came to.

    value: what it returned.
    failure: what it raised, in a line, or how the process was lost; empty if neither happened.
    trace: the same with its traceback.
    foreseen: an update or a connect failed as it may.
    lost: the process is of no further use.
    """

    value: Any = None
    failure: str = ""
    trace: str = ""
    foreseen: bool = False
    lost: bool = False


def fork_server() -> ForkServerContext:
    """Start processes that have imported what ranks need. A process has one server, whoever asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["awex_delta.testing.preload"])
    return context


def warm_up() -> None:
    """Let the server import what processes need, while this process does something else."""
    fork_server()
    multiprocessing.forkserver.ensure_running()


def gather(
    connections: Mapping[str, Connection], timeout_seconds: float, *, last_words_seconds: float | None = None
) -> dict[str, Answer]:
    """Wait for one answer of each process, `timeout_seconds` for all of them together.

    Once one has failed the others have `last_words_seconds`; None for no limit. Answers of processes that
    died or were late are `lost`.
    """
    deadline = time.monotonic() + timeout_seconds
    waiting: dict[Any, str] = {connection: name for name, connection in connections.items()}
    answers: dict[str, Answer] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = f"did not finish in {timeout_seconds:g} s"
            answers.update((name, Answer(failure=late, trace=late, lost=True)) for name in waiting.values())
            break
        for connection in ready:
            name = waiting.pop(connection)
            answers[name] = _receive(connections[name])
            if answers[name].failure and last_words_seconds is not None:
                deadline = min(deadline, time.monotonic() + last_words_seconds)
    return {name: answers[name] for name in connections}


def _receive(connection: Connection) -> Answer:
    try:
        answer: Answer = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own child
    except (EOFError, OSError):  # OSError: with the call unread, or in the middle of its answer
        return Answer(failure="the process died", trace="the process died", lost=True)
    return answer


class Member:
    """One process, and the log that gets all that it prints."""

    def __init__(self) -> None:
        context = fork_server()
        self.connection, theirs = context.Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        fcntl.fcntl(self._log.fileno(), fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied meanwhile
        output = Connection(os.dup(self._log.fileno()), readable=False)  # carries the file to the process
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, output), daemon=True)
        self._process.start()
        theirs.close()
        output.close()

    def forget(self) -> None:
        """Empty the log: a new job begins."""
        os.ftruncate(self._log.fileno(), 0)

    def send(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call an importable function there. `gather` waits for the answer, and reports a death."""
        # Pickled here, tensors travel by value. Sent as objects, they would be shared memory of a process
        # that may have ended before it is read.
        call = pickle.dumps((function, args, kwargs))
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(call)

    def last_words(self) -> str:
        """The last lines that it printed in this job."""
        start = max(0, os.fstat(self._log.fileno()).st_size - _LOG_BYTES)
        text = os.pread(self._log.fileno(), _LOG_BYTES, start).decode(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def end(self, wait_seconds: float = 0.0) -> None:
        """Hang up, so that a process that waits for a call leaves by itself; kill it after `wait_seconds`."""
        self.connection.close()
        self._process.join(wait_seconds)
        self._process.kill()
        self._process.join()
        self._log.close()


class Pool:
    """Processes that wait for a job. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Member] = []

    def take(self, count: int) -> list[Member]:
        """Members that nobody else has; those that are missing are started."""
        with self._lock:
            taken, self._idle = self._idle[:count], self._idle[count:]
        for member in taken:
            member.forget()
        return [*taken, *(Member() for _ in range(count - len(taken)))]

    def give_back(self, members: Sequence[Member]) -> None:
        """Keep those that are as new once they have tidied up, and end the others."""
        for member in members:
            member.send(_tidy_up)
        named = {str(place): member.connection for place, member in enumerate(members)}
        answers = gather(named, _TIDY_SECONDS)
        clean = [m for m, answer in zip(members, answers.values(), strict=True) if answer.value == ""]
        with self._lock:
            kept = clean[: _MOST_IDLE - len(self._idle)]
            self._idle.extend(kept)
        let_leave([member for member in members if member not in kept])

    def close(self) -> None:
        """End those that have nothing to do."""
        with self._lock:
            idle, self._idle = self._idle, []
        let_leave(idle)


def let_leave(members: Sequence[Member]) -> None:
    """End processes that wait for a call. They clean up after themselves, unless that takes them long."""
    for member in members:
        member.connection.close()
    deadline = time.monotonic() + _LEAVE_SECONDS
    for member in members:
        member.end(max(0.0, deadline - time.monotonic()))


def end_all(members: Iterable[Member]) -> None:
    """Kill processes, whatever they do."""
    for member in members:
        member.end()


POOL = Pool()
"""The processes of this program that are alive and have nothing to do. They end with it."""
atexit.register(POOL.close)


class Fleet:
    """Named processes, each with actions of its own. Used as a context manager: on leaving, none is left."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._members: dict[str, Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        members, self._members = [*self._members.values()], {}
        if error is None:
            POOL.give_back(members)
        else:  # nobody knows what they are doing
            end_all(members)

    def start(
        self,
        members: Mapping[str, object],
        build: Callable[..., Actions],
        *,
        timeout_seconds: float = _START_SECONDS,
    ) -> None:
        """Start members, and wait until all of them are built.

        `build` is importable; called in each process with its argument, it returns what that process can be
        asked. Raises FleetError if one died while it was built, raised, or did not get ready.
        """
        taken = dict(zip(members, POOL.take(len(members)), strict=True))
        self._members.update(taken)
        for name, member in taken.items():
            member.send(_build, build, members[name])
        self._answers(list(members), timeout_seconds)

    def ask(
        self, names: Sequence[str], action: str, *, timeout_seconds: float, doomed: str = "", **arguments: Any
    ) -> dict[str, Answer]:
        """Ask several members for one of their actions at once, and wait for all their answers, in that
        order.

        The death of the `doomed` member is expected, and is an answer with a failure, as is an update or a
        connect that failed. Raises FleetError if a member died, did not answer in time, or raised anything
        else.
        """
        for name in names:
            self._members[name].send(_act, action, arguments)
        return self._answers(names, timeout_seconds, doomed)

    def end(self, name: str) -> None:
        """End one member at once, as a crash of its machine would."""
        self._members.pop(name).end()

    def _answers(self, names: Sequence[str], timeout_seconds: float, doomed: str = "") -> dict[str, Answer]:
        answers = gather({name: self._members[name].connection for name in names}, timeout_seconds)
        for name, answer in answers.items():
            if answer.lost and name != doomed:
                what = answer.failure.removeprefix("the process ")
                raise FleetError(f"process {name} {what}\n{self._members[name].last_words()}".rstrip())
            if answer.failure and not (answer.foreseen or name == doomed):
                raise FleetError(f"process {name} failed:\n{answer.trace}")
        return answers


_kept: dict[str, Callable[..., Any]] = {}  # in a member's process: what it can be asked
_beginning: Any = None  # likewise: how it was before its first job


def _build(build: Callable[..., Actions], argument: object) -> None:
    _kept.update(build(argument))


def _act(action: str, arguments: Mapping[str, Any]) -> Any:
    return _kept[action](**arguments)


def _tidy_up() -> str:
    _kept.clear()
    left: str = _beginning.restore()
    return left


def _serve(connection: Connection, output: Connection) -> None:
    """Be one member: answer calls until the program that started it hangs up."""
    global _beginning  # noqa: PLW0603 - one a process
    # Ctrl-C goes to every process of the terminal; the launcher alone decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    faulthandler.enable()
    # By name, because the program that starts members has no use for torch in this module.
    _beginning = importlib.import_module("awex_delta.testing.tidy").Beginning()
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(call))


def _answer(call: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(call)  # noqa: S301 - from the program that started us
        return pickle.dumps(Answer(value=function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - whatever it was, the caller hears of it
        return pickle.dumps(
            Answer(
                failure=f"{type(error).__name__}: {error}",
                trace=traceback.format_exc(),
                foreseen=isinstance(error, UpdateError | ConnectError),
            )
        )
