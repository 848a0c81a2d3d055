"""Train a tiny Qwen3 with Megatron in one process, and serve it from transformers in another, on the CPU.

    python examples/train_and_serve.py

After every optimizer step the engine is brought to the trainer's weights. The first update is full, the
others carry only what the step changed. At the end the engine continues a prompt, and its embedding is
compared with the trainer's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from awex_delta import (
    DeltaSettings,
    Rendezvous,
    RolloutConfig,
    TrainEngineConfig,
    UpdateStats,
    attach_megatron,
    attach_transformers,
    host_store,
    resolve,
)
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config

SPEC = TinySpec(hidden=64, lr=3e-6)
NUM_STEPS = 4
PROMPT = "def main("
ENGINE, TRAINER = 0, 1


def train(me: Rank, settings: DeltaSettings, port: int) -> tuple[list[UpdateStats], torch.Tensor]:
    """The trainer process: what each update did, and the embedding at the end."""
    me.init_gloo(rank=0, world_size=1, name="trainer")  # Megatron's own process group
    tiny = build_trainer(SPEC)
    sender = attach_megatron(
        tiny.chunks, tiny.optimizer, tiny.hf_config, rendezvous=meeting_point(port), settings=settings
    )
    updates = []
    for version in range(1, NUM_STEPS + 1):
        tiny.train_step()
        updates.append(sender.update_weights(version))
    sender.close()
    model: Any = tiny.chunks[0].module
    return updates, model.embedding.word_embeddings.weight.detach().clone()


def serve(_: Rank, settings: DeltaSettings, port: int) -> tuple[str, torch.Tensor]:
    """The engine process: a continuation of the prompt, and the embedding that it was made with."""
    create: Any = AutoModelForCausalLM.from_config
    model = create(hf_config(SPEC), dtype=torch.bfloat16)  # random weights: the first update replaces them
    receiver = attach_transformers(model, rendezvous=meeting_point(port), engine_rank=0, settings=settings)
    for version in range(1, NUM_STEPS + 1):
        receiver.update_weights(version)
    assert receiver.ready  # the weights are exactly one committed version
    prompt = torch.tensor([list(PROMPT.encode())])
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False)
    receiver.close()
    text = "".join(chr(t) if 32 <= t < 127 else "." for t in tokens[0, prompt.shape[1] :].tolist())
    return text, model.get_input_embeddings().weight.detach().clone()


def meeting_point(port: int) -> Rendezvous:
    """Where both processes meet: one engine rank and one trainer rank, at the store of the launcher."""
    return Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)


def work(me: Rank, settings: DeltaSettings, port: int) -> Any:
    """What each of the two processes runs."""
    return train(me, settings, port) if me.rank == TRAINER else serve(me, settings, port)


def report(updates: Sequence[UpdateStats], text: str, *, equal: bool) -> None:
    """Print what happened."""
    for stats in updates:
        share = stats.total_wire_bytes / stats.full_bytes
        size = f"{stats.total_wire_bytes:,} bytes, {share:.1%} of a full sync"
        print(f"version {stats.version}: {stats.verdict}; {size}")
    print(f"the engine continues {PROMPT!r} with {text!r}")
    print(f"trainer and engine hold {'the same' if equal else 'DIFFERENT'} embedding bits")


def main() -> None:
    """Resolve the settings, open the store, run both processes, and report."""
    resolved = resolve(
        TrainEngineConfig(
            backend="megatron:d1",
            enable_delta_weight_update=True,
            weight_update_timeout_seconds=60.0,
        ),
        RolloutConfig(backend="vllm:d1"),  # how many engine ranks there are; here transformers takes the seat
    )
    store = host_store()  # in the launcher, so that it outlives every rank
    with Console(stderr=True).status("training in one process, serving in another"):
        served, (updates, trained) = run_ranks(work, 2, resolved.settings, store.port)
    text, embedding = served
    equal = torch.equal(embedding.view(torch.int16), trained.view(torch.int16))
    report(updates, text, equal=equal)
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
