"""The checkpoint engine `awex_delta` of verl. Importing this registers it.

verl makes one in every trainer rank and in every worker of a replica, and calls it at every synchronization:
`prepare` on all of them, `build_topology` in the driver, `init_process_group` on all, `send_weights` and
`receive_weights` at once, `finalize`. Connections outlive a synchronization; they are made anew when a
trainer or a server is another one than before.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import ray
from torch._C._distributed_c10d import TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from awex_delta.errors import AwexDeltaError, UpdateError
from awex_delta.integrations.verl.checks import NAME, delta_settings
from awex_delta.integrations.verl.followed import LiveWeights, engine_of
from awex_delta.integrations.verl.order import Member, Order, Outcomes, again_once, orders
from awex_delta.integrations.verl.rollout import Replica, find_replica
from awex_delta.protocol.rendezvous import host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.environment import variable
from awex_delta.trainers.view import TrainerView


class Nothing:
    """What verl's server adapters receive: no tensors, but the update happens while they ask for them.

    vLLM's adapter asks asynchronously, SGLang's does not.
    """

    def __init__(self, replica: Replica | None, order: Order) -> None:
        """Without a replica, which its first worker drives alone, nothing happens."""
        self._replica = replica
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        if self._replica is not None:
            self._replica.follow(self._order)
        return iter(())

    async def __aiter__(self) -> AsyncIterator[Any]:
        for tensor in await asyncio.to_thread(iter, self):
            yield tensor


@CheckpointEngineRegistry.register(NAME)
class DeltaCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # verl is not type-checked here
    """One worker's part. Made by verl's registry, with what `engine_kwargs.awex_delta` says."""

    wire_format = "delta_flush"
    """With this and no tensors, verl's server adapters do nothing but set `global_steps`."""

    def __init__(self, bucket_size: int, is_master: bool | None = None, **settings: Any) -> None:  # noqa: ARG002 - as verl calls it
        """Nothing is opened yet.

        Args:
            bucket_size: of verl's own engines; `weight_update_bucket_bytes` counts here.
            is_master: whether this is trainer rank 0; None in a worker of a replica.
            settings: of `TrainEngineConfig`, by name.

        Raises:
            ConfigError: a setting is not known, has a wrong value, or cannot work with verl.
        """
        self._settings = delta_settings(settings)
        self._is_master = is_master
        self._life = uuid.uuid4().hex
        self._store: TCPStore | None = None
        self._order: Order | None = None
        self._view: TrainerView | None = None
        self._sender: Sender | None = None
        self._replica: Replica | None = None
        self._version = 0

    def prepare(self) -> Member:
        """What this worker says of itself. Raises ConfigError if its replica cannot be reached."""
        if self._is_master is None:
            return self._prepare_worker()
        host, port = "", 0
        if self._is_master:
            host = ray.util.get_node_ip_address()
            self._store = self._store or host_store(host, settings=self._settings)
            port = self._store.port
        return Member(life=self._life, version=self._version, host=host, port=port, settings=self._settings)

    def _prepare_worker(self) -> Member:
        if variable("RANK") != "0":
            return Member(settings=self._settings)
        replica = Replica(*find_replica())
        if self._replica is None or self._replica.life != replica.life:
            self._replica = replica
        return Member(
            life=self._replica.life,
            version=self._replica.version,
            leads=True,
            problems=self._replica.problems(),
            settings=self._settings,
        )

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Member]
    ) -> tuple[dict[str, list[Order]], dict[str, list[Order]]]:
        """The `order` of each worker, from what `prepare` answered. Raises ConfigError."""
        trainers, workers = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        told = orders(trainers, workers)
        assert len(workers) == rollout_world_size  # noqa: S101 - verl gives both
        return {"order": told[:actor_wg_world_size]}, {"order": told[actor_wg_world_size:]}

    def init_process_group(self, order: Order) -> None:
        """Keep what `build_topology` told. Ranks meet in the update itself, and only where they have to."""
        self._order = order

    def finalize(self) -> None:
        """Nothing: verl leaves it out after an error, and the next update needs the connections."""

    async def send_weights(
        self,
        weights: LiveWeights,
        global_steps: int | None = None,  # noqa: ARG002 - it may repeat, skip or be missing
    ) -> dict[str, float]:
        """Bring all replicas to the weights of the engine behind `weights`. On every trainer rank.

        Returns what verl logs, by its own names. Raises ConfigError if verl's engine is none of ours, and
        UpdateError if two tries failed. Collective: over all trainer and engine ranks.
        """
        order, engine = self._ordered(), engine_of(weights)
        if self._view is None:
            self._view = engine.view(self._settings)
        if self._sender is None or self._sender.comm.rendezvous != order.rendezvous:
            if self._sender is not None:
                self._sender.close()
            rank = int(self._view.layout().rank_info["global_rank"])
            device = next(iter(engine.parameters())).device
            self._sender = Sender(self._view, order.rendezvous, rank, self._settings, device=device)
        stats = again_once(lambda number: self._send(order, number), f"trainer, version {order.version},")
        self._version = order.version
        return _metrics(stats)

    def receive_weights(self, global_steps: int | None = None) -> Nothing:  # noqa: ARG002 - as above
        """No tensors: this worker holds no weights. The first worker of a replica drives its update."""
        return Nothing(self._replica, self._ordered())

    def _send(self, order: Order, number: int) -> UpdateStats:
        sender = self._sender
        assert sender is not None  # noqa: S101 - send_weights made it
        failure = "trainer rank 0 gave up"
        try:
            stats = sender.update_weights(order.version)
            failure = ""
        except AwexDeltaError as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self._is_master:
                Outcomes(order).tell(number, failure)
        return stats

    def _ordered(self) -> Order:
        if self._order is None:
            raise UpdateError("verl has not called init_process_group: synchronize through its manager")
        return self._order


def _metrics(stats: UpdateStats) -> dict[str, float]:
    """What verl logs of a synchronization, by the names of its own delta engine."""
    return {
        "checkpoint_engine/version": float(stats.version),
        "checkpoint_engine/full": float(stats.verdict.kind is Kind.FULL),
        "checkpoint_engine/changed_elems": float(stats.total_changed),
        "checkpoint_engine/changed_ratio": stats.total_changed / stats.total_owned
        if stats.total_owned
        else 1.0,
        "checkpoint_engine/payload_mbytes": stats.total_wire_bytes / (1 << 20),
    }
