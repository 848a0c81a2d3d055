"""A whole SGLang engine on one GPU, trained into from another, weights over NCCL.

One command on a machine with two GPUs and SGLang: `python -m pytest tests/gpu/test_sglang_live.py`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from awex_delta.engines.sglang.driver import EngineControl, SglangDriver
from awex_delta.engines.sglang.loader import LOAD_FORMAT
from awex_delta.protocol.rendezvous import Joining
from tests.gpu.live_training import KINDS, SETTINGS, training, write_first
from tests.sglang_cpu import sglang_found

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not sglang_found(), reason="SGLang is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: an engine's and a trainer's"),
]

PROMPT = list(range(5, 37))


def generate(engine: Any) -> list[int]:
    answer = engine.generate(
        input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    )
    return list(answer["output_ids"])


def test_a_live_engine_generates_what_a_fresh_one_does(tmp_path: Path) -> None:
    import sglang

    options = {"base_gpu_id": 1, "skip_tokenizer_init": True, "mem_fraction_static": 0.3}
    first = str(write_first(tmp_path))
    engine = sglang.Engine(model_path=first, custom_weight_loader=[LOAD_FORMAT], **options)
    try:
        with training(tmp_path, "cuda:0") as (rendezvous, to_its_end):
            joining = Joining(rendezvous=rendezvous, settings=SETTINGS)
            driver = SglangDriver(EngineControl(engine), joining)
            before = generate(engine)
            for version in range(len(KINDS)):
                generate(engine)  # fills the prefix cache, which must not outlive the update
                driver.update_weights(version)
            seen = to_its_end()
            after = generate(engine)
    finally:
        engine.shutdown()
    assert seen == KINDS
    fresh = sglang.Engine(model_path=str(tmp_path / "last"), **options)
    try:
        assert generate(fresh) == after
    finally:
        fresh.shutdown()
    assert len(before) == len(after) == 32
