"""A whole vLLM on one GPU, with its CUDA graphs, trained into from another, weights over NCCL.

One command on a machine with two GPUs and vLLM: `python -m pytest tests/gpu/test_vllm_live.py`
"""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from awex_delta.engines.vllm_driver import OfflineControl, VllmDriver, init_info
from awex_delta.rendezvous import Rendezvous, host_store
from awex_delta.sender import Sender
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.types import DeltaSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: an engine's and a trainer's"),
]

_AUTO: Any = AutoModelForCausalLM
SETTINGS = DeltaSettings(anchor_interval=3, timeout_seconds=120, connect_timeout_seconds=300)
NUM_VERSIONS = 6
PROMPT = list(range(5, 69))
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
    """Six steps on GPU 1, each followed by an update; then the checkpoint of the last one."""
    model = _AUTO.from_pretrained(folder / "first", dtype=torch.bfloat16).to("cuda:1")
    weights: dict[str, torch.Tensor] = {name: param.data for name, param in model.named_parameters()}
    masters = {name: torch.nn.Parameter(weight.float()) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(list(masters.values()), lr=3e-6, fused=True)
    trainer = TorchAdamWTrainer(
        weights=weights, masters=masters, optimizer=optimizer, settings=SETTINGS, vocab_size=CONFIG.vocab_size
    )
    rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)
    sender = Sender(trainer, rendezvous, 0, SETTINGS, device=torch.device("cuda:1"))
    sender.connect()
    for version in range(NUM_VERSIONS):
        trainer.train_step()
        kinds.put(sender.update_weights(version).verdict.kind.value)
    whole = {name: weight.cpu().contiguous() for name, weight in weights.items()}
    save_file(whole, folder / "last" / "model.safetensors", {"format": "pt"})


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
    for folder in ("first", "last"):
        CONFIG.save_pretrained(tmp_path / folder)
    torch.manual_seed(0)
    _AUTO.from_config(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "first")
    llm = serve(tmp_path / "first")
    store = host_store()
    context = multiprocessing.get_context("spawn")
    kinds = context.Queue()
    trainer = context.Process(target=train, args=(store.port, tmp_path, kinds), daemon=True)
    trainer.start()
    try:
        driver = VllmDriver(OfflineControl(llm))
        rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=store.port)
        driver.connect(init_info(rendezvous, SETTINGS))
        for version in range(NUM_VERSIONS):
            generate(llm)  # fills the prefix cache, which must not outlive the update
            driver.update_weights(version)
        seen = [kinds.get(timeout=60) for _ in range(NUM_VERSIONS)]
        trainer.join(60)
        after = generate(llm)
    finally:
        trainer.kill()
        llm.llm_engine.engine_core.shutdown()
    assert seen == ["full", "delta", "delta", "delta", "full", "delta"]
    assert generate(serve(tmp_path / "last")) == after
