"""Hosts and ports as people write them: names, IPv4, and IPv6 with or without brackets."""

from __future__ import annotations

import ipaddress


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
