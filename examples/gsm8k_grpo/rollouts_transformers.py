"""Completions from a transformers model, in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from awex_delta import attach_transformers
from examples.gsm8k_grpo.policy import hf_config
from examples.gsm8k_grpo.rollouts import EngineProcess, Place, Request, RolloutEngine, Tokens
from examples.gsm8k_grpo.settings import Settings


def start(settings: Settings, place: Place) -> RolloutEngine:
    """Start one replica."""
    return EngineProcess(TransformersRollouts, settings, place)


class TransformersRollouts:
    """The model begins with weights that mean nothing: the first update, which is full, replaces them."""

    def __init__(self, settings: Settings, place: Place) -> None:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.layout.data))
        create: Any = AutoModelForCausalLM.from_config
        self._model: Any = create(hf_config(settings.model), dtype=torch.bfloat16).eval()
        if torch.cuda.is_available():
            self._model = self._model.to(f"cuda:{place.replica % torch.cuda.device_count()}")
        self._receiver = attach_transformers(
            self._model,
            rendezvous=place.rendezvous,
            engine_rank=place.first_rank,
            settings=place.settings,
            engine=place.name,
        )

    def connect(self) -> None:
        """See `RolloutEngine.connect`."""
        self._receiver.connect()

    def update_weights(self, version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self._receiver.update_weights(version)

    def sample(self, request: Request) -> list[Tokens]:
        """See `RolloutEngine.sample`. Prompts are padded on the left."""
        width = max(map(len, request.prompts))
        prompts = torch.tensor([[request.end] * (width - len(one)) + one for one in request.prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in request.prompts])
        torch.manual_seed(request.seed)
        tokens = self._model.generate(
            prompts.repeat_interleave(request.num_samples, 0).to(self._model.device),
            attention_mask=mask.repeat_interleave(request.num_samples, 0).to(self._model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=request.end,
            pad_token_id=request.end,
        )
        completions: list[Tokens] = tokens[:, width:].tolist()
        return [_until(one, request.end) for one in completions]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._receiver.close()


def _until(tokens: Tokens, end: int) -> Tokens:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
