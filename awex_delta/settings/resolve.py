"""What the settings of both sides mean together. `resolve` makes every check before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from awex_delta.errors import ConfigError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.allocation import ENGINE_BACKENDS, TRAINER_BACKENDS, Allocation, parse_allocation
from awex_delta.settings.arguments import require
from awex_delta.settings.schema import RolloutConfig, SchedulingStrategy, TrainEngineConfig, WorldSizePolicy

__all__ = [
    "ResolvedDelta",
    "RolloutConfig",
    "SchedulingStrategy",
    "Topology",
    "TrainEngineConfig",
    "WorldSizePolicy",
    "check_world_size",
    "resolve",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Both allocations of one pairing."""

    trainer: Allocation
    engine: Allocation

    @property
    def world_size(self) -> int:
        """Ranks of both sides together."""
        return self.trainer.world_size + self.engine.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDelta:
    """The settings that both sides must agree on, and where the two sides run.

    topology: None when deltas are off, since dense AWEX takes any backend and any number of ranks.
    """

    settings: DeltaSettings
    topology: Topology | None = None


def resolve(train: TrainEngineConfig, rollout: RolloutConfig) -> ResolvedDelta:
    """Check the two sides against each other. Touches no process, group, file or environment.

    With the flag off nothing is checked, and the settings say that deltas are off, and where the secret is,
    which guards full syncs, too. Raises ConfigError if deltas are on and cannot work; it lists every setting
    at fault with its value and remedy.
    """
    require(TrainEngineConfig, "a TrainEngineConfig", train=train)
    require(RolloutConfig, "a RolloutConfig", rollout=rollout)
    if not train.enable_delta_weight_update:
        source = train.weight_update_secret_source
        return ResolvedDelta(settings=DeltaSettings(enabled=False, secret_source=source))
    problems = [*_train_problems(train), *_disk_problems(train), *_rollout_problems(rollout)]
    topology = None
    with suppress(ConfigError):  # which is one of the problems
        topology = Topology(
            trainer=parse_allocation(train.backend, backends=TRAINER_BACKENDS),
            engine=parse_allocation(rollout.backend, backends=ENGINE_BACKENDS),
        )
        problems += _world_size_problems(train, topology)
    if problems:
        raise ConfigError("enable_delta_weight_update = True cannot work with\n" + "\n".join(problems))
    return ResolvedDelta(settings=DeltaSettings.of(train), topology=topology)


def check_world_size(*, num_trainer_ranks: int, num_engine_ranks: int, policy: WorldSizePolicy) -> None:
    """Refuse a number of ranks for which the transfer schedule does not exist.

    Engine ranks are counted over all replicas. Policy `any` allows a total that is not a power of two.
    Raises ConfigError if a side has no ranks, or the total does not fit the policy.
    """
    world_size = num_trainer_ranks + num_engine_ranks
    counts = f"{num_trainer_ranks} trainer + {num_engine_ranks} engine ranks = {world_size}"
    if num_trainer_ranks < 1 or num_engine_ranks < 1:
        raise ConfigError(
            f"{counts}: a side has no ranks. Remedy: give train.backend and rollout.backend at least one each"
        )
    if policy == "power_of_two" and world_size & (world_size - 1):
        below = 1 << (world_size.bit_length() - 1)
        raise ConfigError(
            f"{counts}: not a power of two, while train.world_size_policy = 'power_of_two'. Remedy: change "
            f"train.backend or rollout.backend so that the ranks add up to {below} or {2 * below}, or set "
            "world_size_policy: any"
        )


def _world_size_problems(train: TrainEngineConfig, topology: Topology) -> Iterator[str]:
    if train.weight_update_transport == "disk":
        return  # through a folder the two sides form no world
    try:
        check_world_size(
            num_trainer_ranks=topology.trainer.world_size,
            num_engine_ranks=topology.engine.world_size,
            policy=train.world_size_policy,
        )
    except ConfigError as error:
        yield f"  {error}"


