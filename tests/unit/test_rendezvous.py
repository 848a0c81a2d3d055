"""Where ranks meet: addresses that are refused, and a store that listens where it was told to."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError
from torch._C._distributed_c10d import HashStore

from awex_delta.errors import ConfigError, ConnectError
from awex_delta.gateway.joining import StoreHost
from awex_delta.protocol.rendezvous import Rendezvous, first_line, host_store
from awex_delta.settings.address import host_and_port, is_loopback, listen
from awex_delta.settings.agreed import DeltaSettings
from tests.serving import needs_ipv6


def listening_addresses(port: int) -> set[str]:
    """Local addresses, as the kernel writes them, on which somebody listens at `port`."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


def test_the_store_listens_on_the_given_address_alone() -> None:
    store = host_store()
    assert listening_addresses(store.port) == {"0100007F"}
    store.set("key", "value")
    assert store.get("key") == b"value"


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "listens"), [("::1", f"{'0' * 24}01000000"), ("[::1]", f"{'0' * 24}01000000")]
)
@pytest.mark.parametrize("told", ["::1", "[::1]"])
def test_a_store_on_ipv6_is_met_with_and_without_brackets(host: str, listens: str, told: str) -> None:
    store = host_store(host)
    assert listening_addresses(store.port) == {listens}
    meeting = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, host=told, port=store.port)
    meeting.open_store(timedelta(seconds=10)).set("key", "value")
    assert store.get(f"{meeting.name}/key") == b"value"
    assert meeting.address == f"[::1]:{store.port}"


@needs_ipv6
def test_a_store_on_every_address_is_met_by_either_kind() -> None:
    store = host_store("::")
    for number, host in enumerate(("127.0.0.1", "::1", "localhost")):
        meeting = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, host=host, port=store.port)
        meeting.open_store(timedelta(seconds=10)).set(f"{number}", host)
        assert store.get(f"{meeting.name}/{number}") == host.encode()


@needs_ipv6
def test_an_error_names_an_ipv6_store_as_urls_do() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
    meeting = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, host="::1", port=port)
    with pytest.raises(ConnectError, match=rf"no store answers at \[::1\]:{port}: "):
        meeting.open_store(timedelta(seconds=1))


@pytest.mark.parametrize(
    ("host", "text", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1:80", True),
        ("127.8.9.10", "127.8.9.10:80", True),
        ("localhost", "localhost:80", True),
        ("::1", "[::1]:80", True),
        ("[::1]", "[::1]:80", True),
        ("::ffff:127.0.0.1", "[::ffff:127.0.0.1]:80", True),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]:80", False),
        ("::", "[::]:80", False),
        ("0.0.0.0", "0.0.0.0:80", False),  # noqa: S104 - nothing listens
        ("fe80::1%eth0", "[fe80::1%eth0]:80", False),
        ("10.0.0.1", "10.0.0.1:80", False),
        ("node-1.cluster", "node-1.cluster:80", False),
    ],
)
def test_hosts_are_written_as_urls_do_and_told_from_this_machine(
    host: str, text: str, *, loopback: bool
) -> None:
    assert host_and_port(host, 80) == text
    assert is_loopback(host) is loopback
    place = TypeAdapter(Rendezvous).validate_python(
        {"num_engine_ranks": 1, "num_trainer_ranks": 1, "host": host, "port": 80}
    )
    assert place.address == text


@pytest.mark.parametrize("host", ["", "a b", "::1]", "[::1", "[[::1]]", "http://a", "a/b", "a" * 256])
def test_a_host_from_json_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="host"):
        TypeAdapter(Rendezvous).validate_python(
            {"num_engine_ranks": 1, "num_trainer_ranks": 1, "host": host, "port": 80}
        )


@pytest.mark.parametrize("host", ["", "no such host", "a" * 64, "203.0.113.7", "2001:db8::7"])
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"port=0: cannot listen there \(.+\); give an address"):
        listen(host, 0).close()


@pytest.mark.parametrize(
    ("host", "source", "warns"),
    [
        ("127.0.0.1", "", False),
        ("0.0.0.0", "", True),  # noqa: S104 - what is warned of
        ("0.0.0.0", "env:ANY", False),  # noqa: S104
        pytest.param("::", "", True, marks=needs_ipv6),
        pytest.param("::1", "", False, marks=needs_ipv6),
    ],
)
def test_a_store_for_other_machines_without_a_secret_is_warned_of(
    host: str, source: str, caplog: pytest.LogCaptureFixture, *, warns: bool
) -> None:
    host_store(host, settings=DeltaSettings(secret_source=source))
    said = [f"a store listens on {host}, where whoever reaches it can take the seat"] if warns else []
    assert [one.getMessage().partition(" of an engine")[0] for one in caplog.records] == said


def test_a_gateway_warns_of_each_pair_without_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    stores = StoreHost("0.0.0.0")  # noqa: S104 - what is warned of
    for source in ("env:ANY", "", "env:ANY", ""):
        settings = DeltaSettings(secret_source=source)
        stores.meet("pair", "0" * 32, num_engine_ranks=1, num_trainer_ranks=1, settings=settings)
    assert [one.getMessage()[:28] for one in caplog.records] == ["a store listens on 0.0.0.0, "] * 2


def test_a_store_for_other_machines_is_warned_of_without_settings(caplog: pytest.LogCaptureFixture) -> None:
    host_store("0.0.0.0")  # noqa: S104 - what is warned of
    assert "Set weight_update_secret_source, and give host_store() the settings" in caplog.text


def test_an_address_of_another_machine_and_a_taken_port_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host='203.0.113.7', port=0: cannot listen there"):
        host_store("203.0.113.7")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: cannot listen there"):
            host_store(port=port)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_engine_ranks": 0, "num_trainer_ranks": 0, "port": 1}, "num_engine_ranks=0"),
        ({"num_engine_ranks": 1, "num_trainer_ranks": -1, "port": 1}, "num_trainer_ranks=-1"),
        ({"num_engine_ranks": 1, "num_trainer_ranks": 1}, "port=0"),
        ({"num_engine_ranks": 1, "num_trainer_ranks": 1, "port": 70000}, "port=70000"),
    ],
)
def test_a_rendezvous_that_cannot_work_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rendezvous(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engines", "trainers", "field"), [(0, 1, "num_engine_ranks"), (1, 0, "num_trainer_ranks")]
)
def test_updates_between_ranks_need_both_sides(engines: int, trainers: int, field: str) -> None:
    rendezvous = Rendezvous(num_engine_ranks=engines, num_trainer_ranks=trainers, port=1)
    with pytest.raises(ConfigError, match=f"{field}=0: each side needs at least one rank"):
        rendezvous.require_both_sides()
    assert Rendezvous.alone().world_size == 1


def test_errors_of_torch_are_cut_to_what_they_say() -> None:
    text = "[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:40834. This is typically caused by\nmore"
    assert first_line(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:40834"


def test_a_seat_is_named_by_side_rank_and_seat() -> None:
    rendezvous = Rendezvous(num_engine_ranks=2, num_trainer_ranks=2, store=HashStore())
    assert [rendezvous.place(seat) for seat in (1, 3)] == ["engine rank 1, seat 1", "trainer rank 1, seat 3"]
