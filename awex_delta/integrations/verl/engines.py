"""verl's training engines, with a way to their optimizer. Importing this registers them.

verl imports the module that `model.external_lib` names before it builds an engine, and looks an engine up by
device and vendor before it falls back to its own.
"""

from __future__ import annotations

from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from awex_delta.integrations.verl.followed import Followed
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.fsdp import FsdpTrainer
from awex_delta.trainers.megatron import MegatronTrainer
from awex_delta.trainers.view import TrainerView


class FollowedMegatron(Followed, MegatronEngineWithLMHead):  # type: ignore[misc] # verl is not type-checked here
    """verl's Megatron engine of language models."""

    def view(self, settings: DeltaSettings) -> TrainerView:
        """See `Followed.view`."""
        return MegatronTrainer.attach(self.module, self.optimizer, self.hf_config, settings=settings)


class FollowedFsdp(Followed, FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP2 engine of language models."""

    def view(self, settings: DeltaSettings) -> TrainerView:
        """See `Followed.view`."""
        return FsdpTrainer.attach(self.module, self.optimizer, self.hf_config, settings=settings)


def register(*, device: str, vendor: str | None) -> None:
    """Let verl build these engines for language models on a device, such as `cuda` of `nvidia`."""
    for strategy, engine in (("megatron", FollowedMegatron), ("fsdp2", FollowedFsdp)):
        EngineRegistry.register(model_type="language_model", backend=strategy, device=device, vendor=vendor)(
            engine
        )


for _vendor in ("nvidia", "amd"):
    register(device="cuda", vendor=_vendor)
