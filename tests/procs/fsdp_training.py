"""A tiny transformers model under FSDP2 on the CPU over Gloo, in as many layouts as the tests need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank
from awex_delta.trainers.fsdp import FsdpTrainer

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSpec:
    """What to train, and how it is sharded.

    mesh: sizes; two of them are HSDP, replicas first, or FSDP and then tensor parallelism with `tensor`.
    wrapped: modules with an FSDP of their own beside the whole model; `pair` puts norm and head into one.
    vocab_size: rows of the embedding; 101 over several ranks is uneven.
    experts: more than 0 makes it a mixture of experts.
    kind: Adam's state can be inverted, momentum's cannot; `bf16` steps bf16 parameters without masters.
    columns: matrices are cut along their second dimension.
    frozen: parameters whose name begins so are not trained; none when empty.
    """

    mesh: tuple[int, ...] = (2,)
    wrapped: Literal["none", "layers", "pair"] = "layers"
    vocab_size: int = 101
    hidden: int = 64
    kv_heads: int = 2
    layers: int = 2
    experts: int = 0
    tied: bool = False
    frozen: str = ""
    reshard: bool | None = None
    tensor: bool = False
    columns: bool = False
    param_dtype: torch.dtype | None = torch.bfloat16
    kind: Literal["adamw", "fused", "momentum", "bf16"] = "adamw"
    lr: float = 3e-6

    @property
    def num_ranks(self) -> int:
        """Trainer ranks."""
        return torch.Size(self.mesh).numel()


def hf_config(spec: FsdpSpec) -> PretrainedConfig:
    """The HF configuration of the model."""
    common: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": 96,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": 16,
        "tie_word_embeddings": spec.tied,
    }
    if not spec.experts:
        return Qwen3Config(**common, architectures=["Qwen3ForCausalLM"])
    moe: dict[str, Any] = {"num_experts": spec.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeConfig(**common, **moe, architectures=["Qwen3MoeForCausalLM"])


class FsdpTraining:
    """One rank of the training."""

    def __init__(self, spec: FsdpSpec, rank: int, config: PretrainedConfig | None = None) -> None:
        """`config` is of another model than that of the spec. Collective: over the default process group."""
        self.spec, self._rank, self.num_steps = spec, rank, 0
        self.hf_config = config or hf_config(spec)
        torch.manual_seed(0)
        create: Any = AutoModelForCausalLM
        self.model: nn.Module = create.from_config(self.hf_config, dtype=torch.float32)
        if spec.kind == "bf16":
            self.model.bfloat16()
        for name, param in self.model.named_parameters():
            param.requires_grad_(not spec.frozen or not name.startswith(spec.frozen))
        shard(self.model, spec)
        self.optimizer = _optimizer(spec, self.model)

    def attach(self, settings: DeltaSettings) -> FsdpTrainer:
        return FsdpTrainer.attach(self.model, self.optimizer, self.hf_config, settings=settings)

    def train_step(self) -> None:
        """Collective: over the default process group."""
        data = self._rank // (self.spec.mesh[1] if self.spec.tensor else 1)  # tensor-parallel ranks share it
        generator = torch.Generator().manual_seed(1000 * self.num_steps + data)
        vocab_size: int = self.hf_config.vocab_size
        tokens = torch.randint(vocab_size, (2, 17), generator=generator)
        logits = self.model(input_ids=tokens[:, :-1]).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss: Any = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    def truth(self) -> State:
        """The whole weights as FSDP would gather them: by torch's own collectives. Collective."""
        dtype = self.spec.param_dtype or torch.float32
        return {
            name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().to(dtype).clone()
            for name, param in self.model.named_parameters()
        }


def shard(model: Any, spec: FsdpSpec) -> None:
    """Put the model under FSDP, and under tensor parallelism before that."""
    policy = MixedPrecisionPolicy(param_dtype=spec.param_dtype, reduce_dtype=torch.float32)
    mesh = _mesh(spec)
    if spec.tensor:
        mesh = _split(model, mesh)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": spec.reshard}
    if spec.columns:
        options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() == 2 else None
    layers: Sequence[nn.Module] = model.model.layers if spec.wrapped != "none" else ()
    for layer in layers:
        fully_shard(layer, **options)
    if spec.wrapped == "pair":
        fully_shard([model.model.norm, model.lm_head], **options)
    fully_shard(model, **options)


def _mesh(spec: FsdpSpec) -> DeviceMesh:
    names = ("fsdp", "tensor") if spec.tensor else ("replicas", "fsdp")[-len(spec.mesh) :]
    return init_device_mesh("cpu", spec.mesh, mesh_dim_names=names)


def _split(model: Any, mesh: DeviceMesh) -> DeviceMesh:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
    return mesh["fsdp"]


def _optimizer(spec: FsdpSpec, model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if spec.kind == "momentum":
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    lr = 1e-5 if spec.kind == "bf16" else spec.lr
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.01, fused=spec.kind == "fused")


def start(me: Rank, spec: FsdpSpec, first: int = 0) -> FsdpTraining:
    """Make the training, over the ranks from `first` on."""
    me.init_gloo(rank=me.rank - first, world_size=spec.num_ranks, name="trainer")
    return FsdpTraining(spec, me.rank - first)
