"""Completions from a running SGLang server, started with our weight loader.

    python -m sglang.launch_server --model-path MODEL --tp 4 --skip-tokenizer-init \
        --custom-weight-loader awex_delta.engines.sglang_loader.load
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import requests

from awex_delta import ConfigError
from awex_delta.engines.sglang_loader import LOAD_FORMAT, Instruction, message
from examples.gsm8k_grpo.rollouts import Place, Request, RolloutEngine, Tokens
from examples.gsm8k_grpo.settings import Settings


def start(settings: Settings, place: Place) -> RolloutEngine:
    """Reach one replica: the server at its place among `engines.urls`."""
    urls = settings.engines.urls
    if len(urls) != place.layout.data:
        raise ConfigError(
            f"engines.urls names {len(urls)} servers, but rollout.backend has d{place.layout.data}. "
            "Remedy: name one server for each data-parallel replica"
        )
    return SGLangRollouts(urls[place.replica], place)


class SGLangRollouts:
    """One server. It draws its samples by itself: SGLang takes no seed unless it runs deterministically."""

    def __init__(self, url: str, place: Place) -> None:
        self._url = url.rstrip("/")
        self._place = place

    def connect(self) -> None:
        """See `RolloutEngine.connect`."""
        self._instruct("connect")

    def update_weights(self, version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self._instruct("update", version)

    def sample(self, request: Request) -> list[Tokens]:
        """See `RolloutEngine.sample`. The samples of a prompt share its prefix in the server's cache."""
        repeated = [prompt for prompt in request.prompts for _ in range(request.num_samples)]
        params = {
            "temperature": 1.0,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": [request.end],
        }
        answers = self._post("generate", {"input_ids": repeated, "sampling_params": params})
        return [one["output_ids"] for one in answers]

    def close(self) -> None:
        """See `RolloutEngine.close`. The server goes on."""
        self._instruct("disconnect")

    def _instruct(self, action: Any, version: int = -1) -> None:
        place = self._place
        instruction = Instruction(
            action=action,
            engine=place.name,
            first_engine_rank=place.first_rank,
            num_engine_ranks=place.rendezvous.num_engine_ranks,
            num_trainer_ranks=place.rendezvous.num_trainer_ranks,
            host=place.rendezvous.host,
            port=place.rendezvous.port,
            pair=place.rendezvous.name,
            settings=place.settings,
            version=version,
        )
        payload = base64.b64encode(pickle.dumps(message(instruction))).decode()
        body = {
            "serialized_named_tensors": [payload] * place.layout.tensor,
            "load_format": LOAD_FORMAT,
            "selector": "target",
        }
        self._post("begin_weight_update", {"selector": "target"})
        try:
            self._post("update_weights_from_tensor", body)
        finally:
            self._post("end_weight_update", {})

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        answer = requests.post(f"{self._url}/{route}", json=body, timeout=3600)
        answer.raise_for_status()
        return answer.json()
