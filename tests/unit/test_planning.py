"""The plan of a run, against transformers' own model, Megatron's own rank groups and real frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.core.parallel_state import RankGenerator
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.cli.plan import as_data, plan_preset
from awex_delta.errors import ConfigError
from awex_delta.lines.changes import Changes
from awex_delta.presets.files import PRESETS, ModelShape, read_preset
from awex_delta.presets.forecast import SHARES, count_parameters, plan_run
from awex_delta.presets.seconds import seconds_by_link
from awex_delta.settings.allocation import parse_allocation
from awex_delta.settings.schema import RolloutConfig, TrainEngineConfig
from awex_delta.wire.choice import expected_bytes
from awex_delta.wire.registry import CODECS
from awex_delta.wire.spans import Span

LARGE = PRESETS / "qwen3_30b_a3b.yaml"
TINY = ModelShape(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
)


def shape_of(path: Path) -> ModelShape:
    return ModelShape.load(read_preset(path)["model"])


def parameters_by_name(shape: ModelShape) -> dict[str, int]:
    """Of transformers' own model, without memory for it."""
    values = shape.model_dump(exclude={"architecture", "rope_theta", "path", "initializer_range"})
    config: Any = Qwen3MoeConfig(**values) if shape.num_experts else Qwen3Config(**values)
    create: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = create(config)
    return {name: param.numel() for name, param in model.named_parameters()}


