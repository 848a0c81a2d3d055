"""Architectures that AWEX converts and transformers has: Megatron trains, a transformers model follows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MegatronModule
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from awex_delta.conversion.routes import find_routes
from awex_delta.engines.transformers import TransformersEngine
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer
from tests.procs.gated_delta import LINEAR, qwen3_5
from tests.procs.test_awex_converters import SETTINGS, arrives, converted, cut_dim, leave, meeting

pytestmark = pytest.mark.timeout(120)

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "patch_size": 4,
}
PLACES = {
    "norm1.": "self_attention.linear_qkv.layer_norm_",
    "norm2.": "mlp.linear_fc1.layer_norm_",
    "attn.qkv.": "self_attention.linear_qkv.",
    "attn.proj.": "self_attention.linear_proj.",
}
"""What AWEX takes the parameters of a layer that sees for, by their names in checkpoints."""


def spec(**given: Any) -> TinySpec:
    return TinySpec(lr=3e-6, init_std=0.2, **given)


MODELS: Mapping[str, TinySpec] = {
    "LlamaForCausalLM": spec(model="llama", tp=2),
    "MistralForCausalLM": spec(model="mistral", tp=2),
    "Qwen2ForCausalLM": spec(model="qwen2", tp=2, tied=True),
    "Qwen3ForCausalLM": spec(tp=2),
    "Qwen3MoeForCausalLM": spec(model="qwen3-moe", ep=2),
    "Qwen3VLForConditionalGeneration": spec(tied=True),
    "Qwen3VLMoeForConditionalGeneration": spec(model="qwen3-moe", ep=2),
    "Qwen3_5ForCausalLM": spec(),
    "Qwen3_5ForConditionalGeneration": spec(),
}
DAILY = ("Qwen2ForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration")


def served_config(architecture: str) -> PretrainedConfig:
    text = hf_config(MODELS[architecture])
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    values = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "dtype")}
    if "Qwen3_5" in architecture:
        rope["partial_rotary_factor"] = 1.0
        values |= {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}
    if architecture == "Qwen3_5ForCausalLM":
        values["architectures"] = [architecture]
        return Qwen3_5TextConfig(**{**values, "rope_parameters": rope, "dtype": torch.bfloat16})
    if not has_tower(architecture):
        return text
    config: PretrainedConfig = getattr(
        transformers, architecture.replace("ForConditionalGeneration", "Config")
    )(
        text_config={**values, "rope_parameters": rope},
        vision_config=VISION,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    config.architectures = [architecture]
    return config


def has_tower(architecture: str) -> bool:
    return architecture.endswith("ForConditionalGeneration")


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    auto: Any = (
        AutoModelForImageTextToText if config.get_text_config() is not config else AutoModelForCausalLM
    )
    model: PreTrainedModel = auto.from_config(config, dtype=torch.bfloat16)
    return model


class Tower(torch.nn.Module):
    """Frozen parameters by the names that AWEX knows in a vision tower; it sees nothing.

    A Megatron tower would need Transformer Engine: it stands for one, whose weights are sent and not trained.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            visual: Any = new_model(config)
        for name, tensor in visual.model.visual.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            *path, last = megatron_name(name).split(".")
            module: torch.nn.Module = self
            for word in path:
                if not hasattr(module, word):
                    module.add_module(word, torch.nn.Module())
                module = module.get_submodule(word)
                module.layer_number = 1  # type: ignore[assignment]
            drawn = torch.randn(tensor.shape, generator=generator).bfloat16()
            module.register_parameter(last, torch.nn.Parameter(drawn, requires_grad=False))


def megatron_name(name: str) -> str:
    name = name.replace("blocks.", "decoder.layers.").replace("merger.norm.", "merger.patch_norm.")
    if name.startswith("deepstack"):
        return "decoder." + name.replace(".norm.", ".patch_norm.")
    for place, there in PLACES.items():
        name = name.replace(place, there)
    return name


