"""What runs inside the demo's processes: trainer ranks and engine ranks. Imported by the fork server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, PreTrainedModel

from awex_delta.demo.scenario import EXPERTS, HEADS, KV_HEADS, VOCAB_SIZE, DemoPlan, RoleName, Seat
from awex_delta.engines.fused import FusedEngine, FusedRank
from awex_delta.engines.transformers import TransformersEngine
from awex_delta.engines.view import EngineTensor, EngineView
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.fleet import Actions
from awex_delta.testing.procs import Rank
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer


def build(seat: Seat) -> Actions:
    """Build what a seat asks for, in this process: actions by name, which the launcher calls.

    Collective: over the trainer's ranks for a trainer seat.
    """
    return _BUILDERS[seat.role](seat)


def _build_store(seat: Seat) -> Actions:
    """The store at which trainer and engines meet. It is no rank, and so it outlives each of them."""
    store = host_store(seat.plan.host, settings=settings_of(seat.plan))
    return {"port": lambda: store.port}


def _build_trainer(seat: Seat) -> Actions:
    plan = seat.plan
    world = Rank(rank=seat.rank, world_size=plan.num_trainer_ranks, folder=seat.folder)
    world.init_gloo(rank=seat.rank, world_size=plan.num_trainer_ranks, timeout_seconds=plan.timeout_seconds)
    trainer = build_trainer(tiny_spec(plan))
    settings = settings_of(plan)
    view = MegatronTrainer.attach(trainer.chunks, trainer.optimizer, trainer.hf_config, settings=settings)
    sender = Sender(view, _rendezvous(seat), seat.rank, settings)
    return {
        "train": trainer.train_step,
        "update": sender.update_weights,
        "dump": lambda: save(megatron_state(trainer)),
    }


def _build_transformers(seat: Seat) -> Actions:
    """Engine rank 0: a transformers model that generates text."""
    torch.manual_seed(seat.plan.seed + 1)  # what it starts with must not matter
    config = hf_config(tiny_spec(seat.plan))
    create: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = create(config, dtype=torch.bfloat16)
    engine = TransformersEngine(model)

    def dump() -> bytes:
        model.save_pretrained(seat.folder / "engine")
        return save(load_file(seat.folder / "engine" / "model.safetensors"))

    def generate_fresh(checkpoint: Path, prompt: list[int], num_tokens: int) -> list[int]:
        config.save_pretrained(checkpoint)
        fresh = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        return _generate(TransformersEngine(fresh), prompt, num_tokens)

    return {
        **_engine_actions(seat, engine),
        "dump": dump,
        "generate": lambda prompt, num_tokens: _generate(engine, prompt, num_tokens),
        "generate_fresh": generate_fresh,
    }


def _build_sharded(seat: Seat) -> Actions:
    """The other engine ranks: together one sharded engine."""
    infer = seat.plan.infer
    place = FusedRank(tp_rank=seat.rank - 1, tp_size=infer.tp, ep_size=infer.ep)
    engine = FusedEngine(hf_config(tiny_spec(seat.plan)), place, separate_lm_head=True)
    return {**_engine_actions(seat, engine), "dump": lambda: save(engine.params)}


_BUILDERS: Mapping[RoleName, Callable[[Seat], Actions]] = {
    "store": _build_store,
    "trainer": _build_trainer,
    "transformers": _build_transformers,
    "sharded": _build_sharded,
}


class BreakableView:
    """An `EngineView` that can be made to fail once.

    fail_once: the device fails after weights were written.
    die_once: the process is killed in the middle of an update, before anything is written.
    """

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self.fail_once = False
        self.die_once = False

    def on_phase(self, phase: str) -> None:
        """Given to the receiver, which calls it as each phase begins."""
        if self.die_once and phase in ("stage", "prepare"):
            os.kill(os.getpid(), signal.SIGKILL)

    def tensors(self) -> Sequence[EngineTensor]:
        """Those of the engine."""
        return self._view.tensors()

    def synchronize(self) -> None:
        """Fail if asked to; otherwise as the engine does."""
        if self.fail_once:
            self.fail_once = False
            raise RuntimeError("injected fault: the device failed while weights were written")
        self._view.synchronize()

    def committed(self, version: int) -> None:
        """Pass on to the engine."""
        self._view.committed(version)


def tiny_spec(plan: DemoPlan) -> TinySpec:
    """The training that a plan describes. A dense model has no experts to spread."""
    return TinySpec(
        model=plan.model,
        tp=plan.train.tp,
        pp=plan.train.pp,
        ep=plan.train.ep if plan.model == "qwen3-moe" else 1,
        layers=plan.layers,
        hidden=plan.hidden,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=plan.head_dim,
        ffn=plan.ffn,
        experts=EXPERTS,
        vocab_size=VOCAB_SIZE,
        vocab_multiple=4,
        tied=plan.tied,
        lr=plan.lr,
        seed=plan.seed,
    )


def megatron_state(trainer: TinyTrainer) -> dict[str, torch.Tensor]:
    """This rank's live Megatron weights, under their names with global layer and expert numbers."""
    state: dict[str, torch.Tensor] = {}
    for chunk in trainer.chunks:
        model: Any = chunk.module
        for name, param in model.named_parameters():
            words = name.split(".")
            if "layers" in words:
                at = words.index("layers") + 1
                words[at] = str(model.decoder.layers[int(words[at])].layer_number - 1)
            if "local_experts" in words:
                at = words.index("local_experts") + 1
                mixture = model.get_submodule(name.partition(".experts.")[0])
                words[at] = str(mixture.local_expert_indices[int(words[at])])
            state[".".join(words)] = param.detach().contiguous()
    return state


def settings_of(plan: DemoPlan) -> DeltaSettings:
    """The settings that all ranks of a run share."""
    return DeltaSettings(
        anchor_interval=plan.anchor_interval,
        allow_any_world_size=plan.padded_schedule,
        timeout_seconds=plan.timeout_seconds,
        connect_timeout_seconds=plan.timeout_seconds,
        secret_source=plan.secret_source,
    )


def _rendezvous(seat: Seat) -> Rendezvous:
    return Rendezvous(
        host=seat.plan.host,
        port=seat.store_port,
        num_engine_ranks=seat.plan.num_engine_ranks,
        num_trainer_ranks=seat.plan.num_trainer_ranks,
    )


def _engine_actions(seat: Seat, engine: TransformersEngine | FusedEngine) -> Actions:
    view = BreakableView(engine)
    receiver = Receiver(
        view, _rendezvous(seat), seat.rank, seat.role, settings_of(seat.plan), on_phase=view.on_phase
    )

    def break_apply() -> None:
        view.fail_once = True

    def drop() -> None:
        view.die_once = True

    def lose_weights() -> None:
        for tensor in engine.tensors():
            tensor.view.zero_()
        receiver.invalidate()

    return {
        "update": receiver.update_weights,
        "ready": lambda: receiver.ready,
        "fail-apply": break_apply,
        "drop-engine": drop,
        "stale-engine": lose_weights,
    }


def _generate(engine: TransformersEngine, prompt: list[int], num_tokens: int) -> list[int]:
    tokens: list[int] = engine.generate(torch.tensor([prompt], dtype=torch.int64, device="cpu"), num_tokens)[
        0
    ].tolist()
    return tokens
