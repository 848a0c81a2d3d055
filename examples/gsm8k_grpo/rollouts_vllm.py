"""Completions from vLLM, in a process of its own, on a CPU or on GPUs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from awex_delta import ConfigError
from awex_delta.engines.vllm.driver import OfflineControl, VllmDriver, init_info
from examples.gsm8k_grpo.policy import hf_config
from examples.gsm8k_grpo.rollouts import EngineProcess, Place, Request, RolloutEngine, Tokens
from examples.gsm8k_grpo.settings import Settings


def start(settings: Settings, place: Place) -> RolloutEngine:
    """Start one replica."""
    if settings.engines.urls:
        raise ConfigError(
            f"engines.urls = {settings.engines.urls!r}: the trainer starts vLLM itself. Remedy: leave it out"
        )
    return EngineProcess(VllmRollouts, settings, place)


class VllmRollouts:
    """vLLM begins with weights that mean nothing: the first update, which is full, replaces them."""

    def __init__(self, settings: Settings, place: Place) -> None:
        # Read by vLLM when it is imported, in this process and its workers alone.
        os.environ |= {"VLLM_PLUGINS": "awex_delta", "VLLM_LOGGING_LEVEL": "ERROR"}
        if not torch.cuda.is_available():
            # The engine core stays in this process, and cores are left to the system.
            os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import LLM, SamplingParams

        self._params: Callable[..., Any] = SamplingParams
        with tempfile.TemporaryDirectory() as folder:
            hf_config(settings.model).save_pretrained(folder)
            self._llm: Any = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=not torch.cuda.is_available(),
                dtype="bfloat16",
                max_model_len=settings.grpo.max_prompt_tokens + settings.grpo.max_new_tokens,
                kv_cache_memory_bytes=settings.engines.memory_bytes,
                tensor_parallel_size=place.layout.tensor,
                seed=settings.run.seed,
                weight_transfer_config={"backend": "awex_delta"},
            )
        self._driver = VllmDriver(OfflineControl(self._llm))
        self._info = init_info(
            place.rendezvous, place.settings, first_engine_rank=place.first_rank, engine=place.name
        )

    def connect(self) -> None:
        """See `RolloutEngine.connect`."""
        self._driver.connect(self._info)

    def update_weights(self, version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self._driver.update_weights(version)

    def sample(self, request: Request) -> list[Tokens]:
        """See `RolloutEngine.sample`."""
        asked = self._params(
            n=request.num_samples,
            temperature=1.0,
            max_tokens=request.max_new_tokens,
            stop_token_ids=[request.end],
            seed=request.seed,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request.prompts]
        answers = self._llm.generate(prompts, asked, use_tqdm=False)
        return [list(one.token_ids) for answer in answers for one in answer.outputs]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._llm.llm_engine.engine_core.shutdown()
