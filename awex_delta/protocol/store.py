"""The store that ranks meet in, with an end to every call.

torch's own client waits for ever for a host that is frozen or cut off, and raises errors of torch when
the host is gone.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

from awex_delta.errors import ConnectError, PeerError
from awex_delta.protocol.rendezvous import Rendezvous, first_line

Value = TypeVar("Value")


class BoundedStore:
    """A connection to the store. After a failed call it is broken, and another one has to be opened."""

    def __init__(self, rendezvous: Rendezvous, timeout: timedelta) -> None:
        """Connect.

        Args:
            rendezvous: says where.
            timeout: longest wait in this call, and in each later one.

        Raises:
            ConnectError: nobody answers there.
            PeerError: somebody does, but not in time.
        """
        self.broken = False
        self._where = "the store" if rendezvous.store else f"the store at {rendezvous.address}"
        self._timeout = timeout.total_seconds()
        self.raw: Store = self._call(lambda: rendezvous.open_store(timeout))

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Set `key` to `desired` where it is `expected` ("" for absent); says what it is then."""
        return self._call(lambda: self.raw.compare_set(key, expected, desired)).decode(errors="replace")

    def put(self, key: str, value: str) -> None:
        """Set `key`, without waiting: torch's client reads no answer to this."""
        try:
            self.raw.set(key, value)
        except Exception as error:
            self.broken = True
            raise PeerError(f"{self._where} went away: {first_line(error)}") from error

    def find(self, key: str) -> str | None:
        """What `key` holds; None when it is absent."""
        found = self._call(lambda: self.raw.get(key) if self.raw.check([key]) else None)
        return None if found is None else found.decode(errors="replace")

    def wait_for(self, key: str) -> str:
        """What `key` holds, as soon as somebody has set it. Raises PeerError if nobody does in time."""
        return self._call(lambda: self.raw.get(key)).decode(errors="replace")

    def epoch(self) -> int:
        """The current epoch. Raises ConnectError if the store holds none."""
        found = self.swap("epoch", "", "0")
        if not re.fullmatch("[0-9]{1,18}", found):
            raise ConnectError(f"{self._where} holds {found[:80]!r} as its epoch: start another one")
        return int(found)

    def open_epoch(self, epoch: int, cause: str) -> None:
        """Move on to `epoch`, unless another rank was faster, and tell why."""
        self.swap(f"{epoch}/cause", "", cause)
        self.swap("epoch", str(epoch - 1), str(epoch))

    def drop(self, key: str) -> None:
        """Forget `key`."""
        self._call(lambda: self.raw.delete_key(key))

    def _call(self, work: Callable[[], Value]) -> Value:
        answer: queue.SimpleQueue[tuple[Value | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((work(), None))
            except Exception as error:  # noqa: BLE001 - raised again where the call was made
                answer.put((None, error))

        threading.Thread(target=run, daemon=True).start()
        try:
            value, error = answer.get(timeout=self._timeout)
        except queue.Empty:
            self.broken = True
            raise PeerError(f"{self._where} did not answer within {self._timeout:g} s") from None
        if isinstance(error, ConnectError):
            raise error
        if error is not None:  # whatever torch raises
            self.broken = True
            raise PeerError(f"{self._where} went away: {first_line(error)}") from error
        return value  # type: ignore[return-value]
