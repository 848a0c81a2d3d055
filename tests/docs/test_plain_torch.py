"""The whole loop of plain torch on the page on trainers, against an engine in another process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from awex_delta import DeltaSettings, Rendezvous, attach_transformers, host_store
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, hf_config
from tests.docs.blocks import python_blocks

NUM_STEPS = 3
ENGINE = 0


@pytest.mark.timeout(120)
def test_the_loop_of_plain_torch() -> None:
    store = host_store()
    served, trained = run_ranks(_work, 2, store.port)
    assert served.keys() == trained.keys()
    for name, bits in trained.items():
        assert torch.equal(served[name], bits), name


def _work(me: Rank, port: int) -> dict[str, torch.Tensor]:
    """The bits of all weights at the end, of the engine or of the trainer."""
    torch.manual_seed(me.rank)  # so that the engine begins elsewhere
    create: Any = AutoModelForCausalLM.from_config
    model = create(hf_config(TinySpec(hidden=64)), dtype=torch.bfloat16)
    start = _bits(model)
    settings = DeltaSettings(timeout_seconds=60, connect_timeout_seconds=60)
    rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)
    if me.rank == ENGINE:
        receiver = attach_transformers(model, rendezvous=rendezvous, engine_rank=0, settings=settings)
        kinds = [receiver.update_weights(version).verdict.kind for version in range(1, NUM_STEPS + 1)]
        assert [kind.value for kind in kinds] == ["full", "delta", "delta"]
        receiver.close()
        return _bits(model)
    tokens = torch.randint(model.config.vocab_size, (2, 16))
    names: dict[str, Any] = {"model": model, "settings": settings, "rendezvous": rendezvous}
    names |= {"num_steps": NUM_STEPS, "loss": lambda policy: policy(tokens, labels=tokens).loss}
    python_blocks("docs/en/trainers.md")[2].run(names)
    end = _bits(model)
    assert any(not torch.equal(end[name], start[name]) for name in end)
    return end


def _bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().view(torch.int16).clone() for name, one in model.named_parameters()}
