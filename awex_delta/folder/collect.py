"""The weights of a full version: taken from the live model, and completed where ranks share a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from awex_delta.conversion.routes import Conversion
from awex_delta.folder.layout import Piece, WholeTensor
from awex_delta.folder.local import Tensors
from awex_delta.protocol.comm import Comm
from awex_delta.wire.codec import as_bytes

Taken = dict[tuple[str, Piece], torch.Tensor]
"""Copies of the pieces that one rank writes or gives to a writer, on the CPU."""


def take_weights(conversion: Conversion, wholes: Sequence[WholeTensor], rank: int) -> Taken:
    """Copy this rank's pieces, one parameter at a time, so that training may go on.

    Raises UnsupportedError if a parameter converts to something else than at connect.
    """
    pieces = {whole.name: [p for p in whole.pieces if p.rank == rank] for whole in wholes}
    return {
        (name, piece): tensor.detach()[piece.source].to("cpu", copy=True).contiguous()
        for name, tensor in conversion.some({name for name, mine in pieces.items() if mine})
        for piece in pieces[name]
    }


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
