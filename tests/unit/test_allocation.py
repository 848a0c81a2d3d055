"""Allocation strings: what they mean, that they survive a round trip, and where an error points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.errors import ConfigError
from awex_delta.settings.allocation import (
    ENGINE_BACKENDS,
    TRAINER_BACKENDS,
    Allocation,
    Parallelism,
    parse_allocation,
)

sizes = st.integers(min_value=1, max_value=64)


@pytest.mark.parametrize(
    ("text", "layout", "world_size"),
    [
        ("megatron:d2p1t4", Parallelism(data=2, tensor=4), 8),
        ("megatron:t4d2", Parallelism(data=2, tensor=4), 8),
        ("megatron:d3", Parallelism(data=3), 3),
        ("megatron:c2p3t4d5", Parallelism(data=5, pipeline=3, tensor=4, context=2), 120),
        ("megatron:d128", Parallelism(data=128), 128),
        ("fsdp:d4p1t1", Parallelism(data=4), 4),
        ("fsdp:d4t2c2", Parallelism(data=4, tensor=2, context=2), 16),
    ],
)
def test_trainer_allocations(text: str, layout: Parallelism, world_size: int) -> None:
    allocation = parse_allocation(text, backends=TRAINER_BACKENDS)
    assert allocation == Allocation(backend=text.partition(":")[0], layout=layout)
    assert allocation.world_size == world_size


@pytest.mark.parametrize(
    ("text", "layout", "world_size"),
    [
        ("sglang:d2t4p1", Parallelism(data=2, tensor=4), 8),
        ("vllm:d1t2", Parallelism(tensor=2), 2),
        ("vllm:p2", Parallelism(pipeline=2), 2),
    ],
)
def test_engine_allocations(text: str, layout: Parallelism, world_size: int) -> None:
    allocation = parse_allocation(text, backends=ENGINE_BACKENDS)
    assert (allocation.layout, allocation.world_size) == (layout, world_size)


@pytest.mark.parametrize("backend", ["fsdp", "torch"])
def test_trainers_whose_ranks_are_data_parallel_alone(backend: str) -> None:
    allocation = parse_allocation(f"{backend}:d3", backends=TRAINER_BACKENDS)
    assert allocation == Allocation(backend=backend, layout=Parallelism(data=3))
    assert parse_allocation(str(allocation), backends=TRAINER_BACKENDS) == allocation


def test_halves_of_a_hybrid_cover_the_same_ranks() -> None:
    allocation = parse_allocation("megatron:(attn:d2p1t4|ffn:d1p1e8)", backends=TRAINER_BACKENDS)
    assert allocation.layout == Parallelism(data=2, tensor=4)
    assert allocation.experts == Parallelism(expert=8)
    assert allocation.world_size == 8


def test_context_parallel_ranks_count_on_the_attention_half() -> None:
    allocation = parse_allocation("megatron:(attn:c2t2|ffn:d2e2)", backends=TRAINER_BACKENDS)
    assert allocation.world_size == 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["backend ''", "megatron"]),
        ("megatron", ["'megatron'", "no dimensions"]),
        ("megatron:", ["'megatron:'", "no dimensions"]),
        ("ddp:d8", ["backend 'ddp'", "'ddp:d8'", "megatron, fsdp, torch"]),
        ("fsdp:d4p2", ["'fsdp:d4p2' has p2", "FSDP2 has no stages", "'fsdp:d4'"]),
        ("fsdp:d4e2", ["'e2' at character 8 ", "d (data), t (tensor), c (context)", "does all parameters"]),
        ("fsdp:(attn:d2|ffn:e2)", ["'(' at character 6 "]),
        ("torch:t2", ["'torch:t2' splits a plain torch trainer", "'torch:d2'"]),
        ("torch:(attn:d2|ffn:d2)", ["'(' at character 7 "]),
        ("torch:c2", ["'c2' at character 7 ", "d (data)"]),
        ("torch", ["'torch'", "no dimensions", "'torch:d2'"]),
        ("sglang:d8", ["backend 'sglang'", "megatron"]),
        ("Megatron:d8", ["backend 'Megatron'"]),
        ("megatron:d2x1t4", ["'x1' at character 12 ", "d (data), p (pipeline), t (tensor), c (context)"]),
        ("megatron:d2p1d4", ["'d4' at character 14 ", "data parallelism a second time"]),
        ("megatron:d0", ["'d0' at character 10 ", "positive whole number"]),
        ("megatron:d-2", ["'d-2' at character 10 ", "positive whole number"]),
        ("megatron:d2.5", ["'d2.5' at character 10 "]),
        ("megatron:d2 t4", ["'d2 ' at character 10 "]),
        ("megatron: d2", ["' ' at character 10 "]),
        ("megatron:dt4", ["'d' at character 10 "]),
        ("megatron:2d", ["'2' at character 10 "]),
        ("megatron:D2", ["'D2' at character 10 "]),
        ("megatron:d02", ["'d02' at character 10 "]),
        ("megatron:d٢", ["'d٢' at character 10 "]),
        ("megatron:d9999999", ["'d9999999' at character 10 "]),
        ("megatron:d2e4", ["'e4' at character 12 ", "ffn half", "megatron:(attn:"]),
        ("megatron:(attn:d2", ["'(attn:d2'", "(attn:d2p1t4|ffn:d1p1e8)"]),
        ("megatron:(ffn:d2|attn:d2)", ["not of the form"]),
        ("megatron:(attn:d2|ffn:e2)x", ["not of the form"]),
        ("megatron:(attn:|ffn:e2)", ["no dimensions at character 16 "]),
        ("megatron:(attn:d2|ffn:c2)", ["'c2' at character 23 ", "e (expert)"]),
        ("megatron:(attn:d2t4|ffn:e4)", ["'attn:d2t4' covers 8", "'ffn:e4' covers 4"]),
        ("megatron:(attn:d2p2|ffn:e4)", ["'attn:d2p2' has p2", "'ffn:e4' has p1"]),
    ],
)
def test_an_error_points_at_the_part_at_fault(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_allocation(text, backends=TRAINER_BACKENDS)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["sglang:t4c2", "sglang:t4e4", "vllm:(attn:d2|ffn:e2)"])
def test_engines_take_only_data_pipeline_and_tensor(text: str) -> None:
    with pytest.raises(ConfigError, match="at character"):
        parse_allocation(text, backends=ENGINE_BACKENDS)


def test_a_transformers_engine_runs_whole_models() -> None:
    allocation = parse_allocation("transformers:d2", backends=ENGINE_BACKENDS)
    assert allocation.layout == Parallelism(data=2)
    assert parse_allocation(str(allocation), backends=ENGINE_BACKENDS) == allocation
    with pytest.raises(ConfigError, match="'transformers:t2' splits a transformers model"):
        parse_allocation("transformers:t2", backends=ENGINE_BACKENDS)


@given(data=sizes, pipeline=sizes, tensor=sizes, context=sizes)
def test_text_survives_a_round_trip(data: int, pipeline: int, tensor: int, context: int) -> None:
    layout = Parallelism(data=data, pipeline=pipeline, tensor=tensor, context=context)
    allocation = Allocation(backend="megatron", layout=layout)
    assert parse_allocation(str(allocation), backends=TRAINER_BACKENDS) == allocation
    assert allocation.world_size == data * pipeline * tensor * context


@given(data=sizes, pipeline=sizes, expert=sizes)
def test_hybrid_text_survives_a_round_trip(data: int, pipeline: int, expert: int) -> None:
    allocation = Allocation(
        backend="megatron",
        layout=Parallelism(data=data * expert, pipeline=pipeline),
        experts=Parallelism(data=data, pipeline=pipeline, expert=expert),
    )
    assert parse_allocation(str(allocation), backends=TRAINER_BACKENDS) == allocation
