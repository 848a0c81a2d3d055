"""A tiny model that is trained on one GPU, for engines that are updated on another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

SETTINGS = DeltaSettings(anchor_interval=3, timeout_seconds=120, connect_timeout_seconds=300)
KINDS = ["full", "delta", "delta", "delta", "full", "delta"]
"""Of the updates, with an anchor after three deltas."""

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
_AUTO: Any = AutoModelForCausalLM


def write_first(folder: Path) -> Path:
    """The checkpoint that engine and trainer begin with; that of the last step goes to `folder / "last"`."""
    for name in ("first", "last"):
        CONFIG.save_pretrained(folder / name)
    torch.manual_seed(0)
    _AUTO.from_config(CONFIG).to(torch.bfloat16).save_pretrained(folder / "first")
    return folder / "first"


@contextmanager
def training(folder: Path, device: str) -> Iterator[tuple[Rendezvous, Callable[[], list[str]]]]:
    """Train in a process of its own, with an update after each step.

    Args:
        folder: that of `write_first`.
        device: of the trainer.

    Yields:
        Where the trainer waits for an engine of one rank, and what waits for its end: gives the kinds of its
        updates.
    """
    store = host_store()
    context = multiprocessing.get_context("spawn")
    kinds = context.Queue()
    trainer = context.Process(target=_train, args=(store.port, folder, device, kinds), daemon=True)

    def to_its_end() -> list[str]:
        seen = [kinds.get(timeout=60) for _ in KINDS]
        trainer.join(60)
        return seen

    trainer.start()
    try:
        yield Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=store.port), to_its_end
    finally:
        trainer.kill()


def _train(port: int, folder: Path, device: str, kinds: Any) -> None:
    """A step before each update; then the checkpoint of the last one."""
    model = _AUTO.from_pretrained(folder / "first", dtype=torch.bfloat16).to(device)
    weights: dict[str, torch.Tensor] = {name: param.data for name, param in model.named_parameters()}
    masters = {name: torch.nn.Parameter(weight.float()) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(list(masters.values()), lr=3e-6, fused=True)
    trainer = TorchAdamWTrainer(
        weights=weights, masters=masters, optimizer=optimizer, settings=SETTINGS, vocab_size=CONFIG.vocab_size
    )
    rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)
    sender = Sender(trainer, rendezvous, 0, SETTINGS, device=torch.device(device))
    sender.connect()
    for version in range(len(KINDS)):
        trainer.train_step()
        kinds.put(sender.update_weights(version).verdict.kind.value)
    whole = {name: weight.cpu().contiguous() for name, weight in weights.items()}
    save_file(whole, folder / "last" / "model.safetensors", {"format": "pt"})
