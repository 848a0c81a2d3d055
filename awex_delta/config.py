"""What the settings mean together, and the environment of worker processes.

`resolve` makes every check before anything is touched. No other module reads the process environment, and
nothing in the package writes it: `worker_environment` returns what a launcher must set.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from awex_delta.allocation import ENGINE_BACKENDS, TRAINER_BACKENDS, Allocation, parse_allocation
from awex_delta.errors import ConfigError
from awex_delta.schema import (
    DeltaEncoding,
    RolloutConfig,
    SchedulingStrategy,
    TrainEngineConfig,
    WorldSizePolicy,
)
from awex_delta.types import DeltaSettings

__all__ = [
    "ResolvedDelta",
    "RolloutConfig",
    "SchedulingStrategy",
    "Topology",
    "TrainEngineConfig",
    "WorldSizePolicy",
    "check_world_size",
    "resolve",
    "scrub_worker_environment",
    "settings_from_environment",
    "worker_environment",
]

_DEFAULTS = DeltaSettings()

_SEPARATION = "DTE_SEPARATION_WEIGHT_UPDATE"
_TRANSFER = "DTE_DELTA_TRANSFER"
_ANCHOR = "DTE_DELTA_ANCHOR_INTERVAL"
_STREAMING = "DTE_STREAMING_RECONSTRUCT"

# Set only where they differ from what a worker assumes by itself: variable, then field of DeltaSettings.
_OPTIONAL_VARIABLES: Mapping[str, str] = {
    "DTE_DELTA_ENCODING": "encoding",
    "DTE_ALLOW_ANY_WORLD_SIZE": "allow_any_world_size",
    "DTE_RELEASE_GRAD_BUFFERS": "release_grad_buffers",
    "DTE_TIMEOUT_SECONDS": "timeout_seconds",
    "DTE_CONNECT_TIMEOUT_SECONDS": "connect_timeout_seconds",
}
_VARIABLES = (_SEPARATION, _TRANSFER, _ANCHOR, _STREAMING, *_OPTIONAL_VARIABLES)
_ENCODINGS: tuple[str, ...] = get_args(DeltaEncoding)
_FLAGS: Mapping[str, bool] = {"1": True, "true": True, "True": True, "0": False, "false": False, "": False}


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

    Args:
        train: the trainer's settings.
        rollout: the inference engines' settings.

    Returns:
        The agreed settings. With the flag off nothing is checked, and the settings say that deltas are off.

    Raises:
        ConfigError: deltas are on and cannot work; lists every setting at fault with its value and remedy.

    Collective: no.
    """
    if not train.enable_delta_weight_update:
        return ResolvedDelta(settings=DeltaSettings(enabled=False))
    problems = [*_train_problems(train), *_rollout_problems(rollout)]
    if problems:
        raise ConfigError("enable_delta_weight_update = True cannot work with\n" + "\n".join(problems))
    topology = Topology(
        trainer=parse_allocation(train.backend, backends=TRAINER_BACKENDS),
        engine=parse_allocation(rollout.backend, backends=ENGINE_BACKENDS),
    )
    check_world_size(
        num_trainer_ranks=topology.trainer.world_size,
        num_engine_ranks=topology.engine.world_size,
        policy=train.world_size_policy,
    )
    settings = DeltaSettings(
        enabled=True,
        anchor_interval=train.weight_update_anchor_interval,
        encoding=train.weight_update_delta_encoding,
        allow_any_world_size=train.world_size_policy == "any",
        release_grad_buffers=train.weight_update_release_grad_buffers,
        timeout_seconds=train.weight_update_timeout_seconds,
        connect_timeout_seconds=train.weight_update_connect_timeout_seconds,
    )
    return ResolvedDelta(settings=settings, topology=topology)