def test_qwen3_30b_a3b_has_30_5_billion_parameters() -> None:
    counts = count_parameters(shape_of(LARGE))
    found = parameters_by_name(shape_of(LARGE))
    assert counts.total == sum(found.values()) == 30_532_122_624
    assert counts.experts == sum(size for name, size in found.items() if ".experts." in name)
    assert counts.copied == sum(size for name, size in found.items() if "norm" in name or ".gate." in name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_is_counted_as_transformers_builds_it(tied: bool) -> None:
    shape = TINY.model_copy(update={"tie_word_embeddings": tied})
    assert count_parameters(shape).total == sum(parameters_by_name(shape).values())


def test_the_large_preset_is_what_its_readme_works_out() -> None:
    plan = plan_preset(LARGE)
    assert (plan.num_trainer_ranks, plan.num_engine_ranks, plan.num_replicas, plan.rounds) == (8, 8, 2, 4)
    # By hand: an eighth of the experts, a quarter of what is split, all norms and routers.
    experts, copied = 28_991_029_248, 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    local = experts // 8 + (30_532_122_624 - experts - copied) // 4 + copied
    dense = local - experts // 8
    assert plan.trainer_memory.weights == 2 * local
    assert plan.trainer_memory.gradients == 4 * local
    assert plan.trainer_memory.optimizer == 12 * (experts // 8 + dense // 2)
    assert plan.engine_memory.weights == 2 * (experts // 4 + dense)
    assert plan.full_bytes == 2 * 2 * (30_532_122_624 + 3 * copied)
    told = {
        "DTE_SEPARATION_WEIGHT_UPDATE": "1",
        "DTE_DELTA_TRANSFER": "1",
        "DTE_DELTA_ANCHOR_INTERVAL": "20",
        "DTE_STREAMING_RECONSTRUCT": "1",
        "DTE_SECRET_SOURCE": "",
    }
    assert told.items() <= plan.environment.items()
    rows = {(row.encoding, row.changed_share): row for row in plan.traffic}
    assert {share for _, share in rows} == set(SHARES)
    for share in SHARES:
        assert rows["indices", share].of_full == pytest.approx(3 * share)
        assert rows["indices", share].total_bytes == pytest.approx(3 * share * plan.full_bytes, rel=1e-6)


@pytest.mark.parametrize(
    "backend",
    [
        "megatron:(attn:d2p1t4|ffn:d1p1e8)",
        "megatron:d2p2t2",
        "megatron:d2t2c2",
        "megatron:(attn:d4p1t2|ffn:d2p1e4)",
    ],
)
def test_owners_are_the_groups_that_megatron_makes(backend: str) -> None:
    shape = shape_of(LARGE)
    engines = RolloutConfig(backend="vllm:d8")
    plan = plan_run(TrainEngineConfig(backend=backend, enable_delta_weight_update=True), engines, shape)
    allocation = parse_allocation(backend, backends=("megatron",))
    dense, experts = allocation.layout, allocation.experts
    ranks = RankGenerator(
        tp=dense.tensor, ep=1, dp=dense.data, pp=dense.pipeline, cp=dense.context, order="tp-cp-ep-dp-pp"
    )
    assert sorted(map(list, plan.owners[0].groups)) == sorted(map(sorted, ranks.get_ranks("dp-cp")))
    if experts is not None:
        ranks = RankGenerator(
            tp=experts.tensor, ep=experts.expert, dp=experts.data, pp=1, cp=1, order="tp-cp-ep-dp-pp"
        )
        assert sorted(map(list, plan.owners[1].groups)) == sorted(map(sorted, ranks.get_ranks("dp")))


@pytest.mark.parametrize("encoding", ["indices", "gaps", "ulp", "ulp_zstd"])
@pytest.mark.parametrize("share", SHARES)
def test_expected_bytes_are_those_of_real_frames(encoding: str, share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    numel = 2_000_000
    index = (torch.rand(numel, generator=generator) < share).nonzero().flatten()
    # Steps as they occur in training: nine of ten by one unit, up or down.
    size = 1 + (torch.rand(index.numel(), generator=generator) > 0.89).to(torch.int8)
    code = size * (1 - 2 * torch.randint(2, (index.numel(),), generator=generator)).to(torch.int8)
    value = torch.randn(index.numel(), generator=generator).to(torch.bfloat16)
    changes = Changes(pos=index, value=value, code=code)
    body = CODECS[encoding].encode(changes, Span(0, numel), torch.bfloat16)
    assert body.numel() / index.numel() == pytest.approx(expected_bytes(encoding, share), rel=0.06)


def test_seconds_are_bytes_work_and_detection_of_the_fullest_rank() -> None:
    plan = plan_preset(LARGE, shares=(0.01,))
    (row,) = seconds_by_link(plan, ["25gbit"], memory_bytes_per_second=1e12)
    # By hand: a trainer rank sends what it owns to 2 replicas, as much as an engine rank gets.
    counts = count_parameters(shape_of(LARGE))
    dense = (counts.total - counts.experts - counts.copied) // 4 + counts.copied
    elements = 2 * (counts.experts // 8 + dense // 2)
    assert row.full == pytest.approx(2 * elements * 8 / 25e9)
    detection = elements / 2 * 15 / 0.38e12
    assert row.deltas["indices"] == pytest.approx(detection + 0.01 * elements * (11e-9 + 6 * 8 / 25e9))
    assert row.best == "indices"
    assert row.break_even == pytest.approx((row.full - detection) / (elements * (11e-9 + 6 * 8 / 25e9)))
    fast, slow = seconds_by_link(plan, ["800gbit", "100Mbit"], memory_bytes_per_second=1e11)
    assert fast.break_even == 0.0  # detection alone takes longer than a full sync
    assert slow.deltas[slow.best] < slow.full / 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--link", "7parsec"], "--link 7parsec: no speed. Remedy: write it in mbit, gbit or tbit"),
        (["--link", "0gbit"], "--link 0gbit: no speed"),
        (["--changed", "0"], "changed = 0: no share of elements. Remedy: write one between 0 and 1"),
        (["--changed", "nan"], "changed = nan"),
        (["--memory", "-3"], "--memory -3: no bandwidth. Remedy: write GB/s"),
    ],
)
def test_assumptions_that_are_none_are_refused(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["plan", "qwen3_30b_a3b", *options])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_a_model_that_does_not_divide_is_refused_with_the_letter() -> None:
    train = TrainEngineConfig(backend="megatron:t4", enable_delta_weight_update=True)
    with pytest.raises(ConfigError, match=r"num_key_value_heads = 2 does not divide by t4 of train.backend"):
        plan_run(train, RolloutConfig(backend="vllm:d4"), TINY)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("trainer", "engine", "says"),
    [
        (
            "megatron:d999999p999999t999999",
            "vllm:d1",
            r"train\.backend = 'megatron:d999999p999999t999999': 999997",
        ),
        (
            "megatron:d100000p1t2",
            "vllm:d1",
            r"train\.backend = 'megatron:d100000p1t2': 200000 ranks, more than",
        ),
        ("megatron:d65536p1t2", "vllm:d1", r"131072 ranks, more than the 65536 .* Remedy: make its numbers"),
        ("megatron:d1", "vllm:d999999t999999", r"rollout\.backend = 'vllm:d999999t999999': 99999800000"),
        ("megatron:(attn:d99999t4|ffn:d99999t4)", "vllm:d1", r"train\.backend = .*: 399996 ranks, more than"),
    ],
)
def test_a_plan_of_more_ranks_than_any_cluster_has_is_refused_at_once(
    trainer: str, engine: str, says: str
) -> None:
    train = TrainEngineConfig(backend=trainer, enable_delta_weight_update=True, world_size_policy="any")
    with pytest.raises(ConfigError, match=says):
        plan_run(train, RolloutConfig(backend=engine), TINY)


def test_the_largest_plan_names_every_owner_and_shows_people_the_first() -> None:
    sizes = ["train.backend=megatron:d16384p1t4", "train.world_size_policy=any"]
    plan = plan_preset(LARGE, sizes)
    assert sum(len(group) for group in plan.owners[0].groups) == plan.num_trainer_ranks == 65536
    result = CliRunner().invoke(app, ["plan", str(LARGE), *sizes])
    assert result.exit_code == 0, result.output
    text = "".join(result.output.split())
    assert "0+4+8+12" in text
    assert "...(16384inall)" in text
    assert len(result.output) < 20_000


def test_what_is_kept_between_updates() -> None:
    plan = plan_preset(PRESETS / "tiny_accumulate.yaml")
    assert plan.kept_bytes == plan.owned_elements == plan.parameters.total
    snapshot = plan_preset(PRESETS / "tiny_cpu.yaml", ["train.weight_update_delta_method=snapshot"])
    assert snapshot.kept_bytes == 2 * plan.owned_elements
    assert plan_preset(LARGE).kept_bytes == 0


def test_the_command_prints_the_same_numbers_as_json() -> None:
    result = CliRunner().invoke(app, ["plan", "qwen3_30b_a3b", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["parameters"]["total"] == 30_532_122_624
    assert data["full_bytes"] == plan_preset(LARGE).full_bytes
    assert {row["link"] for row in data["seconds"]} == {"1gbit", "10gbit", "25gbit", "100gbit", "400gbit"}


def test_the_command_prints_a_table_for_people() -> None:
    result = CliRunner().invoke(app, ["plan", str(LARGE), "train.weight_update_anchor_interval=7"])
    assert result.exit_code == 0, result.output
    for text in ("8 + 8 = 16 ranks", "30,532,122,624", "0+4", "export DTE_DELTA_ANCHOR_INTERVAL=7"):
        assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "one of the presets qwen3_30b_a3b, tiny_accumulate, tiny_cpu, tiny_vllm"),
        (["tiny_cpu", "model.num_hidden_layer=3"], "did you mean num_hidden_layers?"),
        (["tiny_cpu", "rollout.backend=transformers:d2"], "not a power of two"),
        (["tiny_cpu", "train.enable_delta_weight_update=false"], "there is no delta to plan"),
        (["tiny_cpu", "nonsense=1"], "section.setting=value"),
        (["tiny_cpu", "model.hf_path=x"], "section model: ModelShape is refused"),
        (
            ["tiny_cpu", "model.hf_path=x"],
            "hf_path = 'x': Extra inputs are not permitted. Remedy: did you mean path",
        ),
        (
            ["tiny_cpu", "grpo.num_updates=3"],
            "override 'grpo.num_updates=3': a plan reads the sections train",
        ),
        (["tiny_cpu", "train.nonsense=1"], "section train: TrainEngineConfig is refused"),
        (["tiny_cpu", "train.enable_delta=true"], "did you mean enable_delta_weight_update?"),
        (["tiny_cpu", "model.hidden_size=many"], "hidden_size = 'many'"),
        (["tiny_cpu", "model.num_experts=4"], "num_experts = 4"),
    ],
)
def test_what_cannot_work_is_refused_with_exit_code_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert says in result.output


def test_where_the_weights_are_is_a_setting_of_the_model_and_changes_no_size() -> None:
    result = CliRunner().invoke(app, ["plan", "tiny_cpu", "model.path=x", "--json"])
    assert result.exit_code == 0, result.output
    assert (
        json.loads(result.stdout)["parameters"]
        == as_data(plan_preset(PRESETS / "tiny_cpu.yaml"))["parameters"]
    )


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  lr: 3e-6\n  name: e5\n  steps: 12\n")
    data = read_preset(path, ["optimizer.eps=1e-8", "optimizer.betas={a: 0.9}", "optimizer.betas.b=-2.5E+3"])
    expected = {"lr": 3e-6, "name": "e5", "steps": 12, "eps": 1e-8, "betas": {"a": 0.9, "b": -2500.0}}
    assert data == {"optimizer": expected}


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_field_of_the_large_preset_is_commented_and_every_preset_plans(path: Path) -> None:
    assert plan_preset(path).parameters.total > 1_000_000
    if path != LARGE:
        return
    for line in path.read_text().splitlines():
        is_field = ":" in line and not line.startswith("#") and not line.strip().endswith(":")
        assert not is_field or "#" in line, line
    assert yaml.safe_load(path.read_text())["train"]["ppo_n_minibatches"] == 1


HOSTILE_VALUES = [
    "!!python/object/apply:os.system [id]",
    "!!int abc",
    "!!bool x",
    "!!timestamp x",
    "2021-13-45",
    "[" * 3000,
    "9" * 5000,
    "&a [*a]",
    "&a {x: *a}",
    "*unknown",
]


@pytest.mark.parametrize("value", HOSTILE_VALUES, ids=lambda value: value[:20])
def test_hostile_overrides_are_refused_with_exit_code_2(value: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(PRESETS / "tiny_cpu.yaml"), f"train.backend={value}"])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert "backend" in result.output


def laughs() -> bytes:
    """Lists of lists, of which the last one has 9 ** 12 elements."""
    lines = [f"  k{n}: &k{n} [{', '.join([f'*k{n - 1}' if n else '1'] * 9)}]\n" for n in range(12)]
    return f"train:\n{''.join(lines)}rollout: {{}}\nmodel: {{}}\n".encode()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00",
        b"[" * 5000,
        b"1: {a: 2}\ntrain: {}\nrollout: {}\nmodel: {}\n",
        b"? \n: {}\n",
        b"train: &a {b: *a}\nrollout: {}\nmodel: {}\n",
        b"!!python/object/new:os.system [id]",
        b"train: {backend: 2021-13-45}\nrollout: {}\nmodel: {}\n",
        laughs(),
    ],
    ids=lambda text: str(text[:20]),
)
def test_hostile_presets_are_refused_with_exit_code_2(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "preset.yaml"
    path.write_bytes(text)
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit), result.output[:500]
    assert len(result.output) < 50_000
