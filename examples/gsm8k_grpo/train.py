"""Train a model on word problems with GRPO, and keep its engines on the trainer's exact weights.

    python -m examples.gsm8k_grpo.train tiny_cpu
    torchrun --nproc-per-node 8 -m examples.gsm8k_grpo.train qwen3_30b_a3b --plan

Every rank of the trainer runs this program. Rank 0 also talks to the engines. A round: move the weights,
sample a group of completions for each problem, reward exact answers, take the optimizer steps.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore

from awex_delta import (
    ConfigError,
    Rendezvous,
    RunLog,
    Sender,
    UpdateStats,
    attach_megatron,
    host_store,
    resolve,
)
from awex_delta.cli.plan import show as show_plan
from awex_delta.presets.forecast import plan_run
from awex_delta.settings.allocation import ENGINE_BACKENDS, parse_allocation
from examples.gsm8k_grpo.policy import GPU, Batch, Loss, Policy, build_policy
from examples.gsm8k_grpo.problems import (
    HubTokenizer,
    Problem,
    Tokenizer,
    WordTokenizer,
    load_problems,
    reward,
)
from examples.gsm8k_grpo.progress import Activity, digest, show, weights_digest
from examples.gsm8k_grpo.rollouts import Request, Rollouts, Tokens, start_rollouts
from examples.gsm8k_grpo.settings import Settings, check_engine, load_settings

Value = TypeVar("Value")

Group = list[Tokens]
"""The completions of one problem."""


# --- GRPO ---------------------------------------------------------------------------------------------


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each completion is than its group. Rewards and result: fp32 [problems, group]."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)


def grpo_loss(clip_ratio: float, kl_coefficient: float) -> Loss:
    """The loss of each token: clipped ratio times advantage, and the divergence from the reference."""

    def loss(logps: torch.Tensor, batch: Batch) -> torch.Tensor:
        old = logps.detach() if batch.old is None else batch.old
        ratio = torch.exp(logps - old)
        gain = batch.advantage[:, None]
        clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
        value = -torch.minimum(ratio * gain, clipped * gain)
        if batch.reference is not None:
            apart = batch.reference - logps
            value = value + kl_coefficient * (torch.exp(apart) - apart - 1)
        return value

    return loss


def likelihood_loss(logps: torch.Tensor, _: Batch) -> torch.Tensor:
    """The loss of supervised steps."""
    return -logps


def make_batch(
    prompts: Sequence[Tokens], groups: Sequence[Group], gains: torch.Tensor, *, multiple: int = 8
) -> Batch:
    """Sequences of all groups, padded on the right to a common length; gains: [problems, group]."""
    rows = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    length = max(len(prompt) + len(one) for prompt, one in rows) - 1
    length = -(-length // multiple) * multiple
    tokens = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    for row, (prompt, one) in enumerate(rows):
        tokens[row, : len(prompt) + len(one)] = torch.tensor(prompt + one)
        mask[row, len(prompt) - 1 : len(prompt) + len(one) - 1] = 1
    device = torch.device("cuda") if GPU else torch.device("cpu")
    return Batch(tokens=tokens.to(device), mask=mask.to(device), advantage=gains.flatten().to(device))


# --- One run ------------------------------------------------------------------------------------------


class Run:
    """What the rounds share. `rollouts` and `log` are rank 0's alone."""

    def __init__(
        self, settings: Settings, policy: Policy, problems: Sequence[Problem], tokenizer: Tokenizer
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.tokenizer = tokenizer
        problems = problems[: settings.data.limit or None]
        prompts = [tokenizer.encode(settings.data.prompt.format(question=one.question)) for one in problems]
        short = [len(one) <= settings.grpo.max_prompt_tokens for one in prompts]
        self.problems = [one for one, fits in zip(problems, short, strict=True) if fits]
        self.prompts = [one for one, fits in zip(prompts, short, strict=True) if fits]
        wanted = max(settings.grpo.prompts, settings.warmup.batch_size if settings.warmup.steps else 0)
        if len(self.problems) < wanted:
            raise ConfigError(
                f"grpo.prompts or warmup.batch_size asks for {wanted} problems, and {len(self.problems)} are "
                "left by data.limit and grpo.max_prompt_tokens. Remedy: ask for fewer, or leave more"
            )

    def choose(self, count: int, *, draw: str) -> list[int]:
        """Some problems, the same on every rank."""
        generator = random.Random(f"{self.settings.run.seed} {draw}")  # noqa: S311 - no secret
        return generator.sample(range(len(self.problems)), count)

    def warm_up(self, now: Activity) -> None:
        """Supervised steps on worked answers."""
        warmup = self.settings.warmup
        for step in range(warmup.steps):
            now(f"warm-up, step {step + 1} of {warmup.steps}")
            chosen = self.choose(warmup.batch_size, draw=f"warm-up {step}")
            answers = [
                [[*self.tokenizer.encode(self.problems[at].answer), self.tokenizer.end]] for at in chosen
            ]
            batch = make_batch([self.prompts[at] for at in chosen], answers, torch.zeros(len(chosen)))
            self.policy.step(batch, likelihood_loss, warmup.lr)

    def rewards(self, chosen: Sequence[int], groups: Sequence[Group]) -> torch.Tensor:
        """1 for each completion that ends in the right answer, else 0: fp32 [problems, group]."""
        rows = zip(chosen, groups, strict=True)
        return torch.tensor(
            [[reward(self.tokenizer.decode(one), self.problems[at]) for one in group] for at, group in rows]
        )

    def train(self, chosen: Sequence[int], groups: Sequence[Group], rewards: torch.Tensor) -> float:
        """The optimizer steps of one round; returns the last norm of the gradient."""
        grpo, num_minibatches = self.settings.grpo, self.settings.train.ppo_n_minibatches
        whole = make_batch([self.prompts[at] for at in chosen], groups, advantages(rewards))
        old = self.policy.logps(whole) if num_minibatches > 1 else None
        reference = None
        if grpo.kl_coefficient:
            with self.policy.as_reference():
                reference = self.policy.logps(whole)
        whole = Batch(
            tokens=whole.tokens, mask=whole.mask, advantage=whole.advantage, old=old, reference=reference
        )
        loss = grpo_loss(grpo.clip_ratio, grpo.kl_coefficient)
        norm = 0.0
        for minibatch in range(num_minibatches):
            rows = slice(minibatch, None, num_minibatches)
            norm = self.policy.step(whole.rows(rows), loss, self.settings.optimizer.lr)
        return norm


def sample(run: Run, rollouts: Rollouts | None, chosen: Sequence[int], seed: int) -> list[Group]:
    """The groups of some problems, on every rank; rank 0 asks the engines."""
    grpo = run.settings.grpo
    found = torch.full((len(chosen), grpo.group_size, grpo.max_new_tokens), -1, dtype=torch.int64)
    if rollouts is not None:
        request = Request(
            prompts=[run.prompts[at] for at in chosen],
            num_samples=grpo.group_size,
            max_new_tokens=grpo.max_new_tokens,
            end=run.tokenizer.end,
            seed=seed,
        )
        for row, group in enumerate(rollouts.sample(request)):
            for column, one in enumerate(group):
                found[row, column, : len(one)] = torch.tensor(one)
    shared = found.cuda() if GPU else found
    dist.broadcast(shared, src=0)
    return [[[token for token in one if token >= 0] for one in group] for group in shared.tolist()]


def in_both(engines: Callable[[], None], trainers: Callable[[], Value]) -> Value:
    """Do what engines and trainers have to do together, on the rank that calls for both."""
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(engines)
        value = trainers()
        other.result()
    return value


def connect(sender: Sender, rollouts: Rollouts | None) -> None:
    """Let trainers and engines meet, on every rank."""
    if rollouts is None:
        sender.connect()
    else:
        in_both(rollouts.connect, sender.connect)


def move_weights(sender: Sender, rollouts: Rollouts | None, version: int) -> UpdateStats:
    """Take the engines to the trainer's weights, on every rank."""
    if rollouts is None:
        return sender.update_weights(version)
    return in_both(partial(rollouts.update_weights, version), partial(sender.update_weights, version))


def rounds(run: Run, sender: Sender, rollouts: Rollouts | None, log: RunLog, now: Activity) -> list[float]:
    """All rounds. Version v is what the engines hold after v - 1 rounds; the last one is only sampled.

    Returns:
        The mean reward of each version's samples.
    """
    history: list[float] = []
    num_updates = run.settings.grpo.num_updates
    for version in range(1, num_updates + 2):
        now(f"version {version} of {num_updates + 1}: moving weights")
        stats = move_weights(sender, rollouts, version)
        now(f"version {version} of {num_updates + 1}: sampling")
        chosen = run.choose(run.settings.grpo.prompts, draw=f"round {version}")
        groups = sample(run, rollouts, chosen, seed=run.settings.run.seed * 100_003 + version)
        rewards = run.rewards(chosen, groups)
        history.append(rewards.mean().item())
        facts: dict[str, str | float] = {
            "reward": history[-1],
            "tokens": digest(groups),
            "weights": weights_digest(run.policy),
        }
        log.append(stats, changed_by=sender.changed_by, extra=facts)
        if rollouts is not None:
            show(stats, history)
        if version <= num_updates:
            now(f"version {version} of {num_updates + 1}: training")
            run.train(chosen, groups, rewards)
    return history


# --- Start --------------------------------------------------------------------------------------------


def run(settings: Settings) -> list[float]:
    """One training on this rank, from the first weights to the last version.

    Returns:
        The mean reward of each version's samples.
    """
    delta = resolve(settings.train, settings.rollout).settings
    join_trainers(settings)
    problems = load_problems(settings.data.source)
    path = settings.model.path
    tokenizer = HubTokenizer(path) if path else WordTokenizer(problems, settings.model.vocab_size)
    # The store outlives the engines, which the same rank ends.
    first = dist.get_rank() == 0
    store = host_store(settings.run.host, settings.run.port, settings=delta) if first else None
    rendezvous = meeting_point(settings, store.port if store else 0)
    now = Activity(shown=first)
    now("starting the engines")
    rollouts = start_rollouts(settings, rendezvous, delta) if first else None
    try:
        now("building the policy")
        policy = build_policy(settings)
        one = Run(settings, policy, problems, tokenizer)
        sender = attach_megatron(
            policy.chunks, policy.optimizer, policy.hf_config, rendezvous=rendezvous, settings=delta
        )
        one.warm_up(now)
        if settings.grpo.kl_coefficient:
            policy.keep_reference()
        now("connecting")
        connect(sender, rollouts)
        log = RunLog(
            settings.run.log,
            settings=delta,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            model=path or f"{settings.model.architecture}, from random weights",
            topology={"trainer": settings.train.backend, "engines": settings.rollout.backend},
        )
        history = rounds(one, sender, rollouts, log, now)
        sender.close()
        if first:
            print(f"As one page: awex-delta report {settings.run.log}", flush=True)
        return history
    finally:
        if rollouts is not None:
            rollouts.close()
        dist.destroy_process_group()


def join_trainers(settings: Settings) -> None:
    """Make the process group of the trainer ranks, as torchrun says, or of this process alone."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = parse_allocation(settings.train.backend, backends=["megatron"]).world_size
    if world_size != wanted:
        raise ConfigError(
            f"train.backend = {settings.train.backend!r} has {wanted} ranks, but {world_size} were started. "
            f"Remedy: start them with torchrun, {wanted} in all"
        )
    if GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if GPU else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def meeting_point(settings: Settings, port: int) -> Rendezvous:
    """Where trainers and engines meet: rank 0 knows the port."""
    shared = torch.tensor([port], device="cuda" if GPU else "cpu")
    dist.broadcast(shared, src=0)
    return Rendezvous(
        num_engine_ranks=parse_allocation(settings.rollout.backend, backends=ENGINE_BACKENDS).world_size,
        num_trainer_ranks=dist.get_world_size(),
        host=settings.run.host,
        port=int(shared),
    )


def main() -> None:
    """Read the preset and the overrides, and run."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("preset", help="a preset, such as tiny_cpu, or a YAML file")
    parser.add_argument("overrides", nargs="*", help="such as train.enable_delta_weight_update=false")
    parser.add_argument("--plan", action="store_true", help="say what the run needs, and start nothing")
    asked = parser.parse_args()
    try:
        settings = load_settings(asked.preset, asked.overrides)
        if asked.plan:
            show_plan(plan_run(settings.train, settings.rollout, settings.model), Console())
        else:
            check_engine(settings)
            run(settings)
    except ConfigError as error:
        raise SystemExit(f"refused: {error}") from None


if __name__ == "__main__":
    main()