def check_world_size(*, num_trainer_ranks: int, num_engine_ranks: int, policy: WorldSizePolicy) -> None:
    """Refuse a number of ranks for which the transfer schedule does not exist.

    Args:
        num_trainer_ranks: trainer processes.
        num_engine_ranks: engine processes, over all replicas.
        policy: `any` allows a total that is not a power of two.

    Raises:
        ConfigError: a side has no ranks, or the total does not fit the policy.

    Collective: no.
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


def _train_problems(train: TrainEngineConfig) -> Iterator[str]:
    yield from _backend_problems("train.backend", train.backend, TRAINER_BACKENDS)
    yield from _version_problems("train.version", train.version)
    if train.weight_update_mode != "awex":
        yield _problem(
            "train.weight_update_mode",
            train.weight_update_mode,
            "only AWEX's transfer carries deltas",
            "set weight_update_mode: awex",
        )
    if train.use_lora:
        yield _problem(
            "train.use_lora",
            train.use_lora,
            "LoRA trains adapters, and deltas are found in the optimizer state of full weights",
            "set use_lora: false",
        )
    if train.ppo_n_minibatches != 1:
        yield _problem(
            "train.ppo_n_minibatches",
            train.ppo_n_minibatches,
            "a delta covers exactly one step; with more than one optimizer step between two updates, "
            "inverting the last one misses what the earlier ones changed",
            "set ppo_n_minibatches: 1",
        )


def _rollout_problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from _backend_problems("rollout.backend", rollout.backend, ENGINE_BACKENDS)
    yield from _version_problems("rollout.version", rollout.version)
    if rollout.scheduling_strategy.type != "separation":
        yield _problem(
            "rollout.scheduling_strategy.type",
            rollout.scheduling_strategy.type,
            "an engine on the trainer's devices shares its memory and needs no transfer",
            "set scheduling_strategy: separation",
        )


def _backend_problems(field: str, backend: str, backends: tuple[str, ...]) -> Iterator[str]:
    try:
        parse_allocation(backend, backends=backends)
    except ConfigError as error:
        yield _problem(field, backend, str(error), f"write an allocation such as {backends[0]}:d2p1t4")


def _version_problems(field: str, version: str) -> Iterator[str]:
    if version != "v2":
        yield _problem(field, version, "deltas need the v2 control plane on both sides", "set version: v2")


def _problem(field: str, value: object, why: str, remedy: str) -> str:
    return f"  {field} = {value!r}: {why}. Remedy: {remedy}"


def worker_environment(resolved: ResolvedDelta) -> dict[str, str]:
    """The variables that a launcher must set for every trainer and engine worker.

    Args:
        resolved: from `resolve`.

    Returns:
        Names and values, from which `settings_from_environment` rebuilds the same settings; empty with
        deltas off. Merge it over `scrub_worker_environment()`, which drops what was inherited.

    Collective: no.
    """
    settings = resolved.settings
    if not settings.enabled:
        return {}
    environment = {
        # Trainer and engine workers are separate processes that form one group for updates.
        _SEPARATION: "1",
        # After the first full sync, updates carry only what changed.
        _TRANSFER: "1",
        # Both sides count committed deltas, so both must know after how many a full sync is due.
        _ANCHOR: str(settings.anchor_interval),
        # Changes are found slice by slice; a reconstructed copy of all old weights is never held.
        _STREAMING: "1",
    }
    for variable, field in _OPTIONAL_VARIABLES.items():
        value = getattr(settings, field)
        if value != getattr(_DEFAULTS, field):
            environment[variable] = str(value)
    return environment


def scrub_worker_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Copy an environment without this package's variables, so that inherited ones mean nothing.

    Args:
        environ: the environment to copy; None for that of this process.

    Collective: no.
    """
    source = os.environ if environ is None else environ
    return {name: value for name, value in source.items() if name not in _VARIABLES}


def settings_from_environment(environ: Mapping[str, str] | None = None) -> DeltaSettings:
    """Read in a worker what `worker_environment` wrote for it.

    Args:
        environ: the environment to read; None for that of this process.

    Returns:
        The settings. Without `DTE_DELTA_TRANSFER` deltas are off and the other variables are not read.

    Raises:
        ConfigError: a value cannot be read, the set is incomplete, or a name looks like a misspelling of
            one of ours. Other names that begin with `DTE_` are left alone.

    Collective: no.
    """
    source = os.environ if environ is None else environ
    _refuse_misspelled(source)
    if not _flag(source, _TRANSFER):
        return DeltaSettings(enabled=False)
    for variable in (_SEPARATION, _STREAMING):
        if not _flag(source, variable):
            raise _refused(source, variable, f"it must be on while {_TRANSFER} is")
    values: dict[str, Any] = {"anchor_interval": _count(source, _ANCHOR)}
    for variable, field in _OPTIONAL_VARIABLES.items():
        if variable in source:
            values[field] = _optional_value(source, variable, getattr(_DEFAULTS, field))
    return DeltaSettings(enabled=True, **values)


def _flag(source: Mapping[str, str], variable: str) -> bool:
    value = source.get(variable, "")
    if value not in _FLAGS:
        raise _refused(source, variable, "a flag is one of 1, true, True, 0, false, or empty")
    return _FLAGS[value]


def _count(source: Mapping[str, str], variable: str) -> int:
    value = source.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise _refused(source, variable, "it must be a whole number of 0 or more")
    return int(value)


def _optional_value(source: Mapping[str, str], variable: str, default: object) -> object:
    """Read a variable as the type of its default."""
    if isinstance(default, bool):
        return _flag(source, variable)
    if isinstance(default, float):
        return _seconds(source, variable)
    if source[variable] not in _ENCODINGS:
        raise _refused(source, variable, f"it must be one of {', '.join(_ENCODINGS)}")
    return source[variable]


def _seconds(source: Mapping[str, str], variable: str) -> float:
    try:
        seconds = float(source[variable])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _refused(source, variable, "it must be a positive number of seconds")
    return seconds


def _refused(source: Mapping[str, str], variable: str, why: str) -> ConfigError:
    value = repr(source[variable]) if variable in source else "not set"
    return ConfigError(
        f"environment variable {variable} is {value}: {why}. Remedy: start workers with exactly what "
        f"worker_environment() returns, or set {_TRANSFER}=0"
    )


def _refuse_misspelled(source: Mapping[str, str]) -> None:
    """A name of ours with a letter wrong would otherwise be ignored on this side only."""
    for name in source:
        if name in _VARIABLES or not name.upper().startswith("DTE_"):
            continue
        close = difflib.get_close_matches(name.upper(), _VARIABLES, n=1, cutoff=0.9)
        if close:
            raise ConfigError(
                f"environment variable {name} is not known. Remedy: rename it to {close[0]}, or unset it"
            )
