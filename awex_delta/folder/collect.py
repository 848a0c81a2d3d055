"""The weights of a full version: taken from the live model, and completed where ranks share a tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from awex_delta.conversion.routes import Conversion
from awex_delta.folder.layout import Piece, WholeTensor
from awex_delta.folder.local import Tensors
from awex_delta.protocol.comm import Comm
from awex_delta.wire.codec import as_bytes
from awex_delta.wire.digest import digests

Taken = dict[tuple[str, Piece], torch.Tensor]
"""Copies of the pieces that one rank writes or gives to a writer, on the CPU."""


def take_weights(conversion: Conversion, wholes: Sequence[WholeTensor], rank: int) -> Taken:
    """Copy this rank's pieces, one parameter at a time, so that training may go on.

    Raises UnsupportedError if a parameter converts to something else than at connect.
    """
    pieces = {whole.name: [p for p in whole.pieces if p.rank == rank] for whole in wholes}
    taken: Taken = {}
    for route in conversion.routes.values():
        if not any(pieces.get(output.name) for output in route.outputs):
            continue
        for name, tensor in conversion.of(route):
            for piece in pieces.get(name, ()):
                cut = tensor.detach()[piece.source]
                taken[name, piece] = cut.to("cpu", copy=True).contiguous()
    return taken


def hash_copies(conversion: Conversion, names: Collection[str]) -> dict[str, int]:
    """Digests of this rank's parts of some HF tensors, one parameter at a time."""
    found: dict[str, int] = {}
    for route in conversion.routes.values():
        if any(output.name in names for output in route.outputs):
            converted = conversion.of(route)
            found |= digests({name: tensor for name, tensor in converted if name in names})
    return found


def bring_together(comm: Comm, taken: Taken, wholes: Sequence[WholeTensor], rank: int) -> Tensors:
    """Give away the pieces of tensors that others write, and complete those that this rank writes.

    Raises PeerError if a rank did not answer. Collective: yes, over the trainer ranks; those that share no
    tensor exchange nothing.
    """
    found: Tensors = {}
    for whole in wholes:  # in one order on all ranks, so that nobody waits for somebody who waits
        empty = whole.writer == rank and not whole.pieces
        value = torch.empty(whole.shape, dtype=whole.dtype, device="cpu") if empty else None
        for piece in whole.pieces:
            mine = taken.pop((whole.name, piece)) if piece.rank == rank else None
            if whole.writer != rank:
                if mine is not None:
                    comm.send(as_bytes(mine), whole.writer, phase=f"gather {whole.name}")
                continue
            if mine is None:
                num_bytes = piece.numel * whole.dtype.itemsize
                received = comm.receive(num_bytes, piece.rank, phase=f"gather {whole.name}")
                mine = received.view(whole.dtype).view(piece.shape)
            if piece.shape == whole.shape:
                value = mine
            else:
                value = torch.empty(whole.shape, dtype=whole.dtype, device="cpu") if value is None else value
                value[piece.target] = mine
        if value is not None:
            found[whole.name] = value
    return found
