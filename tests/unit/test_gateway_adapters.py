"""Which side is made of which objects, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from transformers import LlamaConfig, LlamaForCausalLM

from awex_delta.engines.vllm.driver import HttpControl, VllmDriver
from awex_delta.errors import AwexDeltaError, ConfigError, UnsupportedError
from awex_delta.gateway import engine_router
from awex_delta.gateway.adapters import engine_side, trainer_side
from awex_delta.gateway.sides import Order, Side
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Joining, Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

SHAPES = {"model.norm.weight": (8,)}
MEETING = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, store=HashStore())
ORDER = Order(pair="a", joining=Joining(rendezvous=MEETING, settings=DeltaSettings(), engine="e"))


def foreign(package: str, name: str, **attributes: Any) -> Any:
    """An object whose class is called as one of a package that is not imported here."""
    base = type(name, (), {})
    base.__module__ = f"{package}.somewhere"
    return type("Subclass", (base,), {"__module__": "users.own", **attributes})()


def shape(side: Side) -> tuple[str, str, int, bool, int | None]:
    return side.role, side.kind, side.num_ranks, side.brings_meeting, side.num_pairs


def test_a_trainer_view_a_sender_and_several_senders() -> None:
    view = TorchAdamWTrainer.create(SHAPES)
    sender = Sender(view, MEETING, 0, DeltaSettings())
    assert shape(trainer_side(view)) == ("trainer", "TorchAdamWTrainer", 1, False, None)
    assert shape(trainer_side(sender)) == ("trainer", "Sender", 1, True, 1)
    assert shape(trainer_side({"a": sender})) == ("trainer", "Senders", 1, True, None)
    with pytest.raises(ConfigError, match=r"pair='a': this trainer has senders for other"):
        trainer_side({"other": sender}).open(ORDER)


def test_a_torch_module_with_adamw_is_watched_from_connect_to_disconnect() -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    master = model.weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    side = trainer_side(model, optimizer, masters={"weight": master})
    assert shape(side) == ("trainer", "torch AdamW", 1, False, None)
    hooks: Any = optimizer._optimizer_step_post_hooks
    assert len(hooks) == 0
    ends = [side.open(ORDER), side.open(ORDER)]
    assert len(hooks) == 2, "each pair needs a record of its own"
    ends[0].close()
    assert len(hooks) == 1
    ends[1].close()
    assert len(hooks) == 0


def test_megatron_is_known_by_its_optimizer() -> None:
    optimizer = foreign("megatron", "MegatronOptimizer")
    side = trainer_side([nn.Linear(2, 2)], optimizer, hf_config=SimpleNamespace())
    assert shape(side) == ("trainer", "Megatron", 1, False, None)
    with pytest.raises(UnsupportedError, match="need hf_config"):
        trainer_side([nn.Linear(2, 2)], optimizer)


def test_engines_of_every_kind() -> None:
    parallel = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2, data_parallel_size=3))
    offline = foreign("vllm", "LLM", llm_engine=SimpleNamespace(vllm_config=parallel))
    sglang = foreign("sglang", "Engine", server_args=SimpleNamespace(tp_size=4))
    driver = VllmDriver(HttpControl("http://127.0.0.1:1"))
    receiver = Receiver(DictEngine(SHAPES), MEETING, 0, "e", DeltaSettings())
    tiny = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert shape(engine_side(DictEngine(SHAPES))) == ("engine", "DictEngine", 1, False, 1)
    assert shape(engine_side(receiver)) == ("engine", "Receiver", 1, True, 1)
    llama: Any = LlamaForCausalLM
    assert shape(engine_side(llama(tiny))) == ("engine", "transformers", 1, False, 1)
    assert shape(engine_side(offline)) == ("engine", "vLLM", 6, False, 1)
    assert shape(engine_side(foreign("vllm", "AsyncLLM", vllm_config=parallel)))[2] == 6
    assert shape(engine_side(sglang)) == ("engine", "SGLang", 4, False, 1)
    assert shape(engine_side(driver, num_ranks=2)) == ("engine", "VllmDriver", 2, False, 1)
    with pytest.raises(ConfigError, match="4 workers do not fit 1 engine ranks"):
        engine_side(sglang).open(ORDER)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: trainer_side(nn.Linear(2, 2)), r"torch\.nn\.modules\.linear\.Linear .*NoneType"),
        (lambda: trainer_side([nn.Linear(2, 2)], object()), r"list of torch.*builtins\.object"),
        (
            lambda: trainer_side(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)),
            r"torch\.optim\.sgd\.SGD",
        ),
        (
            lambda: trainer_side(nn.Linear(2, 2), torch.optim.AdamW([nn.Parameter(torch.ones(1))])),
            "needs masters",
        ),
        (lambda: trainer_side({}), r"builtins\.dict"),
        (lambda: engine_side(nn.Linear(2, 2)), r"Linear; give a transformers model"),
        (lambda: engine_side(None), "NoneType"),
        (lambda: engine_side(VllmDriver(HttpControl("http://127.0.0.1:1"))), "num_ranks=None: say how many"),
        (lambda: engine_side(DictEngine(SHAPES), num_ranks=2), "num_ranks=2: leave it out"),
        (lambda: engine_router(DictEngine(SHAPES), token="x" * 15), "at least 16"),
    ],
)
def test_what_no_adapter_knows_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(AwexDeltaError) as refused:
        make()
    assert re.search(said, str(refused.value)), str(refused.value)
