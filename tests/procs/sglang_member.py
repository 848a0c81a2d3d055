"""A program that holds a whole SGLang engine on a CPU: it follows a training, then reads its checkpoints.

python -m tests.procs.sglang_member JOB_AS_JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import sglang_cpu

# Here, since the processes that SGLang starts import this module, too.
sglang_cpu.install_engine()

from awex_delta.engines.sglang.driver import EngineControl, SglangDriver  # noqa: E402
from awex_delta.engines.sglang.loader import LOAD_FORMAT  # noqa: E402
from awex_delta.protocol.rendezvous import Joining, Rendezvous  # noqa: E402
from tests.procs.vllm_members import NUM_TOKENS, PROMPTS, SETTINGS, Answers  # noqa: E402


def engine(model: Path) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    return Engine(
        model_path=str(model),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        max_total_tokens=1024,
        max_running_requests=4,
        custom_weight_loader=[LOAD_FORMAT],
        log_level="error",
    )


def generate(held: Any) -> Answers:
    asked = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = held.generate(input_ids=PROMPTS, sampling_params=asked, return_logprob=True)
    found = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    return [([token for _, token, _ in steps], [logprob for logprob, _, _ in steps]) for steps in found]


def follow(job: Mapping[str, Any]) -> list[Answers]:
    """What an engine with random weights answers after each update."""
    joining = Joining(
        rendezvous=Rendezvous(
            num_engine_ranks=1, num_trainer_ranks=job["num_trainer_ranks"], port=job["port"]
        ),
        settings=SETTINGS,
        engine="sglang",
    )
    held, seen = engine(Path(job["start"])), []
    driver = SglangDriver(EngineControl(held), joining)
    for version in range(1, job["num_versions"] + 1):
        driver.update_weights(version)  # at once after the answers to what was generated
        driver.publish(version)
        seen.append(generate(held))
    held.shutdown()
    return seen


def read(job: Mapping[str, Any]) -> list[Answers]:
    """What a fresh engine answers, that SGLang loads from each checkpoint in turn."""
    checkpoints = [Path(path) for path in job["checkpoints"]]
    held, seen = engine(checkpoints[0]), []
    for number, checkpoint in enumerate(checkpoints):
        if number:
            assert EngineControl(held).flush(60.0), "a request still runs"
            done, text, *_ = held.update_weights_from_disk(str(checkpoint))
            if not done:
                raise RuntimeError(text)
        seen.append(generate(held))
    held.shutdown()
    return seen


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    answers = read(given) if "checkpoints" in given else follow(given)
    Path(given["path"]).write_text(json.dumps(answers))
    os._exit(0)
