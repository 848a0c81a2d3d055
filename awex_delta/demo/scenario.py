"""What `awex-delta demo` is asked for: options, the model, who runs where. Every refusal happens here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from awex_delta.errors import ConfigError
from awex_delta.settings.address import listen
from awex_delta.settings.secret import read_secret

ModelName: TypeAlias = Literal["qwen3", "qwen3-moe"]
FaultName: TypeAlias = Literal["none", "drop-engine", "fail-apply", "stale-engine"]
RoleName: TypeAlias = Literal["store", "trainer", "transformers", "sharded"]

MODELS: tuple[ModelName, ...] = get_args(ModelName)
FAULTS: tuple[FaultName, ...] = get_args(FaultName)

HEADS, KV_HEADS, EXPERTS = 4, 2, 4
# Not a multiple of anything: Megatron pads the rows on its side, the sharded engine on its own.
VOCAB_SIZE = 130
MIN_FAULT_STEPS = 4

_LARGEST = {"layers": 64, "hidden": 4096, "steps": 10_000}
_PAIR = re.compile(r"(?P<key>[a-z]+)=(?P<size>[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ways one side splits its ranks.

    tp, pp, dp: tensor, pipeline and data parallel ranks.
    ep: on the trainer, ranks that the experts are spread over, beside `dp`; a dense model uses them as
        data parallel. On the engine, groups that the `tp` ranks form to share the experts.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return ",".join(
            f"{key}={getattr(self, key)}" for key in ("tp", "pp", "dp", "ep") if getattr(self, key) > 1
        )

    @property
    def num_trainer_ranks(self) -> int:
        """Processes of a trainer laid out so."""
        return self.tp * self.pp * self.dp * self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """One training of one model, with its engines. Plain values: it is sent to every process.

    train: the trainer's layout.
    infer: layout of the sharded engine, which runs beside one unsharded transformers engine.
    steps: optimizer steps, each followed by an update.
    anchor_interval: committed deltas between two full syncs; 0 means never.
    timeout_seconds: longest wait for any process during an update.
    host: address of this machine where the ranks meet.
    secret_source: where they find the secret that they share; empty for none.
    """

    model: ModelName
    train: Layout
    infer: Layout
    steps: int
    anchor_interval: int
    lr: float
    seed: int
    layers: int
    hidden: int
    fault: FaultName
    timeout_seconds: float
    host: str = "127.0.0.1"
    secret_source: str = ""

    @property
    def num_trainer_ranks(self) -> int:
        """Trainer processes."""
        return self.train.num_trainer_ranks

    @property
    def num_engine_ranks(self) -> int:
        """Engine processes: the transformers engine is rank 0, the sharded engine the rest."""
        return 1 + self.infer.tp

    @property
    def world_size(self) -> int:
        """All processes that take part in an update."""
        return self.num_trainer_ranks + self.num_engine_ranks

    @property
    def padded_schedule(self) -> bool:
        """True when the number of processes is not a power of two."""
        return self.world_size & (self.world_size - 1) != 0

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden // HEADS

    @property
    def ffn(self) -> int:
        """Width of the MLP, or of one expert."""
        return self.hidden * 3 if self.model == "qwen3" else self.hidden * 3 // 2

    @property
    def tied(self) -> bool:
        """The lm_head is the embedding, as in small dense Qwen3 models; the sharded engine keeps a copy."""
        return self.model == "qwen3"

    @property
    def fault_version(self) -> int | None:
        """The version at which the fault strikes."""
        return None if self.fault == "none" else self.steps // 2 + 1

    @property
    def topology(self) -> str:
        """One line for a person."""
        train, infer = str(self.train) or "one rank", str(self.infer) or "one rank"
        return f"trainer {train} | transformers engine + sharded engine {infer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one process needs to take its place. Plain values: it is sent to that process.

    rank: among the trainer's ranks, or among all engine ranks.
    store_port: of the store where trainer and engines meet; 0 for the store itself.
    folder: shared by all processes of the run.
    """

    role: RoleName
    plan: DemoPlan
    rank: int
    store_port: int
    folder: Path


