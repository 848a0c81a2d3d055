"""Tries an `EngineView`: after every commit the engine computes with exactly what the trainer holds.

Between updates the engine's memory is moved, reloaded, cast, offloaded, tied anew and replaced. What is
compared is not what the view reads, but what a forward pass computes; of an engine without a model, what the
owner of the memory reads there. With pytest:

    @pytest.mark.parametrize("move", MOVES)
    def test_my_engine_follows_its_memory(move: str) -> None:
        with EngineTrial([MyView(model)], computes, expects) as trial:
            trial.check_move(lambda: MOVES[move](model))

    @pytest.mark.parametrize("change", UNUSABLE)
    def test_my_engine_refuses_what_it_cannot_write(change: str) -> None:
        with EngineTrial([MyView(model)], computes, expects) as trial:
            trial.check_refusal(lambda: UNUSABLE[change](model))

`MOVES` and `UNUSABLE` are for engines whose tensors are the parameters of a `torch.nn.Module`; for others,
hand in functions that do the same to their memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from awex_delta.engines.view import EngineView
from awex_delta.lines.storages import bits
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.contract import ContractBroken
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.ranks import ThreadRanks
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

Move = Callable[[nn.Module], None]
Weights = Mapping[str, torch.Tensor]
"""HF name -> whole tensor."""

_SETTINGS = DeltaSettings(
    anchor_interval=0, timeout_seconds=60.0, connect_timeout_seconds=60.0, allow_any_world_size=True
)
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class EngineTrial:
    """One engine and a trainer of its weights, as threads of this process over Gloo.

    Use it in a process that has no process groups of its own: threads keep theirs apart from then on. As a
    context manager it leaves at the end.
    """

    def __init__(
        self,
        views: Sequence[EngineView],
        computes: Callable[[], Sequence[torch.Tensor]],
        expects: Callable[[Weights], Sequence[torch.Tensor]],
        *,
        settings: DeltaSettings = _SETTINGS,
    ) -> None:
        """Make a trainer whose weights are named and shaped as those of the engine; nothing connects yet.

        Args:
            views: the ranks of one engine. Their tensors are bf16 or fp32.
            computes: what the engine computes now, such as the logits of a few prompts. It has to depend on
                every weight.
            expects: the same, of an engine that surely holds the given weights, such as a new model that
                loaded them. It may keep them.
            settings: of both sides.
        """
        shapes: dict[torch.dtype, dict[str, tuple[int, ...]]] = {torch.bfloat16: {}, torch.float32: {}}
        tied = False
        for tensor in (tensor for view in views for tensor in view.tensors()):
            tied = tied or tensor.tied_to is not None
            if tensor.tied_to is None:
                shapes[tensor.view.dtype][tensor.name] = tensor.global_shape
        self.trainer = TorchAdamWTrainer.create(
            shapes[torch.bfloat16],
            fp32=shapes[torch.float32],
            tied_embeddings=tied,
            lr=1e-5,  # few enough changes for a delta to be smaller than a full sync
            settings=settings,
        )
        self._tied = tied
        self._computes, self._expects = computes, expects
        self._faults = [FaultPlan() for _ in views]
        rendezvous = Rendezvous(num_engine_ranks=len(views), num_trainer_ranks=1, store=HashStore())
        self.receivers = [
            Receiver(view, rendezvous, rank, "engine", settings, on_phase=self._faults[rank].on_phase)
            for rank, view in enumerate(views)
        ]
        self.sender = Sender(self.trainer, rendezvous, 0, settings)
        self._threads = ThreadRanks(len(views) + 1)
        self._version = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends: list[Receiver | Sender] = [*self.receivers, self.sender]
        self._threads.run(lambda seat: ends[seat].close())
        self._threads.close()
        self.trainer.detach()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of what the trainer holds, a tied head under its name, too."""
        found = {info.param: self.trainer.tensor(info.key).clone() for info in self.trainer.weights()}
        return found | ({_LM_HEAD: found[_EMBEDDING]} if self._tied else {})

    def update(self) -> list[UpdateStats | BaseException]:
        """One optimizer step and one update: what came of it, engine ranks first."""
        self.trainer.train_step()
        self._version += 1
        calls: list[Callable[[int], UpdateStats]] = [one.update_weights for one in self.receivers]
        calls.append(self.sender.update_weights)
        version = self._version
        return list(self._threads.run(lambda seat: calls[seat](version), timeout_seconds=120.0))

    def commit(self, kind: Kind, reason: Reason | None = None) -> None:
        """One update that commits in this way, and for this reason; then `compare`. Raises ContractBroken."""
        for one in self.update():
            if isinstance(one, BaseException):
                raise ContractBroken(f"version {self._version} did not commit: {one}") from one
            if one.verdict.kind is not kind or reason not in (None, one.verdict.reason):
                wanted = f"{kind.value}, {reason.name}" if reason else kind.value
                raise ContractBroken(f"version {self._version} was {one.verdict}, and should be: {wanted}")
        if not all(receiver.ready for receiver in self.receivers):
            raise ContractBroken(f"version {self._version} was committed, and the engine is not ready")
        self.compare()

    def compare(self) -> None:
        """Compare what the engine computes with what one computes that holds the trainer's weights.

        Raises ContractBroken.
        """
        found, wanted = self._computes(), self._expects(self.weights())
        if not _same(found, wanted):
            raise ContractBroken(f"after version {self._version} the engine computes with other weights")

    def begin(self) -> None:
        """Once, a full sync and a delta, both right. Raises ContractBroken."""
        if self._version < 0:
            self.commit(Kind.FULL)
            self.commit(Kind.DELTA)

    def check_move(self, move: Callable[[], None]) -> None:
        """After memory moved the next update is full, for that reason, and right; then deltas go on.

        Args:
            move: moves memory of the engine. Afterwards the engine may hold anything, in the shapes and
                dtypes that it had. Called once more in the middle of an update.

        Raises:
            ContractBroken: says what was wrong.
        """
        self.begin()
        move()
        self.commit(Kind.FULL, Reason.ENGINE_MOVED)
        self.commit(Kind.DELTA)
        self.check_move_meanwhile(move)

    def check_move_meanwhile(self, move: Callable[[], None]) -> None:
        """Memory that moves in the middle of an update fails it on all ranks; the next one is full and right.

        Raises ContractBroken.
        """

        all_ranks_write = threading.Barrier(len(self._faults), action=move, timeout=60.0)
        for faults in self._faults:
            faults.act("apply", all_ranks_write.wait)
        self._require_failure(self.update(), "its memory moved while it was updated")
        self.commit(Kind.FULL)
        self.commit(Kind.DELTA)

    def check_refusal(self, change: Callable[[], Callable[[], None]]) -> None:
        """What cannot be updated fails the update on all ranks, naming a tensor, and nothing is written.

        Args:
            change: makes memory of the engine unusable, as by casting it, and returns what undoes that.

        Raises:
            ContractBroken: says what was wrong.
        """
        self.begin()
        undo = change()
        failures = self.update()
        self._require_failure(failures, "its memory cannot be written")
        names = self.weights()
        for one in failures:
            if not any(name in str(one) for name in names):
                raise ContractBroken(f"the refusal names no tensor: {one}")
        self._require_failure(self.update(), "its memory still cannot be written")
        undo()
        self.commit(Kind.FULL)
        self.commit(Kind.DELTA)

    def _require_failure(self, outcome: Sequence[UpdateStats | BaseException], why: str) -> None:
        for seat, one in enumerate(outcome):
            if not isinstance(one, BaseException):
                raise ContractBroken(f"seat {seat} committed version {self._version}, although {why}")
        if all(receiver.ready for receiver in self.receivers):
            raise ContractBroken(f"the engine calls itself ready, although {why}")


