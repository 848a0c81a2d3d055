"""A sharded engine that stores Qwen3 and Qwen3-MoE weights as SGLang does: fused, split and padded.

One `FusedEngine` is one tensor-parallel rank. It holds weights and publishes versions, but computes
nothing: it stands where an SGLang rank would, in tests, benchmarks and the demo. Storage per rank, of
`tp_size` ranks:

    qkv_proj        [(q + 2 kv) head_dim, hidden]   q query heads, then kv key heads, then kv value heads
    o_proj          [hidden, q head_dim]            split along its input
    gate_up_proj    [2 inter, hidden]               gate rows, then up rows
    down_proj       [hidden, inter]                 split along its input
    w13_weight      [experts, 2 inter, hidden]      the rank's experts; gate rows, then up rows
    w2_weight       [experts, hidden, inter]
    embed_tokens    [rows, hidden]                  a slice of the padded vocabulary, as is lm_head
    norms, router   whole on every rank

With fewer key-value heads than ranks, each head is held by `tp_size / num_kv_heads` neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from awex_delta.engines.view import EngineTensor, LiveParts, part
from awex_delta.errors import LayoutError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB_PADDING = 64

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a Qwen3 or Qwen3-MoE model that decide how its weights are stored.

    moe_layers: indices of the layers whose MLP is a mixture of `num_experts` experts.
    intermediate_size, moe_intermediate_size: width of a dense MLP, and of one expert.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    moe_layers: frozenset[int] = frozenset()
    num_experts: int = 0
    moe_intermediate_size: int = 0

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> ModelShape:
        """Read the sizes from a `Qwen3Config` or `Qwen3MoeConfig`.

        Raises LayoutError for another model type, or attention with biases.
        """
        if config.model_type not in ("qwen3", "qwen3_moe"):
            raise LayoutError(f"FusedEngine stores qwen3 and qwen3_moe models, not {config.model_type!r}")
        if config.attention_bias:
            raise LayoutError("FusedEngine has no storage for attention biases (attention_bias=True)")
        moe = config.model_type == "qwen3_moe"
        # HF's own rule: a head size that is not stated, or null, follows from the hidden size.
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            tied_embeddings=config.tie_word_embeddings,
            moe_layers=_moe_layers(config) if moe else frozenset(),
            num_experts=config.num_experts if moe else 0,
            moe_intermediate_size=config.moe_intermediate_size if moe else 0,
        )


def _moe_layers(config: PretrainedConfig) -> frozenset[int]:
    dense = set(config.mlp_only_layers or ())
    return frozenset(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in dense and (layer + 1) % config.decoder_sparse_step == 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRank:
    """One rank's place in a tensor-parallel group of `tp_size`, whose experts form `ep_size` groups."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_size: int = 1

    @property
    def moe_tp_size(self) -> int:
        """Ranks that share one expert."""
        return self.tp_size // self.ep_size

    @property
    def ep_rank(self) -> int:
        """Which group of experts this rank holds."""
        return self.tp_rank // self.moe_tp_size

    @property
    def moe_tp_rank(self) -> int:
        """Which part of each of its experts this rank holds."""
        return self.tp_rank % self.moe_tp_size

    def validate(self, shape: ModelShape) -> None:
        """Refuse a split that SGLang could not serve. Raises LayoutError, which names the size at fault."""
        if not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(f"tp_rank {self.tp_rank} is outside a group of tp_size {self.tp_size}")
        _divide("tp_size", self.tp_size, "ep_size", self.ep_size)
        _divide("num_attention_heads", shape.num_heads, "tp_size", self.tp_size)
        if self.tp_size > shape.num_kv_heads:
            _divide("tp_size", self.tp_size, "num_key_value_heads", shape.num_kv_heads)
        else:
            _divide("num_key_value_heads", shape.num_kv_heads, "tp_size", self.tp_size)
        if len(shape.moe_layers) < shape.num_layers:
            _divide("intermediate_size", shape.intermediate_size, "tp_size", self.tp_size)
        if shape.moe_layers:
            _divide("num_experts", shape.num_experts, "ep_size", self.ep_size)
            _divide("moe_intermediate_size", shape.moe_intermediate_size, "moe_tp_size", self.moe_tp_size)


