"""A transformers model in this process, as an `EngineView` that can also generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from awex_delta.engines.view import EngineTensor, LiveParts, part
from awex_delta.errors import LayoutError

# How transformers describes fused experts stored as [experts, out, in], gate rows before up rows.
_PLAIN_EXPERTS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # their kernels are stored as checkpoints have them


class TransformersEngine:
    """A causal language model of transformers, updated in place.

    Names are those of HF checkpoints. transformers 5 keeps the experts of a layer in two parameters of
    three dimensions; they are published expert by expert, as checkpoints name them.

    Args:
        model: the whole `...ForCausalLM`, unquantized, on one device. LayoutError if it is a bare base model
            (its names would lack a prefix), a weight is quantized, or fused experts have an unknown layout.

    Attributes:
        version: the committed version; None before the first.
        cache_flushes: how often `committed` dropped cached state. A call of `generate` fills its own
            cache, so there is none to drop between calls; the count shows that it would be, once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.base_model is model:
            raise LayoutError(
                f"{type(model).__name__} is a base model: its names lack the prefix "
                f"{model.base_model_prefix + '.'!r} of HF checkpoints. Pass the causal language model."
            )
        self.model = model
        self.version: int | None = None
        self.cache_flushes = 0
        self._parts = LiveParts(lambda: _served(model).items(), lambda: _parts(model))
        self._parts()

    def tensors(self) -> Sequence[EngineTensor]:
        """HF-named views of the model's parameters and persistent buffers, wherever they lie now."""
        return self._parts()

    def synchronize(self) -> None:
        """Block until writes to the weights are done on the device."""
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize(self.model.device)

    def committed(self, version: int) -> None:
        """Publish a version."""
        self.version = version
        self.cache_flushes += 1

    def generate(self, prompt: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Continue prompts, int64 [batch, length], greedily by `num_tokens`, never stopping early.

        Returns int64 [batch, length + num_tokens].
        """
        tokens = prompt.to(self.model.device)
        cache = None
        pending = tokens
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = self.model(input_ids=pending, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                pending = output.logits[:, -1:].argmax(-1)
                tokens = torch.cat((tokens, pending), dim=1)
        return tokens


def _served(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Live parameters and persistent buffers by name; tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _parts(model: PreTrainedModel) -> Iterator[EngineTensor]:
    first_name: dict[tuple[int, torch.Size], str] = {}
    # The embedding comes before lm_head in the module tree, so the head is the one named as tied.
    for name, tensor in _served(model).items():
        owner = first_name.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if owner != name:
            yield part(name, tensor, tied_to=owner)
        elif is_fused_experts(name):
            experts = split_experts(name, tensor.detach(), model.get_submodule(name.rpartition(".")[0]))
            yield from (part(expert, view) for expert, view in experts)
        elif tensor.dim() > 2 and not isinstance(model.get_submodule(name.rpartition(".")[0]), CONVOLUTIONS):
            raise LayoutError(f"{name} has shape {tuple(tensor.shape)}: no rule names its HF tensors")
        else:
            yield part(name, tensor)


def is_fused_experts(name: str) -> bool:
    """Whether transformers keeps all experts of a layer in the parameter of that name."""
    return name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))


def split_experts(
    name: str, tensor: torch.Tensor, module: nn.Module, first: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors of some experts, as views.

    Args:
        name: of the parameter.
        tensor: `[experts, 2 inter, hidden]` (gate rows, then up rows) or `[experts, hidden, inter]`.
        module: holds the parameter.
        first: number of the first of these experts in its layer.

    Raises:
        LayoutError: the module stores its experts in another way.
    """
    prefix, kind = name.rsplit(".", 1)
    layout = {flag: vars(module).get(flag) for flag in _PLAIN_EXPERTS}
    if layout != _PLAIN_EXPERTS:
        raise LayoutError(
            f"{name}: the experts of {type(module).__name__} are stored as {layout}; "
            f"only {_PLAIN_EXPERTS} is known here"
        )
    for expert, weight in enumerate(tensor.unbind(0), first):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2, dim=0)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
