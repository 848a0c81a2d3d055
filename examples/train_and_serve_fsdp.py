"""Train a tiny Qwen3 under FSDP2 in two processes, and serve it from transformers in two others, on the CPU.

    python examples/train_and_serve_fsdp.py

Each trainer process holds half of every parameter in fp32, and sends the changes of its half; nothing is
gathered for an update. The first update is full, the others carry only what the step changed. At the end an
engine continues a prompt, and all its weights are compared with those that FSDP gathers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from awex_delta import (
    DeltaSettings,
    Rendezvous,
    RolloutConfig,
    TrainEngineConfig,
    UpdateStats,
    attach_fsdp,
    attach_transformers,
    host_store,
    resolve,
)
from awex_delta.testing.procs import Rank, run_ranks

CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=129,  # not even over two ranks
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
TEXT = "def main():\n    print('what it says')\n\n\nif __name__ == '__main__':\n    main()\n"
NUM_STEPS = 4
PROMPT = "def main("
NUM_ENGINES, NUM_TRAINERS = 2, 2

Weights = dict[str, torch.Tensor]


def train(me: Rank, settings: DeltaSettings, port: int) -> tuple[list[UpdateStats], Weights]:
    """A trainer process: what each update did, and the weights at the end as FSDP gathers them."""
    rank = me.rank - NUM_ENGINES
    me.init_gloo(rank=rank, world_size=NUM_TRAINERS, name="trainer")  # the default process group of torch
    torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its part
    model = create_model(torch.float32)
    sharding: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (NUM_TRAINERS,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.model.layers:
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    sender = attach_fsdp(model, optimizer, CONFIG, rendezvous=meeting_point(port), settings=settings)
    updates = []
    for version in range(1, NUM_STEPS + 1):
        tokens = torch.tensor([list(TEXT.encode())[rank : rank + 33]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.append(sender.update_weights(version))
    sender.close()
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    return updates, {name: tensor.detach().bfloat16() for name, tensor in whole.items()}


def serve(me: Rank, settings: DeltaSettings, port: int) -> tuple[str, Weights]:
    """An engine process: a continuation of the prompt, and the weights that it was made with."""
    model = create_model(torch.bfloat16)  # random weights: the first update replaces them
    receiver = attach_transformers(
        model,
        rendezvous=meeting_point(port),
        engine_rank=me.rank,
        settings=settings,
        engine=f"copy {me.rank}",
    )
    for version in range(1, NUM_STEPS + 1):
        receiver.update_weights(version)
    assert receiver.ready  # the weights are exactly one committed version
    prompt = torch.tensor([list(PROMPT.encode())])
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False)
    receiver.close()
    text = "".join(chr(t) if 32 <= t < 127 else "." for t in tokens[0, prompt.shape[1] :].tolist())
    return text, {name: param.detach().clone() for name, param in model.named_parameters()}


def create_model(dtype: torch.dtype) -> Any:
    """A model with random weights."""
    create: Any = AutoModelForCausalLM.from_config
    return create(CONFIG, dtype=dtype)


def meeting_point(port: int) -> Rendezvous:
    """Where all processes meet: two engines of one rank each, and two trainer ranks."""
    return Rendezvous(num_engine_ranks=NUM_ENGINES, num_trainer_ranks=NUM_TRAINERS, port=port)


def work(me: Rank, settings: DeltaSettings, port: int) -> Any:
    """What each of the four processes runs."""
    return serve(me, settings, port) if me.rank < NUM_ENGINES else train(me, settings, port)


def report(updates: Sequence[UpdateStats], text: str, *, equal: bool) -> None:
    """Print what happened."""
    for stats in updates:
        share = stats.total_wire_bytes / stats.full_bytes
        size = f"{stats.total_wire_bytes:,} bytes, {share:.1%} of a full sync"
        print(f"version {stats.version}: {stats.verdict}; {size}")
    print(f"an engine continues {PROMPT!r} with {text!r}")
    print(f"trainer and engines hold {'the same' if equal else 'DIFFERENT'} bits of all weights")


def main() -> None:
    """Resolve the settings, open the store, run the processes, and report."""
    resolved = resolve(
        TrainEngineConfig(
            backend="fsdp:d2", enable_delta_weight_update=True, weight_update_timeout_seconds=60.0
        ),
        RolloutConfig(backend="transformers:d2"),
    )
    store = host_store()  # in the launcher, so that it outlives every rank
    outcomes = run_ranks(work, NUM_ENGINES + NUM_TRAINERS, resolved.settings, store.port)
    engines, (updates, trained) = outcomes[:NUM_ENGINES], outcomes[NUM_ENGINES]
    equal = all(
        weights.keys() == trained.keys()
        and all(
            weights[name].view(torch.int16).equal(bits.view(torch.int16)) for name, bits in trained.items()
        )
        for _, weights in engines
    )
    report(updates, engines[0][0], equal=equal)
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
