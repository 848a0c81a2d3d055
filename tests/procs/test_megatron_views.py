"""Megatron trainings whose memory is freed, moved and replaced, or whose optimizer is spread by layers."""

from __future__ import annotations

import logging.handlers
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, _get_param_groups
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import load_file
from torch._C._distributed_c10d import FileStore

from awex_delta.errors import WeightsAwayError
from awex_delta.folder.writer import DiskWriter
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.contract.trainers import CASES, Trained, check
from awex_delta.testing.megatron_cpu import cpu_device
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer
from awex_delta.trainers.megatron_layout import canonical_name
from tests.procs.test_megatron_trainer import attach, by_key

pytestmark = pytest.mark.timeout(240)

SPEC = TinySpec(layers=1, hidden=32, lr=1e-6)


def live(tiny: TinyTrainer) -> Mapping[str, torch.Tensor]:
    """The parameters of the model, asked of the model."""
    return {f"0/{canonical_name(name)}": param for name, param in tiny.chunks[0].named_parameters()}


def check_contract(me: Rank, method: str) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    settings = DeltaSettings(method=method, verify="full")
    for place, case in enumerate(CASES):
        tiny = build_trainer(SPEC)
        view = attach(tiny, settings)
        training = Trained(view=view, step=tiny.train_step, live=partial(live, tiny), settings=settings)
        try:
            check(case, training, me.folder / str(place))
        finally:
            view.detach()


@pytest.mark.parametrize("method", ["adamw", pytest.param("snapshot", marks=pytest.mark.all)])
def test_contract(method: str) -> None:
    run_ranks(check_contract, 1, method)


def check_offload(me: Rank) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build_trainer(replace(SPEC, frozen="embedding"))
    settings = DeltaSettings(transport="disk", disk_url=str(me.folder / "run"), anchor_interval=0)
    view = attach(tiny, settings)
    writer = DiskWriter(view, Rendezvous.alone(), 0, settings)
    for version in range(2):
        tiny.train_step()
        writer.update_weights(version)
    tiny.train_step()
    buffers = [buffer.param_data for buffer in tiny.chunks[0].buffers]
    held = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)
    with pytest.raises(
        WeightsAwayError, match=r"0/\S+: its storage was freed .*bring offloaded weights back"
    ):
        writer.update_weights(2)
    for buffer, copy in zip(buffers, held, strict=True):
        buffer.untyped_storage().resize_(copy.nbytes)
        buffer.copy_(copy)
    assert writer.update_weights(2).verdict.kind is Kind.DELTA

    model = tiny.chunks[0].module
    norm = model.decoder.final_layernorm
    sound = norm.weight
    norm.weight = torch.nn.Parameter(sound.detach().clone())
    with pytest.raises(
        WeightsAwayError, match=r"final_layernorm.weight: .*another parameter than its optimizer"
    ):
        writer.update_weights(3)
    del norm.weight
    with pytest.raises(
        WeightsAwayError, match=r"final_layernorm.weight: the model has no such tensor any more"
    ):
        writer.update_weights(3)
    norm.weight = sound
    tiny.train_step()
    assert writer.update_weights(3).verdict.kind is Kind.DELTA
    frozen = model.embedding.word_embeddings
    frozen.weight = torch.nn.Parameter(frozen.weight.detach() + 1, requires_grad=False)
    tiny.train_step()
    assert writer.update_weights(4).verdict.kind is Kind.DELTA
    key = "0/embedding.word_embeddings.weight"
    assert view.tensor(key).data_ptr() == frozen.weight.data_ptr()
    writer.wait()
    written = load_file(me.folder / "run" / "weight_v000004" / "delta-00001-of-00001.safetensors")
    assert frozen.weight.view(torch.uint8).numpy().tobytes() in b"".join(
        tensor.numpy().tobytes() for tensor in written.values()
    )
    model.decoder = torch.nn.Identity()
    with pytest.raises(WeightsAwayError, match="no such tensor any more"):
        writer.update_weights(5)
    writer.close()


def test_offloaded_buffers_and_replaced_parameters() -> None:
    run_ranks(check_offload, 1)


def check_drift(me: Rank, url: str) -> tuple[list[str], torch.Tensor]:
    """What one of two tensor-parallel ranks logs, and its norm; rank 1 moved one element of it."""
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build_trainer(replace(SPEC, tp=2))
    settings = DeltaSettings(transport="disk", disk_url=url)
    store: Any = FileStore(str(me.folder / "meeting"), me.world_size)
    meeting = Rendezvous(num_engine_ranks=0, num_trainer_ranks=me.world_size, store=store)
    writer = DiskWriter(attach(tiny, settings), meeting, me.rank, settings)
    norm = tiny.chunks[0].module.decoder.final_layernorm.weight.detach()
    norm.view(torch.int16)[3] += me.rank
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("awex_delta.protocol.replicas").addHandler(heard)
    writer.update_weights(0)
    writer.close()
    logging.getLogger("awex_delta.protocol.replicas").removeHandler(heard)
    return [record.getMessage() for record in heard.buffer], norm.clone()


