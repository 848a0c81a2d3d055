"""Every converter of AWEX in front of two tensor-parallel trainers, which also share the experts.

What a trainer holds are tensors of Megatron's shapes, or a Megatron model; the groups are Megatron's.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from awex.models.qwen4_exp import register_qwen4_exp_awex
from awex.models.registry import ModelRegistry
from megatron.core import parallel_state as mpu

from awex_delta.conversion.routes import find_routes
from awex_delta.errors import UnsupportedError, UpdateAborted
from awex_delta.folder.reader import DiskReader
from awex_delta.folder.writer import DiskWriter
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer
from awex_delta.trainers.converters import converter_of
from awex_delta.trainers.megatron import MegatronTrainer
from awex_delta.trainers.megatron_layout import rank_info
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import TrainerLayout, WeightInfo
from benchmarks.collectives import CountTraffic

pytestmark = pytest.mark.timeout(120)

SETTINGS = DeltaSettings(
    anchor_interval=0, timeout_seconds=30, connect_timeout_seconds=60, allow_any_world_size=True
)
NO_FAULTS = ("",) * 3

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, VOCAB = 32, 48, 4, 2, 8, 4, 64
CONFIG = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_group_size": 2,  # Ling: layer 0 is linear attention, layer 1 is not
    "q_lora_rank": None,
}
VISION = SimpleNamespace(hidden_size=16, num_heads=2)

Shapes = Mapping[str, tuple[int, ...]]
"""Of the parameters of one of two tensor-parallel ranks, by their names in Megatron."""

LAYER = "decoder.layers.0."
OUTER: Shapes = {
    "embedding.word_embeddings.weight": (VOCAB // 2, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCAB // 2, HIDDEN),
}
ATTENTION: Shapes = {
    LAYER + "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    LAYER + "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD_DIM // 2),
    LAYER + "self_attention.q_layernorm.weight": (HEAD_DIM,),
    LAYER + "self_attention.k_layernorm.weight": (HEAD_DIM,),
}
QKV: Shapes = {
    LAYER + "self_attention.linear_qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM // 2, HIDDEN),
    LAYER + "self_attention.linear_qkv.bias": ((HEADS + 2 * KV_HEADS) * HEAD_DIM // 2,),
}
DENSE: Shapes = {
    LAYER + "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    LAYER + "mlp.linear_fc1.weight": (FFN, HIDDEN),
    LAYER + "mlp.linear_fc2.weight": (HIDDEN, FFN // 2),
}
MOE: Shapes = {
    LAYER + "pre_mlp_layernorm.weight": (HIDDEN,),
    LAYER + "mlp.router.weight": (EXPERTS, HIDDEN),
    LAYER + "mlp.experts.linear_fc1.weight0": (2 * FFN, HIDDEN),
    LAYER + "mlp.experts.linear_fc1.weight1": (2 * FFN, HIDDEN),
    LAYER + "mlp.experts.local_experts.0.linear_fc2.weight": (HIDDEN, FFN),
    LAYER + "mlp.experts.local_experts.1.linear_fc2.weight": (HIDDEN, FFN),
}
SHARED_EXPERT: Shapes = {
    LAYER + "mlp.shared_experts.linear_fc1.weight": (FFN, HIDDEN),
    LAYER + "mlp.shared_experts.linear_fc2.weight": (HIDDEN, FFN // 2),
}
GATED: Shapes = {
    LAYER + "self_attention.linear_qkv.weight": ((2 * HEADS + 2 * KV_HEADS) * HEAD_DIM // 2, HIDDEN)
}
GATED_DELTA: Shapes = {
    "decoder.layers.1.self_attention.in_proj.layer_norm_weight": (HIDDEN,),
    "decoder.layers.1.self_attention.in_proj.weight": ((16 + 16 + 32 + 32 + 4 + 4) // 2, HIDDEN),
    "decoder.layers.1.self_attention.conv1d.weight": ((16 + 16 + 32) // 2, 1, 4),
    "decoder.layers.1.self_attention.A_log": (2,),
    "decoder.layers.1.self_attention.dt_bias": (2,),
    "decoder.layers.1.self_attention.out_norm.weight": (8,),
    "decoder.layers.1.self_attention.out_proj.weight": (HIDDEN, 16),
}
LINEAR_ATTENTION: Shapes = {
    LAYER + "self_attention.input_layernorm.weight": (HIDDEN,),
    LAYER + "self_attention.linear_qkv.weight": QKV[LAYER + "self_attention.linear_qkv.weight"],
    LAYER + "self_attention.linear_gate.weight": (HEADS * HEAD_DIM // 2, HIDDEN),
    LAYER + "self_attention.gate_norm.weight": (HEADS * HEAD_DIM // 2,),
    LAYER + "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD_DIM // 2),
}
LATENT_ATTENTION: Shapes = {
    "decoder.layers.1.input_layernorm.weight": (HIDDEN,),
    "decoder.layers.1.self_attention.linear_q_proj.weight": (24, HIDDEN),
    "decoder.layers.1.self_attention.linear_kv_down_proj.weight": (10, HIDDEN),
    "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight": (16,),
    "decoder.layers.1.self_attention.linear_kv_up_proj.weight": (24, 16),
    "decoder.layers.1.self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD_DIM // 2),
}
TOWER: Shapes = {
    "vision_model.decoder.layers.0.self_attention.linear_qkv.weight": (24, 16),
    "vision_model.decoder.layers.0.self_attention.linear_qkv.bias": (24,),
    "vision_model.decoder.layers.0.self_attention.linear_proj.weight": (16, 8),
    "vision_model.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (16,),
    "vision_model.patch_embed.proj.weight": (16, 12),
}
TOWER_QKV = {name for name in TOWER if "linear_qkv.weight" in name or "linear_qkv.bias" in name}


def language(shapes: Shapes) -> Shapes:
    return {f"language_model.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of two ranks of a model. together: parameters that its converter makes of those of both ranks."""

    shapes: Shapes
    together: frozenset[str] = frozenset()


