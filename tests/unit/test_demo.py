"""The demo's options, its judge, and what it says of a process that died, without any process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from awex_delta.cli.demo import app
from awex_delta.demo.oracle import (
    count_changed,
    engine_differences,
    model_shape,
    trainer_hf_state,
)
from awex_delta.demo.scenario import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    VOCAB_SIZE,
    DemoPlan,
    Layout,
    ModelName,
    parse_layout,
)
from awex_delta.errors import ConfigError


def plan_of(model: ModelName = "qwen3", train: Layout | None = None, infer: Layout | None = None) -> DemoPlan:
    return DemoPlan(
        model=model,
        train=train or Layout(),
        infer=infer or Layout(),
        steps=2,
        anchor_interval=0,
        lr=1e-3,
        seed=0,
        layers=1,
        hidden=32,
        fault="none",
        timeout_seconds=5,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama"], "--model llama: give one of qwen3, qwen3-moe, both"),
        (["--train", "tp=0"], "--train tp=0: 'tp=0' is refused"),
        (["--train", "dp=2,dp=2"], "'dp=2' is refused"),
        (
            ["--train", "cp=2"],
            "'cp=2' is refused. Remedy: write for example --train tp=2, from tp, pp, dp, ep",
        ),
        (["--train", ""], "--train : '' is refused"),
        (["--infer", "dp=2"], "--infer dp=2: 'dp=2' is refused"),
        (["--train", "tp=4"], "--train tp=4: it does not divide 2, the number of key-value heads"),
        (["--train", "pp=3"], "--train pp=3: it does not divide 2, the number of layers (--layers)"),
        (["--train", "ep=3"], "--train ep=3: it does not divide 4, the number of experts"),
        (["--train", "tp=2"], "--train tp=2 with --model qwen3-moe"),
        (["--infer", "tp=3"], "--infer tp=3: it does not divide 4, the number of attention heads"),
        (["--infer", "ep=2"], "--infer ep=2: it does not divide 1, the number of engine ranks (tp)"),
        (["--steps", "0"], "--steps 0: give a whole number from 1"),
        (["--anchor-interval", "-1"], "--anchor-interval -1: give a whole number of 0 or more"),
        (["--lr", "nan"], "--lr nan: give a positive number"),
        (["--lr", "0"], "--lr 0: give a positive number"),
        (["--seed", "-1"], "--seed -1"),
        (["--layers", "0"], "--layers 0"),
        (["--hidden", "100"], "--hidden 100: give a multiple of 32"),
        (["--timeout", "0.5"], "--timeout 0.5: give at least 1 second"),
        (["--fault", "fire"], "--fault fire: give one of none, drop-engine, fail-apply, stale-engine"),
        (["--fault", "fail-apply", "--steps", "3"], "--steps 3 with --fault fail-apply"),
        (["--host", "203.0.113.7"], "host='203.0.113.7', port=0: cannot listen there"),
        (["--secret-file", "absent"], "absent cannot be read: FileNotFoundError"),
    ],
)
def test_bad_options_are_refused_before_any_process_starts(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_layouts_are_read() -> None:
    assert parse_layout("--train", "tp=2, pp=3,dp=4", ("tp", "pp", "dp", "ep")) == Layout(tp=2, pp=3, dp=4)
    assert parse_layout("--train", "dp=1,ep=2", ("tp", "pp", "dp", "ep")).num_trainer_ranks == 2
    with pytest.raises(ConfigError, match="from tp, ep, each once"):
        parse_layout("--infer", "tp", ("tp", "ep"))


def test_world_size_counts_the_transformers_engine() -> None:
    plan = plan_of(train=Layout(dp=2), infer=Layout(tp=1))
    assert (plan.world_size, plan.padded_schedule) == (4, False)
    assert plan_of(infer=Layout(tp=4)).padded_schedule  # 1 trainer and 5 engine ranks


def hf_state(plan: DemoPlan) -> dict[str, torch.Tensor]:
    """Random weights of the demo's dense or mixture model with one layer, under HF names."""
    hidden, dim, ffn = plan.hidden, plan.head_dim, plan.ffn
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "lm_head.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * dim, hidden),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * dim, hidden),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * dim, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, HEADS * dim),
        f"{layer}.self_attn.q_norm.weight": (dim,),
        f"{layer}.self_attn.k_norm.weight": (dim,),
    }
    moe = plan.model == "qwen3-moe"
    for mlp in [f"{layer}.mlp.experts.{i}" for i in range(EXPERTS)] if moe else [f"{layer}.mlp"]:
        shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (ffn, hidden)
        shapes[f"{mlp}.down_proj.weight"] = (hidden, ffn)
    if moe:
        shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, hidden)
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def megatron_dumps(plan: DemoPlan, state: dict[str, torch.Tensor]) -> list[bytes]:
    """The same weights as tensor-parallel Megatron ranks hold them; each rank has half of the heads."""
    tp, layer = plan.train.tp, "model.layers.0"
    dumps = []
    for rank in range(plan.num_trainer_ranks):

        def rows(name: str, rank: int = rank) -> torch.Tensor:
            return state[name].chunk(tp)[rank % tp]

        def columns(name: str, rank: int = rank) -> torch.Tensor:
            return state[name].chunk(tp, dim=1)[rank % tp].contiguous()

        groups = []
        dim, per_group = plan.head_dim, HEADS // KV_HEADS
        for group in range(rank % tp * KV_HEADS // tp, (rank % tp + 1) * KV_HEADS // tp):
            q = state[f"{layer}.self_attn.q_proj.weight"]
            groups.append(q[group * per_group * dim : (group + 1) * per_group * dim])
            keys_values = (state[f"{layer}.self_attn.{kind}_proj.weight"] for kind in "kv")
            groups.extend(tensor[group * dim : (group + 1) * dim] for tensor in keys_values)
        padded = {
            name: torch.cat((state[name], torch.full((2, plan.hidden), 9.0).bfloat16())).chunk(tp)[rank % tp]
            for name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        dump = {
            "embedding.word_embeddings.weight": padded["model.embed_tokens.weight"],
            "output_layer.weight": padded["lm_head.weight"],
            "decoder.final_layernorm.weight": state["model.norm.weight"],
            "decoder.layers.0.input_layernorm.weight": state[f"{layer}.input_layernorm.weight"],
            "decoder.layers.0.pre_mlp_layernorm.weight": state[f"{layer}.post_attention_layernorm.weight"],
            "decoder.layers.0.self_attention.linear_qkv.weight": torch.cat(groups),
            "decoder.layers.0.self_attention.q_layernorm.weight": state[f"{layer}.self_attn.q_norm.weight"],
            "decoder.layers.0.self_attention.k_layernorm.weight": state[f"{layer}.self_attn.k_norm.weight"],
            "decoder.layers.0.self_attention.linear_proj.weight": columns(f"{layer}.self_attn.o_proj.weight"),
            "decoder.layers.0.mlp.linear_fc1.weight": torch.cat(
                [rows(f"{layer}.mlp.gate_proj.weight"), rows(f"{layer}.mlp.up_proj.weight")]
            ),
            "decoder.layers.0.mlp.linear_fc2.weight": columns(f"{layer}.mlp.down_proj.weight"),
        }
        dumps.append(save(dump))
    return dumps


@pytest.mark.parametrize("train", [Layout(), Layout(tp=2), Layout(tp=2, dp=2)])
def test_judge_gathers_megatron_weights(train: Layout) -> None:
    plan = plan_of(train=train)
    state = hf_state(plan)
    gathered = trainer_hf_state(plan, megatron_dumps(plan, state))
    assert gathered.keys() == state.keys()
    assert all(torch.equal(gathered[name], tensor) for name, tensor in state.items())
    assert count_changed(gathered, state) == 0


def test_judge_refuses_data_parallel_replicas_that_differ() -> None:
    plan = plan_of(train=Layout(dp=2))
    state = hf_state(plan)
    dumps = megatron_dumps(plan, state)
    state["model.norm.weight"][3] = 77
    with pytest.raises(ValueError, match=r"rank 1 holds other bits of decoder\.final_layernorm"):
        trainer_hf_state(plan, [dumps[0], megatron_dumps(plan, state)[1]])


def fused_dump(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One unsplit rank of the sharded engine."""
    layer = "model.layers.0"
    fused = {name: tensor for name, tensor in state.items() if "_proj" not in name and "experts" not in name}
    fused[f"{layer}.self_attn.o_proj.weight"] = state[f"{layer}.self_attn.o_proj.weight"]
    qkv = [state[f"{layer}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
    fused[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(qkv)
    experts = [
        [state[f"{layer}.mlp.experts.{i}.{kind}_proj.weight"] for kind in ("gate", "up", "down")]
        for i in range(EXPERTS)
    ]
    fused[f"{layer}.mlp.experts.w13_weight"] = torch.stack([torch.cat((g, u)) for g, u, _ in experts])
    fused[f"{layer}.mlp.experts.w2_weight"] = torch.stack([down for _, _, down in experts])
    return fused


def test_judge_names_each_difference() -> None:
    plan = plan_of("qwen3-moe")
    truth = hf_state(plan)
    transformers, fused = save(truth), fused_dump(truth)
    assert engine_differences(plan, truth, [transformers, save(fused)]) == []

    fused["model.layers.0.mlp.experts.w13_weight"][2, plan.ffn + 4, 5] += 1
    fused["model.layers.0.mlp.experts.w13_weight"][2, plan.ffn + 6, 0] += 1
    negative_zero = {**truth, "model.norm.weight": truth["model.norm.weight"].clone()}
    negative_zero["model.norm.weight"][7] = 0.0
    held = {**negative_zero, "model.norm.weight": negative_zero["model.norm.weight"].clone()}
    held["model.norm.weight"][7] = -0.0
    del held["lm_head.weight"]
    found = engine_differences(plan, negative_zero, [save(held), save(fused)])
    up = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert [str(difference) for difference in found] == [
        "transformers engine: lm_head.weight is missing on one side, or has another shape or dtype there",
        "transformers engine: model.norm.weight differs in 1 elements, the first at [7]",
        f"sharded engine: {up} differs in 2 elements, the first at [4, 5]",
        "sharded engine: model.norm.weight differs in 1 elements, the first at [7]",
    ]
    assert found[0].count == VOCAB_SIZE * plan.hidden


def test_judge_knows_the_same_sizes_as_the_options() -> None:
    shape = model_shape(plan_of("qwen3-moe"))
    assert (shape.num_experts, shape.moe_intermediate_size, shape.hidden_size) == (EXPERTS, 48, 32)