class VisionLanguage(MegatronModule):  # type: ignore[misc]
    """A GPT model beside a tower, under the names of Megatron's vision-language models."""

    def __init__(self, language: GPTModel, config: PretrainedConfig) -> None:
        super().__init__(config=language.config)
        self.model_type = language.model_type
        self.vision_model = Tower(config)
        self.language_model = language

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        self.language_model.set_input_tensor(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self.language_model(*args, **kwargs)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of each update, and of the losses after the last one.

    num_owned: trained elements that this rank steps, counted in its model.
    computed: trained parameters whose converter does more than move elements.
    strayed: mean distance of the losses of the same tokens, by the engine and by the trainer, before the
        first update and after the last.
    """

    kinds: Sequence[Kind]
    weights: Sequence[Mapping[str, torch.Tensor]]
    totals: Sequence[int] = ()
    num_owned: int = 0
    computed: Sequence[str] = ()
    strayed: tuple[float, float] = (0.0, 0.0)


NUM_UPDATES = 3


def serve(me: Rank, architecture: str) -> Seen:
    store = host_store()
    leave(me, "port", store.port)
    model = new_model(served_config(architecture))
    engine = TransformersEngine(model)
    receiver = Receiver(engine, meeting(store.port, num_engine_ranks=1), 0, "engine", SETTINGS)
    kinds, weights = [], []
    for version in range(NUM_UPDATES):
        kinds.append(receiver.update_weights(version).verdict.kind)
        weights.append({part.name: part.view.clone() for part in engine.tensors()})
    tokens, trained = arrives(me, "batch")
    fresh = new_model(served_config(architecture))
    strayed = [float((losses(one, tokens) - trained).abs().mean()) for one in (fresh, model)]
    receiver.close()
    return Seen(kinds=kinds, weights=weights, strayed=(strayed[0], strayed[1]))


def losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token, fp32, by transformers."""
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def train(me: Rank, architecture: str) -> Seen:
    with qwen3_5() if "Qwen3_5" in architecture else nullcontext():
        return train_inside(me, architecture)


def train_inside(me: Rank, architecture: str) -> Seen:
    rank, spec, config = me.rank - 1, MODELS[architecture], served_config(architecture)
    me.init_gloo(rank=rank, world_size=2)
    if has_tower(architecture):
        tiny = build_trainer(spec, wrap=lambda model: VisionLanguage(model, config))
    else:
        tiny = build_trainer(spec)
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, config, settings=SETTINGS)
    sender = Sender(view, meeting(arrives(me, "port"), num_engine_ranks=1), rank, SETTINGS)
    kinds, weights, totals = [], [], []
    for version in range(NUM_UPDATES):
        tiny.train_step()
        stats = sender.update_weights(version)
        kinds.append(stats.verdict.kind)
        totals.append(stats.total_owned)
        weights.append(converted(view))
    tokens = next(tiny._batches())
    tiny.train_step()
    if rank == 0:
        leave(me, "batch", (tokens, tiny.token_losses))
    sender.close()
    num_owned = 0
    for name, param in tiny.chunks[0].named_parameters():
        copies = 1 if spec.tp == 2 or (spec.ep == 2 and "local_experts" in name) else 2
        num_owned += param.requires_grad * param.numel() // copies
    routes = find_routes(view, rank).values()
    computed = [route.info.param for route in routes if route.relocations is None and route.info.trained]
    return Seen(kinds=kinds, weights=weights, totals=totals, num_owned=num_owned, computed=computed)


def follow(me: Rank, architecture: str) -> Seen:
    return train(me, architecture) if me.rank else serve(me, architecture)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=() if one in DAILY else pytest.mark.all) for one in MODELS],
)
def test_a_transformers_model_follows_a_megatron_training(architecture: str) -> None:
    engine, *trainers = run_ranks(follow, 3, architecture)
    for seen in (engine, *trainers):
        assert seen.kinds == [Kind.FULL, Kind.DELTA, Kind.DELTA]
    for served, first, second in zip(engine.weights, *(one.weights for one in trainers), strict=True):
        assert served.keys() == first.keys() | second.keys()
        for name, got in served.items():
            parts = [rank[name] for rank in (first, second) if name in rank]
            dim = cut_dim(name) if MODELS[architecture].tp == 2 else None
            want = parts[0] if dim is None else torch.cat(parts, dim)
            assert got.view(torch.uint8).equal(want.contiguous().view(torch.uint8)), name
    assert trainers[0].totals[1:] == [sum(one.num_owned for one in trainers)] * 2
    for one in trainers:
        # AWEX adds one to the norm of linear attention; all else that is trained is proved to move only.
        assert all(name.endswith("out_norm.weight") for name in one.computed)
        assert len(one.computed) == ("Qwen3_5" in architecture)
    strange, close = engine.strayed
    assert close < 0.02 * strange
    assert strange > 0.3
