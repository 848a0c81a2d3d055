"""Our backend of vLLM's weight transfer: one receiver inside each worker, driven by vLLM's four calls."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from awex_delta.engines.vllm.adapter import VllmEngine
from awex_delta.errors import ConfigError, ConnectError, UpdateError
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Joining


class UpdateInfo(BaseModel):
    """What `update_weights` is given: the version that the trainer sends meanwhile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=0)


class VllmTransferEngine(WeightTransferEngine):  # type: ignore[misc] # vLLM is not type-checked here
    """Lives in one worker beside its model. Made by vLLM's factory."""

    init_info_cls = Joining
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: Receiver | None = None
        self._view: VllmEngine | None = None
        self._committed = False

    def init_transfer_engine(self, joining: Joining) -> None:
        """Prove that the model can be updated in place, then meet the trainer. Called again, it reconnects.

        Raises:
            ConfigError: vLLM is laid out in a way that is not supported, or a rank does not fit.
            ConnectError: the model cannot be updated in place, or does not fit the trainer.

        Collective: over all trainer and engine ranks: the trainer's `connect` must run meanwhile.
        """
        self.shutdown()
        rank, engine = self._place(joining)
        with set_current_vllm_config(self.vllm_config):
            if self._view is not None:
                self._view.tensors()  # captured graphs read what they read before, whoever connects
            view = VllmEngine(self.model, captured=self._captures_graphs())
        receiver = Receiver(view, joining.rendezvous, rank, engine, joining.settings, device=self.device)
        try:
            receiver.connect()
        except ConnectError:
            receiver.close()
            raise
        self._receiver, self._view = receiver, view

    def start_weight_update(self) -> None:
        """Begin: nothing is written yet. Raises UpdateError before `init`."""
        self._connected()
        self._committed = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take part in one update, to its commit. It is full if weights were lost since the last one.

        Raises UpdateError if it did not commit; that says whether the weights are still the version before.
        Collective: over all trainer and engine ranks.
        """
        receiver = self._connected()
        if self._view is not None and not self._view.still_committed():
            receiver.invalidate()
        try:
            with set_current_vllm_config(
                self.vllm_config
            ):  # should weights have moved, they are proved again
                stats = receiver.update_weights(update_info.version)
        except (UpdateError, ConnectError) as error:
            state = f"are still version {receiver.version}" if receiver.ready else "must not be served"
            error.add_note(f"the weights of this worker {state}")
            raise
        self._committed = stats.version == update_info.version

    def finish_weight_update(self) -> None:
        """End an update that committed. Raises UpdateError if none did."""
        if not self._committed:
            raise UpdateError("finish_weight_update: no update was committed since start_weight_update")

    def shutdown(self) -> None:
        """Leave the pairing; the weights stay as they are."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _captures_graphs(self) -> bool:
        """Whether this worker replays CUDA graphs. vLLM captures none on a CPU, whatever it is told."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        return self.device.type != "cpu" and (mode is None or mode.name != "NONE")

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise UpdateError("call init_weight_transfer_engine first: this worker has met no trainer")
        return self._receiver

    def _place(self, joining: Joining) -> tuple[int, str]:
        """This worker's engine rank, and the name of the copy of the model that it shares."""
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}: vLLM is updated with tensor, "
                f"data and expert parallelism only. Remedy: pipeline_parallel_size=1"
            )
        replica, per_replica = parallel.data_parallel_index, parallel.world_size
        rank = joining.first_engine_rank + replica * per_replica + parallel.rank
        # Experts are spread over the replicas, which hold one model together then.
        shared = parallel.enable_expert_parallel or parallel.data_parallel_size == 1
        return rank, joining.engine if shared else f"{joining.engine}/{replica}"
