"""Tiny trainings on megatron-core: real model (Qwen3 or a relative of it), real optimizer, real text.

They run on the CPU, through `megatron_cpu`. Weights start equal in every parallel layout: each is
drawn whole from a generator seeded by its name, and cut for the rank.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

from awex_delta.testing.megatron_cpu import cpu_device, install


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySpec:
    """What to train, and how it is spread over ranks.

    tp, pp, ep: tensor, pipeline and expert parallel sizes; the rest of the world is data parallel.
    virtual_pp: model chunks a pipeline rank.
    heads, kv_heads, head_dim, ffn: `ffn` is the width of each expert in the MoE model.
    vocab_size: rows of the HF embedding; at least 128, since the text is ASCII.
    vocab_multiple: Megatron pads the rows to a multiple of `vocab_multiple * tp`.
    expert_bias: keep the load-balancing router bias, a buffer that changes outside the optimizer.
    fp32_router: hold the router weight in fp32.
    frozen: parameters whose name begins so are not trained; none when empty.
    distributed_optimizer: False keeps the whole optimizer state on every data-parallel rank.
    optimizer_instances: groups of data-parallel ranks that each hold the whole optimizer state.
    overlap_param_gather: gather the stepped weights during the next forward, not in the step.
    init_std: standard deviation of the initial weight matrices.
    bucket_size: elements of a gradient bucket; None is Megatron's choice.
    """

    model: Literal["qwen3", "qwen3-moe", "qwen2", "llama", "mistral"] = "qwen3"
    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    ep: int = 1
    layers: int = 2
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 80
    experts: int = 4
    vocab_size: int = 128
    vocab_multiple: int = 1
    tied: bool = False
    expert_bias: bool = False
    fp32_router: bool = False
    frozen: str = ""
    distributed_optimizer: bool = True
    optimizer_instances: int = 1
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    sequence_length: int = 32
    microbatch: int = 2
    lr: float = 3e-5
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    init_std: float = 0.02
    seed: int = 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of Megatron's embedding."""
        multiple = self.vocab_multiple * self.tp
        return -(-self.vocab_size // multiple) * multiple


class TinyTrainer:
    """One rank of a tiny training; see `build_trainer`."""

    def __init__(
        self,
        *,
        spec: TinySpec,
        chunks: list[DistributedDataParallel],
        optimizer: Any,
        hf_config: PretrainedConfig,
        tf_config: TransformerConfig,
    ) -> None:
        self.spec = spec
        self.chunks = chunks
        self.optimizer = optimizer
        self.hf_config = hf_config
        self.tf_config = tf_config
        self.num_steps = 0
        self.token_losses = torch.empty(0, spec.sequence_length, dtype=torch.float32, device="cpu")

    def train_step(self) -> float:
        """One forward, backward and optimizer step on the next batch.

        Returns the mean loss of this rank's batch, whose single losses are in `token_losses`; NaN where no
        chunk computes a loss. Collective: over all trainer ranks.
        """
        with cpu_device():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=[self._batches() for _ in self.chunks],
                model=self.chunks,
                num_microbatches=self.spec.pp,
                seq_length=self.spec.sequence_length,
                micro_batch_size=self.spec.microbatch,
            )
            self.optimizer.step()
        self.num_steps += 1
        self.token_losses = torch.cat(
            [torch.empty(0, self.spec.sequence_length, dtype=torch.float32, device="cpu"), *losses]
        )
        return self.token_losses.mean().item()

    def _batches(self) -> Iterator[torch.Tensor]:
        """Microbatches of tokens, int64 [microbatch, sequence_length + 1]; equal over model ranks."""
        text, dp_rank = _text(), mpu.get_data_parallel_rank()
        generator = torch.Generator().manual_seed((self.spec.seed * 1009 + self.num_steps) * 1009 + dp_rank)
        length = self.spec.sequence_length + 1
        while True:
            starts = torch.randint(
                len(text) - length, (self.spec.microbatch,), generator=generator, device="cpu"
            )
            yield torch.stack([text[start : start + length] for start in starts.tolist()])


def build_trainer(
    spec: TinySpec, wrap: Callable[[GPTModel], torch.nn.Module] = lambda model: model
) -> TinyTrainer:
    """Build the model chunks, gradient buffers and optimizer of this rank, from the same spec on all ranks.

    A model chunk is trained as `wrap` returns it, such as beside a part for images.

    Collective: over the default process group, which must exist (Gloo) and holds only trainers.
    """
    install()
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=spec.tp,
            pipeline_model_parallel_size=spec.pp,
            virtual_pipeline_model_parallel_size=spec.virtual_pp if spec.virtual_pp > 1 else None,
            expert_model_parallel_size=spec.ep,
            num_distributed_optimizer_instances=spec.optimizer_instances,
        )
    with cpu_device():
        model_parallel_cuda_manual_seed(spec.seed + 1)
        config = _transformer_config(spec)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=spec.distributed_optimizer,
            num_distributed_optimizer_instances=spec.optimizer_instances,
            overlap_grad_reduce=spec.overlap_param_gather,
            overlap_param_gather=spec.overlap_param_gather,
            bucket_size=spec.bucket_size,
        )
        chunks = [
            DistributedDataParallel(config, ddp_config, wrap(_model_chunk(spec, config, stage)))
            for stage in range(spec.virtual_pp)
        ]
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.lr,
                min_lr=0.0,
                weight_decay=spec.weight_decay,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=spec.distributed_optimizer,
                overlap_param_gather=spec.overlap_param_gather,
                clip_grad=spec.clip_grad,
            ),
            chunks,
        )
    return TinyTrainer(
        spec=spec, chunks=chunks, optimizer=optimizer, hf_config=hf_config(spec), tf_config=config
    )


