"""How many elements are NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def not_finite(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Count the elements that are NaN or infinite; tensors that have none are left out.

    Every element is read once, into one sum for each tensor, which none of them leaves finite. Only a tensor
    whose sum is not finite is read again, and counted. Waits for the device once, whatever the number.

    Args:
        tensors: by name, of any shape, on one device. Whole numbers are always finite.
    """
    looked = {name: t.detach() for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not looked:
        return {}
    sums = torch.stack([_sum(tensor) for tensor in looked.values()])
    suspects = [name for name, fine in zip(looked, sums.isfinite().tolist(), strict=True) if not fine]
    counts = {name: int((~looked[name].isfinite()).sum()) for name in suspects}
    return {name: count for name, count in counts.items() if count}


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    # A sum in bf16 has the range of fp32, and torch adds it up in fp32 without a copy.
    wide = tensor.dtype in (torch.bfloat16, torch.float32)
    return (tensor.sum() if wide else tensor.sum(dtype=torch.float32)).float()
