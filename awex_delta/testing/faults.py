"""Faults on demand: make one rank fail, sleep or stop as a chosen phase begins."""

from __future__ import annotations

import time
from collections.abc import Callable


class InjectedFault(RuntimeError):
    """What a `FaultPlan` raises."""


class FaultPlan:
    """Decides what happens as a rank enters a phase. Give `on_phase` to a Sender or Receiver.

    Attributes:
        seen: every phase that was entered, in order.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._actions: dict[str, Callable[[], object]] = {}

    def on_phase(self, phase: str) -> None:
        """Record the phase and do what was planned for it, once."""
        self.seen.append(phase)
        action = self._actions.pop(phase, None)
        if action is not None:
            action()

    def fail(self, phase: str, error: BaseException | None = None) -> None:
        """Raise `error` (an InjectedFault by default) as `phase` begins next."""

        def raise_it() -> None:
            raise error if error is not None else InjectedFault(f"injected in phase {phase!r}")

        self.act(phase, raise_it)

    def sleep(self, phase: str, seconds: float) -> None:
        """Be late by `seconds` as `phase` begins next."""
        self.act(phase, lambda: time.sleep(seconds))

    def act(self, phase: str, action: Callable[[], object]) -> None:
        """Do anything as `phase` begins next."""
        self._actions[phase] = action