def hf_config(spec: TinySpec) -> PretrainedConfig:
    """The HF configuration of the same model."""
    common: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": 4 * spec.sequence_length,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": spec.tied,
        "dtype": torch.bfloat16,
    }
    if spec.model == "qwen3-moe":
        common |= {"num_experts": spec.experts, "num_experts_per_tok": 2, "moe_intermediate_size": spec.ffn}
        common["norm_topk_prob"] = True
    name = spec.model.title().replace("-", "")
    config: PretrainedConfig = getattr(transformers, f"{name}Config")(**common)
    config.architectures = [f"{name}ForCausalLM"]
    return config


def _transformer_config(spec: TinySpec) -> TransformerConfig:
    moe: dict[str, Any] = {}
    if spec.model == "qwen3-moe":
        moe = {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": spec.ffn,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_enable_expert_bias": spec.expert_bias,
            "moe_router_score_function": "sigmoid" if spec.expert_bias else "softmax",
        }
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        tensor_model_parallel_size=spec.tp,
        pipeline_model_parallel_size=spec.pp,
        virtual_pipeline_model_parallel_size=spec.virtual_pp if spec.virtual_pp > 1 else None,
        expert_model_parallel_size=spec.ep,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=spec.model.startswith("qwen3"),
        add_bias_linear=False,
        add_qkv_bias=spec.model == "qwen2",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        **moe,
    )


def _model_chunk(spec: TinySpec, config: TransformerConfig, stage: int) -> GPTModel:
    vp_stage = stage if spec.virtual_pp > 1 else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        ),
        vocab_size=spec.padded_vocab_size,
        max_sequence_length=4 * spec.sequence_length,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=spec.tied,
        vp_stage=vp_stage,
    ).bfloat16()
    for name, param in model.named_parameters():
        param.requires_grad_(not spec.frozen or not name.startswith(spec.frozen))
        if spec.fp32_router and name.endswith("router.weight"):
            param.data = param.data.float()
        param.data.copy_(_initial_shard(spec, _global_name(spec, model, name), param))
    return model


def _global_name(spec: TinySpec, model: GPTModel, name: str) -> str:
    """The name with global layer and expert numbers, equal in every layout."""
    words = name.split(".")
    for at, word in enumerate(words):
        if word == "layers":
            words[at + 1] = str(model.decoder.layers[int(words[at + 1])].layer_number - 1)
        if word == "local_experts":
            per_rank = spec.experts // spec.ep
            words[at + 1] = str(int(words[at + 1]) + mpu.get_expert_model_parallel_rank() * per_rank)
    if spec.tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return ".".join(words)


def _initial_shard(spec: TinySpec, name: str, param: Any) -> torch.Tensor:
    """This rank's part of the whole initial tensor, fp32, in the shape of `param`."""
    generator = torch.Generator().manual_seed((spec.seed << 32) + zlib.crc32(name.encode()))
    if param.dim() == 1 and not name.endswith("bias"):
        return torch.randn(param.shape, generator=generator, dtype=torch.float32, device="cpu") * 0.1 + 1
    if not (hasattr(param, "partition_dim") and param.tensor_model_parallel):
        return spec.init_std * torch.randn(
            param.shape, generator=generator, dtype=torch.float32, device="cpu"
        )
    is_expert = "local_experts" in name
    group = mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
    rank, dim, whole = group.rank(), param.partition_dim, list(param.shape)
    whole[dim] *= group.size()
    tensor = spec.init_std * torch.randn(whole, generator=generator, dtype=torch.float32, device="cpu")
    if "linear_fc1" in name:
        # Each rank holds its part of the gate above its part of the up projection.
        gate_up = tensor.view(2, -1, tensor.shape[1])
        rows = param.shape[0] // 2
        return gate_up[:, rank * rows : (rank + 1) * rows].reshape(param.shape)
    return tensor.narrow(dim, rank * param.shape[dim], param.shape[dim])


def _forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device="cpu")[None].expand(tokens.shape[0], -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device="cpu"), 1)[None, None]
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, _mean_loss


def _mean_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return token_losses.float().mean(), token_losses.detach().float()


@cache
def _text() -> torch.Tensor:
    """ASCII bytes of some modules of the standard library, int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "textwrap", "statistics"))
    return torch.tensor([byte for byte in data if byte < 128], dtype=torch.int64, device="cpu")
