"""Which plain tensors a trainer can follow: refused by name before anything is hooked."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from awex_delta.errors import UnsupportedError
from awex_delta.lines.storages import unreadable
from awex_delta.plan.describe import WIRE_DTYPES


def check_tensors(weights: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
    """Refuse what cannot be sent, or whose owned part is no flat range of memory.

    Args:
        weights: by HF name.
        masters: by HF name, what an optimizer steps for the weight of that name.

    Raises:
        UnsupportedError: names the tensor, and what is wrong with it.
    """
    named = [(name, "the weight", tensor) for name, tensor in weights.items()]
    for name, kind, tensor in [*named, *((name, "its master", tensor) for name, tensor in masters.items())]:
        why = unreadable(tensor)
        if not why and tensor.dtype not in WIRE_DTYPES.values():
            why = f"it is {tensor.dtype}; only {', '.join(sorted(WIRE_DTYPES))} can be sent"
        if not why and name in masters and not tensor.is_contiguous():
            why = (
                f"it is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): hold it in "
                "rows, such as by contiguous()"
            )
        if why:
            raise UnsupportedError(f"{name}: {kind}: {why}")
    for name, master in masters.items():
        weight = weights.get(name)
        if weight is None:
            raise UnsupportedError(f"{name}: there is a master, but no weight of that name")
        if weight.shape != master.shape:
            raise UnsupportedError(
                f"{name}: the weight has shape {tuple(weight.shape)}, its master {tuple(master.shape)}. "
                "Remedy: give a master of the same shape, such as weight.float()"
            )
    spans = sorted((str(w.device), w.data_ptr(), w.nbytes, n) for n, w in weights.items() if n in masters)
    for (device, start, size, name), (other_device, other_start, _, other) in pairwise(spans):
        if device == other_device and other_start < start + size:
            raise UnsupportedError(
                f"{name} and {other} share memory and have a master each: give each tensor once "
                "(tied_embeddings=True serves an embedding as lm_head, too)"
            )
