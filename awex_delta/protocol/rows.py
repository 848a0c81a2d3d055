"""What ranks tell each other in rows: bytes and JSON values of any length, over one all-gather."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from awex_delta.errors import ConfigError, ConnectError
from awex_delta.protocol.rendezvous import Rendezvous

MAX_BYTES = 1 << 28
"""The longest description of one rank. A model of a hundred thousand tensors needs a hundredth of it."""


class Rows(ABC):
    """What is built on `gather`."""

    rendezvous: Rendezvous
    is_closed = False

    def require_open(self, kind: str) -> None:
        """Refuse a call after `close`. Raises ConfigError; `kind` says what was closed."""
        if self.is_closed:
            raise ConfigError(f"this {kind} is closed: close() was called. Remedy: make another one")

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self.is_closed = True

    @abstractmethod
    def leave(self) -> None:
        """Leave until the next `connect`. Peers that still wait here fail at once."""

    @abstractmethod
    def gather(self, row: bytes, *, width: int, phase: str) -> list[bytes]:
        """Give one row to every rank and get all rows, by transfer rank.

        Args:
            row: at most `width` - 4 bytes; `width` is the same on every rank.
            phase: names the call in errors.

        Raises:
            PeerError: a rank did not arrive in time, or went away, or its seal is wrong.

        Collective: yes, over all transfer ranks.
        """

    def gather_bytes(self, blob: bytes, *, phase: str) -> list[bytes]:
        """As `gather`, of any length: sizes first, then the bytes. Raises ConnectError beyond `MAX_BYTES`.

        Collective: yes, over all transfer ranks.
        """
        rows = self.gather(len(blob).to_bytes(8, "little"), width=16, phase=phase)
        sizes = [int.from_bytes(row, "little") for row in rows]
        for seat, size in enumerate(sizes):
            if size > MAX_BYTES:
                place = self.rendezvous.place(seat)
                raise ConnectError(f"{place} announces {size} bytes, more than {MAX_BYTES}")
        return self.gather(blob, width=max(sizes) + 4, phase=phase)

    def gather_json(self, value: Any, *, phase: str) -> list[Any]:
        """As `gather_bytes`, of a JSON value. Raises ConnectError where a rank sends what is no JSON.

        Collective: yes, over all transfer ranks.
        """
        blobs = self.gather_bytes(json.dumps(value).encode(), phase=phase)
        return [_parse_json(seat, blob) for seat, blob in enumerate(blobs)]


def _parse_json(seat: int, blob: bytes) -> Any:
    try:
        return json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise ConnectError(f"seat {seat} sent what is no JSON: {error}") from error
