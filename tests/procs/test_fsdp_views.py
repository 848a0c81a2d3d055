"""FSDP2's parameters are freed, moved, gathered and replaced between updates, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from awex_delta.detection.optimizers import local
from awex_delta.errors import UnsupportedError, WeightsAwayError
from awex_delta.folder.writer import DiskWriter
from awex_delta.gateway.adapters import trainer_side
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.contract.trainers import CASES, Trained, check
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.trainers.fsdp import FsdpTrainer
from awex_delta.trainers.fsdp_layout import part_of
from tests.procs.fsdp_training import FsdpSpec, FsdpTraining, hf_config, start

pytestmark = pytest.mark.timeout(240)

SPEC = FsdpSpec(mesh=(1,), layers=1, lr=1e-6)


def live(training: FsdpTraining) -> Mapping[str, torch.Tensor]:
    """What this rank holds of the parameters, asked of the model."""
    return {f"0/{name}": local(param) for name, param in training.model.named_parameters()}


def check_contract(me: Rank, options: dict[str, Any]) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    settings = DeltaSettings(verify="full", **options)
    for place, case in enumerate(CASES):
        training = FsdpTraining(SPEC, 0)
        view = training.attach(settings)
        trained = Trained(
            view=view, step=training.train_step, live=partial(live, training), settings=settings
        )
        try:
            check(case, trained, me.folder / str(place))
        finally:
            view.detach()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"accumulate": True}, id="accumulate", marks=pytest.mark.all),
        pytest.param({"method": "capture"}, id="capture", marks=pytest.mark.all),
        pytest.param({"method": "snapshot"}, id="snapshot", marks=pytest.mark.all),
    ],
)
def test_contract(options: dict[str, Any]) -> None:
    run_ranks(check_contract, 1, options)


def check_what_happens_between_updates(me: Rank, method: Any) -> None:
    training = start(me, replace(SPEC, reshard=False, tied=True))
    settings = DeltaSettings(
        transport="disk", disk_url=str(me.folder / "run"), anchor_interval=0, method=method
    )
    view = training.attach(settings)
    writer = DiskWriter(view, Rendezvous.alone(), 0, settings)
    model: Any = training.model

    def update(version: int) -> Reason:
        training.train_step()
        return writer.update_weights(version).verdict.reason

    assert update(0) is Reason.FIRST_SYNC
    assert update(1) is Reason.NONE

    model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    embedding = model.model.embed_tokens
    layer = model.model.layers[0]
    assert not isinstance(layer.self_attn.q_proj.weight, DTensor), "it stays gathered after a forward alone"
    assert writer.update_weights(2).verdict.reason is Reason.NONE
    assert isinstance(layer.self_attn.q_proj.weight, DTensor), "it was given back"
    assert update(3) is Reason.NONE, "training goes on"

    state = {name: copy.deepcopy(local(param)) * 2 for name, param in model.named_parameters()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            local(param).copy_(state[name])
    doubt = {"adamw": Reason.STATE_REPLACED, "capture": Reason.UNSEEN_CHANGE}[method]
    assert writer.update_weights(4).verdict.reason is doubt
    assert update(5) is Reason.NONE
    view.weights_replaced()
    assert update(6) is Reason.STEP_GAP
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert update(7) in ({Reason.STEP_GAP} if method == "adamw" else {Reason.NONE})

    sound = model.model.norm.weight
    model.model.norm.weight = nn.Parameter(sound.detach().clone())
    with pytest.raises(
        WeightsAwayError, match=r"0/model.norm.weight: .*another parameter.*Remedy: put it back"
    ):
        writer.update_weights(8)
    model.model.norm.weight = sound
    assert update(8) in (Reason.NONE, Reason.STEP_GAP)
    writer.wait()
    expected = local(embedding.weight).to(torch.bfloat16)
    view.detach()
    assert update(9) is Reason.NO_STEP_RECORD
    writer.close()
    written = load_file(me.folder / "run" / "weight_v000009" / "model-00001-of-00001.safetensors")
    assert written["model.embed_tokens.weight"].equal(local(embedding.weight).to(torch.bfloat16))
    assert not written["model.embed_tokens.weight"].equal(expected)


@pytest.mark.parametrize("method", ["adamw", "capture"])
def test_what_happens_between_updates(method: str) -> None:
    run_ranks(check_what_happens_between_updates, 1, method)


Change = Callable[[FsdpTraining], None]


def _made_before(training: FsdpTraining) -> None:
    whole = _unsharded(training)
    training.optimizer = torch.optim.AdamW(whole.parameters())
    fully_shard(whole, mp_policy=_policy(torch.bfloat16))
    training.model = whole


def _unsharded(training: FsdpTraining) -> PreTrainedModel:
    create: Any = AutoModelForCausalLM
    model: PreTrainedModel = create.from_config(training.hf_config, dtype=torch.float32)
    return model


def _policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype)


def _plain(training: FsdpTraining) -> None:
    training.model = _unsharded(training)


def _without_root(training: FsdpTraining) -> None:
    model: Any = _unsharded(training)
    fully_shard(model.model.layers[0], mp_policy=_policy(torch.bfloat16))
    training.model, training.optimizer = model, torch.optim.AdamW(model.parameters())


def _some(training: FsdpTraining) -> None:
    training.optimizer = torch.optim.AdamW(list(training.model.parameters())[1:])


def _no_optimizer(training: FsdpTraining) -> None:
    training.optimizer = object()  # type: ignore[assignment]


def _tied(training: FsdpTraining) -> None:
    training.hf_config.tie_word_embeddings = True


def _double(training: FsdpTraining) -> None:
    model = _unsharded(training)
    fully_shard(model, mp_policy=_policy(torch.float64))
    training.model, training.optimizer = model, torch.optim.AdamW(model.parameters())


def _on_meta(training: FsdpTraining) -> None:
    with torch.device("meta"):
        model = _unsharded(training)
    fully_shard(model, mp_policy=_policy(torch.bfloat16))
    training.model, training.optimizer = model, torch.optim.AdamW(model.parameters())


def _three_dimensions(training: FsdpTraining) -> None:
    model = _unsharded(training)
    model.register_parameter("cube", nn.Parameter(torch.zeros(2, 2, 3)))
    fully_shard(model, mp_policy=_policy(torch.bfloat16))
    training.model, training.optimizer = model, torch.optim.AdamW(model.parameters())


REFUSED: Mapping[str, Change] = {
    r"model=Qwen3ForCausalLM: .*fully_shard.*Remedy: call that on the layers": _plain,
    r"optimizer: \d+ of its parameters are not in the model. Remedy: .*after fully_shard": _made_before,
    r"model.embed_tokens.weight is trained, but no fully_shard module shards it. Remedy": _without_root,
    r"model.embed_tokens.weight is trained, but no optimizer steps it. Remedy": _some,
    r"optimizer=object: give a torch.optim.Optimizer": _no_optimizer,
    r"hf_config.tie_word_embeddings=True, but the model does not tie lm_head.weight": _tied,
    r"model.embed_tokens.weight is computed with in torch.float64; .*Remedy: give fully_shard": _double,
    r"model.embed_tokens.weight lies on meta, its mesh on cpu. Remedy": _on_meta,
    r"cube: this rank holds \(2, 2, 3\) .*Remedy": _three_dimensions,
}


def check_refusals(me: Rank) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    for message, change in REFUSED.items():
        training = FsdpTraining(SPEC, 0)
        change(training)
        with pytest.raises(UnsupportedError, match=message):
            training.attach(DeltaSettings())
        if isinstance(training.optimizer, torch.optim.Optimizer):
            assert not training.optimizer._optimizer_step_pre_hooks
            assert not training.optimizer._optimizer_step_post_hooks
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.zeros(2, 2), mesh, [Partial()])
    with pytest.raises(
        UnsupportedError, match=r"w: placements=.*Partial.*Remedy: train on a mesh of fully_shard"
    ):
        part_of("w", tensor)
    odd = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], shape=torch.Size((3, 2)), stride=(2, 1))
    with pytest.raises(UnsupportedError, match=r"w: .*holds \(2, 2\) of \(3, 2\)"):
        part_of("w", odd)

    training = FsdpTraining(SPEC, 0)
    view = training.attach(DeltaSettings(enabled=False))
    assert view.detect().reason is Reason.DELTA_DISABLED
    assert not any(info.sparse for info in view.weights())
    assert not training.optimizer._optimizer_step_pre_hooks


def test_what_cannot_be_read_is_refused_by_name_before_a_hook_is_set() -> None:
    run_ranks(check_refusals, 1)


def check_recipes(me: Rank) -> None:
    training = start(me, SPEC)
    model: Any = training.model
    params = list(model.parameters())
    several = [torch.optim.AdamW(params[:3], lr=1e-6), torch.optim.SGD(params[3:], lr=1e-3)]
    model.model.register_buffer("scale", torch.ones(3))
    with pytest.raises(UnsupportedError, match="a model under fully_shard needs hf_config"):
        trainer_side(model, several)
    assert trainer_side(model, several, hf_config=hf_config(SPEC)).kind == "FSDP2"
    settings = DeltaSettings(method="capture")
    view = FsdpTrainer.attach(model, several, hf_config(SPEC), settings=settings)
    assert {info.param: info.dtype for info in view.weights() if not info.trained} == {
        "model.scale": torch.float32
    }
    view.committed()
    training.optimizer = several[1]
    training.train_step()
    detection = view.detect()
    assert detection.reason is Reason.NONE
    assert detection.num_changed > 100


def check_wrappers(me: Rank) -> None:
    training = start(me, SPEC)
    settings = DeltaSettings()
    names = [info.param for info in training.attach(settings).weights()]
    model: Any = _unsharded(training)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    fully_shard(model.model.layers[0], mp_policy=_policy(torch.bfloat16))
    fully_shard(model, mp_policy=_policy(torch.bfloat16))
    compiled: Any = torch.compile(model)
    view = FsdpTrainer.attach(
        compiled, torch.optim.AdamW(model.parameters()), training.hf_config, settings=settings
    )
    assert [info.param for info in view.weights()] == names
    for info in view.weights():
        assert view.tensor(info.key).shape == info.shape
    assert any("_checkpoint_wrapped_module" in name for name, _ in compiled.named_parameters())


def test_several_optimizers_saved_buffers_and_wrappers() -> None:
    run_ranks(check_recipes, 1)
    run_ranks(check_wrappers, 1)
