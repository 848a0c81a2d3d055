"""The example's Megatron policy, cut for several ranks, against transformers with the same HF weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from awex_delta.testing.procs import Rank, run_ranks
from examples.gsm8k_grpo.policy import Batch, Policy, build_policy, hf_config
from examples.gsm8k_grpo.settings import Settings, load_settings
from examples.gsm8k_grpo.train import grpo_loss

pytestmark = pytest.mark.timeout(180)

SMALL = (
    *("model.hidden_size=64", "model.num_hidden_layers=2", "model.head_dim=16", "model.intermediate_size=96"),
    *(
        "model.vocab_size=61",
        "model.initializer_range=0.1",
        "model.rope_theta=5000.0",
        "grpo.micro_batch_size=2",
    ),
)
EXPERTS = (
    *("model.architecture=Qwen3MoeForCausalLM", "model.num_experts=8", "model.num_experts_per_tok=2"),
    "model.moe_intermediate_size=48",
)
LAYOUTS = {
    "tensor": ("train.backend=megatron:t2",),
    "pipeline": ("train.backend=megatron:p2",),
    "experts": (*EXPERTS, "train.backend=megatron:(attn:d2|ffn:e2)"),
}


def batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    return Batch(
        tokens=torch.randint(61, (8, 17), generator=generator),
        mask=torch.ones(8, 16),
        advantage=torch.randn(8, generator=generator),
    )


def work(me: Rank, settings: Settings) -> tuple[torch.Tensor | None, ...]:
    """Log-probabilities at first, with the reference after two steps, and after them."""
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    policy: Policy = build_policy(settings)
    first = policy.logps(batch())
    policy.keep_reference()
    for _ in range(2):
        policy.step(batch(), grpo_loss(0.2, 0.0), 1e-3)
    with policy.as_reference():
        reference = policy.logps(batch())
    return first, reference, policy.logps(batch())


def transformers_logps(settings: Settings, folder: Path) -> torch.Tensor:
    """Of transformers' own loader, from the checkpoint that the policy read."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = batch().tokens
    with torch.no_grad():
        logps = torch.log_softmax(model(tokens[:, :-1]).logits, -1)
    assert settings.model.path == str(folder)
    found: torch.Tensor = logps.gather(-1, tokens[:, 1:, None])[..., 0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_means_the_same_in_every_layout(layout: str, tmp_path: Path) -> None:
    overrides = [*SMALL, *LAYOUTS[layout], f"model.path={tmp_path}"]
    settings = load_settings("tiny_cpu", overrides)
    torch.manual_seed(1)
    create: Any = AutoModelForCausalLM.from_config
    create(hf_config(settings.model), dtype=torch.bfloat16).save_pretrained(tmp_path)
    found = run_ranks(work, 2, settings, timeout_seconds=150)
    expected = transformers_logps(settings, tmp_path)
    last = 1 if layout == "pipeline" else 0
    assert (found[0][0] is None) == (layout == "pipeline")
    for first, reference, after in found[last:]:
        # bf16 against fp32 differ by 0.007; one row of each key-value group in a wrong place, by 0.16.
        assert (first - expected).abs().mean() < 0.02
        assert torch.equal(first, reference)
        gain = ((after - first) * batch().advantage[:, None]).mean()
        assert gain > 0.01  # what had an advantage became more probable
