"""Hosts and ports as people write them: names, IPv4, and IPv6 with or without brackets."""

from __future__ import annotations

import ipaddress
import socket

from awex_delta.errors import ConfigError


def bare_host(host: str) -> str:
    """A host without the brackets that URLs put around an IPv6 address: `[::1]` is `::1`."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_and_port(host: str, port: int) -> str:
    """Both as one text, as URLs write them: `10.0.0.1:8090`, `[::1]:8090`."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is reached from this machine alone. Of names, only `localhost` is taken for one."""
    try:
        address = ipaddress.ip_address(bare_host(host))
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def unresolved(host: str) -> str:
    """Why a host has no address, as this machine looks it up now; empty if it has one."""
    try:
        socket.getaddrinfo(bare_host(host), None)
    except (OSError, UnicodeError) as error:
        return str((error.strerror if isinstance(error, OSError) else None) or error)
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine: of a name's addresses, IPv4 before IPv6.

    `::` means every address, of either kind. Raises ConfigError if this machine has no such address, or the
    port is taken.
    """
    host = bare_host(host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(found, key=lambda one: one[0] is not socket.AF_INET)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError, OverflowError) as error:
        why = (
            error.strerror.partition(" (while")[0] if isinstance(error, OSError) and error.strerror else error
        )
        raise ConfigError(
            f"host={host!r}, port={port}: cannot listen there ({why}); "
            "give an address of this machine and a free port"
        ) from error