QWEN3 = {**OUTER, **ATTENTION, **QKV}
QWEN3_5 = {**OUTER, **ATTENTION, **GATED, **GATED_DELTA}
QWEN3_5_TOGETHER = {
    *GATED,
    "decoder.layers.1.self_attention.in_proj.weight",
    "decoder.layers.1.self_attention.conv1d.weight",
}
QWEN4 = {name: shape for name, shape in QWEN3_5.items() if "final_layernorm" not in name}
LING_LINEAR = Model(
    shapes={**OUTER, **LINEAR_ATTENTION, **LATENT_ATTENTION, **MOE},
    together=frozenset(
        {
            LAYER + "self_attention.linear_qkv.weight",
            "decoder.layers.1.self_attention.linear_kv_down_proj.weight",
        }
    ),
)
QWEN3_VL = {**TOWER, **language(QWEN3)}

MODELS: Mapping[str, Model] = {
    "AnyForCausalLM": Model(shapes={**QWEN3, **DENSE}, together=frozenset(QKV)),  # AWEX's default
    "Qwen3ForCausalLM": Model(shapes={**QWEN3, **DENSE}),
    "Qwen3MoeForCausalLM": Model(shapes={**QWEN3, **MOE}),
    "Qwen3VLForConditionalGeneration": Model(
        shapes={**QWEN3_VL, **language(DENSE)}, together=frozenset(TOWER_QKV)
    ),
    "Qwen3VLMoeForConditionalGeneration": Model(
        shapes={**QWEN3_VL, **language(MOE)}, together=frozenset(TOWER_QKV)
    ),
    "Qwen3_5ForCausalLM": Model(shapes={**QWEN3_5, **DENSE}, together=frozenset(QWEN3_5_TOGETHER)),
    "Qwen3_5MoeForCausalLM": Model(shapes={**QWEN3_5, **MOE}, together=frozenset(QWEN3_5_TOGETHER)),
    "Qwen3_5ForConditionalGeneration": Model(
        shapes={**TOWER, **QWEN3_5, **DENSE}, together=frozenset({*TOWER_QKV, *QWEN3_5_TOGETHER})
    ),
    "Qwen3_5MoeForConditionalGeneration": Model(
        shapes={**TOWER, **QWEN3_5, **MOE, **SHARED_EXPERT},
        together=frozenset({*TOWER_QKV, *QWEN3_5_TOGETHER}),
    ),
    "Qwen4ExpForConditionalGeneration": Model(shapes={**QWEN4, **MOE}, together=frozenset(QWEN3_5_TOGETHER)),
    "BailingMoeForCausalLM": Model(shapes={**QWEN3, **MOE, **SHARED_EXPERT}, together=frozenset(QKV)),
    "BailingMoeV2ForCausalLM": LING_LINEAR,
    "BailingMoeLinearForCausalLM": LING_LINEAR,
    "BailingMoeV2_5ForCausalLM": LING_LINEAR,
    "BailingMoeV2_5ForCausalLMNextN": LING_LINEAR,
}
DAILY = (
    "AnyForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "BailingMoeV2_5ForCausalLM",
)
"""The others have converters of the same classes."""


