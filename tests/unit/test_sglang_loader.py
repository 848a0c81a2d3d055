"""What SGLang's hook makes of a request, before any engine is involved."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from awex_delta.engines.sglang import loader as sglang_loader
from awex_delta.engines.sglang.loader import LOAD_FORMAT, TENSOR_NAME, Instruction, attached, load, message
from awex_delta.errors import ConfigError
from awex_delta.protocol.rendezvous import Joining, Rendezvous
from awex_delta.settings.agreed import DeltaSettings

JOINING = Joining(
    rendezvous=Rendezvous(num_engine_ranks=4, num_trainer_ranks=4, host="10.0.0.7", port=4000),
    settings=DeltaSettings(anchor_interval=5, timeout_seconds=7.5),
    first_engine_rank=2,
    engine="a",
)


def text(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def test_an_instruction_survives_its_tensor() -> None:
    ((name, tensor),) = message("update", JOINING, version=9)
    assert (name, tensor.dtype, tensor.dim()) == ("awex_delta.instruction", torch.uint8, 1)
    assert sglang_loader._read([(name, tensor)]) == Instruction(action="update", joining=JOINING, version=9)


def test_the_load_format_names_the_loader() -> None:
    module, _, name = LOAD_FORMAT.rpartition(".")
    assert (module, vars(sglang_loader)[name]) == (sglang_loader.__name__, load)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        pytest.param([], "made by message", id="nothing"),
        pytest.param([("model.norm.weight", torch.ones(3))], "made by message", id="a weight"),
        pytest.param([(TENSOR_NAME, torch.ones(3))], "not JSON text", id="floats"),
        pytest.param(
            [(TENSOR_NAME, torch.zeros(1 << 17, dtype=torch.uint8))], "not JSON text", id="too long"
        ),
        pytest.param([(TENSOR_NAME, text(b"{"))], "cannot be read", id="no JSON"),
        pytest.param([(TENSOR_NAME, text(b"{}"))], "cannot be read", id="fields missing"),
        pytest.param([(TENSOR_NAME, text(b'{"prot": 1}'))], "prot", id="a misspelt field"),
        pytest.param(
            [(TENSOR_NAME, text(b'{"action": "run"}'))], "action", id="an action that does not exist"
        ),
    ],
)
def test_a_request_that_cannot_be_read_changes_nothing(
    tensors: list[tuple[str, torch.Tensor]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=said):
        sglang_loader._read(tensors)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with caplog.at_level(logging.ERROR):
        load(model, tensors)
    assert "the weights stay as they were" in caplog.text
    assert attached(model) is None
    assert torch.equal(model.weight, before)


def test_disconnecting_what_was_never_connected_is_harmless() -> None:
    model = nn.Linear(2, 2)
    load(model, message("disconnect", JOINING))
    assert attached(model) is None
