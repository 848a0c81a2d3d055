"""The contract of trainers, run against the trainer over plain tensors, with each way of finding changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.contract import ContractBroken
from awex_delta.testing.contract.trainers import CASES, Trained, check
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

SHAPES = {"model.embed_tokens.weight": (16, 8), "up.weight": (12, 8), "gate.weight": (12, 8), "norm": (8,)}
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "accumulate": {"accumulate": True},
    "snapshot": {"method": "snapshot"},
}


def trained(
    method: str, kind: type[TorchAdamWTrainer] = TorchAdamWTrainer, *, verify: str = "full"
) -> Trained:
    settings = DeltaSettings(verify=verify, **METHODS[method])
    view = kind.create(SHAPES, lr=1e-5, settings=settings, buffers={"gate.bias": (4,)})
    return Trained(view=view, step=view.train_step, live=lambda: view._weights, settings=settings)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_plain_tensors(case: str, method: str, tmp_path: Path) -> None:
    check(case, trained(method), tmp_path)


class Copies(TorchAdamWTrainer):
    """Gives what its weights were when it was first asked."""

    def tensor(self, key: str) -> torch.Tensor:
        copies: dict[str, torch.Tensor] = self.__dict__.setdefault("copies", {})
        return copies.setdefault(key, self._weights[key].clone())


@pytest.mark.parametrize(("case", "verify"), [("steps", "full"), ("weights edited", "off")])
def test_a_view_that_gives_copies_breaks_it(case: str, verify: str, tmp_path: Path) -> None:
    with pytest.raises(ContractBroken, match=r"version \d.*model.embed_tokens.weight"):
        check(case, trained("adamw", Copies, verify=verify), tmp_path)
