"""How the first worker of a replica drives SGLang under verl. Its server needs GPUs: calls are recorded."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make verl")

from awex_delta.engines.sglang.driver import HttpControl
from awex_delta.errors import ConfigError, UpdateError
from awex_delta.integrations.verl import rollout
from awex_delta.integrations.verl.order import Order, Outcomes
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.settings.agreed import DeltaSettings


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the replica asked of its server. An actor's answer is what it would be."""
    asked: list[Any] = []
    monkeypatch.setattr(rollout, "wait", lambda answer: answer)
    monkeypatch.setattr(HttpControl, "flush", lambda *_: True)
    monkeypatch.setattr(HttpControl, "publish", lambda _, version: asked.append(f"publish {version}"))

    def load(self: HttpControl, _: list[Any], *, flush: bool) -> None:
        asked.append((self._url, self._num_workers, flush))

    monkeypatch.setattr(HttpControl, "load", load)
    return asked


def remote(answer: Any) -> Any:
    """A method of an actor."""
    return SimpleNamespace(remote=lambda *_, **__: answer)


def test_sglangs_version_is_published_once_the_trainer_says_that_it_is_committed(calls: list[Any]) -> None:
    store = host_store()
    order = Order(
        rendezvous=Rendezvous(num_engine_ranks=2, num_trainer_ranks=1, port=store.port, name="verl/1"),
        settings=DeltaSettings(timeout_seconds=10.0, connect_timeout_seconds=10.0),
        version=7,
        ticket="t",
        engine="replica-0",
        num_workers=2,
    )
    replica = rollout.Replica("sglang", SimpleNamespace(get_server_address=remote(("10.0.0.9", 30000))))
    trainer = Outcomes(order)
    trainer.tell(0, "UpdateAborted: no")
    following = threading.Thread(target=replica.follow, args=(order,), daemon=True)
    following.start()
    trainer.tell(1, "")
    following.join(20)
    update = ("http://10.0.0.9:30000", 2, True)
    assert calls == [update, update, "publish 7"], "the second try is the trainer's second"
    assert replica.version == 7


def test_what_sglangs_trainer_gave_up_twice_is_not_published(calls: list[Any]) -> None:
    store = host_store()
    order = Order(
        rendezvous=Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=store.port, name="verl/1"),
        settings=DeltaSettings(timeout_seconds=10.0, connect_timeout_seconds=10.0),
        version=7,
        ticket="t",
        engine="replica-0",
        num_workers=1,
    )
    replica = rollout.Replica("sglang", SimpleNamespace(get_server_address=remote(("10.0.0.9", 30000))))
    for number in (0, 1):
        Outcomes(order).tell(number, f"UpdateAborted: try {number}")
    with pytest.raises(UpdateError, match=r"replica-0 did not reach version 7\. Its requests stay") as raised:
        replica.follow(order)
    assert "try 1" in str(raised.value.__cause__)
    assert len(calls) == 2
    assert replica.version == 0


def test_workers_are_found_by_the_group_that_verl_started(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = {"vllm_server_3_0": "three", "sglang_server_12_0": "twelve"}

    def get_actor(name: str) -> str:
        if name not in actors:
            raise ValueError(name)
        return actors[name]

    monkeypatch.setattr("ray.get_actor", get_actor)
    for prefix, found in (
        ("rollout_standalone_3", ("vllm", "three")),
        ("rollout_standalone_12_x", ("sglang", "twelve")),
    ):
        monkeypatch.setenv("WG_PREFIX", prefix)
        assert rollout.find_replica() == found
    monkeypatch.setenv("WG_PREFIX", "rollout_standalone_4")
    with pytest.raises(ConfigError, match=r"replica 4 has no actor .*Remedy: set rollout\.name"):
        rollout.find_replica()
    monkeypatch.setenv("WG_PREFIX", "actor_rollout")
    with pytest.raises(ConfigError, match=r"'actor_rollout': .*standalone replicas alone"):
        rollout.find_replica()
