"""Two hosts on this machine: network namespaces joined by a link of a chosen speed (root, iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

LOOPBACK = "loopback"
SPEEDS = {"1gbit": "1gbit", "100mbit": "100mbit"}
"""Link name -> rate as `tc` spells it."""


class NoLinkError(RuntimeError):
    """A link cannot be made on this machine; says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where one side of a benchmark runs.

    address: what peers connect to.
    command: put before a command line so that it runs there.
    interface: what Gloo has to listen on; empty for its own choice.
    """

    address: str = "127.0.0.1"
    command: tuple[str, ...] = ()
    interface: str = ""


@contextmanager
def hosts(link: str) -> Iterator[tuple[Host, Host]]:
    """The trainers' and the engines' host, taken down again whatever happens.

    Args:
        link: "loopback" for this machine as it is, or a key of SPEEDS.

    Raises:
        NoLinkError: the link needs root or a tool that is missing.
    """
    if link == LOOPBACK:
        yield Host(), Host()
        return
    if os.geteuid() != 0:
        raise NoLinkError(f"--link {link} makes network namespaces, which needs root; run it as root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoLinkError(f"--link {link} needs {' and '.join(missing)}: install iproute2")
    tag = uuid.uuid4().hex[:6]
    spaces, ends = (f"ad-{tag}-t", f"ad-{tag}-e"), (f"ad{tag}t", f"ad{tag}e")
    addresses = ("10.213.77.1", "10.213.77.2")
    try:
        for space in spaces:
            _run("ip", "netns", "add", space)
        _run(
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            spaces[1],
        )
        for space, end, address in zip(spaces, ends, addresses, strict=True):
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", end)
            _run(*inside, "ip", "link", "set", end, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            shape = ("rate", SPEEDS[link], "burst", "256kbit", "latency", "50ms")
            _run(*inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", *shape)
        trainer, engine = (
            Host(address=address, command=("ip", "netns", "exec", space), interface=end)
            for address, space, end in zip(addresses, spaces, ends, strict=True)
        )
        yield trainer, engine
    finally:
        for space in spaces:  # takes the links with it
            with suppress(NoLinkError):
                _run("ip", "netns", "delete", space)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed tools
    if done.returncode != 0:
        raise NoLinkError(f"{' '.join(command)}: {done.stderr.strip()}")


def environment(host: Host, base: dict[str, str]) -> dict[str, str]:
    """Environment of a process on `host`: Gloo listens on the link, and one thread a rank."""
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**base, **own, **({"GLOO_SOCKET_IFNAME": host.interface} if host.interface else {})}


def arguments(host: Host, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` on `host`."""
    return [*host.command, *command]
