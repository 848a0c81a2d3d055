"""Megatron-core as a `TrainerView`: live weights, owned optimizer shards, AWEX's converter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from awex_delta.conversion.alone import check_conversion
from awex_delta.detection.optimizers import SteppedParams, kept_master, moments, part_of, step_counts
from awex_delta.detection.slices import Detection, OwnedSlice, param_key
from awex_delta.errors import UnsupportedError
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.base import FollowedTrainer
from awex_delta.trainers.converters import converter_of
from awex_delta.trainers.megatron_layout import (
    OwnedPart,
    Shard,
    canonical_name,
    check_model,
    check_training,
    global_layer_ids,
    named_parameters,
    optimizer_shards,
    rank_info,
    router_biases,
)
from awex_delta.trainers.tensors import tensor_at
from awex_delta.trainers.view import TrainerLayout, WeightInfo, live_slice, trainer_line

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"

_Owned = tuple[WeightInfo, int, slice | None, torch.nn.Parameter, OwnedPart]
"""A parameter that is owned: where its owned part begins in the trainer's line, the part of the live weight,
that weight, and what is stepped."""


class MegatronTrainer(FollowedTrainer):
    """One rank of a Megatron training. Made by `attach`."""

    def __init__(
        self,
        *,
        chunks: Sequence[torch.nn.Module],
        shards: Sequence[Shard],
        converter: Any,
        layout: TrainerLayout,
        settings: DeltaSettings,
    ) -> None:
        super().__init__(layout, settings)
        self._chunks = tuple(chunks)
        self._converter = converter
        self._params: dict[str, torch.nn.Parameter] = {}
        self._places: dict[str, tuple[str, ...]] = {}  # of each tensor in its model chunk
        self._parts: dict[str, OwnedPart] = {}
        self._late: list[str] = []
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._infos: dict[str, WeightInfo] = {}
        self._read_weights(shards)
        self._owned = tuple(self._find_owned())
        self._watched = self._stepped_by_optimizer()
        check_conversion(self._infos.values(), self.convert)
        self._follow(self._watched)

    @classmethod
    def attach(
        cls,
        model_chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        hf_config: Any,
        *,
        settings: DeltaSettings,
        router_dtype: str = "bf16",
    ) -> MegatronTrainer:
        """Read the layout of a training, and record its optimizer steps from now on.

        Args:
            model_chunks: this rank's model, one chunk a virtual pipeline stage, wrapped in Megatron's
                DistributedDataParallel.
            optimizer: what `get_megatron_optimizer` returned for these chunks. With
                `settings.enabled` False it is not looked at, and every weight is sent whole.
            hf_config: the HF configuration of the model; `architectures[0]` chooses AWEX's converter.
            settings: as agreed with the engines.
            router_dtype: dtype of the router weight in the engines: "bf16", "fp16" or "fp32".

        Raises:
            ConfigError: an argument is not what it has to be, or Megatron's process groups do not exist yet.
            UnsupportedError: a trainable parameter is stepped by no optimizer, AWEX cannot convert a weight
                or drops one that is trained, a rank holds parts of weights (FSDP, generalized tensor
                parallelism), lm_head is tied in `hf_config` alone, or Megatron's objects lack something
                that is needed.
        """
        check_training(model_chunks, hf_config, settings)
        text = hf_config.get_text_config()
        check_model(model_chunks, tied=text.tie_word_embeddings)
        info = rank_info()
        converter = converter_of(
            hf_config,
            info,
            model_chunks[0].config,
            layer_ids=global_layer_ids(model_chunks),
            router_dtype=router_dtype,
        )
        return cls(
            chunks=model_chunks,
            shards=optimizer_shards(optimizer) if settings.enabled else (),
            converter=converter,
            layout=TrainerLayout(
                architecture=hf_config.architectures[0],
                rank_info=info,
                vocab_size=text.vocab_size,
                tied_embeddings=text.tie_word_embeddings,
            ),
            settings=settings,
        )

    def weights(self) -> Sequence[WeightInfo]:
        """Parameters in the order of the model chunks, then the router biases."""
        return tuple(self._infos.values())

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor with which the model computes under `key` now.

        Raises:
            UnsupportedError: the model has none there any more, or another one than its optimizer steps.
        """
        info = self._infos[key]
        tensor = tensor_at(self._chunks[info.chunk], self._places[key], key)
        if info.trained and tensor is not self._params[key]:
            raise UnsupportedError(
                f"{key}: the model computes with another parameter than its optimizer steps: put it back, or "
                "make the optimizer for the model as it is, and attach again"
            )
        return tensor.detach()

    def owned_slices(self) -> list[OwnedSlice]:
        """The ranges whose optimizer state this rank holds."""
        live, steps = self._live_with_steps()
        return [
            live_slice(
                info,
                begin,
                steps[info.key],
                weight=weight,
                main=live[info.key] if part.has_master else kept_master(part.optimizer, live[info.key]),
                moments=moments(part.optimizer, live[info.key]),
                in_weight=within,
                in_state=None,
            )
            for info, begin, within, weight, part in self._owned
        ]

    def detect(self) -> Detection:
        """What changed in the owned ranges, found as `settings.method` says."""
        if self._late:
            return Detection(
                reason=Reason.NO_FP32_MASTER,
                detail=f"{self._late[0]} is held in fp32 and sent whole, but with overlap_param_gather this "
                f"rank has the current values of its own part only",
            )
        return super().detect()

    def gather_params(self) -> None:
        """Finish a parameter all-gather that is under way, or run one.

        Nothing to do without `overlap_param_gather`: then the optimizer's step has gathered them.

        Collective: over the data-parallel groups of dense and of expert parameters.
        """
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def gather_owned(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Whole local tensors from what the owners of each parameter hold.

        Args:
            parts: key -> bf16 [n], this rank's owned ranges.

        Collective: over the data-parallel groups of dense and of expert parameters.
        """
        whole: dict[str, torch.Tensor] = {}
        for info in (info for info in self._infos.values() if info.sparse):
            tensor = torch.zeros(info.shape, dtype=info.dtype, device=self._params[info.key].device)
            if info.key in parts:
                tensor.view(-1)[info.owned_start : info.owned_stop] = parts[info.key]
            if len(info.owners) > 1:
                # Parts do not overlap, so that a sum of bytes is all parts, bit for bit.
                dist.all_reduce(tensor.view(-1).view(torch.uint8), group=self._groups[info.key])
            whole[info.key] = tensor
        return whole

    def weights_replaced(self) -> None:
        """Tell that master weights were changed by something else than an optimizer step.

        `reload_model_params` does so without leaving a trace in the optimizer: only a sample of the masters
        shows it. Loading an optimizer state is seen without this call. The next update is a full sync.
        """
        super().weights_replaced()

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """AWEX's HF names and tensors for a tensor shaped like `tensor(key)`.

        Collective: over the tensor-parallel ranks, if AWEX's converter gathers the parameter from them.
        """
        info = self._infos[key]
        converted = list(self._converter.convert_param(info.param, tensor, vp_stage=info.chunk))
        names = [name for name, _ in converted]
        # With more pipeline stages the last one holds a copy of its own.
        if self._layout.tied_embeddings and self._layout.rank_info["pp_size"] == 1 and _EMBEDDING in names:
            converted.append((_LM_HEAD, converted[names.index(_EMBEDDING)][1]))
        return converted

    def transfer(self) -> AbstractContextManager[None]:
        """Frees the gradient buffers inside, if so configured; they come back zeroed."""
        return self._without_grad_buffers() if self._settings.release_grad_buffers else nullcontext()

    @contextmanager
    def _without_grad_buffers(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._chunks:
                if isinstance(chunk, DistributedDataParallel):
                    stack.callback(chunk.restore_grad_buffers)
                    chunk.offload_grad_buffers()
            yield

    def _find_owned(self) -> Iterator[_Owned]:
        begins = trainer_line(self._infos.values()).begins()
        for key, part in self._parts.items():
            within = part_of(self._params[key].numel(), part.start, part.stop)
            yield self._infos[key], begins[key] + part.start, within, self._params[key], part

    def _live_with_steps(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """What the optimizers step now, and their counters, by key."""
        live, steps = dict[str, torch.Tensor](), dict[str, int]()
        for stepped in self._watched:
            params = stepped.live()
            live.update(params)
            steps.update(zip(params, step_counts(stepped.optimizer, list(params.values())), strict=True))
        return live, steps

    def _stepped_by_optimizer(self) -> list[SteppedParams]:
        by_optimizer: dict[torch.optim.Optimizer, dict[str, torch.Tensor]] = {}
        for key, part in self._parts.items():
            by_optimizer.setdefault(part.optimizer, {})[key] = part.stepped
        return [SteppedParams(optimizer, params) for optimizer, params in by_optimizer.items()]

    def _read_weights(self, shards: Sequence[Shard]) -> None:
        shard_of = {shard.param: shard for shard in shards}
        for stage, chunk in enumerate(self._chunks):
            for path, param in named_parameters(chunk):
                name = canonical_name(path)
                shard = shard_of.pop(param, None)
                if shard is None and param.requires_grad and self._settings.enabled:
                    raise UnsupportedError(
                        f"{name} (chunk {stage}) is trainable, but no optimizer steps it: attach with the "
                        f"model that the optimizer was made for, or freeze the parameter"
                    )
                self._params[param_key(name, stage)] = param
                self._add_weight(path, stage, param, shard)
        if shard_of:
            raise UnsupportedError(
                f"the optimizer steps {len(shard_of)} parameters that are not in the model"
            )
        for stage, chunk in enumerate(self._chunks):
            for path, buffer in router_biases(chunk):
                # Megatron holds it in fp32 from the first forward on, however the model was cast.
                self._add_weight(path, stage, buffer.to("meta", torch.float32), None)

    def _add_weight(self, path: str, stage: int, tensor: torch.Tensor, shard: Shard | None) -> None:
        name = canonical_name(path)
        key = param_key(name, stage)
        self._places[key] = tuple(path.split("."))
        owners: tuple[int, ...] = ()
        part: OwnedPart | None = None
        if shard is not None and tensor.dtype != torch.float32:
            owners, part = shard.owners, shard.part
        elif shard is not None and shard.late:
            self._late.append(name)
        if part is not None:
            self._parts[key] = part
        if shard is not None and shard.group is not None:
            self._groups[key] = shard.group
        self._infos[key] = WeightInfo(
            param=name,
            chunk=stage,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            owners=owners,
            owned_start=0 if part is None else part.start,
            owned_stop=0 if part is None else part.stop,
            trained=shard is not None,
        )
