"""A real vLLM follows a real Megatron training: tokens, log-probabilities and bits, version by version."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from awex_delta.demo.members import tiny_spec
from awex_delta.demo.scenario import ModelName
from awex_delta.engines.vllm.driver import init_info
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Reason
from awex_delta.testing.tiny_models import hf_config
from tests.procs.vllm_members import (
    SETTINGS,
    Answers,
    Members,
    VllmMember,
    VllmOptions,
    addresses_of,
    cast_norm,
    fail_next_apply,
    lose_weights,
    move_weights,
    state_of,
)
from tests.procs.vllm_training import NUM_VERSIONS, Training, config_only, plan_of

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]

ABORTED = 4


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    """Processes with vLLM imported. The engine core runs in them; cores are left to the system."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_PLUGINS": "awex_delta",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }.items():
            patch.setenv(name, value)
        members = Members()
        yield members
        members.close()


@pytest.fixture
def member(members: Members) -> Iterator[Callable[[VllmOptions], VllmMember]]:
    """Members without an `LLM`, another one at each call; the next test gets them again."""
    yield members.take
    members.give_back()


def differing(truth: dict[str, torch.Tensor], workers: list[Any]) -> list[str]:
    """Names of the tensors of which a worker holds other bits, or that the workers do not hold whole."""
    found: list[str] = []
    for name, whole in truth.items():
        bits = whole.view(torch.int16).numpy()
        held = np.zeros(bits.shape, dtype=bool)
        equal = True
        for offset, part in (parts[name] for parts in workers if name in parts):
            at = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
            held[at] = True
            equal = equal and np.array_equal(bits[at], part)
        if not (equal and held.all()):
            found.append(name)
    return found


STEPS = ["pause", "start", "update", "finish", "reset_prefix_cache", "resume", "paused"]


