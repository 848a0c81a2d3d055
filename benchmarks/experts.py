"""A mixture of experts that is all tensors and no model: one Megatron-shaped rank, one engine rank.

As many HF tensors as one asks for, all of one size. Names, fusions and their order are those of Qwen3-MoE, so
that an update has as many parameters, storages and runs as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_delta.engines.view import EngineTensor, LiveParts, part
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

MAX_EXPERTS = 128  # in a layer
_OUTSIDE = 3  # embedding, last norm and head
_BESIDE = 9  # HF tensors of a layer that are no expert's

Parts = Sequence[tuple[str, int]]
"""HF tensors that lie in one storage, one after the other, and the rows of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many layers and experts there are, and the sizes of their tensors.

    rows, hidden: of each HF tensor but of an expert's down projection, which is its transpose.
    """

    layers: int
    experts: int
    rows: int
    hidden: int

    @classmethod
    def of(cls, tensors: int, elements: int) -> Shape:
        """The shape that comes nearest to so many HF tensors of so many elements.

        Args:
            tensors: at least 15.
            elements: of each, a multiple of 64.
        """
        layers = max(1, round((tensors - _OUTSIDE) / (_BESIDE + 3 * MAX_EXPERTS)))
        experts = max(1, round(((tensors - _OUTSIDE) / layers - _BESIDE) / 3))
        return cls(layers=layers, experts=experts, rows=elements // 64, hidden=64)

    @property
    def tensors(self) -> int:
        """HF tensors."""
        return _OUTSIDE + self.layers * (_BESIDE + 3 * self.experts)

    def params(self) -> Iterator[tuple[str, Parts]]:
        """Megatron's parameters in the order of the model, and the HF tensors that each converts to."""
        rows = self.rows
        yield "embedding.word_embeddings.weight", [("model.embed_tokens.weight", rows)]
        for layer in range(self.layers):
            ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
            attention = f"{theirs}.self_attn"
            yield f"{ours}.self_attention.linear_proj.weight", [(f"{attention}.o_proj.weight", rows)]
            norm = f"{ours}.self_attention.linear_qkv.layer_norm_weight"
            yield norm, [(f"{theirs}.input_layernorm.weight", rows)]
            fused = [(f"{attention}.{letter}_proj.weight", rows) for letter in "qkv"]
            yield f"{ours}.self_attention.linear_qkv.weight", fused
            for letter in "qk":
                norm = f"{ours}.self_attention.{letter}_layernorm.weight"
                yield norm, [(f"{attention}.{letter}_norm.weight", rows)]
            yield f"{ours}.pre_mlp_layernorm.weight", [(f"{theirs}.post_attention_layernorm.weight", rows)]
            yield f"{ours}.mlp.router.weight", [(f"{theirs}.mlp.gate.weight", rows)]
            experts = f"{ours}.mlp.experts"
            for expert in range(self.experts):
                yield f"{experts}.linear_fc1.weight{expert}", self.up(layer, expert)
            for expert in range(self.experts):
                yield f"{experts}.linear_fc2.weight{expert}", self.down(layer, expert)
        yield "decoder.final_layernorm.weight", [("model.norm.weight", rows)]
        yield "output_layer.weight", [("lm_head.weight", rows)]

    def columns(self, param: str) -> int:
        """Of a parameter."""
        return self.rows if ".linear_fc2." in param else self.hidden

    def up(self, layer: int, expert: int) -> Parts:
        """What an expert's fc1 converts to."""
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return [(f"{prefix}.gate_proj.weight", self.rows), (f"{prefix}.up_proj.weight", self.rows)]

    def down(self, layer: int, expert: int) -> Parts:
        """What an expert's fc2 converts to."""
        return [(f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", self.hidden)]


class ExpertsTrainer(TorchAdamWTrainer):
    """A rank that owns all parameters of a shape, stepped by `torch.optim.AdamW`."""

    def __init__(
        self, shape: Shape, lr: float, settings: DeltaSettings, device: torch.device | str = "cpu"
    ) -> None:
        """Draw weights from N(0, 0.02).

        Args:
            shape: of the model.
            lr: of the AdamW.
            settings: as agreed with the engine.
            device: of weights and optimizer.
        """
        self._parts: Mapping[str, Parts] = dict(shape.params())
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, parts in self._parts.items():
            rows = sum(rows for _, rows in parts)
            weights[name] = (torch.randn(rows, shape.columns(name), generator=generator) * 0.02).to(
                device, torch.bfloat16
            )
        masters = {name: weight.float().requires_grad_() for name, weight in weights.items()}
        optimizer = torch.optim.AdamW(masters.values(), lr=lr, weight_decay=0.01, foreach=True)
        super().__init__(
            weights=weights,
            masters=masters,
            optimizer=optimizer,
            settings=settings,
            architecture="Qwen3MoeForCausalLM",
            vocab_size=shape.rows,
        )

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """The rows of each HF tensor, as views."""
        parts = self._parts[key.removeprefix("0/")]
        return [(name, piece) for (name, _), piece in zip(parts, _split(tensor, parts), strict=True)]


class ExpertsEngine:
    """An `EngineView` of a shape that serves nothing. Weights begin at zero."""

    def __init__(self, shape: Shape, *, fused: bool, device: torch.device | str = "cpu") -> None:
        """Allocate.

        Args:
            shape: of the model.
            fused: experts, queries, keys and values share storages as they do in SGLang and vLLM: w13
                [experts, 2 rows, hidden], w2 [experts, hidden, rows]. Otherwise each tensor has its own.
            device: of the weights.
        """
        self._device = torch.device(device)
        self._shape = shape
        self._fused = fused
        self.version: int | None = None
        self.params: dict[str, torch.Tensor] = {}
        self._live = LiveParts(self.params.items, self._parts)
        self._live()

    def tensors(self) -> Sequence[EngineTensor]:
        """See `EngineView.tensors`."""
        return self._live()

    def _parts(self) -> Iterator[EngineTensor]:
        for param, parts in self._shape.params():
            kind, _, expert = param.partition(".weight")
            columns, rows = self._shape.columns(param), sum(rows for _, rows in parts)
            if not self._fused:
                views = [self._storage(name, size, columns) for name, size in parts]
            elif ".experts." in param:
                views = [*_split(self._storage(kind, self._shape.experts, rows, columns)[int(expert)], parts)]
            else:
                views = [*_split(self._storage(param, rows, columns), parts)]
            for (name, _), view in zip(parts, views, strict=True):
                yield part(name, view)

    def synchronize(self) -> None:
        """See `EngineView.synchronize`."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def committed(self, version: int) -> None:
        """See `EngineView.committed`."""
        self.version = version

    def _storage(self, name: str, *shape: int) -> torch.Tensor:
        """Memory by its name, which is allocated when it is asked for the first time."""
        if name not in self.params:
            self.params[name] = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        return self.params[name]


def identical(engine: ExpertsEngine, trainer: ExpertsTrainer) -> bool:
    """True if the engine holds exactly the bits that the trainer's weights convert to."""
    held = {tensor.name: tensor.view for tensor in engine.tensors()}
    for info in trainer.weights():
        for name, value in trainer.convert(info.key, trainer.tensor(info.key)):
            if not torch.equal(held.pop(name).view(torch.int16), value.contiguous().view(torch.int16)):
                return False
    return not held


def _split(tensor: torch.Tensor, parts: Parts) -> Sequence[torch.Tensor]:
    return torch.split(tensor, [rows for _, rows in parts])
