"""A whole vLLM on one GPU, with its CUDA graphs, trained into from another, weights over NCCL.

One command on a machine with two GPUs and vLLM: `python -m pytest tests/gpu/test_vllm_live.py`
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from awex_delta.engines.vllm.driver import OfflineControl, VllmDriver, init_info
from tests.gpu.live_training import KINDS, SETTINGS, training, write_first

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: an engine's and a trainer's"),
]

PROMPT = list(range(5, 69))


def serve(model: Path) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.3,
        enable_prefix_caching=True,
        weight_transfer_config={"backend": "awex_delta"},
    )


def generate(llm: Any) -> list[int]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


def test_a_live_vllm_generates_what_a_fresh_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "awex_delta")
    llm = serve(write_first(tmp_path))
    try:
        with training(tmp_path, "cuda:1") as (rendezvous, to_its_end):
            driver = VllmDriver(OfflineControl(llm))
            driver.connect(init_info(rendezvous, SETTINGS))
            for version in range(len(KINDS)):
                generate(llm)  # fills the prefix cache, which must not outlive the update
                driver.update_weights(version)
            seen = to_its_end()
            after = generate(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert seen == KINDS
    assert generate(serve(tmp_path / "last")) == after
