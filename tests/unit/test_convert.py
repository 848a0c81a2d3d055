"""Relocation proofs, against HF tensors written down by hand and AWEX's own converters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from awex.models.registry import get_train_weights_converter
from awex.sharding.rank_info import RankInfo
from transformers import Qwen3Config, Qwen3MoeConfig

from awex_delta.conversion.relocation import Converter, Prover, Relocation

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS = 24, 8, 2, 4, 40, 8
ATTENTION = "decoder.layers.0.self_attention"
EXPERT = "decoder.layers.0.mlp.experts"


def awex(
    name: str,
    *,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    router: str = "bf16",
    norm_head: bool = False,
) -> Converter:
    """AWEX's converter of one Megatron parameter, at (rank, size) of tensor and expert parallelism."""
    is_moe = ep[1] > 1 or "experts" in name or "router" in name
    settings: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "norm_head": norm_head,
    }
    hf_config = Qwen3MoeConfig(**settings, num_experts=EXPERTS) if is_moe else Qwen3Config(**settings)
    architecture = "Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"
    ranks: dict[str, Any] = dict.fromkeys(RankInfo.__dataclass_fields__, 0)
    ranks |= {"tp_rank": tp[0], "tp_size": tp[1], "attn_tp_rank": tp[0], "attn_tp_size": tp[1]}
    ranks |= {"ep_rank": ep[0], "ep_size": ep[1], "pp_size": 1}
    infer = {"infer_atten_tp_size": 1, "device_backend": "cpu", "router_dtype": router}
    converter = get_train_weights_converter(
        "mcore", architecture, hf_config, RankInfo(**ranks), infer, tf_config=SimpleNamespace()
    )
    return lambda tensor: converter.convert_param(name, tensor)


def integers(*shape: int) -> torch.Tensor:
    """Distinct values."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def fused_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tp: tuple[int, int]) -> torch.Tensor:
    """Megatron's rows for one tensor-parallel rank, head by head: each group is its queries, its k, its v."""
    per_group = HEADS // KV_HEADS
    rows = []
    for group in range(KV_HEADS * tp[0] // tp[1], KV_HEADS * (tp[0] + 1) // tp[1]):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * HEAD_DIM + i] for i in range(HEAD_DIM)]
        rows += [k[group * HEAD_DIM + i] for i in range(HEAD_DIM)]
        rows += [v[group * HEAD_DIM + i] for i in range(HEAD_DIM)]
    return torch.stack(rows)


def moved(relocations: Sequence[Relocation], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """HF tensors by the runs alone; -1 where no run goes."""
    outputs: dict[str, torch.Tensor] = {}
    for one in relocations:
        output = parameter.new_full((torch.Size(one.shape).numel(),), -1, dtype=one.dtype)
        if not parameter.is_floating_point():
            output = output.to(parameter.dtype)
        for src, dst, length in zip(one.src.tolist(), one.dst.tolist(), one.length.tolist(), strict=True):
            output[dst : dst + length] = parameter.reshape(-1)[src : src + length]
        outputs[one.name] = output.view(one.shape)
    return outputs


def prove_relocation(
    convert: Converter, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> tuple[Relocation, ...] | None:
    like = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return Prover(0).prove("weight", convert, like, convert(like))


def proved(
    convert: Converter, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> tuple[Relocation, ...]:
    relocations = prove_relocation(convert, shape, dtype)
    assert relocations is not None
    return relocations


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].equal(tensor), name


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_grouped_query_attention_is_unfused_by_group(rank: int, size: int) -> None:
    q = integers(HEADS * HEAD_DIM, HIDDEN)
    k = 10_000 + integers(KV_HEADS * HEAD_DIM, HIDDEN)
    v = 20_000 + integers(KV_HEADS * HEAD_DIM, HIDDEN)
    local = fused_qkv(q, k, v, (rank, size))
    expected = {
        f"model.layers.0.self_attn.{letter}_proj.weight": whole.chunk(size)[rank]
        for letter, whole in (("q", q), ("k", k), ("v", v))
    }
    assert_same(
        moved(proved(awex(f"{ATTENTION}.linear_qkv.weight", tp=(rank, size)), local.shape), local), expected
    )
    thirds = [part.shape for part in local.chunk(3)]
    assert thirds != [tensor.shape for tensor in expected.values()], "equal thirds would go unnoticed"


def test_a_fused_bias_is_unfused_too() -> None:
    q, k, v = (
        integers(HEADS * HEAD_DIM),
        1000 + integers(KV_HEADS * HEAD_DIM),
        2000 + integers(KV_HEADS * HEAD_DIM),
    )
    local = fused_qkv(q, k, v, (0, 1))
    outputs = moved(proved(awex(f"{ATTENTION}.linear_qkv.bias"), local.shape), local)
    assert [tensor.tolist() for tensor in outputs.values()] == [q.tolist(), k.tolist(), v.tolist()]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (0, 4), (3, 4)])
def test_gate_and_up_are_kept_apart(rank: int, size: int) -> None:
    gate, up = integers(FFN, HIDDEN), 10_000 + integers(FFN, HIDDEN)
    rows = FFN // size
    local = torch.cat([gate[rank * rows : (rank + 1) * rows], up[rank * rows : (rank + 1) * rows]])
    outputs = moved(
        proved(awex("decoder.layers.0.mlp.linear_fc1.weight", tp=(rank, size)), local.shape), local
    )
    assert_same(
        outputs,
        {
            "model.layers.0.mlp.gate_proj.weight": gate.chunk(size)[rank],
            "model.layers.0.mlp.up_proj.weight": up.chunk(size)[rank],
        },
    )
    # Gathering the local tensors and cutting the result in two mixes gate and up.
    if size > 1:
        others = [torch.cat([g, u]) for g, u in zip(gate.chunk(size), up.chunk(size), strict=True)]
        assert not torch.cat(others).chunk(2)[0].equal(gate)


@pytest.mark.parametrize("name", ["local_experts.1.linear_fc2.weight", "linear_fc2.weight1"])
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (3, 4)])
def test_experts_get_global_numbers(name: str, rank: int, size: int) -> None:
    local = integers(HIDDEN, FFN)
    outputs = moved(proved(awex(f"{EXPERT}.{name}", ep=(rank, size)), local.shape), local)
    expert = rank * EXPERTS // size + 1
    assert_same(outputs, {f"model.layers.0.mlp.experts.{expert}.down_proj.weight": local})


