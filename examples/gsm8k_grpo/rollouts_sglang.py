"""Completions from a running SGLang server, started with our weight loader.

    python -m sglang.launch_server --model-path MODEL --tp 4 --skip-tokenizer-init \
        --custom-weight-loader awex_delta.engines.sglang.loader.load
"""

from __future__ import annotations

from awex_delta import ConfigError
from awex_delta.engines.sglang.driver import HttpControl, SglangDriver
from awex_delta.protocol.rendezvous import Joining
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
    """One server. It draws its samples by itself: SGLang takes no seed unless it runs deterministically.

    Whether an update was committed, the trainer says: its `update_weights` raises where it was not.
    """

    def __init__(self, url: str, place: Place) -> None:
        self._server = HttpControl(url, place.layout.tensor)
        joining = Joining(
            rendezvous=place.rendezvous,
            settings=place.settings,
            first_engine_rank=place.first_rank,
            engine=place.name,
        )
        self._driver = SglangDriver(self._server, joining)

    def connect(self) -> None:
        """See `RolloutEngine.connect`."""
        self._driver.connect()

    def update_weights(self, version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self._driver.update_weights(version)

    def sample(self, request: Request) -> list[Tokens]:
        """See `RolloutEngine.sample`. The samples of a prompt share its prefix in the server's cache."""
        params = {
            "temperature": 1.0,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": [request.end],
        }
        repeated = [prompt for prompt in request.prompts for _ in range(request.num_samples)]
        answers = self._server.post("generate", {"input_ids": repeated, "sampling_params": params})
        return [one["output_ids"] for one in answers]

    def close(self) -> None:
        """See `RolloutEngine.close`. The server goes on."""
        self._driver.disconnect()
