"""What a configuration of verl is refused for, and what each rank is told before an update. Without verl."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from awex_delta.errors import ConfigError, UpdateAborted
from awex_delta.integrations.verl.checks import check, delta_settings
from awex_delta.integrations.verl.followed import engine_of
from awex_delta.integrations.verl.order import Member, again_once, orders
from awex_delta.settings.agreed import DeltaSettings

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "verl_gsm8k").glob("*.yaml"))
GOOD: dict[str, Any] = {
    "model": {"lora_rank": 0, "lora": {"rank": 0}},
    "actor": {
        "strategy": "fsdp2",
        "fsdp_config": {"param_offload": False, "optimizer_offload": False, "offload_policy": False},
        "megatron": {"param_offload": False, "optimizer_offload": False, "use_megatron_fsdp": False},
    },
    "rollout": {
        "name": "vllm",
        "free_cache_engine": False,
        "data_parallel_size": 1,
        "quantization": None,
        "checkpoint_engine": {"backend": "awex_delta", "engine_kwargs": {}},
        "engine_kwargs": {
            "vllm": {"weight_transfer_config": {"backend": "awex_delta"}},
            "sglang": {"custom_weight_loader": ["awex_delta.engines.sglang.loader.load"]},
        },
    },
}


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    for path, value in changes:
        *parents, last = path.split(".")
        section = config
        for name in parents:
            section = section[name]
        section[last] = value
    return {"actor_rollout_ref": config}


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("rollout.name", "sglang"), ("rollout.free_cache_engine", True)],  # SGLang releases its cache alone
        [("actor.strategy", "megatron"), ("actor.fsdp_config.param_offload", True)],
    ],
)
def test_what_can_work_is_not_refused(changes: list[tuple[str, Any]]) -> None:
    check(changed(*changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [("rollout.free_cache_engine", True)],
            r"rollout\.free_cache_engine = True: .*level 2.*set it to false",
        ),
        (
            [("rollout.engine_kwargs.vllm", {})],
            r"rollout\.engine_kwargs\.vllm\.weight_transfer_config = None: .*\{backend: awex_delta\}",
        ),
        (
            [("rollout.name", "sglang"), ("rollout.engine_kwargs.sglang", {})],
            r"custom_weight_loader = None: .*\[awex_delta\.engines\.sglang\.loader\.load\]",
        ),
        ([("rollout.name", "trtllm")], r"rollout\.name = 'trtllm': .*set vllm or sglang"),
        ([("rollout.data_parallel_size", 2)], r"rollout\.data_parallel_size = 2: .*more replicas"),
        ([("rollout.quantization", "fp8")], r"rollout\.quantization = 'fp8': .*set it to null"),
        ([("actor.fsdp_config.param_offload", True)], r"actor\.fsdp_config\.param_offload = True: .*false"),
        (
            [("actor.strategy", "megatron"), ("actor.megatron.optimizer_offload", True)],
            r"actor\.megatron\.optimizer_offload = True: .*false",
        ),
        (
            [("actor.strategy", "megatron"), ("actor.megatron.use_megatron_fsdp", True)],
            r"actor\.megatron\.use_megatron_fsdp = True",
        ),
        ([("actor.strategy", "veomni")], r"actor\.strategy = 'veomni': .*megatron, fsdp2"),
        ([("model.lora_rank", 8)], r"model\.lora_rank = 8: .*set it to 0"),
        ([("model.lora.rank", 8)], r"model\.lora\.rank = 8: .*set it to 0"),
        ([("rollout.checkpoint_engine.backend", "nccl")], r"backend = 'nccl': .*awex_delta"),
    ],
)
def test_what_cannot_work_is_refused_by_field_value_and_remedy(
    changes: list[tuple[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(changed(*changes))


def test_everything_at_fault_is_named_at_once() -> None:
    config = changed(("rollout.free_cache_engine", True), ("actor.fsdp_config.param_offload", True))
    with pytest.raises(ConfigError, match=r"(?s)param_offload.*free_cache_engine"):
        check(config)


def test_settings_follow_every_step_and_allow_any_world() -> None:
    settings = delta_settings({})
    assert (settings.enabled, settings.accumulate, settings.allow_any_world_size) == (True, True, True)
    captured = delta_settings({"weight_update_delta_method": "capture", "weight_update_anchor_interval": 7})
    assert (captured.method, captured.accumulate, captured.anchor_interval) == ("capture", False, 7)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"weight_update_anker_interval": 7}, "did you mean weight_update_anchor_interval"),
        ({"backend": "megatron:d2"}, "backend = 'megatron:d2': verl decides"),
        ({"weight_update_transport": "disk", "weight_update_disk_url": "/x"}, "travel from rank to rank"),
        ({"enable_delta_weight_update": False}, "enable_delta_weight_update = False"),
        ({"weight_update_delta_accumulate": False}, "ppo_n_minibatches = 2"),
    ],
)
def test_settings_that_cannot_work_with_verl_are_refused(written: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        delta_settings(written)


def member(life: str = "", **fields: Any) -> Member:
    return Member(settings=DeltaSettings(), life=life, **fields)


def test_each_worker_is_told_its_replica_and_its_place_in_it() -> None:
    trainers = [member("t0", version=4, host="10.0.0.1", port=99), member("t1", version=4)]
    workers = [member("a", leads=True, version=5), member(), member("b", leads=True), member()]
    told = orders(trainers, workers)
    assert {order.version for order in told} == {6}, "one more than the last that anybody committed"
    assert len({order.ticket for order in told}) == len({order.rendezvous for order in told}) == 1
    rendezvous = told[0].rendezvous
    assert (rendezvous.num_trainer_ranks, rendezvous.num_engine_ranks, rendezvous.address) == (
        2,
        4,
        "10.0.0.1:99",
    )
    assert [(order.engine, order.first_engine_rank, order.num_workers) for order in told[2:]] == [
        *[("replica-0", 0, 2)] * 2,
        *[("replica-1", 2, 2)] * 2,
    ]
    again, other = orders(trainers, workers)[0], orders(trainers, [*workers[:2], member("c", leads=True)])[0]
    assert again.rendezvous == rendezvous
    assert again.ticket != told[0].ticket
    assert other.rendezvous.name != rendezvous.name, "another server has to meet the trainer first"


def test_replicas_that_cannot_be_written_are_refused_before_anybody_meets() -> None:
    workers = [
        member("a", leads=True, problems=["  rollout.free_cache_engine = True"]),
        member("b", leads=True),
    ]
    with pytest.raises(ConfigError, match="free_cache_engine = True"):
        orders([member("t", host="h", port=1)], workers)


def test_an_update_is_tried_twice_and_its_last_error_passes() -> None:
    tries: list[int] = []

    def fail_once(number: int) -> str:
        tries.append(number)
        if number == 0:
            raise UpdateAborted("no")
        return "done"

    assert again_once(fail_once, "trainer") == "done"
    assert tries == [0, 1]

    def fail(number: int) -> str:
        raise UpdateAborted(f"try {number}")

    with pytest.raises(UpdateAborted, match="try 1"):
        again_once(fail, "trainer")


def test_an_engine_that_verl_built_itself_is_refused_with_the_line_that_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"external_lib: awex_delta\.integrations\.verl\.engines"):
        engine_of(iter([]))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_lines_of_the_examples_can_work(path: Path) -> None:
    check(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make verl")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_lines_of_the_examples_are_settings_of_verl(path: Path) -> None:
    """Compared with what verl composed for its own two trainers; it is not imported."""
    verl = find_spec("verl")
    assert verl is not None
    assert verl.submodule_search_locations
    config = Path(verl.submodule_search_locations[0], "trainer/config")
    known: set[str] = set()
    for name in ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml"):
        known |= set(paths(yaml.safe_load((config / name).read_text(encoding="utf-8"))))
    said = paths(yaml.safe_load(path.read_text(encoding="utf-8")))
    free = ("engine_kwargs.", "override_config.", ".load_tokenizer", ".external_lib")
    assert not [one for one in said if one not in known and not any(part in one for part in free)]


def paths(tree: object, above: str = "") -> Iterator[str]:
    """The dotted path of each setting."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from paths(value, f"{above}.{name}" if above else name)
    else:
        yield above