def test_a_table_does_not_grow_with_the_parameter() -> None:
    for width in (8, 800):
        shape = ((HEADS + 2 * KV_HEADS) * HEAD_DIM, width)
        relocations = proved(awex(f"{ATTENTION}.linear_qkv.weight"), shape)
        assert [relocation.src.numel() for relocation in relocations] == [KV_HEADS] * 3


def test_a_parameter_bigger_than_what_is_read_fully() -> None:
    shape = (2 * 600, 512)
    relocations = proved(lambda x: [("a", x[600:]), ("b", x[:600, 256:].contiguous())], shape)
    assert [relocation.src.numel() for relocation in relocations] == [1, 600]
    local = integers(*shape)
    assert_same(moved(relocations, local), {"a": local[600:], "b": local[:600, 256:]})


def test_rows_that_are_no_rows_of_the_parameter_are_not_taken_for_one() -> None:
    def swap_inside_rows(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [("a", torch.cat((tensor[:, :1], tensor[:, 2:3], tensor[:, 1:2], tensor[:, 3:]), dim=1))]

    assert prove_relocation(swap_inside_rows, (1000, 512), torch.bfloat16) is None
    assert prove_relocation(swap_inside_rows, (10, 8), torch.bfloat16) is not None


Operation = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x: x * 2, id="scales"),
        pytest.param(lambda x: x + 1, id="adds one"),
        pytest.param(lambda x: x + 0, id="adds zero: -0.0 becomes 0.0"),
        pytest.param(lambda x: -x, id="negates"),
        pytest.param(lambda x: x.clamp(min=-0.5), id="clamps"),
        pytest.param(lambda x: torch.nn.functional.normalize(x, dim=0), id="normalises"),
        pytest.param(
            lambda x: torch.nn.functional.normalize(x.float(), dim=0).to(x.dtype), id="normalises cast"
        ),
        pytest.param(lambda x: x.to(torch.float8_e4m3fn), id="quantises"),
        pytest.param(lambda x: torch.cat((x, torch.zeros_like(x))), id="pads with zeros"),
        pytest.param(lambda x: x.to(torch.float8_e4m3fn).to(torch.bfloat16), id="loses bits on the way"),
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (6, 5), (300, 7)])
def test_a_converter_that_computes_is_found_out(operation: Operation, shape: tuple[int, ...]) -> None:
    assert prove_relocation(lambda x: [("a", operation(x))], shape, torch.bfloat16) is None


