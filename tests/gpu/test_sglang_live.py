"""A whole SGLang engine on one GPU, trained into from another, weights over NCCL.

One command on a machine with two GPUs and SGLang: `python -m pytest tests/gpu/test_sglang_live.py`
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from awex_delta.engines.sglang_loader import LOAD_FORMAT, Instruction, message
from awex_delta.rendezvous import Rendezvous, host_store
from awex_delta.sender import Sender
from awex_delta.testing.sglang_cpu import sglang_found
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.types import DeltaSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not sglang_found(), reason="SGLang is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: an engine's and a trainer's"),
]

_AUTO: Any = AutoModelForCausalLM
SETTINGS = DeltaSettings(anchor_interval=3, timeout_seconds=120, connect_timeout_seconds=300)
NUM_VERSIONS = 6
PROMPT = list(range(5, 37))
CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def train(port: int, folder: Path, kinds: Any) -> None:
    """Six steps on GPU 0, each followed by an update; then the checkpoint of the last one."""
    model = _AUTO.from_pretrained(folder / "first", dtype=torch.bfloat16).to("cuda:0")
    weights: Mapping[str, torch.Tensor] = {name: param.data for name, param in model.named_parameters()}
    masters = {name: torch.nn.Parameter(weight.float()) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(list(masters.values()), lr=3e-6, fused=True)
    trainer = TorchAdamWTrainer(
        weights=weights, masters=masters, optimizer=optimizer, settings=SETTINGS, vocab_size=CONFIG.vocab_size
    )
    rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)
    sender = Sender(trainer, rendezvous, 0, SETTINGS, device=torch.device("cuda:0"))
    for version in range(NUM_VERSIONS):
        trainer.train_step()
        kinds.put(sender.update_weights(version).verdict.kind.value)
    whole = {name: weight.cpu().contiguous() for name, weight in weights.items()}
    save_file(whole, folder / "last" / "model.safetensors")


def generate(engine: Any) -> list[int]:
    answer = engine.generate(
        input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    )
    return list(answer["output_ids"])


def test_a_live_engine_generates_what_a_fresh_one_does(tmp_path: Path) -> None:
    import sglang

    for folder in ("first", "last"):
        CONFIG.save_pretrained(tmp_path / folder)
    torch.manual_seed(0)
    _AUTO.from_config(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "first")
    options = {"base_gpu_id": 1, "skip_tokenizer_init": True, "mem_fraction_static": 0.3}
    engine = sglang.Engine(model_path=str(tmp_path / "first"), custom_weight_loader=[LOAD_FORMAT], **options)
    store = host_store()
    asked = Instruction(
        action="update",
        engine="sglang",
        first_engine_rank=0,
        num_engine_ranks=1,
        num_trainer_ranks=1,
        host="127.0.0.1",
        port=store.port,
        settings=SETTINGS,
    )
    context = multiprocessing.get_context("spawn")
    kinds = context.Queue()
    trainer = context.Process(target=train, args=(store.port, tmp_path, kinds), daemon=True)
    trainer.start()
    try:
        before = generate(engine)
        for version in range(NUM_VERSIONS):
            generate(engine)  # fills the prefix cache, which must not outlive the update
            engine.begin_weight_update("target")
            engine.update_weights_from_tensor(
                message(replace(asked, version=version)), load_format=LOAD_FORMAT
            )
            engine.end_weight_update()
        seen = [kinds.get(timeout=60) for _ in range(NUM_VERSIONS)]
        trainer.join(60)
        after = generate(engine)
    finally:
        trainer.kill()
        engine.shutdown()
    assert seen == ["full", "delta", "delta", "delta", "full", "delta"]
    fresh = sglang.Engine(model_path=str(tmp_path / "last"), **options)
    try:
        assert generate(fresh) == after
    finally:
        fresh.shutdown()
    assert len(before) == len(after) == 32