def _train_problems(train: TrainEngineConfig) -> Iterator[str]:
    yield from _side_problems(train, TRAINER_BACKENDS)
    if train.weight_update_release_grad_buffers and train.backend.startswith("fsdp:"):
        yield _problem(
            train,
            "weight_update_release_grad_buffers",
            "FSDP2 keeps no gradient buffers; optimizer.zero_grad() frees its gradients",
            "set weight_update_release_grad_buffers: false",
        )
    if train.weight_update_mode != "awex":
        yield _problem(
            train, "weight_update_mode", "only AWEX's transfer carries deltas", "set weight_update_mode: awex"
        )
    if train.use_lora:
        yield _problem(
            train,
            "use_lora",
            "LoRA trains adapters, and deltas are found in the optimizer state of full weights",
            "set use_lora: false",
        )
    if train.weight_update_verify == "off" and train.weight_update_verify_interval:
        yield _problem(
            train,
            "weight_update_verify_interval",
            "nothing is compared while weight_update_verify is 'off'",
            "set weight_update_verify: touched, or weight_update_verify_interval: 0",
        )
    if train.ppo_n_minibatches < 1:
        yield _problem(
            train, "ppo_n_minibatches", "without a step nothing is trained", "set ppo_n_minibatches: 1"
        )
    elif train.ppo_n_minibatches > 1 and not _covers_many_steps(train):
        yield _problem(
            train,
            "ppo_n_minibatches",
            "with more than one optimizer step between two updates, inverting the last one misses what the "
            "earlier ones changed",
            "set weight_update_delta_accumulate: true, which follows every step for one byte of memory an "
            "owned element, or set ppo_n_minibatches: 1",
        )
    if train.weight_update_delta_accumulate and train.weight_update_delta_method != "adamw":
        yield _problem(
            train,
            "weight_update_delta_accumulate",
            f"only inverted steps are added up; {train.weight_update_delta_method} covers any number of "
            "steps by itself",
            "set weight_update_delta_accumulate: false, or weight_update_delta_method: adamw",
        )


def _covers_many_steps(train: TrainEngineConfig) -> bool:
    return train.weight_update_delta_accumulate or train.weight_update_delta_method != "adamw"


def _disk_problems(train: TrainEngineConfig) -> Iterator[str]:
    """A folder that is missing, and settings that one of the two transports would not heed."""
    if train.weight_update_transport == "disk":
        if not train.weight_update_disk_url:
            yield _problem(
                train,
                "weight_update_disk_url",
                "weight_update_transport = 'disk' needs a folder",
                "name one that trainer and engines reach, such as /shared/run or s3://bucket/run",
            )
        if train.weight_update_release_grad_buffers:
            yield _problem(
                train,
                "weight_update_release_grad_buffers",
                "through a folder nothing is transferred while training waits",
                "set weight_update_release_grad_buffers: false",
            )
        return
    for field, default in (("weight_update_disk_url", ""), ("weight_update_disk_kind", "delta")):
        if getattr(train, field) != default:
            yield _problem(
                train,
                field,
                "weight_update_transport = 'p2p' uses no folder",
                "set weight_update_transport: disk, or remove it",
            )


def _rollout_problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from _side_problems(rollout, ENGINE_BACKENDS)
    if rollout.scheduling_strategy.type != "separation":
        yield _problem(
            rollout,
            "scheduling_strategy.type",
            "an engine on the trainer's devices shares its memory and needs no transfer",
            "set scheduling_strategy: separation",
        )


def _side_problems(side: TrainEngineConfig | RolloutConfig, backends: tuple[str, ...]) -> Iterator[str]:
    try:
        parse_allocation(side.backend, backends=backends)
    except ConfigError as error:
        yield _problem(side, "backend", str(error), f"write an allocation such as {backends[0]}:d2p1t4")
    if side.version != "v2":
        why = "deltas need the v2 control plane on both sides"
        yield _problem(side, "version", why, "set version: v2")


def _problem(side: TrainEngineConfig | RolloutConfig, field: str, why: str, remedy: str) -> str:
    name = "train" if isinstance(side, TrainEngineConfig) else "rollout"
    return f"  {name}.{field} = {attrgetter(field)(side)!r}: {why}. Remedy: {remedy}"