def _same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether tensors have the same bits."""
    return len(found) == len(wanted) and all(
        one.dtype is other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
        for one, other in zip(found, wanted, strict=True)
    )


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Move:
    def move(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = change(param.data)

    return move


def _one(model: nn.Module) -> None:
    param = list(model.parameters())[-1]
    param.data = param.data.clone()


def _apply(model: Any) -> None:
    model._apply(torch.clone)  # what `to`, `cuda`, `cpu` and `bfloat16` do


def _assign(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _replace_params(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad))


def _replace_module(model: nn.Module) -> None:
    path, module = [(path, one) for path, one in model.named_modules() if [*one.parameters(recurse=False)]][
        -1
    ]
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, copy.deepcopy(module))


def _cast_and_back(model: nn.Module) -> None:
    dtypes = [param.dtype for param in model.parameters()]
    _each(torch.Tensor.double)(model)
    for param, dtype in zip(model.parameters(), dtypes, strict=True):
        param.data = param.data.to(dtype)


def _offload_and_reload(model: nn.Module) -> None:
    saved = [param.detach().clone() for param in model.parameters()]
    _each(lambda data: data.new_empty(0))(model)
    for param, data in zip(model.parameters(), saved, strict=True):
        param.data = data


def _share_one_storage(model: nn.Module) -> None:
    params = list(model.parameters())[::-1]
    if len({param.dtype for param in params}) > 1:
        return _each(torch.clone)(model)
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    for param, piece in zip(params, torch.split(flat, [param.numel() for param in params]), strict=True):
        param.data = piece.view(param.shape)
    return None


MOVES: Mapping[str, Move] = {
    "data_swapped": _each(torch.clone),
    "one_tensor": _one,
    "apply": _apply,
    "state_dict_assigned": _assign,
    "parameters_replaced": _replace_params,
    "module_replaced": _replace_module,
    "cast_and_back": _cast_and_back,
    "offloaded_and_reloaded": _offload_and_reload,
    "weights_lost": _each(torch.zeros_like),
    "other_strides": _each(lambda data: data.clone().mT.contiguous().mT if data.dim() > 1 else data.clone()),
    "one_storage_for_all": _share_one_storage,
}
"""Ways in which the parameters of a module come to lie elsewhere, by name."""


def _undone(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], Callable[[], None]]:
    def make(model: nn.Module) -> Callable[[], None]:
        saved = [(param, param.data.clone()) for param in model.parameters()]
        _each(change)(model)

        def undo() -> None:
            for param, data in saved:
                param.data = data

        return undo

    return make


def _released(data: torch.Tensor) -> torch.Tensor:
    data.untyped_storage().resize_(0)
    return data


UNUSABLE: Mapping[str, Callable[[nn.Module], Callable[[], None]]] = {
    "cast": _undone(torch.Tensor.float),
    "quantized": _undone(lambda data: data.to(torch.float8_e4m3fn)),
    "offloaded": _undone(lambda data: data.new_empty(0)),
    "released": _undone(_released),
    "transposed": _undone(lambda data: data.mT.contiguous() if data.dim() > 1 else data),
}
"""Changes after which the parameters of a module cannot be written, by name; each returns what undoes it."""
