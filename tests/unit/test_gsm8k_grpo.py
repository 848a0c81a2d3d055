"""Parts of the GRPO example: rewards, advantages, the loss, problems and settings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from awex_delta import ConfigError, resolve
from examples.gsm8k_grpo import make_problems
from examples.gsm8k_grpo.hf_weights import checkpoint_weights
from examples.gsm8k_grpo.policy import Batch
from examples.gsm8k_grpo.problems import Problem, WordTokenizer, final_answer, load_problems, reward
from examples.gsm8k_grpo.rollouts import Request, Rollouts, Tokens
from examples.gsm8k_grpo.settings import load_settings
from examples.gsm8k_grpo.train import Run, advantages, grpo_loss, make_batch


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 1,234", "1234"),
        ("#### 5 no, #### 6", "6"),
        ("####7", "7"),
        ("#### -3", "-3"),
        ("#### 2.5", "2.5"),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_the_final_answer_is_read_in_the_format_of_gsm8k(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_only_an_exact_answer_earns_a_reward() -> None:
    problem = Problem(question="", answer="6 * 7 = 42\n#### 42")
    assert reward("#### 42", problem) == 1.0
    assert reward("#### 042", problem) == 0.0
    assert reward("42", problem) == 0.0


def test_the_shipped_problems_are_right_and_what_the_program_writes() -> None:
    problems = load_problems("problems.jsonl")
    assert [vars_of(one) for one in problems] == make_problems.problems()
    assert len({one.question for one in problems}) == len(problems) == 310
    for one in problems:
        equation, _, final = one.answer.partition("\n#### ")
        left, _, right = equation.partition(" = ")
        a, sign, b = left.split()
        assert final == right == str(int(a) + int(b) if sign == "+" else int(a) - int(b))
        # Both numbers stand in the question, and a difference is asked where something is taken away.
        assert {a, b} <= set(one.question.replace(".", " ").split())
        assert (sign == "-") == ("loses" in one.question or "gives away" in one.question)


def vars_of(problem: Problem) -> dict[str, str]:
    return {"question": problem.question, "answer": problem.answer}


def test_words_become_tokens_and_answers_survive_the_way_back() -> None:
    problems = load_problems("problems.jsonl")
    tokenizer = WordTokenizer(problems, 64)
    for one in problems:
        tokens = [*tokenizer.encode(one.answer), tokenizer.end]
        assert max(tokens) < 64
        assert reward(tokenizer.decode([*tokens, 5, 6]), one) == 1.0
    with pytest.raises(ConfigError, match="vocab_size = 8"):
        WordTokenizer(problems, 8)


def test_advantages_are_normalised_in_each_group() -> None:
    found = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))
    assert found[0].tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert found[1].tolist() == [0.0] * 4  # nothing to learn where all are equal
    assert found[2].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)


def batch_of(advantage: float, old: float | None, reference: float | None) -> Batch:
    return Batch(
        tokens=torch.zeros(1, 2, dtype=torch.int64),
        mask=torch.ones(1, 1),
        advantage=torch.tensor([advantage]),
        old=None if old is None else torch.tensor([[old]]),
        reference=None if reference is None else torch.tensor([[reference]]),
    )


def slope_of(loss: torch.Tensor, logps: torch.Tensor) -> float:
    (slope,) = torch.autograd.grad(loss, logps)
    return slope.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (2.0, 1.0, -2.0, -2.0),
        (2.0, 1.5, -2.4, 0.0),  # a gain counts only up to the clip
        (2.0, 0.5, -1.0, -1.0),
        (-2.0, 1.5, 3.0, 3.0),  # a loss counts in full
        (-2.0, 0.5, 1.6, 0.0),
    ],
)
def test_the_ratio_is_clipped_where_it_would_gain(
    advantage: float, ratio: float, value: float, slope: float
) -> None:
    logps = torch.tensor([[-1.0]], requires_grad=True)
    loss = grpo_loss(0.2, 0.0)(logps, batch_of(advantage, -1.0 - math.log(ratio), None)).sum()
    assert loss.item() == pytest.approx(value)
    assert slope_of(loss, logps) == pytest.approx(slope, abs=1e-6)


def test_without_older_weights_the_gradient_is_that_of_the_policy() -> None:
    logps = torch.tensor([[-1.0]], requires_grad=True)
    loss = grpo_loss(0.2, 0.0)(logps, batch_of(3.0, None, None)).sum()
    assert slope_of(loss, logps) == pytest.approx(-3.0)


def test_the_divergence_is_zero_at_the_reference_and_pulls_back_to_it() -> None:
    for apart in (0.0, 0.7, -0.7):
        logps = torch.tensor([[-1.0 + apart]], requires_grad=True)
        loss = grpo_loss(0.2, 0.5)(logps, batch_of(0.0, None, -1.0)).sum()
        assert loss.item() == pytest.approx(0.5 * (math.exp(-apart) + apart - 1), abs=1e-6)
        # Above the reference the loss falls towards it, and below it too.
        assert slope_of(loss, logps) == pytest.approx(0.5 * (1 - math.exp(-apart)), abs=1e-6)


def test_a_batch_masks_exactly_the_completions() -> None:
    batch = make_batch(
        [[5, 6, 7], [8]], [[[1, 2], [3]], [[4], [9, 9]]], torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    )
    assert batch.tokens.shape == (4, 9)
    assert batch.advantage.tolist() == [1.0, 2.0, 3.0, 4.0]
    learned = [batch.tokens[row, 1:][batch.mask[row] > 0].tolist() for row in range(4)]
    assert learned == [[1, 2], [3], [4], [9, 9]]


class Echo:
    """An engine whose completions say what it was asked."""

    def __init__(self, replica: int) -> None:
        self._replica = replica

    def connect(self) -> None:
        """Nobody to meet."""

    def update_weights(self, version: int) -> None:
        """Nothing to update."""

    def sample(self, request: Request) -> list[Tokens]:
        return [[*prompt, self._replica, n] for prompt in request.prompts for n in range(request.num_samples)]

    def close(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_prompt_gets_its_own_completions_from_one_replica(count: int) -> None:
    rollouts = Rollouts([Echo(replica) for replica in range(count)])
    prompts = [[10 + at] for at in range(5)]
    found = rollouts.sample(Request(prompts=prompts, num_samples=2, max_new_tokens=1, end=0, seed=0))
    assert found == [[[10 + at, at % count, n] for n in range(2)] for at in range(5)]
    rollouts.close()


@pytest.mark.parametrize("preset", ["tiny_cpu", "tiny_vllm", "tiny_accumulate", "qwen3_30b_a3b"])
def test_presets_load_and_resolve(preset: str) -> None:
    settings = load_settings(preset)
    assert resolve(settings.train, settings.rollout).settings.enabled
    assert settings.optimizer.weight_decay == 0.003


def test_the_large_preset_is_the_run_that_was_asked_for() -> None:
    settings = load_settings("qwen3_30b_a3b")
    assert settings.train.backend == "megatron:(attn:d2p1t4|ffn:d1p1e8)"
    assert settings.rollout.backend == "sglang:d2t4p1"
    assert (settings.optimizer.lr, settings.data.source) == (3e-6, "openai/gsm8k")
    assert (settings.train.weight_update_anchor_interval, settings.train.ppo_n_minibatches) == (20, 1)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optimizer.lr=fast"], r"section optimizer: .*\nlr = 'fast'.*Remedy: write a number above 0"),
        (["optimizer.weight_decai=0.1"], "did you mean weight_decay?"),
        (["grpo.group_size=1"], "group_size = 1"),
        (
            ["grpo.prompts=3", "grpo.group_size=3", "train.ppo_n_minibatches=2"],
            "divide into train.ppo_n_minibatches",
        ),
        (["nothing.lr=1"], "section.setting=value"),
        (["grpo"], "section.setting=value"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        load_settings("tiny_cpu", overrides)


def test_more_minibatches_without_the_option_are_refused_and_it_is_named() -> None:
    settings = load_settings("tiny_cpu", ["train.ppo_n_minibatches=4"])
    with pytest.raises(ConfigError, match="weight_update_delta_accumulate: true"):
        resolve(settings.train, settings.rollout)


def test_a_missing_preset_and_an_unknown_section_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file 'nowhere'.* presets qwen3_30b_a3b, .*tiny_cpu"):
        load_settings("nowhere")
    path = tmp_path / "x.yaml"
    path.write_text("trains: {}\n")
    with pytest.raises(ConfigError, match="unknown sections trains"):
        load_settings(str(path))


@pytest.mark.parametrize("place", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", ".."])
def test_an_index_names_no_file_outside_of_its_checkpoint(place: str, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": place}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside of the folder"):
        checkpoint_weights(str(tmp_path))


@pytest.mark.parametrize("change", ["data.limit=3", "grpo.max_prompt_tokens=1"])
def test_too_few_problems_are_refused_before_anything_is_sampled(change: str) -> None:
    settings = load_settings("tiny_cpu", [change])
    problems = load_problems(settings.data.source)
    tokenizer = WordTokenizer(problems, settings.model.vocab_size)
    with pytest.raises(ConfigError, match="Remedy: ask for fewer"):
        Run(settings, None, problems, tokenizer)  # type: ignore[arg-type] # no policy is asked