def test_every_converter_of_awex_is_listed_here() -> None:
    register_qwen4_exp_awex()
    assert set(ModelRegistry.get_registered_models()) == MODELS.keys() - {"AnyForCausalLM"}


COLUMNS = tuple(f"{name}.weight" for name in ("o_proj", "out_proj", "dense", "down_proj", "attn.proj"))


def config_of(architecture: str) -> Any:
    text: Any = SimpleNamespace(**CONFIG, architectures=[architecture], get_text_config=lambda: text)
    if "ConditionalGeneration" not in architecture:
        return text
    return SimpleNamespace(**vars(text), text_config=text, vision_config=VISION)


def cut_dim(name: str) -> int | None:
    """The dimension along which two ranks share an HF tensor; None if each that has it has all of it."""
    if ".experts." in name or "kv_a_" in name or "patch_embed" in name:
        return None
    if "attn.qkv" in name or "lm_head" in name or "embed_tokens" in name or "g_norm" in name:
        return 0
    if "norm" in name or "mlp.gate." in name:
        return None
    return 1 if name.endswith(COLUMNS) else 0


class Shards(TorchAdamWTrainer):
    """One of two tensor-parallel ranks, whose parameters AWEX's converter is given."""

    def __init__(self, architecture: str, shapes: Shapes) -> None:
        info = rank_info()
        self._rank = int(info["tp_rank"])
        self._converter = converter_of(
            config_of(architecture),
            info,
            SimpleNamespace(
                hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=KV_HEADS, kv_channels=HEAD_DIM
            ),
            layer_ids={},
            router_dtype="bf16",
        )
        weights = {name: self._draw(name, shape) for name, shape in shapes.items()}
        masters = {name: weight.float().requires_grad_() for name, weight in weights.items()}
        super().__init__(
            weights=weights,
            masters=masters,
            optimizer=torch.optim.AdamW(list(masters.values()), lr=3e-6),
            settings=SETTINGS,
        )
        self._layout = TrainerLayout(
            architecture=architecture, rank_info=info, vocab_size=VOCAB, tied_embeddings=False
        )

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """What ranks hold in full is equal, what they share is not."""
        outputs = self._converter.convert_param(name, torch.empty(shape, device="meta"))
        is_cut = any(cut_dim(output) is not None or ".experts." in output for output, _ in outputs)
        seed = zlib.crc32(name.encode()) + (self._rank if is_cut or "kv_down" in name else 0)
        return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()

    def _info(self, name: str, tensor: torch.Tensor) -> WeightInfo:
        return replace(super()._info(name, tensor), owners=(self._rank,))

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        converted: Sequence[tuple[str, torch.Tensor]] = self._converter.convert_param(
            key.removeprefix("0/"), tensor
        )
        return converted


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of one update. traffic: calls and bytes on the trainers' own groups."""

    kind: Kind
    weights: Mapping[str, torch.Tensor]
    traffic: tuple[int, int] = (0, 0)


def arrives(me: Rank, name: str) -> Any:
    """What another rank left in the folder."""
    while not (me.folder / name).exists():
        time.sleep(0.02)
    return torch.load(me.folder / name)


def leave(me: Rank, name: str, value: Any) -> None:
    torch.save(value, me.folder / "unfinished")
    (me.folder / "unfinished").rename(me.folder / name)


def converted(view: Any) -> dict[str, torch.Tensor]:
    """Collective: over both trainers."""
    return {
        name: tensor.detach().clone()
        for info in view.weights()
        for name, tensor in view.convert(info.key, view.tensor(info.key))
    }


