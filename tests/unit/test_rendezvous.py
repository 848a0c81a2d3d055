"""Where ranks meet: addresses that are refused, and a store that listens where it was told to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from awex_delta.errors import ConfigError
from awex_delta.protocol.rendezvous import Rendezvous, first_line, host_store


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
