"""The settings of one run: the sections of a preset, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from pydantic import Field

from awex_delta import ConfigError, RolloutConfig, TrainEngineConfig
from awex_delta.presets.files import ModelShape, find_preset, load_section, read_preset
from awex_delta.settings.schema import Section


class OptimizerConfig(Section):
    """AdamW, as Megatron-core runs it."""

    lr: float = Field(gt=0)
    """Learning rate of the policy steps."""

    weight_decay: float = Field(default=0.003, ge=0)
    """Decoupled weight decay."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0: not clipped."""


class GrpoConfig(Section):
    """Group-relative policy optimization."""

    num_updates: int = Field(gt=0)
    """Rounds of sampling and training; the weights move to the engines once in each."""

    prompts: int = Field(gt=0)
    """Problems in a round."""

    group_size: int = Field(gt=1)
    """Completions of each problem, among which the advantage is normalised."""

    max_new_tokens: int = Field(gt=0)
    """Longest completion."""

    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer problems are left out."""

    clip_ratio: float = Field(default=0.2, gt=0)
    """How far the ratio of new to old probability counts on either side of 1."""

    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the first policy; 0 keeps no reference weights."""

    micro_batch_size: int = Field(default=1, gt=0)
    """Sequences in one forward and backward."""


class WarmupConfig(Section):
    """Supervised steps on the worked answers, before the first round."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 where a checkpoint already knows the format."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of these steps."""

    batch_size: int = Field(default=64, gt=0)
    """Problems in a step, over all trainer ranks."""


class DataConfig(Section):
    """Where the problems come from."""

    source: str
    """A JSONL file of questions and answers, or a data set of the hub such as `openai/gsm8k`."""

    limit: int = Field(default=0, ge=0)
    """Take only so many of the problems, the first ones; 0: all."""

    prompt: str = "{question}\n"
    """What the model reads; `{question}` is replaced."""


class EnginesConfig(Section):
    """The engines that sample."""

    urls: tuple[str, ...] = Field(default=(), strict=False)
    """Addresses of running servers, one for each data-parallel replica; none: started by the trainer."""

    memory_bytes: int = Field(default=1 << 26, gt=0)
    """Key-value cache of an engine that the trainer starts."""


class RunConfig(Section):
    """The run itself."""

    seed: int = 0
    """Of the weights, the order of problems and the samples."""

    log: str = "RUN.jsonl"
    """A line for each version is added here."""

    host: str = "127.0.0.1"
    """Address of trainer rank 0 at which the engines find it."""

    port: int = Field(default=0, ge=0, lt=65536)
    """Port of the store there; 0: a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All sections of a preset."""

    train: TrainEngineConfig
    rollout: RolloutConfig
    model: ModelShape
    optimizer: OptimizerConfig
    grpo: GrpoConfig
    warmup: WarmupConfig
    data: DataConfig
    engines: EnginesConfig
    run: RunConfig


def load_settings(preset: str, overrides: Sequence[str] = ()) -> Settings:
    """Read and check a preset.

    Args:
        preset: a YAML file, or the name of a preset of the package.
        overrides: such as `train.enable_delta_weight_update=false`.

    Raises:
        ConfigError: names the setting, its value and the remedy.
    """
    path = find_preset(preset)
    data = read_preset(path, overrides)
    unknown = data.keys() - set(Settings.__slots__)
    if unknown:
        raise ConfigError(
            f"{path} has the unknown sections {', '.join(sorted(unknown))}. "
            f"Remedy: use {', '.join(Settings.__slots__)}"
        )
    settings = Settings(
        train=load_section(TrainEngineConfig, data, "train"),
        rollout=load_section(RolloutConfig, data, "rollout"),
        model=load_section(ModelShape, data, "model"),
        optimizer=load_section(OptimizerConfig, data, "optimizer"),
        grpo=load_section(GrpoConfig, data, "grpo"),
        warmup=load_section(WarmupConfig, data, "warmup"),
        data=load_section(DataConfig, data, "data"),
        engines=load_section(EnginesConfig, data, "engines"),
        run=load_section(RunConfig, data, "run"),
    )
    _check_batch(settings)
    return settings


def check_engine(settings: Settings) -> None:
    """Refuse an engine that cannot start here, before its absence is noticed by a timeout."""
    backend = settings.rollout.backend
    if backend.startswith("vllm:") and find_spec("vllm") is None:
        raise ConfigError(f"rollout.backend = {backend!r}: vllm is not installed. Remedy: make vllm")


def _check_batch(settings: Settings) -> None:
    grpo, num_minibatches = settings.grpo, settings.train.ppo_n_minibatches
    if (grpo.prompts * grpo.group_size) % num_minibatches:
        raise ConfigError(
            f"grpo.prompts times grpo.group_size = {grpo.prompts * grpo.group_size} completions do not "
            f"divide into train.ppo_n_minibatches = {num_minibatches}. Remedy: make it a divisor"
        )
