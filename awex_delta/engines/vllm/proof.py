"""Proof, on live weights, that views over a vLLM model are what vLLM loads and what it computes with.

A pattern is loaded through vLLM's own `load_weights`, one storage after the other, and looked for in the
views; then the layer computes with it. The old weights are put back whatever happens.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from awex_delta.engines.view import EngineTensor
from awex_delta.engines.vllm.live import is_live
from awex_delta.errors import LayoutError

# Kernels that read expert weights as they were loaded; others reorder them first.
_PLAIN_EXPERT_KERNELS = ("TRITON", "BATCHED_TRITON")


def prove(model: nn.Module, parts: Sequence[EngineTensor]) -> None:
    """Show that every view is where vLLM loads its HF tensor, and that its layer computes with it.

    Requests must not run meanwhile. Needs a copy of one storage at a time. The weights are as before, also
    if it raises LayoutError, which names the tensor or layer for which it does not hold.
    """
    by_storage: dict[int, list[EngineTensor]] = {}
    for entry in parts:
        if entry.tied_to is None:
            by_storage.setdefault(entry.view.untyped_storage().data_ptr(), []).append(entry)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, RoutedExperts):
            _require_plain_kernel(name, module)
    users = _users(model)
    for weight in {id(weight): weight for weight in model.parameters()}.values():
        address = weight.untyped_storage().data_ptr()
        _prove_storage(model, weight.detach(), by_storage.get(address, []), users.get(address, []))


def _users(model: nn.Module) -> Mapping[int, list[tuple[str, Any]]]:
    """The layers that multiply with each storage."""
    users: dict[int, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase | VocabParallelEmbedding):
            users.setdefault(module.weight.untyped_storage().data_ptr(), []).append((name, module))
    return users


def _prove_storage(
    model: Any, weight: torch.Tensor, parts: Sequence[EngineTensor], users: Sequence[tuple[str, Any]]
) -> None:
    address, saved = weight.data_ptr(), weight.clone()
    try:
        _load(model, parts)
        for entry in parts:
            whole = _pattern(entry)
            for dim, start in enumerate(entry.global_offset):
                whole = whole.narrow(dim, start, entry.view.shape[dim])
            if weight.data_ptr() != address or not torch.equal(entry.view, whole):
                raise LayoutError(
                    f"{entry.name}: vLLM's loader puts it elsewhere than expected: updates would be misplaced"
                )
        for name, module in users:
            _prove_used(name, module)
    finally:
        weight.copy_(saved)


def _load(model: Any, parts: Sequence[EngineTensor]) -> None:
    try:
        model.load_weights((entry.name, _pattern(entry)) for entry in parts)
    except Exception as error:
        raise LayoutError(
            f"{', '.join(entry.name for entry in parts[:3])}: vLLM's own loader fails, as it does once a "
            f"parameter was replaced: "
            f"{type(error).__name__}: {error}. Start vLLM anew."
        ) from error


def _pattern(entry: EngineTensor) -> torch.Tensor:
    """The whole HF tensor, with a hash of its name, row and column in each element, from -1 to 1.

    8 bits an element, which bf16 holds exactly, and never more than three bytes of memory for one.
    """
    seed, device = zlib.crc32(entry.name.encode()), entry.view.device
    cells = _hashes(entry.global_shape[-1], seed, device)
    for size in reversed(entry.global_shape[:-1]):
        cells = _hashes(size, seed + 1, device).view(-1, *[1] * cells.dim()) ^ cells
    return cells.to(entry.view.dtype).sub_(127.5).div_(128)


def _hashes(size: int, seed: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(size, device=device)
    return ((index + seed) * 2654435761 >> 24 & 0xFF).to(torch.uint8)


def _prove_used(name: str, module: Any) -> None:
    weight = module.weight.detach()
    rows = (torch.arange(2 * weight.shape[1], device=weight.device) % 7 - 3).to(weight.dtype)
    given = rows.view(2, -1)
    got = module.quant_method.apply(module, given, None)
    if not torch.allclose(got.float(), given.float() @ weight.float().T, rtol=0.02, atol=0.5):
        raise LayoutError(
            f"{name} computes with a copy of its weight that vLLM made after loading. Start vLLM with "
            f"weight_transfer_config backend 'awex_delta', so that the weight stays live."
        )


def _require_plain_kernel(name: str, module: Any) -> None:
    kernel = module.quant_method.unquantized_backend.name
    if kernel not in _PLAIN_EXPERT_KERNELS and not is_live(module.quant_method.moe_kernel.fused_experts):
        raise LayoutError(
            f"{name}: the {kernel} kernel keeps expert weights in an order of its own. "
            f"Serve them with one of {', '.join(_PLAIN_EXPERT_KERNELS)} (moe_backend='triton')."
        )
