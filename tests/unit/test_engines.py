"""Engine adapters: their views against loaders and readers that do not share a line with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from awex_delta.engines.fused import FusedEngine, FusedRank, padded_vocab
from awex_delta.engines.transformers import TransformersEngine
from awex_delta.engines.view import Bound, EngineTensor, EngineView, LiveParts, part, require_aliases
from awex_delta.errors import CorruptFrameError, LayoutError
from awex_delta.lines.storages import Storages
from tests.fused_oracle import full_hf_state, load_hf_state

# bf16 bits that arithmetic would not keep: quiet and signalling NaNs, -0.0, the least subnormal, infinity.
ODD_BITS = (0x7FC1, 0x7F81, -1, -0x8000, 1, 0x7F80)
HEAD_DIM = 4
# Not a declared field of the mixture's configuration, yet the published ones carry it.
MOE_EXTRAS: dict[str, Any] = {"head_dim": HEAD_DIM}


def dense_config(*, tied: bool = False, vocab: int = 100, kv_heads: int = 2) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )


def moe_config(*, experts: int = 8, hidden: int = 12, inter: int = 20) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=70,
        hidden_size=hidden,
        intermediate_size=24,
        moe_intermediate_size=inter,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
        initializer_range=0.3,
        **MOE_EXTRAS,
    )


def kv_heads_of(config: Qwen3Config | Qwen3MoeConfig) -> int:
    assert config.num_key_value_heads is not None
    return config.num_key_value_heads


def numbered_state(config: Qwen3Config | Qwen3MoeConfig) -> dict[str, torch.Tensor]:
    """Every HF tensor of the model, its elements numbered: no two bit patterns of one tensor are equal."""
    hidden, dim = config.hidden_size, HEAD_DIM
    q, kv = config.num_attention_heads * dim, kv_heads_of(config) * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (q, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.self_attn.q_norm.weight": (dim,),
            f"{prefix}.self_attn.k_norm.weight": (dim,),
        }
        if isinstance(config, Qwen3MoeConfig) and layer not in (config.mlp_only_layers or ()):
            shapes[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
            for expert in range(config.num_experts):
                shapes |= mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, config.moe_intermediate_size)
        else:
            shapes |= mlp_shapes(f"{prefix}.mlp", hidden, config.intermediate_size)
    numbers = itertools.count(1, step=1009)
    state = {name: numbered(shape, next(numbers)) for name, shape in shapes.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def mlp_shapes(prefix: str, hidden: int, inter: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inter, hidden),
        f"{prefix}.up_proj.weight": (inter, hidden),
        f"{prefix}.down_proj.weight": (hidden, inter),
    }


def numbered(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) + start).to(torch.int16).view(torch.bfloat16).view(shape)


def group(
    config: Qwen3Config | Qwen3MoeConfig, tp: int, ep: int = 1, *, separate_lm_head: bool = False
) -> list[FusedEngine]:
    return [
        FusedEngine(
            config,
            FusedRank(tp_rank=rank, tp_size=tp, ep_size=ep),
            separate_lm_head=separate_lm_head,
        )
        for rank in range(tp)
    ]


def cut(entry: EngineTensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole HF tensor that an entry says it is."""
    assert tuple(whole.shape) == entry.global_shape, entry.name
    for axis, (start, size) in enumerate(zip(entry.global_offset, entry.view.shape, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole


def write_through_views(engine: EngineView, state: dict[str, torch.Tensor]) -> None:
    """Overwrite every element through `Storages`, the last tensor first in its line."""
    entries = [entry for entry in reversed(engine.tensors()) if entry.tied_to is None]
    values = torch.cat([cut(entry, state[entry.name]).flatten() for entry in entries])
    Storages([entry.view for entry in entries]).scatter(torch.arange(values.numel()), values)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int16)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


FUSED_CASES = [
    pytest.param(dense_config(), 1, 1, id="tp1"),
    pytest.param(dense_config(), 2, 1, id="tp2"),
    pytest.param(dense_config(), 4, 1, id="tp4-kv2"),
    pytest.param(dense_config(kv_heads=1), 8, 1, id="tp8-kv1"),
    pytest.param(dense_config(tied=True), 2, 1, id="tied"),
    pytest.param(dense_config(vocab=10), 4, 1, id="rank-of-only-padding"),
    pytest.param(moe_config(), 1, 1, id="moe-tp1"),
    pytest.param(moe_config(), 2, 1, id="moe-tp2"),
    pytest.param(moe_config(), 2, 2, id="moe-tp2-ep2"),
    pytest.param(moe_config(), 4, 2, id="moe-tp4-ep2"),
    pytest.param(moe_config(), 4, 4, id="moe-tp4-ep4"),
]


@pytest.mark.parametrize(("config", "tp", "ep"), FUSED_CASES)
def test_writing_fused_views_fills_storage_as_a_loader_does(
    config: Qwen3Config | Qwen3MoeConfig, tp: int, ep: int
) -> None:
    state = numbered_state(config)
    loaded, written = group(config, tp, ep), group(config, tp, ep)
    for oracle, engine in zip(loaded, written, strict=True):
        load_hf_state(oracle, state)
        write_through_views(engine, state)
        assert engine.params.keys() == oracle.params.keys()
        for name, expected in oracle.params.items():
            assert same_bits(engine.params[name], expected), name
    whole = full_hf_state(written)
    assert whole.keys() == state.keys()
    for name, expected in state.items():
        assert same_bits(whole[name], expected), name


@pytest.mark.parametrize(("config", "tp", "ep"), FUSED_CASES)
def test_fused_views_cover_each_element_as_often_as_the_group_holds_it(
    config: Qwen3Config | Qwen3MoeConfig, tp: int, ep: int
) -> None:
    holders = {name: torch.zeros(tensor.shape) for name, tensor in numbered_state(config).items()}
    for engine in group(config, tp, ep):
        for entry in engine.tensors():
            cut(entry, holders[entry.name]).add_(1)
    for name, count in holders.items():
        replicated = "norm" in name or name.endswith("mlp.gate.weight")
        by_kv_head = "k_proj" in name or "v_proj" in name
        expected = tp if replicated else max(1, tp // kv_heads_of(config)) if by_kv_head else 1
        assert set(count.flatten().tolist()) == {expected}, name


def test_key_value_heads_fewer_than_ranks_are_held_by_neighbours() -> None:
    """8 heads, 2 key-value heads, head size 4, 4 ranks: 8 query rows, then 4 key and 4 value rows."""
    config = dense_config()
    engine = FusedEngine(config, FusedRank(tp_rank=3, tp_size=4))
    state = numbered_state(config)
    write_through_views(engine, state)
    attention = "model.layers.1.self_attn"
    fused = engine.params[f"{attention}.qkv_proj.weight"]
    assert fused.shape == (16, 12)
    assert same_bits(fused[:8], state[f"{attention}.q_proj.weight"][24:32])
    assert same_bits(fused[8:12], state[f"{attention}.k_proj.weight"][4:8])
    assert same_bits(fused[12:16], state[f"{attention}.v_proj.weight"][4:8])


def test_experts_keep_their_global_ids_under_expert_parallelism() -> None:
    engine = FusedEngine(moe_config(experts=8), FusedRank(tp_rank=1, tp_size=2, ep_size=2))
    prefix = "model.layers.0.mlp.experts"
    names = [entry.name for entry in engine.tensors() if entry.name.startswith(f"{prefix}.")]
    assert names[0] == f"{prefix}.4.gate_proj.weight"
    assert {int(name.removeprefix(f"{prefix}.").split(".")[0]) for name in names} == {4, 5, 6, 7}
    up = next(entry for entry in engine.tensors() if entry.name == f"{prefix}.5.up_proj.weight")
    up.view.fill_(3)
    w13 = engine.params[f"{prefix}.w13_weight"]
    assert w13.count_nonzero() == 20 * 12
    assert torch.equal(w13[1, 20:], torch.full((20, 12), 3, dtype=torch.bfloat16))


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(100, 1, 128), (100, 2, 128), (64, 2, 64), (100, 6, 384)])
def test_vocabulary_padding(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab(vocab, tp) == rows


def test_padding_rows_are_in_no_view() -> None:
    engines = group(dense_config(vocab=100), 2)
    for engine in engines:
        for tensor in engine.params.values():
            tensor.fill_(7)
        for entry in engine.tensors():
            entry.view.zero_()
    assert [engine.params["lm_head.weight"].count_nonzero() for engine in engines] == [0, 28 * 12]
    assert (engines[1].params["lm_head.weight"][36:] == 7).all()
    assert not any(
        tensor.any()
        for engine in engines
        for name, tensor in engine.params.items()
        if name not in ("lm_head.weight", "model.embed_tokens.weight")
    )


def test_tied_head_shares_storage_or_is_a_tensor_of_its_own() -> None:
    shared = FusedEngine(dense_config(tied=True))
    separate = FusedEngine(dense_config(tied=True), separate_lm_head=True)
    assert "lm_head.weight" not in shared.params
    by_name = {entry.name: entry for entry in shared.tensors()}
    assert by_name["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    by_name["model.embed_tokens.weight"].view[3, 5] = 9
    assert by_name["lm_head.weight"].view[3, 5] == 9
    by_name = {entry.name: entry for entry in separate.tensors()}
    assert by_name["lm_head.weight"].tied_to is None
    by_name["model.embed_tokens.weight"].view[3, 5] = 9
    assert by_name["lm_head.weight"].view[3, 5] == 0


def test_reader_refuses_replicas_that_differ() -> None:
    engines = group(dense_config(), 4)
    state = numbered_state(dense_config())
    for engine in engines:
        load_hf_state(engine, state)
    keys = engines[1].params["model.layers.0.self_attn.qkv_proj.weight"]
    keys[8, 0] = 1
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj\.weight: replica 1"):
        full_hf_state(engines)


def test_router_may_be_float32() -> None:
    engine = FusedEngine(moe_config(), router_dtype=torch.float32)
    dtypes = {entry.view.dtype for entry in engine.tensors() if entry.name.endswith("mlp.gate.weight")}
    assert dtypes == {torch.float32}
    assert engine.params["model.layers.0.mlp.experts.w13_weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (FusedRank(tp_size=3), "tp_size 3 does not divide num_attention_heads 8"),
        (FusedRank(tp_size=2, ep_size=4), "ep_size 4 does not divide tp_size 2"),
        (FusedRank(tp_size=2, tp_rank=2), "tp_rank 2 is outside a group of tp_size 2"),
        (FusedRank(tp_size=8, ep_size=1), "moe_tp_size 8 does not divide moe_intermediate_size 20"),
        (FusedRank(tp_size=0), "0 is outside a group of tp_size 0"),
    ],
)
def test_unservable_splits_are_refused(rank: FusedRank, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        FusedEngine(moe_config(), rank)


def test_key_value_heads_must_divide_or_be_divided_by_the_ranks() -> None:
    with pytest.raises(LayoutError, match="num_key_value_heads 3 does not divide tp_size 8"):
        FusedEngine(dense_config(kv_heads=3), FusedRank(tp_size=8))


def test_unsupported_models_are_refused() -> None:
    config = dense_config()
    config.attention_bias = True
    with pytest.raises(LayoutError, match="attention_bias"):
        FusedEngine(config)
    with pytest.raises(LayoutError, match="'llama'"):
        FusedEngine(LlamaConfig())


def test_a_commit_publishes_and_flushes_once() -> None:
    engine = FusedEngine(dense_config())
    assert isinstance(engine, EngineView)
    assert (engine.version, engine.cache_flushes) == (None, 0)
    engine.committed(4)
    engine.synchronize()
    assert (engine.version, engine.cache_flushes) == (4, 1)


def strided_views() -> list[tuple[str, torch.Tensor]]:
    def storage(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    return [
        ("contiguous", storage(5, 7)),
        ("rows", storage(9, 7)[2:6]),
        ("columns", storage(5, 9)[:, 2:6]),
        ("transpose", storage(5, 7).t()),
        ("column-of-a-transpose", storage(5, 7).t()[3]),
        ("one-expert", storage(3, 4, 5)[1]),
        ("transposed-experts-slice", storage(3, 4, 5).transpose(1, 2)[:, 1:4]),
        ("every-second-row", storage(8, 3)[1::2]),
        ("permuted", storage(2, 3, 4).permute(2, 0, 1)),
        ("vector", storage(6)),
    ]


@pytest.mark.parametrize(("view"), [pytest.param(view, id=name) for name, view in strided_views()])
def test_writes_reach_storage_whatever_the_strides(view: torch.Tensor) -> None:
    index = torch.tensor([0, 2, 3, view.numel() - 1])
    values = torch.tensor(ODD_BITS[:4], dtype=torch.int16).view(torch.bfloat16)
    cells = list(itertools.product(*(range(size) for size in view.shape)))
    storage = view.as_strided((view.untyped_storage().nbytes() // 2,), (1,), 0)
    storage.zero_()
    Storages([view]).scatter(index, values)
    written = {cells[position]: bit for position, bit in zip(index.tolist(), ODD_BITS, strict=False)}
    for cell in cells:
        assert view[cell].view(torch.int16).item() == written.get(cell, 0), cell
    assert storage.view(torch.int16).count_nonzero() == len(written)


def test_writes_reach_float32_and_parameters_that_require_grad() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    payload = torch.tensor([0x7FC00123, 1], dtype=torch.int32).view(torch.float32)
    Storages([weight[:, 1]]).scatter(torch.tensor([1, 3]), payload)
    assert weight.detach().view(torch.int32)[:, 1].tolist() == [0, 0x7FC00123, 0, 1]


def test_writes_take_strided_values() -> None:
    view = torch.zeros(6, dtype=torch.bfloat16)
    Storages([view]).scatter(torch.tensor([0, 2, 4]), torch.arange(6, dtype=torch.bfloat16)[1::2])
    assert view.tolist() == [1, 0, 3, 0, 5, 0]


def test_writes_of_another_dtype_or_another_count_are_refused() -> None:
    view = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"float16 values into a torch\.bfloat16"):
        Storages([view]).scatter(torch.tensor([0]), torch.zeros(1, dtype=torch.float16))
    with pytest.raises(CorruptFrameError, match="1 values for 2 positions"):
        Storages([view]).scatter(torch.tensor([0, 1]), torch.zeros(1, dtype=torch.bfloat16))
    assert view.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.float64])
def test_weights_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(LayoutError, match=rf"w is served as {dtype}"):
        part("w", torch.zeros(2, 2).to(dtype))


@pytest.mark.parametrize(
    ("view", "shape", "offset", "message"),
    [
        (torch.zeros(2, 3), (2, 4), (0, 2), "does not fit"),
        (torch.zeros(2, 3), (2, 3), (-1, 0), "does not fit"),
        (torch.zeros(2, 3), (6,), (0,), "does not fit"),
        (torch.zeros(1, 3).expand(2, 3), None, None, "expanded"),
        (torch.zeros(2, 3, device="meta"), None, None, "meta device"),
    ],
)
def test_impossible_parts_are_refused(
    view: torch.Tensor, shape: tuple[int, ...] | None, offset: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        part("w", view, shape, offset)


def test_a_copy_is_refused() -> None:
    live = torch.zeros(3, 4)
    require_aliases([part("w", live[:, 1:])], [live])
    with pytest.raises(LayoutError, match="w is a copy"):
        require_aliases([part("w", live[:, 1:].contiguous())], [live])


def test_memory_that_was_released_and_tensors_without_memory_are_refused() -> None:
    live = torch.zeros(3, 4)
    live.untyped_storage().resize_(0)
    two: Any = TwoTensor
    with pytest.raises(LayoutError, match="w has no memory: its storage was freed"):
        part("w", live)
    with pytest.raises(LayoutError, match="w is a TwoTensor, which has no memory of its own"):
        part("w", two(torch.zeros(2), torch.zeros(2)))
    assert part("w", torch.zeros(0, 4)).view.shape == (0, 4)


def test_a_part_is_an_ordinary_tensor_over_the_same_memory() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 6))
    with torch.inference_mode():
        made = torch.zeros(3)
        views = [part("a", param[:, 1:5:2]).view, part("b", made).view]
    for view in views:
        assert not view.requires_grad
        view.fill_(1)
    assert param.detach().sum(0).tolist() == [0, 4, 0, 4, 0, 0]
    assert made.tolist() == [1, 1, 1]


class Given(EngineView):
    """An engine whose owner says what it computes with now."""

    def __init__(self, *live: EngineTensor) -> None:
        self.live: Sequence[EngineTensor] | Callable[[], Sequence[EngineTensor]] = live

    def tensors(self) -> Sequence[EngineTensor]:
        return self.live() if callable(self.live) else self.live

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def committed(self, version: int) -> None:
        """Nothing to publish."""


def test_what_is_bound_is_what_the_engine_computes_with_now() -> None:
    first, second, third = (torch.zeros(2, 3) for _ in range(3))
    engine = Given(part("a", first), part("b", second))
    bound = Bound(engine)
    assert bound.look()
    assert not bound.look()
    looks = bound.looks()
    engine.live = [part("a", first), part("b", third)]
    with pytest.raises(LayoutError, match="moved to other memory while they were updated: b"):
        bound.require_unmoved()
    assert bound.look()
    assert (bound.moved, bound.looks() == looks) == ("b", True)
    bound.require_unmoved()
    bound.parts[1].view.fill_(7)
    assert [int(tensor.sum()) for tensor in (second, third)] == [0, 42]
    for other in (
        [part("a", first), part("c", third)],
        [part("a", first.view(3, 2)), part("b", third)],
        [part("a", first), part("b", third, (4, 3), (2, 0))],
        [part("a", first)],
        [part("a", first), part("b", first, tied_to="a")],
    ):
        engine.live = other
        assert bound.look()
        assert bound.looks() != looks


def test_what_would_be_written_twice_or_never_is_refused() -> None:
    live = torch.zeros(3, 4)
    for parts, message in (
        ([part("w", live[:1]), part("w", live[1:])], "w is published twice"),
        ([part("a", live), part("b", live[:2])], "b shares the memory of a: name that as its tied_to"),
        ([part("a", live), part("b", live.clone(), tied_to="a")], "b is given as tied to a, but has other"),
        ([part("a", live), part("b", live[1:], tied_to="c")], "b is given as tied to c, but has other"),
    ):
        with pytest.raises(LayoutError, match=message):
            Bound(Given(*parts)).look()
    engine = Given()
    engine.live = lambda: [part("a", live.clone())]
    with pytest.raises(LayoutError, match=r"a: tensors\(\) gives copies"):
        Bound(engine).look()


def test_views_are_made_anew_only_when_a_live_tensor_moved() -> None:
    model = torch.nn.Linear(4, 3, bias=False)
    made: list[torch.Tensor] = []

    def parts() -> list[EngineTensor]:
        made.append(model.weight)
        return [part("top", model.weight[:1]), part("rest", model.weight[1:])]

    live = LiveParts(model.named_parameters, parts)
    assert live() is live()
    model.weight.data = model.weight.data.clone()
    model.weight.data.fill_(2)
    assert live()[1].view.tolist() == [[2] * 4] * 2
    model.weight = torch.nn.Parameter(torch.ones(3, 4))
    assert live()[1].view.tolist() == [[1] * 4] * 2
    assert len(made) == 3
    copying = LiveParts(model.named_parameters, lambda: [part("w", model.weight.clone())])
    with pytest.raises(LayoutError, match="w is a copy"):
        copying()


def test_captured_graphs_read_the_addresses_that_weights_had() -> None:
    model = torch.nn.Linear(4, 3)
    live = LiveParts(
        model.named_parameters,
        lambda: [part(n, t) for n, t in model.named_parameters()],
        captured="start anew",
    )
    assert len(live()) == 2
    with torch.no_grad():
        model.weight.fill_(1)
    assert len(live()) == 2
    model.bias.data = model.bias.data.clone()
    for _ in range(2):
        with pytest.raises(
            LayoutError, match="bias moved to other memory than captured graphs read: start anew"
        ):
            live()


def model_of(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    # A model cast by `.to(bfloat16)` would have its rotary frequencies rounded too; a loaded one has not.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    build: Callable[..., PreTrainedModel] = Qwen3MoeForCausalLM if kind == "moe" else Qwen3ForCausalLM
    # The grouped matrix product of transformers wants rows of a multiple of 16 bytes.
    moe = moe_config(experts=4, hidden=16, inter=24)
    try:
        return build(moe if kind == "moe" else dense_config(tied=kind == "tied"))
    finally:
        torch.set_default_dtype(before)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=torch.arange(1, 13)[None]).logits
    return output


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_transformers_views_are_the_weights_that_the_model_serves(kind: str, tmp_path: Path) -> None:
    served, trained = model_of(kind, 1), model_of(kind, 2)
    trained.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    engine = TransformersEngine(served)
    assert isinstance(engine, EngineView)
    assert {entry.name for entry in engine.tensors() if entry.tied_to is None} == checkpoint.keys()

    before = logits(served)
    write_through_views(engine, checkpoint)
    assert not torch.equal(logits(served), before)
    fresh: Any = type(trained).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits(served), logits(fresh))
    prompt = torch.tensor([[5, 6, 7], [9, 9, 1]])
    tokens = engine.generate(prompt, 8)
    assert tokens.shape == (2, 11)
    assert torch.equal(tokens, TransformersEngine(fresh).generate(prompt, 8))
    assert torch.equal(tokens, fresh.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None))


def test_transformers_tied_head_is_named_as_tied() -> None:
    engine = TransformersEngine(model_of("tied", 0))
    tied = {entry.name: entry.tied_to for entry in engine.tensors() if entry.tied_to is not None}
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_transformers_model_without_its_head_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"Qwen3Model is a base model.*'model\.'"):
        TransformersEngine(Qwen3Model(dense_config()))


def test_transformers_experts_of_an_unknown_layout_are_refused() -> None:
    model = model_of("moe", 0)
    vars(model.get_submodule("model.layers.0.mlp.experts"))["is_transposed"] = True
    with pytest.raises(LayoutError, match="'is_transposed': True"):
        TransformersEngine(model)


def test_transformers_quantized_weights_are_refused() -> None:
    model = model_of("dense", 0)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight = torch.nn.Parameter(torch.zeros(24, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(LayoutError, match=r"up_proj\.weight is served as torch\.int8"):
        TransformersEngine(model)


def test_transformers_commit_publishes_once() -> None:
    engine = TransformersEngine(model_of("dense", 0))
    engine.synchronize()
    engine.committed(2)
    assert (engine.version, engine.cache_flushes) == (2, 1)