def _divide(name: str, size: int, by_name: str, by: int) -> int:
    if by < 1 or size % by:
        raise LayoutError(f"{by_name} {by} does not divide {name} {size}")
    return size // by


class FusedEngine:
    """One tensor-parallel rank's weights in SGLang's layout, as an `EngineView`.

    Args:
        config: a `Qwen3Config` or `Qwen3MoeConfig`; LayoutError if it, or the split, is not supported.
        rank: this rank's place.
        dtype: dtype of all weights; the router's have `router_dtype`, if it is given.
        separate_lm_head: keep a tied lm_head in a storage of its own, as a pipeline's last stage does.
        device: where the weights live.

    Attributes:
        params: fused storage by SGLang's parameter name. Weights, and padding, begin at zero.
        version: the committed version; None before the first.
        cache_flushes: how often the (pretended) prefix cache was dropped.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        rank: FusedRank | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        router_dtype: torch.dtype | None = None,
        separate_lm_head: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = ModelShape.from_hf(config)
        self.rank = rank or FusedRank()
        self.rank.validate(self.shape)
        self.params: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.cache_flushes = 0
        self._dtype = dtype
        self._router_dtype = router_dtype or dtype
        self._device = torch.device(device)
        self._separate_lm_head = separate_lm_head
        self._parts = LiveParts(self.params.items, self._make_parts)
        self._make_parts()

    def tensors(self) -> Sequence[EngineTensor]:
        """HF-named views of what `params` holds now. Padding is in none of them."""
        return self._parts()

    def synchronize(self) -> None:
        """Block until writes to the weights are done on the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def committed(self, version: int) -> None:
        """Publish a version, and drop the prefix cache that the old weights filled."""
        self.version = version
        self.cache_flushes += 1

    def _make_parts(self) -> list[EngineTensor]:
        parts = self._vocabulary()
        for layer in range(self.shape.num_layers):
            parts += self._layer(layer)
        return [*parts, self._whole("model.norm.weight", (self.shape.hidden_size,))]

    def _storage(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fused storage by its name. It is allocated when it is asked for the first time."""
        if name not in self.params:
            self.params[name] = torch.zeros(shape, dtype=dtype or self._dtype, device=self._device)
        return self.params[name]

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> EngineTensor:
        return part(name, self._storage(name, shape, dtype))

    def _vocabulary(self) -> list[EngineTensor]:
        embedding = self._vocabulary_slice(EMBEDDING, self._vocabulary_storage(EMBEDDING))
        if self.shape.tied_embeddings and not self._separate_lm_head:
            return embedding + self._vocabulary_slice(LM_HEAD, self.params[EMBEDDING], tied_to=EMBEDDING)
        return embedding + self._vocabulary_slice(LM_HEAD, self._vocabulary_storage(LM_HEAD))

    def _vocabulary_storage(self, name: str) -> torch.Tensor:
        rows = padded_vocab(self.shape.vocab_size, self.rank.tp_size) // self.rank.tp_size
        return self._storage(name, (rows, self.shape.hidden_size))

    def _vocabulary_slice(
        self, name: str, storage: torch.Tensor, tied_to: str | None = None
    ) -> list[EngineTensor]:
        """The rows of real tokens; nothing on a rank that holds only padding."""
        vocab = self.shape.vocab_size
        start = self.rank.tp_rank * storage.shape[0]
        rows = min(storage.shape[0], vocab - start)
        if rows <= 0:
            return []
        whole = (vocab, self.shape.hidden_size)
        return [part(name, storage.narrow(0, 0, rows), whole, (start, 0), tied_to)]

    def _layer(self, layer: int) -> list[EngineTensor]:
        prefix = f"model.layers.{layer}"
        mlp = self._experts if layer in self.shape.moe_layers else self._mlp
        return [
            self._whole(f"{prefix}.input_layernorm.weight", (self.shape.hidden_size,)),
            *self._attention(f"{prefix}.self_attn"),
            self._whole(f"{prefix}.post_attention_layernorm.weight", (self.shape.hidden_size,)),
            *mlp(f"{prefix}.mlp"),
        ]

    def _attention(self, prefix: str) -> list[EngineTensor]:
        shape, tp_rank, tp_size = self.shape, self.rank.tp_rank, self.rank.tp_size
        hidden, dim = shape.hidden_size, shape.head_dim
        q = shape.num_heads // tp_size * dim
        kv = max(1, shape.num_kv_heads // tp_size) * dim
        kv_start = tp_rank * shape.num_kv_heads // tp_size * dim
        qkv = self._storage(f"{prefix}.qkv_proj.weight", (q + 2 * kv, hidden))
        out = self._storage(f"{prefix}.o_proj.weight", (hidden, q))
        all_q, all_kv = (shape.num_heads * dim, hidden), (shape.num_kv_heads * dim, hidden)
        return [
            part(f"{prefix}.q_proj.weight", qkv.narrow(0, 0, q), all_q, (tp_rank * q, 0)),
            part(f"{prefix}.k_proj.weight", qkv.narrow(0, q, kv), all_kv, (kv_start, 0)),
            part(f"{prefix}.v_proj.weight", qkv.narrow(0, q + kv, kv), all_kv, (kv_start, 0)),
            part(f"{prefix}.o_proj.weight", out, (hidden, all_q[0]), (0, tp_rank * q)),
            self._whole(f"{prefix}.q_norm.weight", (dim,)),
            self._whole(f"{prefix}.k_norm.weight", (dim,)),
        ]

    def _mlp(self, prefix: str) -> list[EngineTensor]:
        hidden, inter = self.shape.hidden_size, self.shape.intermediate_size // self.rank.tp_size
        gate_up = self._storage(f"{prefix}.gate_up_proj.weight", (2 * inter, hidden))
        down = self._storage(f"{prefix}.down_proj.weight", (hidden, inter))
        return _gated(prefix, gate_up, down, self.rank.tp_rank, self.rank.tp_size)

    def _experts(self, prefix: str) -> list[EngineTensor]:
        shape, rank = self.shape, self.rank
        local = shape.num_experts // rank.ep_size
        inter = shape.moe_intermediate_size // rank.moe_tp_size
        w13 = self._storage(f"{prefix}.experts.w13_weight", (local, 2 * inter, shape.hidden_size))
        w2 = self._storage(f"{prefix}.experts.w2_weight", (local, shape.hidden_size, inter))
        router = (shape.num_experts, shape.hidden_size)
        parts = [self._whole(f"{prefix}.gate.weight", router, self._router_dtype)]
        for slot in range(local):
            expert = f"{prefix}.experts.{rank.ep_rank * local + slot}"
            parts += _gated(expert, w13[slot], w2[slot], rank.moe_tp_rank, rank.moe_tp_size)
        return parts


def _gated(
    prefix: str, gate_up: torch.Tensor, down: torch.Tensor, rank: int, size: int
) -> list[EngineTensor]:
    """The three HF tensors of one gated MLP, from its fused storage on `rank` of `size`."""
    hidden, inter = down.shape
    rows, columns = (size * inter, hidden), (hidden, size * inter)
    return [
        part(f"{prefix}.gate_proj.weight", gate_up.narrow(0, 0, inter), rows, (rank * inter, 0)),
        part(f"{prefix}.up_proj.weight", gate_up.narrow(0, inter, inter), rows, (rank * inter, 0)),
        part(f"{prefix}.down_proj.weight", down, columns, (0, rank * inter)),
    ]


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """Rows of the padded vocabulary over all ranks: a multiple of 64 that `tp_size` divides."""
    multiple = VOCAB_PADDING
    if -(-vocab_size // multiple) * multiple % tp_size:
        multiple *= tp_size
    return -(-vocab_size // multiple) * multiple