def serve(me: Rank, faults: Sequence[str]) -> list[Seen]:
    """The engine: one rank that holds all HF tensors."""
    store = host_store()
    leave(me, "port", store.port)
    tensors = arrives(me, "tensors")
    engine = DictEngine(
        {name: shape for name, (shape, _) in tensors.items()},
        dtypes={name: dtype for name, (_, dtype) in tensors.items()},
    )
    receiver = Receiver(engine, meeting(store.port, num_engine_ranks=1), 0, "engine", SETTINGS)

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in engine.tensors_by_name.items()}

    seen = [
        Seen(kind=stats.verdict.kind, weights=weights()) for stats in commits(receiver.update_weights, faults)
    ]
    receiver.close()
    arrives(me, "trained")
    return seen


def train(me: Rank, view: Any, train_step: Callable[[], object], faults: Sequence[str]) -> list[Seen]:
    """One of two trainers; the second fails in the phases `faults`, attempt by attempt."""
    rank, plan = me.rank - 1, FaultPlan()
    announce(me, view)
    there = meeting(arrives(me, "port"), num_engine_ranks=1)
    sender = Sender(view, there, rank, SETTINGS, on_phase=plan.on_phase)
    sender.connect()
    counter = CountTraffic()

    def update(version: int) -> UpdateStats:
        train_step()
        counter.num_calls.clear()
        counter.num_bytes.clear()
        with counter:
            return sender.update_weights(version)

    seen = []
    for stats in commits(update, faults, plan if rank else None):
        training = [name for name in counter.num_calls if not name.startswith("awex_delta/")]
        traffic = sum(counter.num_calls[n] for n in training), sum(counter.num_bytes[n] for n in training)
        seen.append(Seen(kind=stats.verdict.kind, weights=converted(view), traffic=traffic))
    sender.close()
    dist.barrier()
    if rank == 0:
        leave(me, "trained", rank)
    return seen


def meeting(port: int, num_engine_ranks: int) -> Rendezvous:
    return Rendezvous(num_engine_ranks=num_engine_ranks, num_trainer_ranks=2, port=port)


def commits(
    update: Callable[[int], UpdateStats], faults: Sequence[str], plan: FaultPlan | None = None
) -> Iterator[UpdateStats]:
    """One attempt for each fault, which is empty where none is meant; the updates that committed."""
    version = 0
    for fault in faults:
        if plan is not None and fault:
            plan.fail(fault)
        if fault:
            with pytest.raises(UpdateAborted, match=f"trainer rank 1.*InjectedFault.*{fault}"):
                update(version)
        else:
            yield update(version)
            version += 1


def announce(me: Rank, view: Any) -> None:
    """Tell the engine what the trainers hold together."""
    hf: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}, {}]
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in converted(view).items()}
    dist.all_gather_object(hf, mine)
    whole = {**hf[1], **hf[0]}
    for name in hf[0].keys() & hf[1].keys():
        shape, dtype = hf[0][name]
        dim = cut_dim(name)
        whole[name] = tuple(2 * n if at == dim else n for at, n in enumerate(shape)), dtype
    if me.rank == 1:
        leave(me, "tensors", whole)


def run_shards(me: Rank, architecture: str) -> list[Seen]:
    register_qwen4_exp_awex()  # both sides plan by what is registered
    if me.rank == 0:
        return serve(me, NO_FAULTS)
    me.init_gloo(rank=me.rank - 1, world_size=2)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    view = Shards(architecture, MODELS[architecture].shapes)
    return train(me, view, view.train_step, NO_FAULTS)


def assert_served(engine: Sequence[Seen], trainers: Sequence[Sequence[Seen]], kinds: Sequence[Kind]) -> None:
    """After every update the engine holds the bits that the converters make of all ranks' weights."""
    assert [[one.kind for one in rank] for rank in (engine, *trainers)] == [list(kinds)] * 3
    for served, first, second in zip(engine, *trainers, strict=True):
        assert served.weights.keys() == first.weights.keys() | second.weights.keys()
        for name, got in served.weights.items():
            parts = [rank.weights[name] for rank in (first, second) if name in rank.weights]
            dim = cut_dim(name)
            want = torch.cat(parts, dim) if dim is not None and len(parts) == 2 else parts[0]
            assert got.view(torch.uint8).equal(want.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=() if one in DAILY else pytest.mark.all) for one in MODELS],
)
def test_an_engine_follows_two_tensor_parallel_trainers(architecture: str) -> None:
    model = MODELS[architecture]
    engine, *trainers = run_ranks(run_shards, 3, architecture)
    assert_served(engine, trainers, [Kind.FULL, Kind.DELTA, Kind.DELTA])
    # Each such parameter is given to one all-gather, with room for that of both ranks.
    num_bytes = sum(2 * torch.Size(model.shapes[name]).numel() * 3 for name in model.together)
    for seen in (one for trainer in trainers for one in trainer):
        assert seen.traffic == (len(model.together), num_bytes)


