"""Tensors of a trainer: where they stand in a model, and which plain ones can be followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from awex_delta.errors import UnsupportedError
from awex_delta.lines.storages import unreadable
from awex_delta.plan.describe import WIRE_DTYPES


def tensor_at(module: torch.nn.Module, path: Sequence[str], key: str) -> torch.Tensor:
    """The parameter or buffer that a module holds now under the words of a name.

    It is called for each tensor in each update, since moving a module replaces its buffers, and anyone may
    replace a parameter. torch's own look-up takes ten times as long.

    Raises:
        UnsupportedError: there is none; it names `key`.
    """
    held = module.__dict__
    try:
        for name in path[:-1]:
            held = held["_modules"][name].__dict__
        found: torch.Tensor | None = held["_parameters"].get(path[-1])
        if found is None:
            found = held["_buffers"].get(path[-1])
    except (AttributeError, KeyError):
        found = None
    if found is None:
        raise UnsupportedError(f"{key}: the model has no such tensor any more")
    return found


def data_parallel_info(rank: int, size: int) -> Mapping[str, int | str | bool]:
    """The fields of AWEX's RankInfo for a trainer rank that splits no computation with others."""
    return {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "dp_size": size,
        "dp_rank": rank,
        "ep_rank": 0,
        "ep_size": 1,
        "ep_tp_rank": 0,
        "ep_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_tp_size": 1,
        "attn_dp_rank": rank,
        "world_size": size,
        "global_rank": rank,
        "local_rank": rank,
        "engine_rank": 0,
        "is_infer": False,
        "cp_rank": 0,
        "cp_size": 1,
        "cp_mode": "none",
    }


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
