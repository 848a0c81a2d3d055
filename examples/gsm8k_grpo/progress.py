"""What a run says about itself: one line a version, and short names of tokens and weights."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.status import Status

from awex_delta import UpdateStats
from examples.gsm8k_grpo.policy import Policy


class Activity:
    """What a run does at the moment, on the last line of a terminal; nothing in a pipe."""

    def __init__(self, *, shown: bool) -> None:
        """Begin; `shown` on one rank of the trainer alone."""
        console = Console()
        self._status = Status("starting", console=console) if shown and console.is_terminal else None
        if self._status is not None:
            self._status.start()
            atexit.register(self._status.stop)  # gives the cursor back

    def __call__(self, doing: str) -> None:
        """Say what begins."""
        if self._status is not None:
            self._status.update(doing)


def digest(value: Any) -> str:
    """A short name of nested lists of tokens, equal only for equal ones."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def weights_digest(policy: Policy) -> str:
    """A short name of the bits of this rank's weights."""
    whole = hashlib.sha256()
    for chunk in policy.chunks:
        for name, param in chunk.named_parameters():
            whole.update(name.encode())
            whole.update(param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def show(stats: UpdateStats, history: Sequence[float]) -> None:
    """One line of output for a version."""
    recent = history[-8:]
    changed = f"{stats.total_changed / stats.total_owned:.1%}" if stats.total_owned else "-"
    print(
        f"version {stats.version:4d}  {stats.verdict}  changed {changed:>6}  "
        f"{stats.total_wire_bytes:>13,} bytes ({stats.total_wire_bytes / stats.full_bytes:6.1%} of full)  "
        f"{sum(stats.seconds.values()):.2f} s  reward {history[-1]:.3f}, of the last {len(recent)}: "
        f"{sum(recent) / len(recent):.3f}",
        flush=True,
    )