def parse_layout(option: str, text: str, keys: tuple[str, ...]) -> Layout:
    """Read `tp=2,dp=2`: what is given of `keys`, the others are 1.

    Raises ConfigError, which names the option, the part at fault and the remedy.
    """
    sizes: dict[str, int] = {}
    remedy = f"write for example {option} {keys[0]}=2, from {', '.join(keys)}, each once and at least 1"
    for item in text.split(","):
        match = _PAIR.fullmatch(item.strip())
        if match is None or match["key"] not in keys or match["key"] in sizes:
            raise ConfigError(f"{option} {text}: {item.strip()!r} is refused. Remedy: {remedy}")
        sizes[match["key"]] = int(match["size"])
    return Layout(**sizes)


def check_plan(plan: DemoPlan) -> None:
    """Refuse what could not run, before any process starts.

    Raises ConfigError, which names the option, its value and the remedy.
    """
    _check_range("--steps", plan.steps, 1, _LARGEST["steps"])
    _check_range("--layers", plan.layers, 1, _LARGEST["layers"])
    _check_range("--anchor-interval", plan.anchor_interval, 0, None)
    _check_range("--seed", plan.seed, 0, 2**31 - 1)
    if plan.hidden % 32 or not 32 <= plan.hidden <= _LARGEST["hidden"]:
        raise ConfigError(f"--hidden {plan.hidden}: give a multiple of 32 from 32 to {_LARGEST['hidden']}")
    if not (math.isfinite(plan.lr) and plan.lr > 0):
        raise ConfigError(f"--lr {plan.lr:g}: give a positive number, such as 3e-6")
    if not (math.isfinite(plan.timeout_seconds) and plan.timeout_seconds >= 1):
        raise ConfigError(f"--timeout {plan.timeout_seconds:g}: give at least 1 second")
    if plan.fault != "none" and plan.steps < MIN_FAULT_STEPS:
        raise ConfigError(
            f"--steps {plan.steps} with --fault {plan.fault}: a fault needs versions before and after it. "
            f"Remedy: --steps {MIN_FAULT_STEPS} or more"
        )
    _check_train(plan)
    _check_infer(plan)
    read_secret(plan.secret_source)
    listen(plan.host, 0).close()


def _check_range(option: str, value: int, least: int, largest: int | None) -> None:
    if value < least or (largest is not None and value > largest):
        limit = f"from {least} to {largest}" if largest is not None else f"of {least} or more"
        raise ConfigError(f"{option} {value}: give a whole number {limit}")


def _check_train(plan: DemoPlan) -> None:
    train = plan.train
    _check_divides("--train", "tp", train.tp, "key-value heads", KV_HEADS)
    _check_divides("--train", "pp", train.pp, "layers (--layers)", plan.layers)
    _check_divides("--train", "ep", train.ep, "experts", EXPERTS)
    if plan.model == "qwen3-moe" and train.tp > 1:
        raise ConfigError(
            f"--train tp={train.tp} with --model qwen3-moe: under tensor parallelism Megatron trains experts "
            "only with sequence parallelism, which needs a GPU. Remedy: tp=1 with ep=2, or --model qwen3"
        )


def _check_infer(plan: DemoPlan) -> None:
    infer = plan.infer
    _check_divides("--infer", "tp", infer.tp, "attention heads", HEADS)
    _check_divides("--infer", "ep", infer.ep, "engine ranks (tp)", infer.tp)
    _check_divides("--infer", "ep", infer.ep, "experts", EXPERTS)


def _check_divides(option: str, key: str, size: int, name: str, whole: int) -> None:
    if whole % size:
        fitting = [str(n) for n in range(1, whole + 1) if whole % n == 0]
        raise ConfigError(
            f"{option} {key}={size}: it does not divide {whole}, the number of {name}. "
            f"Remedy: {key} of {', '.join(fitting)}"
        )


def choose_models(text: str) -> tuple[ModelName, ...]:
    """The models that `--model` names. Raises ConfigError."""
    if text == "both":
        return MODELS
    if text not in MODELS:
        raise ConfigError(f"--model {text}: give one of {', '.join(MODELS)}, both")
    return (text,)


def choose_fault(text: str) -> FaultName:
    """The fault that `--fault` names. Raises ConfigError."""
    if text not in FAULTS:
        raise ConfigError(f"--fault {text}: give one of {', '.join(FAULTS)}")
    return text
