"""Changes of a whole line, parameter by parameter, for oracles that know parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from awex_delta.lines.changes import Changes
from awex_delta.trainers.view import WeightInfo


def by_parameter(infos: Iterable[WeightInfo], changes: Changes) -> dict[str, Changes]:
    """By key, with positions in the parameter; parameters without changes are left out."""
    found, start = {}, 0
    for info in infos:
        if info.sparse:
            stop = start + torch.Size(info.shape).numel()
            here = (changes.pos >= start) & (changes.pos < stop)
            if bool(here.any()):
                code = None if changes.code is None else changes.code[here]
                value = None if changes.value is None else changes.value[here]
                found[info.key] = Changes(pos=changes.pos[here] - start, code=code, value=value)
            start = stop
    return found
