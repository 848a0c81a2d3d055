"""What our training engines of verl have in common, and how a checkpoint engine gets to them.

verl hands a checkpoint engine a generator of tensors, and no way to the engine behind it. So these engines
give out `LiveWeights` in its place: the same tensors for whoever iterates, and the engine for us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from awex_delta.errors import ConfigError
from awex_delta.integrations.verl.checks import refuse, training_problems
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.view import TrainerView

ENGINES = "awex_delta.integrations.verl.engines"
"""What `model.external_lib` names."""


class LiveWeights:
    """What an engine gives out as its weights: tensors for whoever iterates, and the engine itself."""

    def __init__(self, engine: Followed, export: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """`export` begins verl's own export, which loads and gathers weights, once somebody iterates."""
        self.engine = engine
        self._export = export

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._export())


class Followed:
    """What makes an engine of verl one that can be followed. Stands before that engine's class."""

    module: Any
    optimizer: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        """As verl's engines. Raises ConfigError where weights or optimizer state will not stay in place."""
        if not engine_config.forward_only:  # a reference model is never sent
            refuse(list(training_problems(engine_config, model_config)))
        verl_engine: Any = super()
        verl_engine.__init__(model_config, engine_config, *args, **kwargs)
        self.hf_config = model_config.hf_config

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[LiveWeights, None]:
        """The weights as `LiveWeights`, and no adapter."""

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            base: Any = super(Followed, self)
            weights: Iterator[tuple[str, torch.Tensor]] = base.get_per_tensor_param(*args, **kwargs)[0]
            return weights

        return LiveWeights(self, export), None

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of the model that it trains; of Megatron's first chunk."""
        chunk = self.module[0] if isinstance(self.module, Sequence) else self.module
        parameters: Iterator[torch.nn.Parameter] = chunk.parameters()
        return parameters

    def view(self, settings: DeltaSettings) -> TrainerView:
        """Record the optimizer's steps from now on. Raises UnsupportedError."""
        raise NotImplementedError


def engine_of(weights: object) -> Followed:
    """The engine behind what verl gave as weights. Raises ConfigError if it is not one of ours."""
    if isinstance(weights, LiveWeights):
        return weights.engine
    raise ConfigError(
        f"weights = {type(weights).__name__}: verl built an engine of its own, which shows no optimizer. "
        f"Remedy: set actor_rollout_ref.model.external_lib: {ENGINES}, with actor.strategy megatron or fsdp2"
    )
