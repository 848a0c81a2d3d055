"""What a configuration of verl must say for deltas. Pure: mappings and attributes in, problems out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from awex_delta.engines.sglang.loader import LOAD_FORMAT
from awex_delta.engines.vllm.live import BACKEND
from awex_delta.errors import ConfigError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig, resolve

NAME = "awex_delta"
"""What `rollout.checkpoint_engine.backend` says."""

_ENGINE_KWARGS = f"rollout.checkpoint_engine.engine_kwargs.{NAME}"
_STRATEGIES = {"megatron": "megatron", "fsdp2": "fsdp_config"}
"""By the strategy of an actor, the section that says whether it offloads."""


def delta_settings(written: Mapping[str, Any]) -> DeltaSettings:
    """What `engine_kwargs.awex_delta` says, by the names of `TrainEngineConfig`.

    verl steps its optimizer several times between two updates, and starts any number of replicas. So any
    world size is allowed, and inverted steps are added up unless another method is chosen.

    Raises ConfigError for a setting that is not known, has a wrong value, or cannot work with verl.
    """
    method = written.get("weight_update_delta_method", "adamw")
    decided: dict[str, Any] = {
        "backend": "megatron:d1",
        "enable_delta_weight_update": True,
        "world_size_policy": "any",
        "ppo_n_minibatches": 2,
        "weight_update_delta_accumulate": method == "adamw",
    }
    for name in ("backend", "version", "_version", "ppo_n_minibatches", "world_size_policy"):
        if name in written:
            raise ConfigError(f"{_ENGINE_KWARGS}.{name} = {written[name]!r}: verl decides. Remedy: remove it")
    train = TrainEngineConfig.load({**decided, **written})
    if not train.enable_delta_weight_update or train.weight_update_transport != "p2p":
        raise ConfigError(
            f"{_ENGINE_KWARGS}: enable_delta_weight_update = {train.enable_delta_weight_update}, "
            f"weight_update_transport = {train.weight_update_transport!r}: deltas travel "
            "from rank to rank here. Remedy: remove both, or choose another checkpoint_engine.backend"
        )
    return resolve(train, RolloutConfig(backend="vllm:d1")).settings


def training_problems(engine: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Why an engine cannot be followed, from verl's `engine_config` and `model_config`."""
    section = f"actor.{_STRATEGIES.get(engine.get('strategy', ''), 'engine')}"
    for field in ("param_offload", "optimizer_offload", "offload_policy"):
        if engine.get(field):
            yield _problem(
                f"{section}.{field}",
                engine[field],
                "weights and optimizer state have to stay where the optimizer steps them until they are sent",
                "set it to false: trainer and rollout have devices of their own here",
            )
    if engine.get("use_megatron_fsdp"):
        field, why = f"{section}.use_megatron_fsdp", "Megatron-FSDP is not read"
        yield _problem(field, engine["use_megatron_fsdp"], why, "set it to false")
    ranks = {"lora_rank": model.get("lora_rank"), "lora.rank": (model.get("lora") or {}).get("rank")}
    for field, rank in ranks.items():
        if rank:
            yield _problem(f"model.{field}", rank, "deltas cover full weights, no adapters", "set it to 0")


def rollout_problems(rollout: Mapping[str, Any]) -> Iterator[str]:
    """Why replicas cannot be written in place. `rollout` is verl's `RolloutConfig`."""
    name = rollout.get("name")
    kwargs = (rollout.get("engine_kwargs") or {}).get(name) or {}
    if name == "vllm":
        if rollout.get("free_cache_engine", True):
            yield _problem(
                "rollout.free_cache_engine",
                rollout.get("free_cache_engine", "missing"),
                "before each update verl puts vLLM to sleep at level 2, which discards the weights that a "
                "delta builds on",
                "set it to false",
            )
        if (kwargs.get("weight_transfer_config") or {}).get("backend") != BACKEND:
            yield _problem(
                "rollout.engine_kwargs.vllm.weight_transfer_config",
                kwargs.get("weight_transfer_config"),
                "vLLM's workers need our backend to receive anything",
                f"set it to {{backend: {BACKEND}}}",
            )
    elif name == "sglang":
        if LOAD_FORMAT not in (kwargs.get("custom_weight_loader") or ()):
            yield _problem(
                "rollout.engine_kwargs.sglang.custom_weight_loader",
                kwargs.get("custom_weight_loader"),
                "SGLang's workers need our loader to receive anything",
                f"set it to [{LOAD_FORMAT}]",
            )
    else:
        yield _problem(
            "rollout.name", name, "only vLLM and SGLang are written in place", "set vllm or sglang"
        )
    if (size := rollout.get("data_parallel_size", 1)) > 1:
        yield _problem(
            "rollout.data_parallel_size",
            size,
            "verl reaches the workers of one data-parallel rank alone",
            "set it to 1 and start more replicas",
        )
    if rollout.get("quantization"):
        yield _problem(
            "rollout.quantization", rollout.get("quantization"), "deltas are bf16", "set it to null"
        )


def check(config: Mapping[str, Any]) -> None:
    """Refuse a whole configuration of verl before anything of it starts.

    `config` is the composed configuration, as Hydra gives it to verl's main function: a mapping with
    `actor_rollout_ref`. Raises ConfigError, which lists every setting at fault with its value and remedy.
    """
    side = config["actor_rollout_ref"]
    rollout, actor = side.get("rollout", {}), side.get("actor", {})
    engine, strategy = rollout.get("checkpoint_engine", {}), actor.get("strategy")
    problems = []
    if engine.get("backend") != NAME:
        field, why = "rollout.checkpoint_engine.backend", "deltas have a backend of their own"
        problems.append(_problem(field, engine.get("backend"), why, f"set it to {NAME}"))
    delta_settings((engine.get("engine_kwargs") or {}).get(NAME) or {})
    if strategy in _STRATEGIES:
        settings = {**actor.get(_STRATEGIES[strategy], {}), "strategy": strategy}
        problems += training_problems(settings, side.get("model", {}))
    else:
        why, remedy = "it cannot be followed", f"set one of {', '.join(_STRATEGIES)}"
        problems.append(_problem("actor.strategy", strategy, why, remedy))
    problems += rollout_problems(rollout)
    refuse(problems)


def refuse(problems: list[str]) -> None:
    """Raise ConfigError if there are problems, with all of them."""
    if problems:
        raise ConfigError(f"checkpoint_engine.backend = {NAME!r} cannot work with\n" + "\n".join(problems))


def _problem(field: str, value: object, why: str, remedy: str) -> str:
    """One line of an error."""
    return f"  {field} = {value!r}: {why}. Remedy: {remedy}"
