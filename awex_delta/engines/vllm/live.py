"""On a CPU vLLM packs weights into other layouts after loading them. This keeps them as they are.

The switches act only in a worker whose `weight_transfer_config` names our backend; other engines of the
same installation keep their faster kernels. They must be set before the model is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, silu

BACKEND = "awex_delta"
"""Name of our weight-transfer backend in vLLM."""

_MARK = "awex_delta_live"


class _UnlessLive:
    """Stands for a flag of vLLM, and is false while weights must stay live."""

    def __init__(self, flag: object) -> None:
        self._flag = flag

    def __bool__(self) -> bool:
        return bool(self._flag) and not _wanted()


def keep_weights_live() -> None:
    """Set the switches in this process. May be called again.

    * Linear layers, embeddings: neither oneDNN nor the SGL kernel packs them; torch multiplies.
    * Experts: they are not packed; torch multiplies, one expert after the other.
    """
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if isinstance(ops._supports_onednn, _UnlessLive):  # noqa: SLF001 - vLLM has no public switch
        return
    ops._supports_onednn = _UnlessLive(ops._supports_onednn)  # noqa: SLF001
    suits_sgl = utils.check_cpu_sgl_kernel
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: not _wanted() and suits_sgl(n, k, dtype)
    pack, packed_apply = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if _wanted():
            vars(self)[_MARK] = True
        else:
            pack(self, layer)

    def apply(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
        if is_live(self):
            _live_experts(output, hidden_states, **given)
        else:
            packed_apply(self, output, hidden_states, **given)

    CPUUnquantizedExperts.process_weights_after_loading = process_weights_after_loading
    CPUUnquantizedExperts.apply = apply


def is_live(experts: object) -> bool:
    """True for an expert kernel of vLLM that reads the weights as they were loaded."""
    return _MARK in vars(experts)


def _wanted() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def _live_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Write the weighted sum of each token's experts into `output` [tokens, hidden]."""
    if activation.value != "silu":
        raise NotImplementedError(f"live experts on a CPU know silu, not {activation.value}")
    slots = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device="cpu")
    for slot in range(w1.shape[0]):
        tokens, choice = (slots == slot).nonzero(as_tuple=True)
        if not tokens.numel():
            continue
        gate, up = linear(hidden_states[tokens], w1[slot]).float().chunk(2, dim=1)
        found = linear((silu(gate) * up).to(hidden_states.dtype), w2[slot]).float()
        if not apply_router_weight_on_input:
            found *= topk_weights[tokens, choice].float()[:, None]
        total.index_add_(0, tokens, found)
    output.copy_(total)
