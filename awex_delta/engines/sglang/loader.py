"""What SGLang calls in every tensor-parallel worker to update its weights.

Start SGLang with `--custom-weight-loader awex_delta.engines.sglang.loader.load`. A request to
`update_weights_from_tensor` whose `load_format` is that path then reaches `load`, with the worker's live
model and the request's tensors: here one tensor, which carries an `Instruction` (see `message`).

The hook has no answer: SGLang calls any return a success. So a failure that left the weights as they were
is logged and known from the trainer, whose `update_weights` raises for it; after a failure that wrote
weights which were never committed `load` raises, which ends SGLang's scheduler rather than serve a mixture.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from awex_delta.engines.sglang.adapter import SGLangEngine, rank_in_engine
from awex_delta.errors import AwexDeltaError, ConfigError
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings

logger = logging.getLogger(__name__)

LOAD_FORMAT = "awex_delta.engines.sglang.loader.load"
"""The `load_format` of a request, and what `--custom-weight-loader` names."""

TENSOR_NAME = "awex_delta.instruction"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What one request asks of every worker of one SGLang instance.

    action: "update" (connects where that is still to be done), "connect" alone, "invalidate" (the weights
        were lost or reloaded, so the next update is full) or "disconnect".
    engine: name of this SGLang instance, another one for each that shares the pairing.
    first_engine_rank: rank of its first worker among all engine ranks of the pairing.
    num_engine_ranks, num_trainer_ranks, host, port, pair: the `Rendezvous`; `pair` is its name.
    settings: as the trainer resolved them.
    version: of an update.
    """

    # A field that is misspelt must not silently mean its default.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    action: Literal["update", "connect", "invalidate", "disconnect"]
    engine: str
    first_engine_rank: int
    num_engine_ranks: int
    num_trainer_ranks: int
    host: str
    port: int
    pair: str = "awex_delta"
    settings: DeltaSettings = field(default_factory=DeltaSettings)
    version: int = -1


_INSTRUCTION = TypeAdapter(Instruction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What one worker keeps of one pairing.

    asked: the instruction that made it, without its action and version.
    outcome: what the last request did; its error where it failed.
    """

    view: SGLangEngine
    receiver: Receiver
    asked: Instruction
    outcome: UpdateStats | AwexDeltaError | None = None


_attached: WeakKeyDictionary[nn.Module, Attached] = WeakKeyDictionary()


def message(instruction: Instruction) -> list[tuple[str, torch.Tensor]]:
    """The `named_tensors` of a request.

    Args:
        instruction: what the workers are to do.

    Returns:
        One named tensor: the JSON text as uint8, on the CPU.

    Collective: no.
    """
    text = json.dumps(asdict(instruction)).encode()
    return [(TENSOR_NAME, torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def attached(model: nn.Module) -> Attached | None:
    """What this worker keeps of the pairing of `model`; None when it has none. Collective: no."""
    return _attached.get(model)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the instruction of a request; SGLang calls this, in every worker.

    Args:
        model: the live model of this worker.
        named_tensors: what `message` made.

    Raises:
        AwexDeltaError: weights were written and not committed. SGLang must not go on serving them.

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
        return _INSTRUCTION.validate_json(bytes(tensor.tolist()))
    except ValidationError as error:
        raise ConfigError(f"{TENSOR_NAME} cannot be read: {error}") from error


def _carry_out(model: nn.Module, instruction: Instruction) -> None:
    if instruction.action == "disconnect":
        held = _attached.pop(model, None)
        if held is not None:
            held.receiver.close()
        return
    held = _attach(model, instruction)
    outcome: UpdateStats | None = None
    if instruction.action == "invalidate":
        held.receiver.invalidate()
    elif instruction.action == "connect":
        held.receiver.connect()
    else:
        outcome = held.receiver.update_weights(instruction.version)
    _attached[model] = replace(held, outcome=outcome)


def _attach(model: nn.Module, instruction: Instruction) -> Attached:
    asked = replace(instruction, action="connect", version=-1)
    held = _attached.get(model)
    if held is not None and held.asked == asked:
        return held
    if held is not None:
        raise ConfigError(f"connected as {held.asked}; disconnect before asking for {asked}")
    if any(other.asked == asked for other in _attached.values()):
        raise ConfigError("a second model of this worker was asked, a draft model? Send selector='target'")
    view = SGLangEngine(model)
    receiver = Receiver(
        view,
        Rendezvous(
            num_engine_ranks=asked.num_engine_ranks,
            num_trainer_ranks=asked.num_trainer_ranks,
            host=asked.host,
            port=asked.port,
            name=asked.pair,
        ),
        asked.first_engine_rank + rank_in_engine(),
        asked.engine,
        asked.settings,
        # In the update's own phases, so that one rank's doubt reaches the agreement of all.
        on_phase=lambda phase: view.require_unmoved() if phase in ("prepare", "stage") else None,
        device=view.device,
    )
    held = Attached(view=view, receiver=receiver, asked=asked)
    _attached[model] = held
    return held