def test_a_norm_that_drifted_between_tensor_parallel_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(check_drift, 2, str(tmp_path))
    (warning,) = ranks[0][0]
    assert "1 tensors that should be equal: model.norm.weight (trainer ranks 0, 1)" in warning
    assert ranks[1][0] == []
    written = [load_file(path) for path in (tmp_path / "weight_v000000").glob("model*.safetensors")]
    (norm,) = [file["model.norm.weight"] for file in written if "model.norm.weight" in file]
    assert norm.equal(ranks[zlib.crc32(b"model.norm.weight") % 2][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one rank: changed elements by parameter, really and as found; who owns; what inversion said."""

    truth: Mapping[str, list[int]]
    found: Mapping[str, list[int]]
    owned: Mapping[str, tuple[tuple[int, ...], int, int]]
    numel: Mapping[str, int]
    inverted: Reason
    kinds: list[Kind]


def layer_wise(tiny: TinyTrainer, kind: Callable[..., torch.optim.Optimizer]) -> Any:
    """Megatron's layer-wise optimizer: `kind` steps matrices, AdamW what is left."""
    config = OptimizerConfig(
        optimizer="adam", lr=1e-5, min_lr=0.0, bf16=True, params_dtype=torch.bfloat16, weight_decay=0.1
    )
    groups = _get_param_groups(tiny.chunks, config, {})
    flat = [{**group, "params": [p for p in group["params"] if p.dim() != 2]} for group in groups]
    matrices = [{**group, "params": [p for p in group["params"] if p.dim() == 2]} for group in groups]
    made = [kind([g for g in matrices if g["params"]], lr=1e-5)]
    made.append(torch.optim.AdamW([g for g in flat if g["params"]], lr=1e-5))
    optimizer = LayerWiseDistributedOptimizer(made, config, ProcessGroupCollection.use_mpu_process_groups())
    optimizer.allgather_params = optimizer.broadcast_params  # Gloo gathers equal sizes alone
    return optimizer


def spread(me: Rank, spec: TinySpec, kind: Callable[..., torch.optim.Optimizer]) -> Spread:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build_trainer(spec)
    with cpu_device():
        tiny.optimizer = layer_wise(tiny, kind)
    settings = DeltaSettings(
        method="capture", transport="disk", disk_url=str(me.folder / "run"), verify="full"
    )
    view, inverting = attach(tiny, settings), attach(tiny, DeltaSettings())
    inverting.committed()
    store: Any = FileStore(str(me.folder / "meeting"), me.world_size)
    meeting = Rendezvous(num_engine_ranks=0, num_trainer_ranks=me.world_size, store=store)
    writer = DiskWriter(view, meeting, me.rank, settings)
    kinds = [writer.update_weights(0).verdict.kind]
    sparse = [info for info in view.weights() if info.sparse]
    before = {info.key: view.tensor(info.key).clone() for info in sparse}
    tiny.train_step()
    inverted = inverting.detect().reason
    detection = view.detect()
    assert detection.reason is Reason.NONE, detection
    truth = {
        key: (old.view(torch.int16) != view.tensor(key).view(torch.int16))
        .view(-1)
        .nonzero()
        .view(-1)
        .tolist()
        for key, old in before.items()
    }
    kinds.append(writer.update_weights(1).verdict.kind)
    writer.close()
    return Spread(
        truth=truth,
        found={key: index.tolist() for key, (index, _) in by_key(view, detection).items()},
        owned={info.key: (info.owners, info.owned_start, info.owned_stop) for info in sparse},
        numel={info.key: torch.Size(info.shape).numel() for info in sparse},
        inverted=inverted,
        kinds=kinds,
    )


@pytest.mark.parametrize(
    ("spec", "kind", "inverted"),
    [
        pytest.param(
            TinySpec(distributed_optimizer=False, layers=1), torch.optim.Muon, Reason.NOT_ADAMW, id="muon"
        ),
        pytest.param(
            TinySpec(distributed_optimizer=False, layers=1, model="qwen3-moe"),
            torch.optim.AdamW,
            Reason.NONE,
            id="adamw-experts",
        ),
    ],
)
def test_an_optimizer_that_is_spread_by_layers(
    spec: TinySpec, kind: Callable[..., torch.optim.Optimizer], inverted: Reason
) -> None:
    ranks: list[Spread] = run_ranks(spread, 2, spec, kind)
    assert sum(map(len, ranks[0].truth.values())) > 100
    assert ranks[0].truth == ranks[1].truth, "each rank has the whole model"
    for key, truth in ranks[0].truth.items():
        assert [rank.owned[key][0] for rank in ranks] == [(0, 1), (0, 1)]
        assert sorted(rank.owned[key][1:] for rank in ranks) == [(0, 0), (0, ranks[0].numel[key])]
        assert sorted(index for rank in ranks for index in rank.found.get(key, [])) == truth
    assert all(any(rank.owned[key][2] for key in rank.owned) for rank in ranks)
    assert {rank.inverted for rank in ranks} == {inverted}
    assert all(rank.kinds == [Kind.FULL, Kind.DELTA] for rank in ranks)
