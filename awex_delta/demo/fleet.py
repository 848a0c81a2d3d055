"""The demo's processes: start them, ask them, hear of their deaths, and never leave one behind."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from awex_delta.demo.scenario import Seat
from awex_delta.errors import AwexDeltaError, ConnectError, UpdateError

_START_SECONDS = 120.0
_LEAVE_SECONDS = 3.0
_LOG_TAIL_LINES = 15


class DemoError(AwexDeltaError):
    """The demo cannot go on: a process died, or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call of one of a member's actions."""

    action: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an action returned; or, where an update failed, `failure` in words."""

    value: Any = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the fleet."""

    process: BaseProcess
    connection: Connection
    log: Path


class Fleet:
    """Processes that serve requests. Used as a context manager: on leaving, all of them end or are killed.

    Processes fork from a server that imports once what all of them need; see `warm_up`.
    """

    def __init__(self, folder: Path) -> None:
        """Start nothing yet.

        Args:
            folder: where each member's output is kept, to be shown if it dies.
        """
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._members: dict[str, Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A process that waits for a request leaves by itself when the launcher hangs up.
        for member in self._members.values():
            member.connection.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for member in self._members.values():
            member.process.join(max(0.0, deadline - time.monotonic()))
            member.process.kill()
            member.process.join()

    def start(self, members: Mapping[str, Seat]) -> None:
        """Start members, and wait until all of them are built.

        Args:
            members: name to what the new process builds.

        Raises:
            DemoError: one died while it was built, or did not get ready.

        Collective: no.
        """
        for name, seat in members.items():
            ours, theirs = self._context.Pipe()
            log = self._folder / f"{name}.log"
            process = self._context.Process(target=serve, args=(theirs, seat, log), daemon=True, name=name)
            process.start()
            theirs.close()
            self._members[name] = Member(process=process, connection=ours, log=log)
        self._collect(list(members), _START_SECONDS)

    def ask(
        self,
        names: Sequence[str],
        action: str,
        *,
        timeout_seconds: float,
        doomed: str = "",
        **arguments: Any,
    ) -> dict[str, Answer]:
        """Ask several members at once, and wait for all their answers.

        Args:
            names: who is asked.
            action: one of their actions.
            timeout_seconds: longest wait for all answers together.
            doomed: a member whose death is expected, and is an answer with a failure.
            arguments: of the action.

        Returns:
            Answers by name, in the order of `names`.

        Raises:
            DemoError: a member died, or did not answer in time.

        Collective: no.
        """
        for name in names:
            with suppress(BrokenPipeError, ConnectionResetError):  # reported when its answer is collected
                self._members[name].connection.send(Request(action=action, arguments=arguments))
        return self._collect(names, timeout_seconds, doomed)

    def kill(self, name: str) -> None:
        """End one member at once, as a crash of its machine would. Collective: no."""
        member = self._members.pop(name)
        member.process.kill()
        member.process.join()
        member.connection.close()

    def _collect(self, names: Sequence[str], timeout_seconds: float, doomed: str = "") -> dict[str, Answer]:
        deadline = time.monotonic() + timeout_seconds
        waiting = {self._members[name].connection: name for name in names}
        answers: dict[str, Answer] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(sorted(waiting.values()))
                raise DemoError(f"no answer within {timeout_seconds:g} s from {late}; see --timeout")
            for connection in [known for known in waiting if known in ready]:
                name = waiting.pop(connection)
                answers[name] = self._receive(name, connection, doomed)
        return {name: answers[name] for name in names}

    def _receive(self, name: str, connection: Connection, doomed: str) -> Answer:
        try:
            answer: Answer = connection.recv()
        except (EOFError, OSError):  # OSError: with the request unread, or in the middle of its answer
            if name == doomed:
                return Answer(failure="the process was killed")
            raise DemoError(f"process {name} died:\n{self._log_tail(name)}") from None
        return answer

    def _log_tail(self, name: str) -> str:
        log = self._members[name].log
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def warm_up() -> None:
    """Let the fork server import what members need, while this process does something else.

    Collective: no.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["awex_delta.demo.preload"])
    multiprocessing.forkserver.ensure_running()


def serve(connection: Connection, seat: Seat, log: Path) -> None:
    """Be one member: take the seat, then answer requests until the launcher is gone.

    A failed update is an answer. Any other exception ends the process, its traceback in the log.

    Args:
        connection: to the launcher.
        seat: what to build.
        log: gets everything that the process prints.

    Collective: no.
    """
    # Ctrl-C goes to every process of the terminal; the launcher alone decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # By name, because the launcher also imports this module and has no use for the heavy one.
    actions = importlib.import_module("awex_delta.demo.members").build(seat)
    connection.send(Answer())
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        try:
            answer = Answer(value=actions[request.action](**request.arguments))
        except (UpdateError, ConnectError) as error:
            answer = Answer(failure=f"{type(error).__name__}: {error}")
        connection.send(answer)