def test_a_converter_that_answers_differently_each_time_is_found_out() -> None:
    calls = []

    def alternate(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        calls.append(1)
        return [("a", tensor if len(calls) % 2 else tensor.flip(0))]

    assert prove_relocation(alternate, (60, 10), torch.bfloat16) is None


@pytest.mark.parametrize(("rank", "proved"), [(0, True), (1, False)])
def test_data_of_another_rank_is_not_taken_for_ones_own(rank: int, proved: bool) -> None:
    """What rank 0 was given is what a gather between both would bring to either."""
    given = list[torch.Tensor]()
    like = torch.empty(60, 10, dtype=torch.bfloat16, device="meta")

    def note(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        given.append(tensor.clone())
        return [("a", tensor)]

    assert Prover(0).prove("weight", note, like, note(like)) is not None
    of_rank_0 = iter(given)
    found = Prover(rank).prove("weight", lambda _: [("a", next(of_rank_0))], like, [("a", next(of_rank_0))])
    assert (found is not None) == proved


def test_a_normalised_lm_head_is_found_out() -> None:
    for norm_head in (False, True):
        convert = awex("output_layer.weight", norm_head=norm_head)
        relocations = prove_relocation(convert, (160, HIDDEN), torch.bfloat16)
        assert (relocations is None) == norm_head


def test_a_big_transpose_needs_too_many_runs_and_a_small_one_is_exact() -> None:
    def transpose(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [("a", tensor.t().contiguous())]

    assert prove_relocation(transpose, (300, 200), torch.bfloat16) is None
    small = integers(6, 5)
    assert_same(moved(proved(transpose, small.shape), small), {"a": small.t()})


def test_a_cast_is_part_of_the_relocation() -> None:
    (relocation,) = proved(awex("decoder.layers.0.mlp.router.weight", router="fp32"), (EXPERTS, HIDDEN))
    assert (relocation.name, relocation.dtype) == ("model.layers.0.mlp.gate.weight", torch.float32)
    (relocation,) = proved(awex("decoder.layers.0.mlp.router.weight"), (EXPERTS, HIDDEN), torch.float32)
    assert relocation.dtype == torch.bfloat16


def test_runs_ascend_in_the_output_whatever_their_order_in_the_parameter() -> None:
    (rotate,) = proved(lambda x: [("a", torch.cat((x[7:], x[:2])))], (10,))
    assert (rotate.src.tolist(), rotate.dst.tolist(), rotate.length.tolist()) == ([7, 0], [0, 3], [3, 2])


def test_an_element_may_go_to_two_places() -> None:
    (twice,) = proved(lambda x: [("a", torch.cat((x, x)))], (3, 4))
    assert (twice.src.tolist(), twice.dst.tolist(), twice.length.tolist()) == ([0, 0], [0, 12], [12, 12])


def test_where_nothing_moves_one_run_says_so() -> None:
    (relocation,) = proved(lambda x: [("a", x)], (30, 4))
    assert (relocation.src.tolist(), relocation.length.tolist()) == ([0], [120])


def test_an_empty_parameter() -> None:
    (relocation,) = proved(lambda x: [("a", x)], (0, 4))
    assert relocation.src.numel() == relocation.dst.numel() == relocation.length.numel() == 0


@pytest.mark.parametrize("tp", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("ep", [(0, 1), (1, 2)])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding.word_embeddings.weight", (80, HIDDEN)),
        (f"{ATTENTION}.linear_qkv.weight", (-1, HIDDEN)),
        (f"{ATTENTION}.linear_qkv.layer_norm_weight", (HIDDEN,)),
        (f"{ATTENTION}.q_layernorm.weight", (HEAD_DIM,)),
        (f"{ATTENTION}.linear_proj.weight", (HIDDEN, 16)),
        ("decoder.layers.0.pre_mlp_layernorm.weight", (HIDDEN,)),
        ("decoder.layers.0.mlp.router.weight", (EXPERTS, HIDDEN)),
        (f"{EXPERT}.local_experts.3.linear_fc1.weight", (20, HIDDEN)),
        (f"{EXPERT}.linear_fc2.weight3", (HIDDEN, 10)),
        ("output_layer.weight", (80, HIDDEN)),
    ],
)
def test_runs_make_what_the_converter_makes(
    name: str, shape: tuple[int, ...], tp: tuple[int, int], ep: tuple[int, int]
) -> None:
    shape = tuple((HEADS + 2 * KV_HEADS) * HEAD_DIM // tp[1] if size == -1 else size for size in shape)
    convert = awex(name, tp=tp, ep=ep)
    parameter = torch.randn(shape).bfloat16()
    assert_same(moved(proved(convert, shape), parameter), dict(convert(parameter)))
