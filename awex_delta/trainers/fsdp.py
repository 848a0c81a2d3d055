"""A transformers model under FSDP2 (`fully_shard`) as a `TrainerView`.

Each rank holds and steps a part of every parameter. The model computes with whole parameters, which FSDP
gathers in the dtype of its `MixedPrecisionPolicy`: what engines hold is that rounding. A rank sends what it
holds itself, so that nothing is gathered for an update, neither for a delta nor for a full sync.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from awex_delta.detection.optimizers import SteppedParams, local, moments, step_counts
from awex_delta.detection.slices import OwnedSlice, param_key
from awex_delta.engines.transformers import CONVOLUTIONS, is_fused_experts, split_experts
from awex_delta.errors import LayoutError, UnsupportedError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.base import FollowedTrainer
from awex_delta.trainers.fsdp_layout import Held, held_tensors, optimizer_of, trainer_rank
from awex_delta.trainers.tensors import data_parallel_info, tensor_at
from awex_delta.trainers.view import HfPart, TrainerLayout, WeightInfo, live_slice, trainer_line

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class FsdpTrainer(FollowedTrainer):
    """One rank of a training under FSDP2. Made by `attach`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        held: Sequence[Held],
        optimizers: Mapping[str, torch.optim.Optimizer],
        hf_config: Any,
        tied: bool,
        settings: DeltaSettings,
    ) -> None:
        self._model = model
        self._tied = tied
        self._rank, num_ranks = trainer_rank()
        # Of a tensor with few rows some ranks hold none.
        self._held = {param_key(one.name, 0): one for one in held if local(one.tensor).numel()}
        self._infos = {key: self._info(one, one.name in optimizers) for key, one in self._held.items()}
        layout = TrainerLayout(
            architecture=hf_config.architectures[0],
            rank_info=data_parallel_info(self._rank, num_ranks),
            vocab_size=hf_config.get_text_config().vocab_size,
            tied_embeddings=tied,
            parts=self._parts(),
        )
        super().__init__(layout, settings)
        stepped: dict[torch.optim.Optimizer, dict[str, torch.Tensor]] = {}
        for key, info in self._infos.items():
            if info.sparse:
                stepped.setdefault(optimizers[info.param], {})[key] = self._held[key].tensor
        self._watched = [SteppedParams(optimizer, params) for optimizer, params in stepped.items()]
        self._follow(self._watched)

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        hf_config: Any,
        *,
        settings: DeltaSettings,
    ) -> FsdpTrainer:
        """Read what this rank holds of a training, and record its optimizer steps from now on.

        Args:
            model: a causal language model of transformers; `fully_shard` was called on it and on any modules
                inside. All ranks of torch's default process group are trainers.
            optimizer: what steps its parameters, or several that step some each. With `settings.enabled`
                False it is not looked at, and every weight is sent whole.
            hf_config: the HF configuration of the model that engines serve.
            settings: as agreed with the engines.

        Raises:
            UnsupportedError: a trained parameter is not sharded or stepped by no optimizer, a tensor cannot
                be sent, or the head is tied in the model alone or in `hf_config` alone. Nothing was hooked.
        """
        held, aliases = held_tensors(model)
        tied = aliases.get(_LM_HEAD) == _EMBEDDING
        if tied != hf_config.tie_word_embeddings:
            raise UnsupportedError(
                f"hf_config.tie_word_embeddings={hf_config.tie_word_embeddings}, but the model "
                f"{'ties' if tied else 'does not tie'} {_LM_HEAD} to {_EMBEDDING}. Remedy: give the "
                "configuration of this model, or tie its weights before fully_shard (model.tie_weights())"
            )
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        return cls(
            model=model,
            held=held,
            optimizers=optimizer_of(several, held) if settings.enabled else {},
            hf_config=hf_config,
            tied=tied,
            settings=settings,
        )

    def weights(self) -> Sequence[WeightInfo]:
        """What this rank holds of parameters, then of persistent buffers, in the order of the model."""
        return tuple(self._infos.values())

    def tensor(self, key: str) -> torch.Tensor:
        """This rank's part of the parameter that the model has under `key` now.

        Parameters that FSDP keeps gathered after a forward pass (`reshard_after_forward=False`) are sharded
        again first, since an optimizer steps the parts alone.

        Raises:
            UnsupportedError: the model has none there any more, or another one than its optimizer steps.
        """
        held = self._held[key]
        tensor = tensor_at(self._model, held.path, key)
        if tensor is not held.tensor and held.module is not None:
            held.module.reshard()
            tensor = tensor_at(self._model, held.path, key)
            if tensor is not held.tensor:
                raise UnsupportedError(
                    f"{key}: the model has another parameter than its optimizer steps. Remedy: put it back, "
                    "or make the optimizer for the model as it is, and attach again"
                )
        return local(tensor)

    def owned_slices(self) -> list[OwnedSlice]:
        """The parts that this rank steps."""
        begins, found = trainer_line(self._infos.values()).begins(), dict[str, OwnedSlice]()
        for stepped in self._watched:
            live = stepped.live()
            counts = step_counts(stepped.optimizer, list(live.values()))
            for (key, param), step in zip(live.items(), counts, strict=True):
                weight, main = local(self._held[key].tensor), local(param)
                found[key] = live_slice(
                    self._infos[key],
                    begins[key],
                    step,
                    weight=weight,
                    main=main if main.dtype is torch.float32 else None,
                    moments=moments(stepped.optimizer, param),
                    in_weight=None,
                    in_state=None,
                )
        return [found[key] for key in begins]

    def gather_params(self) -> None:
        """Nothing to gather: a rank sends its part."""

    def gather_owned(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parts in their shapes, since a rank owns all that it holds.

        Args:
            parts: key -> bf16 [n].
        """
        return {key: part.view(self._infos[key].shape) for key, part in parts.items()}

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """The tensor as engines hold it, in the dtype that the model computes with, under its HF names."""
        held = self._held[key]
        tensor = tensor.to(held.served)
        if is_fused_experts(held.name):
            module = self._model.get_submodule(".".join(held.path[:-1]))
            return list(split_experts(held.name, tensor, module, held.part.offset[0]))
        if self._tied and held.name == _EMBEDDING:
            return [(_EMBEDDING, tensor), (_LM_HEAD, tensor)]
        return [(held.name, tensor)]

    def transfer(self) -> AbstractContextManager[None]:
        """FSDP keeps no gradient buffers, so there is nothing to release."""
        return nullcontext()

    def _info(self, held: Held, trained: bool) -> WeightInfo:
        shape = tuple(local(held.tensor).shape)
        sparse = trained and held.served is torch.bfloat16
        return WeightInfo(
            param=held.name,
            chunk=0,
            shape=shape,
            dtype=held.tensor.dtype,
            owners=(self._rank,) if sparse else (),
            owned_start=0,
            owned_stop=math.prod(shape) if sparse else 0,
            trained=trained,
        )

    def _parts(self) -> dict[str, HfPart]:
        """Which part this rank holds of each HF tensor."""
        return {name: part for key in self._held for name, part in self._parts_of(key)}

    def _parts_of(self, key: str) -> Iterator[tuple[str, HfPart]]:
        held, shape = self._held[key], self._infos[key].shape
        like = torch.empty(shape, dtype=held.tensor.dtype, device="meta")
        fused = is_fused_experts(held.name)
        plain = len(shape) < 3 or isinstance(
            self._model.get_submodule(".".join(held.path[:-1])), CONVOLUTIONS
        )
        if shape[1:] != held.part.whole[1:] if fused else not plain:
            raise UnsupportedError(
                f"{held.name}: this rank holds {shape} of {held.part.whole}, and no rule names the HF "
                "tensors of such a part. Remedy: shard it along dimension 0, as fully_shard does by itself"
            )
        try:
            outputs = self.convert(key, like)
        except LayoutError as error:
            raise UnsupportedError(str(error)) from error
        for name, output in outputs:
            whole = tuple(output.shape)
            yield name, HfPart(offset=(0,) * len(whole), whole=whole) if fused else held.part
