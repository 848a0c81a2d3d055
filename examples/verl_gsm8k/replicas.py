"""Replicas that run without a GPU: in place of a vLLM server, a transformers model behind the same interface.

Everything else is verl's: the replica, its workers, the server adapter in them, and the manager.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.rollout import RolloutReplica

from awex_delta.engines.transformers import TransformersEngine
from awex_delta.errors import UpdateError
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Joining
from awex_delta.testing.faults import FaultPlan


class TinyServer:
    """What the actor `vllm_server_0_0` of verl offers, and in its process what vLLM's worker does."""

    def __init__(self, path: str, config: Any) -> None:
        """Load a model with weights of its own: only an update brings those of the trainer."""
        torch.set_num_threads(1)
        torch.manual_seed(os.getpid())
        self._config = config
        qwen3: Any = AutoModelForCausalLM
        self._model = qwen3.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        self._receiver: Receiver | None = None
        self._faults = FaultPlan()
        self._reasons: list[str] = []
        self._global_steps: int | None = None
        self._stopped = False
        self._cache_drops = 0

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ARG002 - as verl names it
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Call a method of vLLM's worker."""
        getattr(self, f"worker_{method}")(*args, **(kwargs or {}))

    def worker_init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Meet the trainer."""
        self.worker_shutdown_weight_transfer_engine()
        joining = Joining.model_validate(init_info)
        receiver = Receiver(
            TransformersEngine(self._model),
            joining.rendezvous,
            joining.first_engine_rank,
            joining.engine,
            joining.settings,
            on_phase=self._faults.on_phase,
        )
        receiver.connect()
        self._receiver = receiver

    def worker_start_weight_update(self) -> None:
        """As vLLM's worker."""

    def worker_update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Take part in one update."""
        if not self._stopped or self._receiver is None:
            raise UpdateError("requests run, or this server has met no trainer")
        self._reasons.append(self._receiver.update_weights(update_info["version"]).verdict.reason.name)

    def worker_finish_weight_update(self) -> None:
        """As vLLM's worker."""

    def worker_shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def clear_kv_cache(self) -> None:
        """Drop what the old weights filled."""
        self._cache_drops += 1

    def set_global_steps(self, global_steps: int) -> None:
        """What verl's server adapter says after an update."""
        self._global_steps = global_steps

    def get_rollout_config(self) -> Any:
        """verl's configuration of this replica."""
        return self._config

    def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """Stop."""
        self._stopped = True
        return {"aborted_count": 0, "request_ids": []}

    def resume_generation(self) -> None:
        """Go on."""
        self._stopped = False

    def release_kv_cache(self) -> None:
        """There is none."""

    def resume_kv_cache(self) -> None:
        """There is none."""

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens. Raises UpdateError while requests are stopped."""
        if self._stopped:
            raise UpdateError("requests are stopped")
        tokens = torch.tensor([prompt], dtype=torch.int64, device="cpu")
        answer = self._model.generate(tokens, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return [int(token) for token in answer[0, len(prompt) :]]

    def state(self) -> dict[str, Any]:
        """What this server holds, for those who check it: weights by name, and how it came to them."""
        return {
            "weights": {name: value.detach().clone() for name, value in self._model.state_dict().items()},
            "version": None if self._receiver is None else self._receiver.version,
            "reasons": list(self._reasons),
            "global_steps": self._global_steps,
            "stopped": self._stopped,
            "cache_drops": self._cache_drops,
        }

    def fail(self, phase: str) -> None:
        """Fail once, as that phase of an update begins."""
        self._faults.fail(phase)


class TinyReplica(RolloutReplica):  # type: ignore[misc] # verl is not type-checked here
    """One replica of verl with a `TinyServer`."""

    async def launch_servers(self) -> None:
        """Start the server under the name by which verl's adapters find it."""
        server = ray.remote(TinyServer).options(name=f"vllm_server_{self.replica_rank}_0", num_cpus=0)
        self.servers = [server.remote(self.model_config.path, self.config)]
        self._server_handle = self.servers[0]
