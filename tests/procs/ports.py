"""Ports of servers that a test starts later, or starts again."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A free port, kept until the socket is closed: nobody else is given it before a server listens there.

    Nothing listens on it yet, so that clients are refused. A server that sets SO_REUSEADDR may bind it, too.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def number_of(held: socket.socket) -> int:
    """The number of a port that is held."""
    number: int = held.getsockname()[1]
    return number
