"""Where the ranks of a pairing meet: seats in the transfer world, and the store that they share."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.json_schema import SkipJsonSchema
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from awex_delta.errors import ConfigError, ConnectError
from awex_delta.settings.address import bare_host, host_and_port, is_loopback, listen, unresolved
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require

logger = logging.getLogger(__name__)

# A name, or an address, with a zone such as `%eth0` where IPv6 needs one.
_HOST = r"^([A-Za-z0-9.:%_-]{1,255}|\[[0-9A-Za-z.:%_-]{1,253}\])$"
_COUNTS = ("num_engine_ranks", "num_trainer_ranks")
RankCount = Annotated[int, Field(ge=0, le=1 << 20, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one trainer and its engines meet. Between processes it travels as JSON.

    num_engine_ranks, num_trainer_ranks: ranks of each side; all of them take part in every update. One
        side alone meets where updates travel through a folder.
    host, port: of the TCP store that `host_store` opened; an IPv6 address with or without brackets. Ignored
        where `store` is given.
    name: keeps several pairings on one store apart.
    store: an existing torch store, such as a HashStore between threads.
    """

    # Read from JSON, which may come from anybody, it is checked more closely.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    num_engine_ranks: RankCount
    num_trainer_ranks: RankCount
    host: Annotated[str, StringConstraints(pattern=_HOST)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=65536, strict=True)] = 0
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,128}$")] = "awex_delta"
    store: Annotated[SkipJsonSchema[Store | None], Field(exclude=True)] = None

    def __post_init__(self) -> None:
        require(int, "a whole number", **{name: getattr(self, name) for name in (*_COUNTS, "port")})
        require(str, "a text", host=self.host, name=self.name)
        require((Store, type(None)), "a store of torch, or None", store=self.store)
        for field in _COUNTS:
            if getattr(self, field) < 0 or not (self.num_engine_ranks or self.num_trainer_ranks):
                raise ConfigError(f"{field}={getattr(self, field)}: give the number of ranks of that side")
        if self.store is None and not 0 < self.port < 65536:
            raise ConfigError(f"port={self.port}: give the port of the store that host_store() opened")

    @classmethod
    def alone(cls) -> Rendezvous:
        """For a trainer of one rank that meets nobody: its updates travel through a folder."""
        return cls(num_engine_ranks=0, num_trainer_ranks=1, store=HashStore())

    def require_both_sides(self) -> None:
        """Refuse a meeting of one side alone, for updates that travel between ranks. Raises ConfigError."""
        for field in _COUNTS:
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: each side needs at least one rank")

    @property
    def world_size(self) -> int:
        """Ranks of both sides together."""
        return self.num_engine_ranks + self.num_trainer_ranks

    @property
    def address(self) -> str:
        """Host and port of the store, as URLs write them."""
        return host_and_port(self.host, self.port)

    def engine_seat(self, engine_rank: int) -> int:
        """Transfer rank of engine rank `engine_rank` (0-based over all engines)."""
        _require_rank(self.num_engine_ranks, engine_rank=engine_rank)
        return engine_rank

    def trainer_seat(self, trainer_rank: int) -> int:
        """Transfer rank of trainer rank `trainer_rank` (0-based over the trainer's world)."""
        _require_rank(self.num_trainer_ranks, trainer_rank=trainer_rank)
        return self.num_engine_ranks + trainer_rank

    def place(self, seat: int) -> str:
        """One transfer rank as a person would call it, and as logs count it: `trainer rank 1, seat 3`."""
        return f"{self.name_seats([seat])}, seat {seat}"

    def name_seats(self, seats: Sequence[int]) -> str:
        """Transfer ranks as a person would call them: `engine rank 0, trainer rank 2`."""
        first = self.num_engine_ranks
        names = [f"engine rank {s}" if s < first else f"trainer rank {s - first}" for s in seats]
        return ", ".join(names) or "some rank"

    def open_store(self, timeout: timedelta) -> Store:
        """Connect to the store. Raises ConnectError if its host does not resolve, or nobody answers there."""
        base = self.store
        if base is None:
            if why := unresolved(self.host):
                raise ConnectError(
                    f"host = {self.host!r} does not resolve on this machine ({why}). Remedy: give an "
                    "address, or a name that every rank can look up"
                )
            try:
                base = TCPStore(bare_host(self.host), self.port, is_master=False, timeout=timeout)
            except RuntimeError as error:
                raise ConnectError(f"no store answers at {self.address}: {first_line(error)}") from error
        return PrefixStore(self.name, base)


def _require_rank(count: int, **given: int) -> None:
    """Refuse a rank, by the name of its argument, that is none of `count` ranks."""
    require(int, "a whole number", **given)
    for name, rank in given.items():
        if not 0 <= rank < count:
            raise ConfigError(
                f"{name}={rank} is outside [0, {count}). Remedy: count all ranks of that side in it"
            )


class Joining(BaseModel):
    """How one engine joins a pairing, of which its workers are told as JSON.

    rendezvous: where all ranks of the pairing meet.
    settings: the same as on the trainer's side.
    first_engine_rank: of this engine's workers among all engine ranks of the rendezvous.
    engine: name of this engine, another one for each that shares the pairing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rendezvous: Rendezvous
    settings: DeltaSettings
    first_engine_rank: RankCount = 0
    engine: str = "engine"


def host_store(host: str = "127.0.0.1", port: int = 0, *, settings: DeltaSettings | None = None) -> TCPStore:
    """Open the store that a `Rendezvous` points at, in this process.

    Args:
        host: address to listen on, and on no other; IPv4, or IPv6 with or without brackets, or a name of one.
            `::` means every address of this machine, of either kind.
        port: 0 picks a free one; read it from `.port` of the result.
        settings: of the ranks that will meet here. If they share no secret, and `host` is not a loopback
            address, a warning says so: whoever reaches the store can then take a seat.

    The store lives as long as the returned object does. It asks nobody who they are.

    Raises:
        ConfigError: this machine has no such address, or the port is taken.
    """
    require(str, "an address of this machine", host=host)
    require(int, "a free port, or 0", port=port)
    require((DeltaSettings, type(None)), "what resolve(...).settings is", settings=settings)
    listener = listen(host, port)
    bound = listener.getsockname()[1]
    warn_without_secret(host, settings)
    # torch would listen on every interface by itself; it is handed a socket that does not.
    return TCPStore(
        bare_host(host),
        bound,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def warn_without_secret(host: str, settings: DeltaSettings | None) -> None:
    """Log a warning if a store at `host` lets other machines in and those who meet there prove no secret."""
    if not is_loopback(host) and (settings is None or not settings.secret_source):
        logger.warning(
            "a store listens on %s, where whoever reaches it can take the seat of an engine or a trainer: "
            "no secret is asked for. Set weight_update_secret_source, and give host_store() the settings",
            host,
        )


def first_line(error: Exception) -> str:
    """What an error of torch says, without Gloo's source position before it and its advice after it."""
    text = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0])
    return text.partition(". This is typically")[0]
