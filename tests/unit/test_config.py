"""Settings: every refusal with its field, value and remedy; the flag off; the environment of workers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from awex_delta.errors import ConfigError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.environment import (
    scrub_worker_environment,
    settings_from_environment,
    worker_environment,
)
from awex_delta.settings.resolve import (
    RolloutConfig,
    TrainEngineConfig,
    WorldSizePolicy,
    check_world_size,
    resolve,
)
from awex_delta.settings.schema import DeltaEncoding, DeltaMethod
from awex_delta.wire.registry import CODECS, codecs_for

TRAIN: Mapping[str, object] = {"backend": "megatron:d2t2", "enable_delta_weight_update": True}
ROLLOUT: Mapping[str, object] = {"backend": "sglang:d2t2"}
DISK = {"weight_update_transport": "disk", "weight_update_disk_url": "memory://run"}


def train_config(**changes: object) -> TrainEngineConfig:
    return TrainEngineConfig.load({**TRAIN, **changes})


def rollout_config(**changes: object) -> RolloutConfig:
    return RolloutConfig.load({**ROLLOUT, **changes})


# --- what works ---------------------------------------------------------------------------------------------


def test_defaults_resolve() -> None:
    resolved = resolve(train_config(), rollout_config())
    assert resolved.settings == DeltaSettings(
        enabled=True,
        anchor_interval=20,
        encoding="indices",
        allow_any_world_size=False,
        release_grad_buffers=False,
        timeout_seconds=300.0,
        connect_timeout_seconds=300.0,
    )
    assert resolved.topology is not None
    sizes = (resolved.topology.trainer.world_size, resolved.topology.engine.world_size)
    assert (*sizes, resolved.topology.world_size) == (4, 4, 8)


# Setting, another value than its default; field and value of the resolved settings; variable and its text;
# and whether all ranks must agree on it.
WRITTEN = [
    ("weight_update_anchor_interval", 0, "anchor_interval", 0, "DTE_DELTA_ANCHOR_INTERVAL", "0", True),
    ("weight_update_delta_encoding", "ulp", "encoding", "ulp", "DTE_DELTA_ENCODING", "ulp", True),
    ("weight_update_verify", "full", "verify", "full", "DTE_VERIFY", "full", True),
    ("weight_update_verify_interval", 6, "verify_interval", 6, "DTE_VERIFY_INTERVAL", "6", True),
    ("weight_update_bucket_bytes", 2048, "bucket_bytes", 2048, "DTE_BUCKET_BYTES", "2048", True),
    ("world_size_policy", "any", "allow_any_world_size", True, "DTE_ALLOW_ANY_WORLD_SIZE", "True", True),
    ("weight_update_delta_method", "snapshot", "method", "snapshot", "DTE_DELTA_METHOD", "snapshot", False),
    ("weight_update_delta_accumulate", True, "accumulate", True, "DTE_DELTA_ACCUMULATE", "True", False),
    *(
        (f"weight_update_{field}", value, field, value, f"DTE_{field.upper()}", str(value), shared)
        for field, value, shared in [
            ("release_grad_buffers", True, False),
            ("timeout_seconds", 7.0, False),
            ("connect_timeout_seconds", 0.5, False),
            ("not_finite", "refuse", False),
            ("keep_anchors", 5, True),
            ("read_workers", 9, False),
        ]
    ),
    ("weight_update_disk_url", "file://a", "disk_url", "file://a", "DTE_DISK_URL", "file://a", True),
    ("weight_update_disk_kind", "full", "disk_kind", "full", "DTE_DISK_KIND", "full", True),
    ("weight_update_transport", "disk", "transport", "disk", "DTE_TRANSPORT", "disk", True),
    ("weight_update_secret_source", "env:S", "secret_source", "env:S", "DTE_SECRET_SOURCE", "env:S", False),
]


@pytest.mark.parametrize(("setting", "written", "field", "value", "variable", "text", "shared"), WRITTEN)
def test_a_setting_reaches_the_ranks_by_every_way(
    *, setting: str, written: object, field: str, value: Any, variable: str, text: str, shared: bool
) -> None:
    others = DISK if "disk" in field or field == "transport" else {}
    resolved = resolve(train_config(**{**others, setting: written}), rollout_config())
    assert getattr(resolved.settings, field) == value
    if not others:
        assert resolved.settings == replace(DeltaSettings(), **{field: value})
    environment = worker_environment(resolved)
    assert environment[variable] == text
    assert settings_from_environment(environment) == resolved.settings
    assert resolved.settings.shared().get(field) == (value if shared else None)


def test_the_table_of_settings_is_complete() -> None:
    shared = {field for *_, field, _, _, _, is_shared in WRITTEN if is_shared}
    assert {row[2] for row in WRITTEN} | {"enabled"} == set(DeltaSettings.__slots__)
    assert DeltaSettings().shared().keys() == shared | {"enabled"}
    assert DeltaSettings().enabled


@pytest.mark.parametrize("backend", ["sglang:d2t2", "vllm:t4"])
@pytest.mark.parametrize("interval", [0, 1, 2, 20])
def test_supported_engines_and_intervals(backend: str, interval: int) -> None:
    train = train_config(weight_update_anchor_interval=interval)
    assert resolve(train, rollout_config(backend=backend)).settings.anchor_interval == interval


def test_the_version_alias_is_the_same_setting() -> None:
    assert TrainEngineConfig.load({"backend": "megatron:d2", "_version": "v1"}).version == "v1"
    assert RolloutConfig.load({"backend": "vllm:d2", "_version": "v2", "version": "v2"}).version == "v2"


def test_a_scheduling_strategy_may_be_its_type_alone() -> None:
    mapping = {"type": "colocation", "target": "actor"}
    assert rollout_config(scheduling_strategy="separation") == rollout_config()
    assert rollout_config(scheduling_strategy=mapping).scheduling_strategy.target == "actor"


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        train_config().backend = "megatron:d8"


# --- refusals across settings -------------------------------------------------------------------------------

CROSS_REFUSALS: list[tuple[Mapping[str, object], Mapping[str, object], list[str]]] = [
    (
        {"backend": "ddp:d4"},
        {},
        [
            "train.backend = 'ddp:d4'",
            "not one of megatron, fsdp, torch",
            "Remedy: write an allocation such as megatron:d2p1t4",
        ],
    ),
    (
        {"backend": "fsdp:d4", "weight_update_release_grad_buffers": True},
        {"backend": "vllm:t4"},
        [
            "train.weight_update_release_grad_buffers = True: FSDP2 keeps no gradient buffers",
            "Remedy: set weight_update_release_grad_buffers: false",
        ],
    ),
    (
        {"backend": "megatron:d2x2"},
        {},
        ["train.backend = 'megatron:d2x2'", "'x2' at character 12", "Remedy: write an allocation"],
    ),
    (
        {"backend": "megatron:(attn:d4|ffn:e2)"},
        {},
        ["train.backend = ", "'attn:d4' covers 4", "'ffn:e2' covers 2", "Remedy:"],
    ),
    (
        {},
        {"backend": "trtllm:t4"},
        [
            "rollout.backend = 'trtllm:t4'",
            "not one of sglang, vllm",
            "Remedy: write an allocation such as sglang:",
        ],
    ),
    ({"version": "v1"}, {}, ["train.version = 'v1'", "both sides", "Remedy: set version: v2"]),
    ({}, {"_version": "v1"}, ["rollout.version = 'v1'", "both sides", "Remedy: set version: v2"]),
    (
        {"weight_update_mode": "disk"},
        {},
        ["train.weight_update_mode = 'disk'", "only AWEX", "Remedy: set weight_update_mode: awex"],
    ),
    ({"weight_update_mode": "xccl"}, {}, ["train.weight_update_mode = 'xccl'", "weight_update_mode: awex"]),
    (
        {},
        {"scheduling_strategy": {"type": "colocation", "target": "actor"}},
        [
            "rollout.scheduling_strategy.type = 'colocation'",
            "shares its memory",
            "Remedy: set scheduling_strategy: separation",
        ],
    ),
    (
        {"weight_update_verify": "off", "weight_update_verify_interval": 4},
        {},
        [
            "train.weight_update_verify_interval = 4",
            "nothing is compared",
            "Remedy: set weight_update_verify",
        ],
    ),
    ({"use_lora": True}, {}, ["train.use_lora = True", "adapters", "Remedy: set use_lora: false"]),
    (
        {"ppo_n_minibatches": 4},
        {},
        [
            "train.ppo_n_minibatches = 4",
            "more than one optimizer step between two updates",
            "Remedy: set weight_update_delta_accumulate: true, which follows every step for one byte",
            "or set ppo_n_minibatches: 1",
        ],
    ),
    ({"ppo_n_minibatches": 0}, {}, ["train.ppo_n_minibatches = 0", "Remedy: set ppo_n_minibatches: 1"]),
    (
        {"ppo_n_minibatches": 0, "weight_update_delta_accumulate": True},
        {},
        ["train.ppo_n_minibatches = 0", "Remedy: set ppo_n_minibatches: 1"],
    ),
    (
        {"weight_update_delta_method": "snapshot", "weight_update_delta_accumulate": True},
        {},
        [
            "train.weight_update_delta_accumulate = True",
            "snapshot covers any number of steps by itself",
            "Remedy: set weight_update_delta_accumulate: false, or weight_update_delta_method: adamw",
        ],
    ),
    (
        {"backend": "megatron:d3"},
        {"backend": "vllm:t2"},
        [
            "3 trainer + 2 engine ranks = 5",
            "train.world_size_policy = 'power_of_two'",
            "Remedy: change train.backend or rollout.backend so that the ranks add up to 4 or 8",
            "world_size_policy: any",
        ],
    ),
]


@pytest.mark.parametrize(("train", "rollout", "parts"), CROSS_REFUSALS)
def test_a_refusal_names_field_value_and_remedy(
    train: Mapping[str, object], rollout: Mapping[str, object], parts: list[str]
) -> None:
    before = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        resolve(train_config(**train), rollout_config(**rollout))
    for part in parts:
        assert part in str(caught.value)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(("train", "rollout", "parts"), CROSS_REFUSALS)
def test_with_the_flag_off_nothing_is_refused(
    train: Mapping[str, object], rollout: Mapping[str, object], parts: list[str]
) -> None:
    del parts
    off = train_config(**train, enable_delta_weight_update=False)
    resolved = resolve(off, rollout_config(**rollout))
    assert resolved.settings == DeltaSettings(enabled=False)
    assert resolved.topology is None


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_accumulating_allows_several_minibatches(num_minibatches: int) -> None:
    train = train_config(weight_update_delta_accumulate=True, ppo_n_minibatches=num_minibatches)
    assert resolve(train, rollout_config()).settings.accumulate
    assert not resolve(train_config(), rollout_config()).settings.accumulate


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_a_snapshot_allows_several_minibatches(num_minibatches: int) -> None:
    train = train_config(weight_update_delta_method="snapshot", ppo_n_minibatches=num_minibatches)
    settings = resolve(train, rollout_config()).settings
    assert (settings.method, settings.accumulate) == ("snapshot", False)
    assert settings_from_environment({**FULL, "DTE_DELTA_METHOD": "snapshot"}).method == "snapshot"
    assert settings_from_environment(FULL).method == "adamw"


def test_all_refusals_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(
            train_config(use_lora=True, version="v1", weight_update_mode="nccl", ppo_n_minibatches=2),
            rollout_config(backend="tgi:d1", version="v1", scheduling_strategy="colocation"),
        )
    assert str(caught.value).count("Remedy: ") == 7


# --- world sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(2, 34))
def test_only_powers_of_two_fit_the_schedule(world_size: int) -> None:
    powers = {2, 4, 8, 16, 32}
    for num_trainer_ranks in range(1, world_size):
        ranks = {"num_trainer_ranks": num_trainer_ranks, "num_engine_ranks": world_size - num_trainer_ranks}
        check_world_size(**ranks, policy="any")
        if world_size in powers:
            check_world_size(**ranks, policy="power_of_two")
            continue
        with pytest.raises(ConfigError, match=f"ranks = {world_size}: not a power of two"):
            check_world_size(**ranks, policy="power_of_two")


@pytest.mark.parametrize("policy", get_args(WorldSizePolicy))
@pytest.mark.parametrize(("trainers", "engines"), [(0, 4), (4, 0), (0, 0), (-1, 2), (0, 1)])
def test_a_side_without_ranks_is_refused(policy: WorldSizePolicy, trainers: int, engines: int) -> None:
    with pytest.raises(ConfigError, match="a side has no ranks"):
        check_world_size(num_trainer_ranks=trainers, num_engine_ranks=engines, policy=policy)


def test_the_policy_any_admits_other_sums() -> None:
    resolved = resolve(train_config(world_size_policy="any"), rollout_config(backend="vllm:d1"))
    assert resolved.topology is not None
    assert resolved.topology.world_size == 5
    assert resolved.settings.allow_any_world_size


# --- refusals of one setting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"weight_update_anchor_interval": -1},
            ["weight_update_anchor_interval = -1", "Remedy: write a whole number from 0, such as 20"],
        ),
        ({"weight_update_anchor_interval": "5"}, ["weight_update_anchor_interval = '5'", "valid integer"]),
        ({"weight_update_anchor_interval": 2.5}, ["weight_update_anchor_interval = 2.5", "valid integer"]),
        ({"weight_update_anchor_interval": 2.0}, ["weight_update_anchor_interval = 2.0", "valid integer"]),
        ({"weight_update_anchor_interval": True}, ["weight_update_anchor_interval = True", "valid integer"]),
        ({"weight_update_anchor_interval": None}, ["weight_update_anchor_interval = None", "valid integer"]),
        ({"weight_update_delta_method": "sgd"}, ["weight_update_delta_method = 'sgd'", "'adamw'"]),
        ({"weight_update_delta_encoding": "xor"}, ["weight_update_delta_encoding = 'xor'", "'indices'"]),
        ({"weight_update_verify": "all"}, ["weight_update_verify = 'all'", "'touched' or 'full'"]),
        ({"weight_update_verify": True}, ["weight_update_verify = True"]),
        (
            {"weight_update_verify_interval": -1},
            ["weight_update_verify_interval = -1", "write a whole number from 0"],
        ),
        ({"weight_update_verify_interval": "5"}, ["weight_update_verify_interval = '5'", "valid integer"]),
        ({"world_size_policy": "all"}, ["world_size_policy = 'all'", "'power_of_two' or 'any'"]),
        ({"weight_update_timeout_seconds": 0}, ["weight_update_timeout_seconds = 0", "greater than 0"]),
        ({"weight_update_timeout_seconds": 2e6}, ["weight_update_timeout_seconds = 2000000.0", "1000000"]),
        ({"weight_update_timeout_seconds": math.inf}, ["weight_update_timeout_seconds = inf", "finite"]),
        ({"weight_update_connect_timeout_seconds": -1}, ["weight_update_connect_timeout_seconds = -1"]),
        ({"enable_delta_weight_update": "true"}, ["enable_delta_weight_update = 'true'", "valid boolean"]),
        (
            {"weight_update_delta_accumulate": "yes"},
            ["weight_update_delta_accumulate = 'yes'", "valid boolean", "Remedy: write true or false"],
        ),
        ({"weight_update_transport": "nfs"}, ["weight_update_transport = 'nfs'", "'p2p' or 'disk'"]),
        ({"weight_update_disk_kind": "half"}, ["weight_update_disk_kind = 'half'", "'delta' or 'full'"]),
        ({"weight_update_keep_anchors": 0}, ["weight_update_keep_anchors = 0", "greater than or equal to 1"]),
        ({"weight_update_read_workers": 0}, ["weight_update_read_workers = 0", "greater than or equal to 1"]),
        ({"use_lora": 1}, ["use_lora = 1", "valid boolean"]),
        ({"backend": 8}, ["backend = 8", "valid string", "megatron:d2p1t4"]),
        ({"version": 2}, ["version = 2", "valid string", "Remedy: write a text, such as v2"]),
        ({"anchor_interval": 5}, ["anchor_interval = 5", "did you mean weight_update_anchor_interval?"]),
        ({"enable_delta_weight_updates": True}, ["did you mean enable_delta_weight_update?"]),
        ({"zzz": 1}, ["zzz = 1", "remove it; known settings: backend, version"]),
        ({3: 1}, ["3 = 1", "remove it"]),
        ({"version": "v2", "_version": "v1"}, ["version = 'v2' and _version = 'v1'", "Remedy: keep one"]),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_given(changes: dict[Any, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainEngineConfig.load({**TRAIN, **changes})
    for part in [*parts, "Remedy: "]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"scheduling_strategy": "shared"}, ["scheduling_strategy.type = 'shared'", "'colocation'"]),
        ({"scheduling_strategy": {"typ": "separation"}}, ["scheduling_strategy.typ = 'separation'"]),
        ({"scheduling_strategy": 1}, ["scheduling_strategy = 1"]),
        ({"enable_delta_weight_update": True}, ["enable_delta_weight_update = True", "remove it"]),
    ],
)
def test_a_wrong_rollout_setting_is_refused(changes: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        rollout_config(**changes)
    for part in [*parts, "Remedy: "]:
        assert part in str(caught.value)


def test_keywords_are_refused_as_loaded_data_is() -> None:
    with pytest.raises(ConfigError, match="weight_update_anchor_interval = -1"):
        TrainEngineConfig(backend="megatron:d2", weight_update_anchor_interval=-1)
    with pytest.raises(
        ConfigError, match=re.escape("backend is missing. Remedy: write a text, such as megatron:d2p1t4")
    ):
        TrainEngineConfig.load({})


def test_every_encoding_in_the_settings_exists() -> None:
    for name in get_args(DeltaEncoding):
        if name != "auto":
            assert [codec.name for codec in codecs_for(name)] == [name]
    # Chosen by hand only: it needs numba on both sides.
    assert {codec.name for codec in codecs_for("auto")} == CODECS.keys() - {"ulp_context"}


# --- updates through a folder -------------------------------------------------------------------------------


def test_a_folder_is_resolved_and_read_back_by_workers() -> None:
    changes = {
        "weight_update_keep_anchors": 5,
        "weight_update_read_workers": 9,
        "weight_update_disk_kind": "full",
        "weight_update_delta_encoding": "ulp_context",
    }
    resolved = resolve(train_config(**DISK, **changes), rollout_config())
    settings = resolved.settings
    assert (settings.transport, settings.disk_url, settings.disk_kind) == ("disk", "memory://run", "full")
    assert (settings.keep_anchors, settings.read_workers) == (5, 9)
    assert settings_from_environment(worker_environment(resolved)) == settings


def test_through_a_folder_any_number_of_ranks_will_do() -> None:
    with pytest.raises(ConfigError, match="= 5: not a power of two"):
        resolve(train_config(), rollout_config(backend="vllm:d1"))
    assert resolve(train_config(**DISK), rollout_config(backend="vllm:d1")).settings.transport == "disk"


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"weight_update_transport": "disk"}, "weight_update_disk_url = ''", "s3://bucket/run"),
        (
            {**DISK, "weight_update_release_grad_buffers": True},
            "weight_update_release_grad_buffers = True",
            "weight_update_release_grad_buffers: false",
        ),
        ({"weight_update_disk_url": "/shared"}, "weight_update_disk_url = '/shared'", "transport: disk"),
        ({"weight_update_disk_kind": "full"}, "weight_update_disk_kind = 'full'", "transport: disk"),
    ],
)
def test_settings_of_the_other_transport_are_refused(
    changes: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"train.{field}")) as caught:
        resolve(train_config(**changes), rollout_config())
    assert remedy in str(caught.value)


# --- the environment of workers -----------------------------------------------------------------------------


def test_worker_environment_by_default() -> None:
    before = dict(os.environ)
    assert worker_environment(resolve(train_config(), rollout_config())) == {
        "DTE_SEPARATION_WEIGHT_UPDATE": "1",
        "DTE_STREAMING_RECONSTRUCT": "1",
        "DTE_DELTA_TRANSFER": "1",
        "DTE_DELTA_ANCHOR_INTERVAL": "20",
        "DTE_DELTA_ENCODING": "indices",
        "DTE_VERIFY": "touched",
        "DTE_VERIFY_INTERVAL": "0",
        "DTE_BUCKET_BYTES": "67108864",
        "DTE_ALLOW_ANY_WORLD_SIZE": "False",
        "DTE_DELTA_METHOD": "adamw",
        "DTE_DELTA_ACCUMULATE": "False",
        "DTE_RELEASE_GRAD_BUFFERS": "False",
        "DTE_TIMEOUT_SECONDS": "300.0",
        "DTE_CONNECT_TIMEOUT_SECONDS": "300.0",
        "DTE_NOT_FINITE": "warn",
        "DTE_SECRET_SOURCE": "",
        "DTE_TRANSPORT": "p2p",
        "DTE_DISK_URL": "",
        "DTE_DISK_KIND": "delta",
        "DTE_KEEP_ANCHORS": "2",
        "DTE_READ_WORKERS": "4",
    }
    assert dict(os.environ) == before


LEFTOVERS = {variable: text for *_, variable, text, _ in WRITTEN} | dict.fromkeys(
    ("DTE_SEPARATION_WEIGHT_UPDATE", "DTE_STREAMING_RECONSTRUCT", "DTE_DELTA_TRANSFER"), "1"
)
"""Every variable, from a run whose settings were all others than the defaults."""


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("leftover", [*LEFTOVERS, "all"])
def test_what_a_worker_inherits_changes_nothing(leftover: str, *, enabled: bool) -> None:
    inherited = LEFTOVERS if leftover == "all" else {leftover: LEFTOVERS[leftover]}
    resolved = resolve(train_config(enable_delta_weight_update=enabled), rollout_config())
    started_with = {"HOME": "/", **inherited} | worker_environment(resolved)
    assert settings_from_environment(started_with) == resolved.settings == DeltaSettings(enabled=enabled)
    assert started_with["HOME"] == "/"
    assert {name for name in LEFTOVERS if name in worker_environment(resolved)} == set(LEFTOVERS)


def test_an_environment_can_be_freed_of_all_variables(clean_env: pytest.MonkeyPatch) -> None:
    for name, value in LEFTOVERS.items():
        clean_env.setenv(name, value)
    clean_env.setenv("DTE_SOMETHING_ELSE", "kept")
    scrubbed = scrub_worker_environment()
    assert not scrubbed.keys() & LEFTOVERS.keys()
    assert scrubbed["DTE_SOMETHING_ELSE"] == "kept"
    assert os.environ["DTE_DELTA_TRANSFER"] == "1"


def test_the_place_of_the_secret_counts_with_the_flag_off() -> None:
    source = "file:/run/secret"
    train = train_config(enable_delta_weight_update=False, weight_update_secret_source=source)
    resolved = resolve(train, rollout_config())
    assert resolved.settings == DeltaSettings(enabled=False, secret_source=source)
    assert settings_from_environment(worker_environment(resolved)) == resolved.settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("weight_update_secret_source", "correct-horse-battery"),
        ("weight_update_secret_source", "correct-horse: battery"),
        ("weight_update_secret_source", ["correct-horse-battery"]),
        ("weight_update_secret", "correct-horse-battery"),
        ("weight_update_secret_sauce", {"env": "correct-horse-battery"}),
    ],
)
def test_what_may_be_a_secret_is_not_shown_where_it_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} = \(not shown\): .*Remedy: ") as caught:
        train_config(**{setting: value})
    assert "horse" not in str(caught.value)


@given(
    interval=st.integers(min_value=0, max_value=10**6),
    verify=st.sampled_from(["touched", "full"]),
    verify_interval=st.integers(min_value=0, max_value=10**6),
    policy=st.sampled_from(get_args(WorldSizePolicy)),
    method=st.sampled_from(get_args(DeltaMethod)),
    accumulate=st.booleans(),
    release=st.booleans(),
    timeout=st.floats(min_value=1e-9, max_value=1e6),
    connect_timeout=st.floats(min_value=1e-9, max_value=1e6),
)
def test_workers_read_back_what_was_resolved(
    *,
    interval: int,
    verify: str,
    verify_interval: int,
    policy: str,
    method: str,
    accumulate: bool,
    release: bool,
    timeout: float,
    connect_timeout: float,
) -> None:
    train = train_config(
        weight_update_anchor_interval=interval,
        weight_update_verify=verify,
        weight_update_verify_interval=verify_interval,
        world_size_policy=policy,
        weight_update_delta_method=method,
        weight_update_delta_accumulate=accumulate and method == "adamw",
        weight_update_release_grad_buffers=release,
        weight_update_timeout_seconds=timeout,
        weight_update_connect_timeout_seconds=connect_timeout,
    )
    resolved = resolve(train, rollout_config())
    assert settings_from_environment(worker_environment(resolved)) == resolved.settings


ON = {"DTE_SEPARATION_WEIGHT_UPDATE": "1", "DTE_DELTA_TRANSFER": "1", "DTE_STREAMING_RECONSTRUCT": "1"}
FULL = {**ON, "DTE_DELTA_ANCHOR_INTERVAL": "20"}


@pytest.mark.parametrize(
    ("value", "enabled"),
    [("1", True), ("true", True), ("True", True), ("0", False), ("false", False), ("", False)],
)
def test_flags_are_read_strictly(value: str, enabled: bool) -> None:
    assert settings_from_environment({**FULL, "DTE_DELTA_TRANSFER": value}).enabled is enabled


def test_an_empty_environment_means_off() -> None:
    assert settings_from_environment({}) == DeltaSettings(enabled=False)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"DTE_DELTA_TRANSFER": "yes"}, ["DTE_DELTA_TRANSFER is 'yes'", "1, true, True, 0, false"]),
        ({"DTE_DELTA_TRANSFER": "TRUE"}, ["DTE_DELTA_TRANSFER is 'TRUE'"]),
        ({"DTE_DELTA_TRANSFER": " 1"}, ["DTE_DELTA_TRANSFER is ' 1'"]),
        ({"DTE_SEPARATION_WEIGHT_UPDATE": "0"}, ["DTE_SEPARATION_WEIGHT_UPDATE is '0'", "must be on"]),
        ({"DTE_SEPARATION_WEIGHT_UPDATE": None}, ["DTE_SEPARATION_WEIGHT_UPDATE is not set", "must be on"]),
        ({"DTE_STREAMING_RECONSTRUCT": ""}, ["DTE_STREAMING_RECONSTRUCT is ''", "must be on"]),
        ({"DTE_DELTA_ANCHOR_INTERVAL": "-1"}, ["DTE_DELTA_ANCHOR_INTERVAL is '-1'", "whole number"]),
        ({"DTE_DELTA_ANCHOR_INTERVAL": "2.0"}, ["DTE_DELTA_ANCHOR_INTERVAL is '2.0'"]),
        ({"DTE_DELTA_ANCHOR_INTERVAL": ""}, ["DTE_DELTA_ANCHOR_INTERVAL is ''"]),
        ({"DTE_DELTA_ANCHOR_INTERVAL": None}, ["DTE_DELTA_ANCHOR_INTERVAL is not set"]),
        ({"DTE_DELTA_ANCHOR_INTERVAL": "9" * 5000}, ["whole number"]),
        ({"DTE_DELTA_ENCODING": "xor"}, ["DTE_DELTA_ENCODING is 'xor'", "indices"]),
        ({"DTE_DELTA_METHOD": "sgd"}, ["DTE_DELTA_METHOD is 'sgd'", "one of adamw, capture, snapshot"]),
        ({"DTE_DELTA_ACCUMULATE": "yes"}, ["DTE_DELTA_ACCUMULATE is 'yes'", "1, true, True"]),
        ({"DTE_VERIFY": "some"}, ["DTE_VERIFY is 'some'", "off, touched, full"]),
        ({"DTE_VERIFY_INTERVAL": "-2"}, ["DTE_VERIFY_INTERVAL is '-2'", "whole number"]),
        ({"DTE_TIMEOUT_SECONDS": "nan"}, ["DTE_TIMEOUT_SECONDS is 'nan'", "positive number"]),
        ({"DTE_TIMEOUT_SECONDS": "soon"}, ["DTE_TIMEOUT_SECONDS is 'soon'"]),
        ({"DTE_TRANSPORT": "nfs"}, ["DTE_TRANSPORT is 'nfs'", "one of p2p, disk"]),
        ({"DTE_KEEP_ANCHORS": "few"}, ["DTE_KEEP_ANCHORS is 'few'", "whole number"]),
        ({"DTE_CONNECT_TIMEOUT_SECONDS": "0"}, ["DTE_CONNECT_TIMEOUT_SECONDS is '0'"]),
        ({"DTE_DELTA_TRANFER": "1"}, ["DTE_DELTA_TRANFER is not known", "rename it to DTE_DELTA_TRANSFER"]),
        ({"dte_delta_transfer": "1"}, ["dte_delta_transfer is not known"]),
    ],
)
def test_a_wrong_worker_environment_is_refused(changes: Mapping[str, str | None], parts: list[str]) -> None:
    merged = {**FULL, **changes}
    environ = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        settings_from_environment(environ)
    for part in [*parts, "Remedy: "]:
        assert part in str(caught.value)


def test_a_misspelled_name_is_refused_even_alone() -> None:
    with pytest.raises(ConfigError, match="rename it to DTE_DELTA_TRANSFER"):
        settings_from_environment({"DTE_DELTA_TRANSFERS": "1"})


def test_foreign_names_are_left_alone() -> None:
    assert settings_from_environment({**FULL, "DTE_PROFILE": "x", "DATE": "y"}).anchor_interval == 20
