"""What SGLang calls in every tensor-parallel worker to update its weights.

Start SGLang with `--custom-weight-loader awex_delta.engines.sglang.loader.load`. A request to
`update_weights_from_tensor` whose `load_format` is that path then reaches `load`, with the worker's live
model and the request's tensors: here one tensor, which carries an `Instruction` (see `message`).

The hook has no answer: SGLang calls any return a success. So a failure that left the weights as they were
is logged and known from the trainer, whose `update_weights` raises for it; after a failure that wrote
weights which were never committed `load` raises, which ends SGLang's scheduler rather than serve a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from awex_delta.engines.sglang.adapter import SGLangEngine, rank_in_engine
from awex_delta.errors import AwexDeltaError, ConfigError
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Joining
from awex_delta.protocol.stats import UpdateStats

logger = logging.getLogger(__name__)

LOAD_FORMAT = "awex_delta.engines.sglang.loader.load"
"""The `load_format` of a request, and what `--custom-weight-loader` names."""

TENSOR_NAME = "awex_delta.instruction"
_MAX_BYTES = 1 << 16


Action = Literal["update", "connect", "invalidate", "disconnect"]


class Instruction(BaseModel):
    """What one request asks of every worker of one SGLang instance.

    action: "update" (connects first if the workers are not connected), "connect" alone, "invalidate" (the
        weights were lost or reloaded, so the next update is full) or "disconnect".
    joining: the pairing, and this instance's place in it.
    version: of an update.
    """

    # A field that is misspelt must not silently mean its default.
    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Action
    joining: Joining
    version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What one worker keeps of one pairing.

    joining: as the request that made it said.
    outcome: what the last request did, or the error with which it failed.
    """

    view: SGLangEngine
    receiver: Receiver
    joining: Joining
    outcome: UpdateStats | AwexDeltaError | None = None


_attached: WeakKeyDictionary[nn.Module, Attached] = WeakKeyDictionary()
# One for each model, since a view knows the addresses that captured graphs read, whoever connects.
_views: WeakKeyDictionary[nn.Module, SGLangEngine] = WeakKeyDictionary()


def message(action: Action, joining: Joining, *, version: int = -1) -> list[tuple[str, torch.Tensor]]:
    """The `named_tensors` of a request: the JSON text of an `Instruction` as one uint8 tensor on the CPU."""
    instruction = Instruction(action=action, joining=joining, version=version)
    text = bytearray(instruction.model_dump_json().encode())
    return [(TENSOR_NAME, torch.frombuffer(text, dtype=torch.uint8))]


def attached(model: nn.Module) -> Attached | None:
    """What this worker keeps of the pairing of `model`; None when it has none."""
    return _attached.get(model)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the instruction of a request, which `message` made; SGLang calls this, in every worker.

    Raises AwexDeltaError if weights were written and not committed. SGLang must not go on serving them.

    Collective: over the trainer's and all engines' ranks, for "connect" and "update".
    """
    try:
        _carry_out(model, _read(named_tensors))
    except AwexDeltaError as error:
        held = _attached.get(model)
        if held is not None:
            _attached[model] = replace(held, outcome=error)
            if held.receiver.dirty:
                raise
        logger.error("the weights stay as they were: %s", error)  # noqa: TRY400 - the text says what happened


def _read(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Instruction:
    names = [name for name, _ in named_tensors]
    if names != [TENSOR_NAME]:
        raise ConfigError(
            f"{LOAD_FORMAT} takes one tensor, {TENSOR_NAME!r}, made by message(); got {names[:3]}"
        )
    tensor = named_tensors[0][1]
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() > _MAX_BYTES:
        raise ConfigError(f"{TENSOR_NAME} is {tensor.dtype} {tuple(tensor.shape)}, not JSON text as uint8")
    try:
        return Instruction.model_validate_json(bytes(tensor.tolist()))
    except ValidationError as error:
        raise ConfigError(f"{TENSOR_NAME} cannot be read: {error}") from error


def _carry_out(model: nn.Module, instruction: Instruction) -> None:
    if instruction.action == "disconnect":
        held = _attached.pop(model, None)
        if held is not None:
            held.receiver.close()
        return
    held = _attach(model, instruction.joining)
    outcome: UpdateStats | None = None
    if instruction.action == "invalidate":
        held.receiver.invalidate()
    elif instruction.action == "connect":
        held.receiver.connect()
    else:
        outcome = held.receiver.update_weights(instruction.version)
    _attached[model] = replace(held, outcome=outcome)


def _attach(model: nn.Module, joining: Joining) -> Attached:
    held = _attached.get(model)
    if held is not None and held.joining == joining:
        return held
    if held is not None:
        raise ConfigError(f"connected as {held.joining}; disconnect before asking for {joining}")
    if any(other.joining == joining for other in _attached.values()):
        raise ConfigError("a second model of this worker was asked, a draft model? Send selector='target'")
    view = _views[model] = _views.get(model) or SGLangEngine(model)
    receiver = Receiver(
        view,
        joining.rendezvous,
        joining.first_engine_rank + rank_in_engine(),
        joining.engine,
        joining.settings,
        device=view.device,
    )
    held = Attached(view=view, receiver=receiver, joining=joining)
    _attached[model] = held
    return held
