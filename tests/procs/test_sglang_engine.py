"""A whole SGLang engine on a CPU follows a real Megatron training: tokens and log-probabilities."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from awex_delta.demo.members import tiny_spec
from awex_delta.protocol.stats import UpdateStats
from awex_delta.testing.tiny_models import hf_config
from tests import sglang_cpu
from tests.procs.vllm_members import PROMPTS
from tests.procs.vllm_training import NUM_VERSIONS, Training, plan_of

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not sglang_cpu.sglang_found(), reason="SGLang is not installed: make sglang"),
]


def run_member(folder: Path, **job: Any) -> list[Any]:
    path = folder / "answers.json"
    path.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.procs.sglang_member", json.dumps({**job, "path": str(path)})],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # SGLang's own processes end with it
    )
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert path.exists(), output[-6000:]
    answers: list[Any] = json.loads(path.read_text())
    return answers


@pytest.mark.all
def test_a_following_engine_generates_as_one_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    plan = plan_of("qwen3")
    create: Any = AutoModelForCausalLM
    torch.manual_seed(1)
    create.from_config(hf_config(tiny_spec(plan)), dtype=torch.bfloat16).save_pretrained(tmp_path / "start")
    training = Training(plan, tmp_path, num_engine_ranks=1)
    followed = run_member(
        tmp_path,
        start=str(tmp_path / "start"),
        port=training.rendezvous.port,
        num_trainer_ranks=plan.num_trainer_ranks,
        num_versions=NUM_VERSIONS,
    )
    for stats in training.outcome():
        kinds = [one.verdict.kind.value for one in stats if isinstance(one, UpdateStats)]
        assert kinds == ["full", "delta", "delta", "delta", "full", "delta"]
    checkpoints = [training.checkpoint(version) for version in range(1, NUM_VERSIONS + 1)]
    assert followed == run_member(tmp_path, checkpoints=list(map(str, checkpoints)))
    assert len({json.dumps(answers) for answers in followed}) == NUM_VERSIONS

    # The stand-ins for kernels compute nothing: transformers continues with the same token.
    model = create.from_pretrained(checkpoints[-1], dtype=torch.bfloat16)
    for prompt, (tokens, logprobs) in zip(PROMPTS, followed[-1], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        assert logprobs[0] == pytest.approx(float(expected[tokens[0]]), abs=0.03)
        assert logprobs[0] == pytest.approx(float(expected.max()), abs=0.03)
