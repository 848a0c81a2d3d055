"""Apps under uvicorn in this process, and whether this machine has an IPv6 loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn


def _has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


LOOPBACK = "::1" if _has_ipv6_loopback() else "127.0.0.1"
needs_ipv6 = pytest.mark.skipif(LOOPBACK != "::1", reason="this machine has no IPv6 loopback")


@contextmanager
def served(app: Any, host: str) -> Iterator[str]:
    """Serve an app; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server.should_exit = True
    thread.join(30)
