"""Where tests take part in an update: frames as they are packed, values as they reach an engine's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from awex_delta.lines.storages import Storages
from awex_delta.protocol import sender
from awex_delta.protocol.receiver import Receiver
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.wire.frame import FrameIdentity, pack_frame

Scatter = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes values at ascending positions of the engine's line."""


def pack_by(
    monkeypatch: pytest.MonkeyPatch,
    packed: Callable[[FrameIdentity, Callable[[FrameIdentity], torch.Tensor]], torch.Tensor],
) -> None:
    """Let `packed` give each frame of all senders, from its identity and what packs it under one."""

    def pack(identity: FrameIdentity, *rest: Any, **options: Any) -> torch.Tensor:
        return packed(identity, lambda one: pack_frame(one, *rest, **options))

    monkeypatch.setattr(sender, "pack_frame", pack)


def write_by(
    monkeypatch: pytest.MonkeyPatch,
    engine: DictEngine,
    written: Callable[[Scatter, torch.Tensor, torch.Tensor], None],
) -> None:
    """Let `written` do all writes to one engine, from what writes, positions in its line, and values."""
    theirs = {tensor.view.untyped_storage().data_ptr() for tensor in engine.tensors()}
    scatter = Storages.scatter

    def write(self: Storages, pos: torch.Tensor, value: torch.Tensor) -> None:
        if {memory.cells.untyped_storage().data_ptr() for memory in self._memories} == theirs:
            written(lambda pos, value: scatter(self, pos, value), pos, value)
        else:
            scatter(self, pos, value)

    monkeypatch.setattr(Storages, "scatter", write)


@contextmanager
def frames_damaged_at(receiver: Receiver) -> Iterator[None]:
    """The last byte of each frame that one engine rank receives is another one."""
    receive = receiver.comm.receive

    def damage(num_bytes: int, peer: int, *, phase: str) -> torch.Tensor:
        frame = receive(num_bytes, peer, phase=phase)
        frame[-1] ^= num_bytes > 8  # not the size that goes before each frame
        return frame

    receiver.comm.receive = damage  # type: ignore[method-assign]
    try:
        yield
    finally:
        receiver.comm.receive = receive  # type: ignore[method-assign]
