"""Whole weights between ranks, along AWEX's plan of a full sync, a batch of operations at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from awex.transfer.transfer_plan import slice_tensor

from awex_delta.plan.shards import Operations

Weights = Mapping[str, torch.Tensor]

Begin = Callable[[Any, Weights, Operations], tuple[list[Any], Callable[[], None]]]
"""Begins the operations of a batch in a group: what to wait for, and what to do after that."""


def send_batch(group: Any, tensors: Weights, batch: Operations) -> tuple[list[Any], Callable[[], None]]:
    """Begin to send parts of `tensors`, the HF tensors of a trainer rank by name. See `Begin`."""
    copies: dict[str, torch.Tensor] = {}  # of what is not contiguous: one for all its receivers
    works = []
    for peer, op in batch:
        part = slice_tensor(tensors[op.send_shard_meta.name], op, is_train=True, slice_context=copies)
        works.append(group.send([part], peer, 0))
    return works, copies.clear


def receive_batch(group: Any, tensors: Weights, batch: Operations) -> tuple[list[Any], Callable[[], None]]:
    """Begin to receive into parts of `tensors`, an engine rank's live weights by name. See `Begin`."""
    works, copies = [], []
    for peer, op in batch:
        target = slice_tensor(tensors[op.recv_shard_meta.name], op, is_train=False)
        buffer = target.contiguous()
        if buffer is not target:
            copies.append((target, buffer))
        works.append(group.recv([buffer], peer, 0))

    def write() -> None:
        with torch.inference_mode():  # in which parameters can be written, and weights that were made in it
            for target, buffer in copies:
                target.copy_(buffer)

    return works, write
