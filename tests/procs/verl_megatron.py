"""verl's Megatron engine on a CPU, for `verl_scenario.py`; what `model.external_lib` names there.

verl builds a model by mbridge, whose layers are Transformer Engine's, which has no build for CPUs. So the
model and its optimizer are those of the other tests; the engine around them, its process groups and the way
to it are verl's and ours.
"""

from __future__ import annotations

from dataclasses import replace

from safetensors.torch import save
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine import EngineRegistry

from awex_delta.demo.members import megatron_state, tiny_spec
from awex_delta.integrations.verl.engines import FollowedMegatron
from awex_delta.testing.megatron_cpu import install
from awex_delta.testing.tiny_models import TinyTrainer, build_trainer
from examples.verl_gsm8k.tiny import TinyActor
from tests.procs.vllm_training import plan_of

PLAN = replace(plan_of("qwen3"), lr=1e-6)

install()


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class TinyMegatron(FollowedMegatron):
    """Our engine, with a model that a CPU can train."""

    trainer: TinyTrainer

    def initialize(self) -> None:
        """Build the model, as verl calls it."""
        self.trainer = build_trainer(tiny_spec(PLAN))
        self.module, self.optimizer = self.trainer.chunks, self.trainer.optimizer


class MegatronActor(TinyActor):
    """verl's actor with that engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self, num_steps: int) -> None:
        """Some steps on text."""
        for _ in range(num_steps):
            self.actor.engine.trainer.train_step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def weights(self) -> bytes:
        """This rank's Megatron weights, of which the demo's judge makes those of the model."""
        return save(megatron_state(self.actor.engine.trainer))
