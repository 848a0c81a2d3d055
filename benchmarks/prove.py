"""What it costs at connect to prove that AWEX's converter only moves elements, for a large model.

    python -m benchmarks.prove > prove.json

The shapes are those of one of eight trainer ranks of Qwen3-30B-A3B: an eighth of the experts, and all else
whole. There are no weights: the proof needs none.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from awex.models.registry import get_train_weights_converter
from awex.sharding.rank_info import RankInfo
from transformers import Qwen3MoeConfig

from awex_delta.conversion.relocation import kind_of
from awex_delta.conversion.routes import find_routes
from awex_delta.trainers.view import TrainerView, WeightInfo
from benchmarks.environment import environment_record

RANKS, HEADS, KV_HEADS, HEAD_DIM, EXPERT_WIDTH = 8, 32, 4, 128, 768


class Rank:
    """What the proof asks of a trainer rank: names and shapes, and AWEX's converter."""

    def __init__(self, *, layers: int, experts: int, hidden: int, vocab_size: int) -> None:
        """Expert parallel rank 0 of eight; `experts` are its own in each layer."""
        self._shapes = dict(_shapes(layers, experts, hidden, vocab_size))
        settings: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_experts": RANKS * experts,
            "moe_intermediate_size": EXPERT_WIDTH,
        }
        config = Qwen3MoeConfig(**settings)
        info: dict[str, Any] = dict.fromkeys(RankInfo.__dataclass_fields__, 0)
        info |= {"tp_size": 1, "pp_size": 1, "ep_size": RANKS, "attn_tp_size": 1, "world_size": RANKS}
        infer = {"infer_atten_tp_size": 1, "device_backend": "cuda", "router_dtype": "bf16"}
        self._converter = get_train_weights_converter(
            "mcore", "Qwen3MoeForCausalLM", config, RankInfo(**info), infer, tf_config=SimpleNamespace()
        )

    def weights(self) -> Sequence[WeightInfo]:
        """Every parameter, as if all ranks owned it in parts."""
        return [
            WeightInfo(
                param=name,
                chunk=0,
                shape=shape,
                dtype=torch.bfloat16,
                owners=tuple(range(RANKS)),
                owned_start=0,
                owned_stop=math.prod(shape) // RANKS,
                trained=True,
            )
            for name, shape in self._shapes.items()
        ]

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """AWEX's HF names and tensors."""
        converted: list[tuple[str, torch.Tensor]] = self._converter.convert_param(
            key.removeprefix("0/"), tensor, vp_stage=0
        )
        return converted


def _shapes(layers: int, experts: int, hidden: int, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Megatron's parameters, in the model's order."""
    yield "embedding.word_embeddings.weight", (vocab_size, hidden)
    for layer in (f"decoder.layers.{number}" for number in range(layers)):
        yield f"{layer}.self_attention.linear_proj.weight", (hidden, HEADS * HEAD_DIM)
        yield f"{layer}.self_attention.linear_qkv.layer_norm_weight", (hidden,)
        yield f"{layer}.self_attention.linear_qkv.weight", ((HEADS + 2 * KV_HEADS) * HEAD_DIM, hidden)
        yield f"{layer}.self_attention.q_layernorm.weight", (HEAD_DIM,)
        yield f"{layer}.self_attention.k_layernorm.weight", (HEAD_DIM,)
        yield f"{layer}.pre_mlp_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.router.weight", (RANKS * experts, hidden)
        for expert in range(experts):
            yield f"{layer}.mlp.experts.linear_fc1.weight{expert}", (2 * EXPERT_WIDTH, hidden)
        for expert in range(experts):
            yield f"{layer}.mlp.experts.linear_fc2.weight{expert}", (hidden, EXPERT_WIDTH)
    yield "decoder.final_layernorm.weight", (hidden,)
    yield "output_layer.weight", (vocab_size, hidden)


def run(
    *,
    layers: int = 48,
    experts: int = 16,
    hidden: int = 2048,
    vocab_size: int = 151_936,
    threads: int = 1,
) -> dict[str, Any]:
    """Prove every parameter of a rank, and measure it. Linux only.

    Args:
        layers, hidden, vocab_size: of the model.
        experts: of this rank, in each layer.
        threads: that torch may use.

    Returns:
        JSON-able: parameters, elements, kinds (parameters that are alike but for layer and expert count as
        one), seconds, peak_bytes (resident memory beyond what there was before), threads, environment.

    Raises:
        RuntimeError: a converter was not proved to relocate.
    """
    before, rank = (
        torch.get_num_threads(),
        Rank(layers=layers, experts=experts, hidden=hidden, vocab_size=vocab_size),
    )
    torch.set_num_threads(threads)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # a peak could hide in freed memory that the allocator kept
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        resident, start = status_bytes("VmRSS"), time.perf_counter()
        routes = find_routes(cast(TrainerView, rank), 0).values()
        seconds, peak = time.perf_counter() - start, status_bytes("VmHWM")
    finally:
        torch.set_num_threads(before)
    unproved = [route.info.param for route in routes if route.relocations is None]
    if unproved:
        raise RuntimeError(f"{len(unproved)} parameters were not proved, such as {unproved[0]}")
    infos = [route.info for route in routes]
    return {
        "parameters": len(infos),
        "elements": sum(math.prod(info.shape) for info in infos),
        "kinds": len({(kind_of(info.param), info.shape) for info in infos}),
        "seconds": seconds,
        "peak_bytes": peak - resident,
        "threads": threads,
        "environment": environment_record(),
    }


def status_bytes(field: str) -> int:
    """A field of the status of this process, in bytes. Linux only."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def main() -> None:
    """Print the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    print(json.dumps(run(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
