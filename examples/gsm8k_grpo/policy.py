"""The policy on megatron-core: build it, read log-probabilities, take optimizer steps.

On GPUs it uses Transformer Engine's layers; where there is none, Megatron's own layers on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from awex_delta.engines.transformers import TransformersEngine
from awex_delta.presets.files import ModelShape
from awex_delta.settings.allocation import Allocation, parse_allocation
from awex_delta.testing import megatron_cpu
from examples.gsm8k_grpo.hf_weights import Weights, checkpoint_weights, load_into
from examples.gsm8k_grpo.settings import OptimizerConfig, Settings

GPU = torch.cuda.is_available()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of prompt and completion. B sequences of T + 1 tokens, padded on the right.

    tokens: int64 [B, T + 1].
    mask: fp32 [B, T], 1 where the *next* token belongs to a completion.
    advantage: fp32 [B].
    old, reference: fp32 [B, T], log-probabilities before the round and of the first policy; None where
        they are not needed.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    advantage: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    def rows(self, rows: slice) -> Batch:
        """Some of the sequences."""
        return Batch(
            tokens=self.tokens[rows],
            mask=self.mask[rows],
            advantage=self.advantage[rows],
            old=None if self.old is None else self.old[rows],
            reference=None if self.reference is None else self.reference[rows],
        )


Loss: TypeAlias = Callable[[torch.Tensor, Batch], torch.Tensor]
"""Log-probabilities of the next tokens, fp32 [B, T], and their batch, to the loss of each token [B, T]."""


class Policy:
    """One rank of the training; see `build_policy`. Methods are collective over all trainer ranks."""

    def __init__(
        self,
        *,
        chunks: list[DistributedDataParallel],
        optimizer: Any,
        hf_config: PretrainedConfig,
        micro: int,
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.hf_config = hf_config
        self._micro = micro
        self._reference: list[torch.Tensor] = []

    def step(self, batch: Batch, loss: Loss, lr: float) -> float:
        """One optimizer step on this data-parallel rank's rows of a batch that all ranks know.

        Args:
            batch: the whole batch; its rows divide by the data-parallel size.
            loss: of each token; its mean over all masked tokens of the batch is minimised.
            lr: learning rate of this step.

        Returns:
            The norm of the gradient before clipping.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mine = self._mine(batch)
        parts = mine.tokens.shape[0] / min(self._micro, mine.tokens.shape[0])
        # Megatron divides by the microbatches and averages over the data-parallel ranks.
        scale = parts * mpu.get_data_parallel_world_size() / batch.mask.sum()
        with _device():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._run(mine, lambda logps, part: (loss(logps, part) * part.mask).sum() * scale)
            _, norm, _ = self.optimizer.step()
        return float(norm)

    def logps(self, batch: Batch) -> torch.Tensor | None:
        """Log-probabilities of all next tokens of the batch, fp32 [B, T]; None before the last stage."""
        with _device(), torch.no_grad():
            mine = self._run(self._mine(batch), lambda logps, _: logps.sum(), forward_only=True)
        if not mine:
            return None
        group = mpu.get_data_parallel_group()
        local = torch.cat(mine)
        every = [torch.empty_like(local) for _ in range(group.size())]
        torch.distributed.all_gather(every, local, group=group)
        return torch.stack(every, dim=1).flatten(0, 1)

    def keep_reference(self) -> None:
        """Remember the current weights as those of the reference: one more copy of them."""
        self._reference = [param.detach().clone() for chunk in self.chunks for param in chunk.parameters()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute with the reference weights inside."""
        params = [param.data for chunk in self.chunks for param in chunk.parameters()]
        current = [param.clone() for param in params]
        torch._foreach_copy_(params, self._reference)
        try:
            yield
        finally:
            torch._foreach_copy_(params, current)

    def _mine(self, batch: Batch) -> Batch:
        return batch.rows(slice(mpu.get_data_parallel_rank(), None, mpu.get_data_parallel_world_size()))

    def _run(
        self,
        batch: Batch,
        total: Callable[[torch.Tensor, Batch], torch.Tensor],
        *,
        forward_only: bool = False,
    ) -> list[torch.Tensor]:
        """Forward, and backward from `total`. Returns the log-probabilities by microbatch."""
        size = min(self._micro, batch.tokens.shape[0])
        parts = [batch.rows(slice(at, at + size)) for at in range(0, batch.tokens.shape[0], size)]
        found: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=lambda parts, model: _forward_step(next(parts), model, total),
            data_iterator=[iter(parts) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(parts),
            seq_length=batch.tokens.shape[1] - 1,
            micro_batch_size=size,
            forward_only=forward_only,
        )
        return found


def build_policy(settings: Settings) -> Policy:
    """Build this rank's model, with its initial weights, and its optimizer.

    Collective over the default process group, which must exist and holds the trainer ranks only.
    """
    allocation = parse_allocation(settings.train.backend, backends=["megatron"])
    layout, experts = allocation.layout, allocation.experts
    if not GPU:
        megatron_cpu.install()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=experts.expert if experts else 1,
        expert_tensor_parallel_size=experts.tensor if experts else None,
    )
    hf = hf_config(settings.model)
    with _device():
        model_parallel_cuda_manual_seed(settings.run.seed + 1)
        config = _transformer_config(settings.model, allocation)
        model = _gpt_model(settings.model, config)
        load_into(model, hf, initial_weights(settings))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        chunk = DistributedDataParallel(config, ddp, model)
        optimizer = get_megatron_optimizer(_optimizer_config(settings.optimizer), [chunk])
    return Policy(chunks=[chunk], optimizer=optimizer, hf_config=hf, micro=settings.grpo.micro_batch_size)


def hf_config(model: ModelShape) -> PretrainedConfig:
    """The HF configuration of the model, for AWEX's converter and for engines that begin without weights."""
    kind = Qwen3MoeConfig if model.num_experts else Qwen3Config
    values = model.model_dump(exclude={"architecture", "path", "rope_theta"})
    if not model.num_experts:
        values = {name: value for name, value in values.items() if "expert" not in name and "moe" not in name}
    else:
        values["norm_topk_prob"] = True
    return kind(
        **values,
        architectures=[model.architecture],
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        dtype=torch.bfloat16,
    )


def initial_weights(settings: Settings) -> Weights:
    """Those of the checkpoint, or random ones, equal on every rank."""
    if settings.model.path is not None:
        return checkpoint_weights(settings.model.path)
    torch.manual_seed(settings.run.seed)
    create: Any = AutoModelForCausalLM.from_config
    model = create(hf_config(settings.model), dtype=torch.bfloat16)
    return {tensor.name: tensor.view for tensor in TransformersEngine(model).tensors()}.__getitem__


def _transformer_config(model: ModelShape, allocation: Allocation) -> TransformerConfig:
    layout, experts = allocation.layout, allocation.experts
    moe: dict[str, Any] = {}
    if model.num_experts:
        moe = {
            "num_moe_experts": model.num_experts,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "moe_router_topk": model.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": False,
            "moe_token_dispatcher_type": "alltoall" if GPU else "allgather",
            "moe_grouped_gemm": GPU,
        }
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate_size,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=experts.expert if experts else 1,
        expert_tensor_parallel_size=experts.tensor if experts else None,
        # Megatron asks for it where experts meet tensor parallelism; torch's RMSNorm on the CPU refuses it.
        sequence_parallel=GPU and layout.tensor > 1,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=not GPU,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=GPU,
        bias_dropout_fusion=GPU,
        masked_softmax_fusion=GPU,
        persist_layer_norm=GPU,
        recompute_granularity="full" if GPU else None,
        recompute_method="uniform" if GPU else None,
        recompute_num_layers=1 if GPU else None,
        finalize_model_grads_func=finalize_model_grads,
        **moe,
    )


def _gpt_model(model: ModelShape, config: TransformerConfig) -> GPTModel:
    multiple = config.tensor_model_parallel_size
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=GPU, normalization="RMSNorm"
        ),
        vocab_size=-(-model.vocab_size // multiple) * multiple,
        max_sequence_length=model.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
    )
    return gpt.cuda().bfloat16() if GPU else gpt.bfloat16()


def _optimizer_config(optimizer: OptimizerConfig) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )


def _forward_step(
    batch: Batch, model: Any, total: Callable[[torch.Tensor, Batch], torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    length = batch.tokens.shape[1] - 1
    positions = torch.arange(length, device=batch.tokens.device)[None].expand(batch.tokens.shape[0], -1)
    # Padding stands on the right, where a causal mask hides it. Transformer Engine brings its own mask.
    mask = None if GPU else torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    token_losses = model(batch.tokens[:, :-1], positions, mask, labels=batch.tokens[:, 1:])

    def finish(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logps = -losses.float()
        return total(logps, batch), logps.detach()

    return token_losses, finish


def _device() -> AbstractContextManager[None]:
    return nullcontext() if GPU else megatron_cpu.cpu_device()
