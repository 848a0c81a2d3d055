"""One call a side: from a training or an engine to the object whose `update_weights` keeps them equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from awex_delta.errors import ConfigError
from awex_delta.folder.reader import DiskReader
from awex_delta.folder.writer import DiskWriter
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require
from awex_delta.trainers.view import TrainerView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attach_megatron(
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    hf_config: Any,
    *,
    rendezvous: Rendezvous,
    settings: DeltaSettings,
    router_dtype: str = "bf16",
) -> Sender:
    """Attach to a Megatron training: records its optimizer steps from now on.

    Args:
        model_chunks: what `get_model` returned, wrapped in Megatron's DistributedDataParallel.
        optimizer: what `get_megatron_optimizer` returned.
        hf_config: config of the HF model that the engines serve.
        rendezvous: where trainer and engine ranks meet; the same on all of them.
        settings: `resolve(train_config, rollout_config).settings`.
        router_dtype: dtype in which engines hold the router weights, "bf16" or "fp32".

    Returns:
        This rank's sender. Nothing is connected yet: call `connect`, or the first `update_weights`.

    Raises:
        UnsupportedError: the model or the optimizer cannot be read.
        ConfigError: the world size is not allowed, or the settings say that updates go through a folder.

    Call it on every rank of the trainer; the ranks do not wait for each other.
    """
    from awex_delta.trainers.megatron import MegatronTrainer

    _require_transport(settings, "p2p")
    view = MegatronTrainer.attach(
        model_chunks, optimizer, hf_config, settings=settings, router_dtype=router_dtype
    )
    rank = int(view.layout().rank_info["global_rank"])
    device = next(iter(model_chunks[0].parameters())).device
    return Sender(view, rendezvous, rank, settings, device=device)


def attach_fsdp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    hf_config: Any,
    *,
    rendezvous: Rendezvous,
    settings: DeltaSettings,
) -> Sender:
    """Attach to a transformers model under FSDP2: records its optimizer steps from now on.

    Args:
        model: `fully_shard` was called on it. All ranks of torch's default process group train it.
        optimizer: what steps its parameters, made after `fully_shard`; or several that step some each.
        hf_config: config of the HF model that the engines serve.
        rendezvous: where trainer and engine ranks meet; the same on all of them.
        settings: `resolve(train_config, rollout_config).settings`.

    Returns:
        This rank's sender. Nothing is connected yet: call `connect`, or the first `update_weights`.

    Raises:
        UnsupportedError: the model or the optimizer cannot be read; nothing was hooked.
        ConfigError: the world size is not allowed, or the settings say that updates go through a folder.

    Call it on every rank of the trainer; the ranks do not wait for each other.
    """
    from awex_delta.trainers.fsdp import FsdpTrainer

    _require_transport(settings, "p2p")
    view = FsdpTrainer.attach(model, optimizer, hf_config, settings=settings)
    rank = int(view.layout().rank_info["global_rank"])
    device = next((view.tensor(info.key).device for info in view.weights()), None)
    return Sender(view, rendezvous, rank, settings, device=device)


def attach_transformers(
    model: PreTrainedModel,
    *,
    rendezvous: Rendezvous,
    engine_rank: int,
    settings: DeltaSettings,
    engine: str = "transformers",
) -> Receiver:
    """Attach to a transformers model that generates text in this process.

    Args:
        model: loaded with the trainer's dtype (`dtype=torch.bfloat16`), on one device.
        rendezvous: where trainer and engine ranks meet; the same on all of them.
        engine_rank: this rank among all engine ranks of the rendezvous, from 0.
        settings: `resolve(train_config, rollout_config).settings`.
        engine: name of this engine, another one for each copy of the model.

    Returns:
        This rank's receiver. Nothing is connected yet: call `connect`, or the first `update_weights`.

    Raises:
        LayoutError: the model holds weights that cannot be updated in place.
        ConfigError: a rank or the world size is not allowed.
    """
    from awex_delta.engines.transformers import TransformersEngine

    _require_transport(settings, "p2p")
    _require_model(model)
    return Receiver(TransformersEngine(model), rendezvous, engine_rank, engine, settings, device=model.device)


def attach_megatron_disk(
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    hf_config: Any,
    *,
    rendezvous: Rendezvous,
    settings: DeltaSettings,
    router_dtype: str = "bf16",
    extra_files: Mapping[str, bytes] | None = None,
    options: Mapping[str, Any] | None = None,
) -> DiskWriter:
    """Attach to a Megatron training whose updates go through a folder.

    Args:
        model_chunks, optimizer, router_dtype: as for `attach_megatron`.
        hf_config: config of the HF model; written as config.json beside the weights of full versions.
        rendezvous: where the trainer ranks meet, with no engine ranks.
        settings: `resolve(train_config, rollout_config).settings`, with `weight_update_transport: disk`.
        extra_files: more files for full versions, such as those of the tokenizer, by name.
        options: fsspec's options of the filesystem.

    Returns:
        This rank's writer.

    Raises:
        UnsupportedError: the model or the optimizer cannot be read.
        ConfigError: the settings name another transport, or a folder that cannot be opened.

    Call it on every rank of the trainer; the ranks do not wait for each other.
    """
    from awex_delta.trainers.megatron import MegatronTrainer

    _require_transport(settings, "disk")
    view = MegatronTrainer.attach(
        model_chunks, optimizer, hf_config, settings=settings, router_dtype=router_dtype
    )
    return _disk_writer(view, hf_config, rendezvous, settings, extra_files, options)


def attach_fsdp_disk(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    hf_config: Any,
    *,
    rendezvous: Rendezvous,
    settings: DeltaSettings,
    extra_files: Mapping[str, bytes] | None = None,
    options: Mapping[str, Any] | None = None,
) -> DiskWriter:
    """Attach to a transformers model under FSDP2 whose updates go through a folder.

    Args:
        model, optimizer: as for `attach_fsdp`.
        hf_config, rendezvous, settings, extra_files, options: as for `attach_megatron_disk`.

    Returns:
        This rank's writer.

    Raises:
        UnsupportedError: the model or the optimizer cannot be read; nothing was hooked.
        ConfigError: the settings name another transport, or a folder that cannot be opened.

    Call it on every rank of the trainer; the ranks do not wait for each other.
    """
    from awex_delta.trainers.fsdp import FsdpTrainer

    _require_transport(settings, "disk")
    view = FsdpTrainer.attach(model, optimizer, hf_config, settings=settings)
    return _disk_writer(view, hf_config, rendezvous, settings, extra_files, options)


def attach_transformers_disk(
    model: PreTrainedModel,
    *,
    settings: DeltaSettings,
    engine: str = "transformers",
    options: Mapping[str, Any] | None = None,
) -> DiskReader:
    """Attach to a transformers model in this process that follows a folder.

    Args:
        model: loaded with the trainer's dtype (`dtype=torch.bfloat16`), on one device.
        settings: `resolve(train_config, rollout_config).settings`, with `weight_update_transport: disk`.
        engine: name of this engine, for its lease and for messages.
        options: fsspec's options of the filesystem.

    Returns:
        The reader. Nothing is read yet: call `update_weights`.

    Raises:
        LayoutError: the model holds weights that cannot be updated in place.
        ConfigError: the settings name another transport, or a folder that cannot be opened.
    """
    from awex_delta.engines.transformers import TransformersEngine

    _require_transport(settings, "disk")
    _require_model(model)
    return DiskReader(TransformersEngine(model), settings, engine=engine, options=options)


def _disk_writer(
    view: TrainerView,
    hf_config: Any,
    rendezvous: Rendezvous,
    settings: DeltaSettings,
    extra_files: Mapping[str, bytes] | None,
    options: Mapping[str, Any] | None,
) -> DiskWriter:
    files = {"config.json": hf_config.to_json_string().encode(), **(extra_files or {})}
    rank = int(view.layout().rank_info["global_rank"])
    return DiskWriter(view, rendezvous, rank, settings, extra_files=files, options=options)


def _require_model(model: Any) -> None:
    from transformers import PreTrainedModel

    require(
        PreTrainedModel, "a loaded model, such as AutoModelForCausalLM.from_pretrained returns", model=model
    )


def _require_transport(settings: DeltaSettings, transport: str) -> None:
    require(DeltaSettings, "what resolve(...).settings is", settings=settings)
    if settings.transport != transport:
        raise ConfigError(
            f"weight_update_transport={settings.transport!r}: this call is for {transport!r}. "
            "Remedy: attach with "
            + (
                "attach_..._disk"
                if settings.transport == "disk"
                else "attach_megatron, attach_fsdp or attach_transformers"
            )
        )