@pytest.mark.parametrize("model", ["qwen3", pytest.param("qwen3-moe", marks=pytest.mark.all)])
def test_vllm_generates_as_one_loaded_from_the_checkpoint(
    model: ModelName, tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of(model)
    training = Training(plan, tmp_path, num_engine_ranks=1)
    engine, fresh = member(VllmOptions()), member(VllmOptions())
    engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
    engine.ask("connect", init_info(training.rendezvous, SETTINGS))
    addresses = engine.ask("rpc", addresses_of)
    seen: list[Answers] = []
    for version in range(1, NUM_VERSIONS + 1):
        assert engine.ask("update", version) == STEPS
        assert engine.ask("version") == str(version)
        seen.append(engine.ask("generate"))
        checkpoint = training.checkpoint(version)
        assert differing(load_file(checkpoint / "model.safetensors"), engine.ask("rpc", state_of)) == []
        # Starting takes long: the oracle starts with one version, and vLLM itself loads the others in turn.
        fresh.ask("load" if version == 1 else "reload", checkpoint)
        assert seen[-1] == fresh.ask("generate"), version
    assert engine.ask("rpc", addresses_of) == addresses
    assert len({json.dumps(answers) for answers in seen}) == NUM_VERSIONS
    for stats in training.outcome():
        kinds = [one.verdict.kind.value for one in stats if isinstance(one, UpdateStats)]
        assert kinds == ["full", "delta", "delta", "delta", "full", "delta"]


@pytest.mark.parametrize(
    ("model", "ep"),
    [
        pytest.param("qwen3", False, marks=pytest.mark.all),
        pytest.param("qwen3-moe", False, marks=pytest.mark.all),
        pytest.param("qwen3-moe", True),
    ],
)
def test_vllm_ranks_hold_their_parts(
    model: ModelName, ep: bool, tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of(model)
    training = Training(plan, tmp_path, num_engine_ranks=2)
    engine = member(VllmOptions(tp=2, ep=ep))
    engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
    engine.ask("connect", init_info(training.rendezvous, SETTINGS))
    addresses = engine.ask("rpc", addresses_of)
    seen: list[Answers] = []
    for version in range(1, NUM_VERSIONS + 1):
        assert engine.ask("update", version) == STEPS
        seen.append(engine.ask("generate"))
        checkpoint = training.checkpoint(version)
        assert differing(load_file(checkpoint / "model.safetensors"), engine.ask("rpc", state_of)) == []
    assert engine.ask("rpc", addresses_of) == addresses
    training.outcome()
    engine.ask("load", training.checkpoint(1))
    for version, followed in enumerate(seen, start=1):
        engine.ask("reload", training.checkpoint(version))
        assert followed == engine.ask("generate"), version
    assert len({json.dumps(answers) for answers in seen}) == NUM_VERSIONS


def test_a_failed_update_keeps_requests_stopped_and_the_cache_untouched(
    tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of("qwen3")
    training = Training(plan, tmp_path, num_engine_ranks=1, aborted=ABORTED)
    engine, fresh = member(VllmOptions()), member(VllmOptions())
    engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
    engine.ask("connect", init_info(training.rendezvous, SETTINGS))
    for version in range(1, ABORTED):
        engine.ask("update", version)
    engine.ask("rpc", fail_next_apply)
    with pytest.raises(RuntimeError, match=r"(?s)injected.*must not be served") as failure:
        engine.ask("update", ABORTED)
    assert "UpdateAborted" in str(failure.value)
    assert engine.ask("calls_made") == STEPS[:3]
    assert engine.ask("version") == str(ABORTED - 1)
    assert engine.ask("update", ABORTED) == STEPS
    followed = engine.ask("generate")
    fresh.ask("load", training.checkpoint(ABORTED))
    assert followed == fresh.ask("generate")

    # Without the reset the old weights' cache is served: the tests above would notice.
    engine.ask("update_without_driver", ABORTED + 1)
    stale = engine.ask("generate")
    fresh.ask("reload", training.checkpoint(ABORTED + 1))
    expected = fresh.ask("generate")
    assert stale != expected
    assert engine.ask("reset_prefix_cache")
    assert engine.ask("generate") == expected

    engine.ask("rpc", lose_weights)
    engine.ask("update", ABORTED + 2)
    fresh.ask("reload", training.checkpoint(ABORTED + 2))
    assert engine.ask("generate") == fresh.ask("generate")
    for stats in training.outcome():
        assert stats[ABORTED - 1] == "UpdateAborted"
        again = stats[ABORTED]
        assert isinstance(again, UpdateStats)
        assert again.verdict.reason in (Reason.ENGINE_DIRTY, Reason.PREVIOUS_ABORTED)
        reasons = [one.verdict.reason for one in stats[-2:] if isinstance(one, UpdateStats)]
        assert reasons == [Reason.NONE, Reason.ENGINE_STALE]


@pytest.mark.all
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_vllm_is_followed_wherever_its_weights_move(
    model: ModelName, tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of(model)
    training = Training(plan, tmp_path, num_engine_ranks=1, aborted=ABORTED)
    engine, fresh = member(VllmOptions()), member(VllmOptions())
    engine.ask("load", config_only(plan, tmp_path / "config"), "dummy")
    engine.ask("connect", init_info(training.rendezvous, SETTINGS))

    def follow(version: int) -> None:
        engine.ask("update", version)
        fresh.ask("load" if version == 1 else "reload", training.checkpoint(version))
        assert engine.ask("generate") == fresh.ask("generate"), version

    follow(1)
    engine.ask("rpc", move_weights, "data_swapped")
    follow(2)
    engine.ask("rpc", move_weights, "offloaded_and_reloaded")
    follow(3)
    engine.ask("rpc", cast_norm, torch.float32)
    with pytest.raises(RuntimeError, match=r"(?s)model\.norm\.weight: .*float32.*must not be served"):
        engine.ask("update", ABORTED)
    engine.ask("rpc", cast_norm, torch.bfloat16)
    follow(ABORTED)
    engine.ask("rpc", move_weights, "weights_lost")
    follow(5)
    follow(6)
    (stats, *_) = training.outcome()
    reasons = [one if isinstance(one, str) else one.verdict.reason for one in stats]
    assert reasons[1:3] == [Reason.ENGINE_MOVED] * 2
    assert reasons[3:] == ["LayoutError", Reason.PREVIOUS_ABORTED, Reason.ENGINE_MOVED, Reason.NONE]


def test_weights_that_vllm_packed_are_refused_and_its_own_kernels_agree(
    tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    """A plain vLLM packs weights away: it cannot be followed, and it is an oracle that shares no kernel."""
    plain, live = member(VllmOptions(backend="")), member(VllmOptions())
    for model in ("qwen3", "qwen3-moe"):
        plan = plan_of(model)
        torch.manual_seed(1)
        create: Any = AutoModelForCausalLM.from_config
        checkpoint = tmp_path / model
        create(hf_config(tiny_spec(plan)), dtype=torch.bfloat16).save_pretrained(checkpoint)
        plain.ask("load", checkpoint)
        live.ask("load", checkpoint)
        with pytest.raises(RuntimeError, match=r"LayoutError.*packed the weight away after loading"):
            plain.ask("rpc", state_of)
        with pytest.raises(RuntimeError, match="call init_weight_transfer_engine first"):
            live.ask("update_without_driver", 1)
        assert agree(live.ask("generate"), plain.ask("generate"))


def agree(found: Answers, expected: Answers) -> bool:
    """Log-probabilities are near each other as long as the tokens are the same; the first one is."""
    for (tokens, logprobs), (others, other_logprobs) in zip(found, expected, strict=True):
        same = next(
            (k for k, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), None
        )
        if same == 0 or not np.allclose(logprobs[:same], other_logprobs[:same], atol=0.03):
            return False
    return True


def test_views_read_what_vllm_loaded_where_heads_are_repeated_and_lm_head_is_tied(
    tmp_path: Path, member: Callable[[VllmOptions], VllmMember]
) -> None:
    plan = plan_of("qwen3")
    config = hf_config(replace(tiny_spec(plan), kv_heads=1, tied=True))
    torch.manual_seed(2)
    create: Any = AutoModelForCausalLM.from_config
    model = create(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    engine = member(VllmOptions(tp=2))
    engine.ask("load", tmp_path / "model")
    workers = engine.ask("rpc", state_of)
    truth = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert torch.equal(truth["lm_head.weight"], truth["model.embed_tokens.weight"])
    assert differing(truth, workers) == []
    offset, part = workers[1]["model.layers.0.self_attn.k_proj.weight"]
    assert (offset, part.shape[0]) == ((0, 0), config.head_dim)


def test_the_program_on_the_page(tmp_path: Path, member: Callable[[VllmOptions], VllmMember]) -> None:
    plan = replace(plan_of("qwen3"), steps=2)
    training = Training(plan, tmp_path, num_engine_ranks=1)
    engine, fresh = member(VllmOptions()), member(VllmOptions(backend=""))
    model = config_only(plan, tmp_path / "config")
    answers = engine.ask("follow_page", training.rendezvous, model, plan.steps)
    fresh.ask("load", training.checkpoint(plan.steps))
    assert answers == fresh.ask("generate")
    assert engine.ask("version") == str(plan.steps)
    training.outcome()