LING = TinySpec(tp=2, layers=1, lr=3e-6)
FAULTS = ("prepare", "", "encode", "", "")
"""A full sync that fails on one trainer, and again; a delta that fails; a full sync and a delta."""
FAULT_KINDS = [Kind.FULL, Kind.FULL, Kind.DELTA]


def ling(me: Rank, settings: DeltaSettings) -> tuple[MegatronTrainer, TinyTrainer]:
    """A Megatron model of the layout of Ling, whose converter gathers the attention of both ranks."""
    me.init_gloo(rank=me.rank - 1, world_size=2)
    tiny = build_trainer(LING)
    tiny.hf_config.architectures = ["BailingMoeForCausalLM"]
    return MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=settings), tiny


def run_megatron(me: Rank) -> list[Seen]:
    if me.rank == 0:
        return serve(me, FAULTS)
    view, tiny = ling(me, SETTINGS)
    return train(me, view, tiny.train_step, FAULTS)


def test_a_trainer_that_fails_leaves_nobody_in_the_collective_of_a_converter() -> None:
    engine, *trainers = run_ranks(run_megatron, 3)
    assert_served(engine, trainers, FAULT_KINDS)
    num_bytes = 3 * 2 * (LING.heads + 2 * LING.kv_heads) * LING.head_dim * LING.hidden // LING.tp
    for trainer in trainers:
        # The step has gathered the parameters, so what is left is the converter's.
        assert trainer[-1].traffic == (1, num_bytes)


def write(me: Rank) -> list[Seen]:
    """One of two trainers that write to a folder, and then read it as an engine would."""
    settings = replace(SETTINGS, transport="disk", disk_url=str(me.folder / "run"))
    me = replace(me, rank=me.rank + 1)
    view, tiny = ling(me, settings)
    store = host_store() if me.rank == 1 else None
    if store is not None:
        leave(me, "port", store.port)
    rank, plan = me.rank - 1, FaultPlan()
    there = meeting(arrives(me, "port"), num_engine_ranks=0)
    writer = DiskWriter(view, there, rank, settings, on_phase=plan.on_phase)
    announce(me, view)

    def update(version: int) -> UpdateStats:
        tiny.train_step()
        stats = writer.update_weights(version)
        writer.wait()
        return stats

    tensors = arrives(me, "tensors")
    engine = DictEngine({name: shape for name, (shape, _) in tensors.items()})
    reader = DiskReader(engine, settings, engine=f"engine {rank}")
    seen = []
    for version, stats in enumerate(commits(update, FAULTS, plan if rank else None)):
        reader.update_weights(version)
        weights = {name: tensor.clone() for name, tensor in engine.tensors_by_name.items()}
        seen.append(Seen(kind=stats.verdict.kind, weights=converted(view)))
        seen.append(Seen(kind=stats.verdict.kind, weights=weights))
    writer.close()
    dist.barrier()
    return seen


def test_a_folder_follows_them_too() -> None:
    first, second = run_ranks(write, 2)
    for reader in (first, second):
        assert_served(reader[1::2], (first[::2], second[::2]), FAULT_KINDS)


def talk_with_data(me: Rank) -> str:
    me.init_gloo(rank=me.rank, world_size=1)
    mpu.initialize_model_parallel()
    view = Shards("Qwen3ForCausalLM", {"decoder.final_layernorm.weight": (HIDDEN,)})

    def convert(_: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        dist.all_reduce(torch.ones(1))
        return [("model.norm.weight", tensor)]

    view.convert = convert  # type: ignore[assignment,method-assign]
    with pytest.raises(UnsupportedError) as refusal:
        find_routes(view, 0)
    return str(refusal.value)


def test_a_collective_that_shapes_do_not_show_is_refused_before_it_is_entered() -> None:
    (text,) = run_ranks(talk_with_data, 1)
    assert "converter of decoder.final_layernorm.weight calls c10d.allreduce_" in text
    assert "without tensor parallelism" in text
