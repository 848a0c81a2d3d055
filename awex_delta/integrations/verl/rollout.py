"""One replica of verl's rollout, driven by its first worker while verl holds the replica's requests.

That worker is in none of the processes that hold weights: it calls vLLM's workers through verl's server
actor, or SGLang's server over HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from awex_delta.engines.sglang.driver import HttpControl, SglangDriver
from awex_delta.engines.vllm.driver import StoppedVllmDriver, VllmTransfer
from awex_delta.errors import AwexDeltaError, ConfigError, UpdateError
from awex_delta.integrations.verl.checks import rollout_problems
from awex_delta.integrations.verl.order import Order, Outcomes, again_once
from awex_delta.protocol.rendezvous import Joining
from awex_delta.settings.address import host_and_port
from awex_delta.settings.environment import variable

_PREFIX = r"rollout_standalone_(\d+)(?:_.*)?"


class RayTransfer(VllmTransfer):
    """vLLM's weight transfer, through the actor in which verl runs a vLLM server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def init(self, info: Mapping[str, Any]) -> None:
        self._workers("init_weight_transfer_engine", init_info=dict(info))

    def start(self) -> None:
        self._workers("start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        self._workers("update_weights", update_info=dict(info))

    def finish(self, version: str) -> None:  # noqa: ARG002 - verl counts versions by its own `global_steps`
        self._workers("finish_weight_update")

    def reset_prefix_cache(self, *, running: bool) -> bool:  # noqa: ARG002 - verl has aborted all requests
        wait(self._server.clear_kv_cache.remote())
        return True

    def leave(self) -> None:
        self._workers("shutdown_weight_transfer_engine")

    def _workers(self, method: str, **kwargs: Any) -> None:
        wait(self._server.collective_rpc.remote(method, kwargs=kwargs))


class Replica:
    """The replica that this process is the first worker of, as long as its server lives."""

    def __init__(self, kind: str, server: Any) -> None:
        """`kind` is `vllm` or `sglang`; `server` is the handle of its actor."""
        self.kind = kind
        self.server = server
        self.version = 0
        self._vllm = StoppedVllmDriver(RayTransfer(server)) if kind == "vllm" else None
        self._sglang: SglangDriver | None = None
        self._pairing = ""

    @property
    def life(self) -> str:
        """Another one for each server that was started."""
        return str(self.server._actor_id.hex())  # noqa: SLF001 - Ray offers it nowhere else

    def problems(self) -> list[str]:
        """Why this replica cannot be written in place, as far as its server tells its configuration."""
        return list(rollout_problems(wait(self.server.get_rollout_config.remote()))) if self._vllm else []

    def follow(self, order: Order) -> None:
        """Take part in one update, and once more if it fails.

        Raises UpdateError if it failed twice; the replica's requests have to stay stopped then.
        Collective: over all trainer and engine ranks.
        """
        try:
            again_once(lambda number: self._update(order, number), order.engine)
        except AwexDeltaError as error:
            raise UpdateError(
                f"{order.engine} did not reach version {order.version}. Its requests stay stopped, since its "
                "weights may be a mixture, until an update succeeds"
            ) from error
        self.version = order.version

    def _update(self, order: Order, number: int) -> None:
        joining = Joining(
            rendezvous=order.rendezvous,
            settings=order.settings,
            first_engine_rank=order.first_engine_rank,
            engine=order.engine,
        )
        if self._vllm is not None:
            self._update_vllm(self._vllm, joining, order.version)
        else:
            self._update_sglang(joining, order, number)

    def _update_vllm(self, driver: StoppedVllmDriver, joining: Joining, version: int) -> None:
        if self._pairing != joining.rendezvous.name:
            driver.connect(joining.model_dump(mode="json"))
            self._pairing = joining.rendezvous.name
        driver.update_weights(version)

    def _update_sglang(self, joining: Joining, order: Order, number: int) -> None:
        if self._sglang is None or self._pairing != joining.rendezvous.name:
            if self._sglang is not None:
                self._sglang.disconnect()
            url = f"http://{host_and_port(*wait(self.server.get_server_address.remote()))}"
            self._sglang = SglangDriver(HttpControl(url, order.num_workers), joining)
            self._pairing = joining.rendezvous.name
        self._sglang.update_weights(order.version)
        failure = Outcomes(order).hear(number)
        if failure:
            raise UpdateError(failure)
        self._sglang.publish(order.version)


def find_replica() -> tuple[str, Any]:
    """The kind and the server's actor of the replica that this worker belongs to.

    Raises ConfigError if this is no worker of a standalone replica of vLLM or SGLang.
    """
    prefix = variable("WG_PREFIX") or ""
    number = re.fullmatch(_PREFIX, prefix)
    if number is None:
        raise ConfigError(
            f"this worker group is called {prefix!r}: deltas go to standalone replicas alone, whose devices "
            "are not the trainer's. Remedy: give the rollout devices of its own (rollout.nnodes and "
            "rollout.n_gpus_per_node of an asynchronous trainer of verl)"
        )
    for kind in ("vllm", "sglang"):
        try:
            return kind, ray.get_actor(f"{kind}_server_{number[1]}_0")
        except ValueError:
            continue
    raise ConfigError(
        f"replica {number[1]} has no actor vllm_server_{number[1]}_0 or sglang_server_{number[1]}_0. "
        "Remedy: set rollout.name to vllm or sglang"
    )


def wait(answer: Any) -> Any:
    """What an actor answers. Raises UpdateError if it fails, or is gone.

    verl's workers run an event loop, on whose thread Ray warns of any wait.
    """
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(ray.get, answer).result()
    except RayError as error:
        raise UpdateError(f"the server of this replica: {error}") from error
