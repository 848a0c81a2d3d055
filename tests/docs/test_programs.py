"""The Python blocks of the pages, run in order for real: what a page takes for granted is made here."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from awex_delta import (
    DeltaSettings,
    Rendezvous,
    RolloutConfig,
    TrainEngineConfig,
    UpdateStats,
    attach_transformers,
    host_store,
    read_run,
    resolve,
)
from awex_delta.engines.sglang.driver import EngineControl
from awex_delta.engines.sglang.loader import LOAD_FORMAT
from awex_delta.errors import ConfigError
from awex_delta.gateway import read_token
from awex_delta.protocol.stats import PartCount
from awex_delta.protocol.verdict import Kind, Reason, Verdict
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config
from tests.docs.blocks import ROOT, blocks_of, pages, python_blocks
from tests.procs.ports import hold_port, number_of
from tests.unit.test_sglang_driver import FakeEngine

SPEC = TinySpec(hidden=64, lr=3e-6)
NUM_STEPS = 2
ENGINE, TRAINER = 0, 1

RUN_HERE = {
    "README.md",
    *(f"docs/en/{name}.md" for name in ("configuration", "disk", "gateway", "integration", "operations")),
    *(f"docs/en/{name}.md" for name in ("report", "sglang", "targets", "trainers", "verl")),
}
RUN_ELSEWHERE = {
    "docs/en/first.md": "tests/docs/test_first.py",
    "docs/en/fsdp.md": "tests/procs/test_fsdp_streams.py",
    "docs/en/vllm.md": "tests/procs/test_vllm.py",
}


def test_every_page_with_programs_is_run() -> None:
    with_programs = {
        str(path.relative_to(ROOT))
        for path in pages()
        if path.parent.name != "zh" and any(block.language == "python" for block in blocks_of(path))
    }
    assert with_programs == RUN_HERE | set(RUN_ELSEWHERE)
    assert all((ROOT / test).exists() for test in RUN_ELSEWHERE.values())


@pytest.mark.timeout(180)
def test_the_readme() -> None:
    launcher, *_ = python_blocks("README.md")
    names: dict[str, Any] = {}
    launcher.run(names, {"d2p1t2": "d1", "d2t2": "d1"})  # two processes in place of eight
    store = names["store"]
    served, (updates, trained) = run_ranks(_readme_rank, 2, names["resolved"], "127.0.0.1", store.port)
    assert [stats.verdict.kind for stats in updates] == [Kind.DELTA, Kind.DELTA]
    assert torch.equal(served.view(torch.int16), trained.view(torch.int16))


def _readme_rank(me: Rank, resolved: Any, host: str, port: int) -> Any:
    _, trainer, engine = python_blocks("README.md")
    (failure,) = python_blocks("docs/en/operations.md")
    names: dict[str, Any] = {"resolved": resolved, "host": host, "port": port, "num_steps": NUM_STEPS}
    counts = {"num_engine_ranks=4, num_trainer_ranks=4": "num_engine_ranks=1, num_trainer_ranks=1"}
    if me.rank == TRAINER:
        me.init_gloo(rank=0, world_size=1, name="trainer")
        tiny = build_trainer(SPEC)
        names |= {"model_chunks": tiny.chunks, "optimizer": tiny.optimizer, "hf_config": tiny.hf_config}
        names |= {"train_step": tiny.train_step, "log": logging.getLogger().error}
        trainer.run(names, counts)
        updates: list[UpdateStats] = [names["stats"]]
        tiny.train_step()
        names["version"] = NUM_STEPS + 1
        failure.run(names)
        model: Any = tiny.chunks[0].module
        return [*updates, names["stats"]], model.embedding.word_embeddings.weight.detach().clone()
    create: Any = AutoModelForCausalLM.from_config
    names |= {"model": create(hf_config(SPEC), dtype=torch.bfloat16), "rank": ENGINE}
    names["rendezvous"] = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, host=host, port=port)
    engine.run(names)
    names["receiver"].update_weights(NUM_STEPS + 1)
    return names["model"].get_input_embeddings().weight.detach().clone()


@pytest.mark.timeout(180)
def test_the_page_on_integration() -> None:
    settings = next(block for block in blocks_of(ROOT / "docs/en/integration.md") if block.language == "yaml")
    _, areal, _ = python_blocks("docs/en/integration.md")
    names: dict[str, Any] = {"config": yaml.safe_load(settings.code)}
    areal.run(names)
    assert names["resolved"].topology.world_size == 16
    assert names["variables"]["DTE_DELTA_ANCHOR_INTERVAL"] == "20"

    sides = ("megatron:d1", "vllm:d1")
    resolved = resolve(
        TrainEngineConfig(backend=sides[0], enable_delta_weight_update=True), RolloutConfig(backend=sides[1])
    )
    store = host_store()
    served, trained = run_ranks(_integration_rank, 2, resolved, store.port)
    assert len(served) == NUM_STEPS
    assert all(torch.equal(*pair) for pair in zip(served, trained, strict=True))


def test_the_suite_on_the_page_on_integration() -> None:
    names: dict[str, Any] = {}
    python_blocks("docs/en/integration.md")[2].run(names)
    for move in ("one_tensor", "parameters_replaced"):
        names["test_it_is_followed_wherever_it_moves"](new_linears(), move)
    names["test_it_is_refused_when_it_cannot_be_written"](new_linears(), "cast")


def new_linears() -> torch.nn.Module:
    """What the page's fixture makes."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).bfloat16()


def _integration_rank(me: Rank, resolved: Any, port: int) -> list[torch.Tensor]:
    """The bits of the embedding after each update, of the trainer's own and of the engine's."""
    kept: list[torch.Tensor] = []

    def keep(weight: torch.Tensor) -> None:
        kept.append(weight.detach().view(torch.int16).clone())

    if me.rank == TRAINER:
        me.init_gloo(rank=0, world_size=1, name="trainer")
        tiny = build_trainer(SPEC)
        model: Any = tiny.chunks[0].module
        names: dict[str, Any] = {"resolved": resolved, "store_host": "127.0.0.1", "store_port": port}
        names |= {"model": tiny.chunks, "optimizer": tiny.optimizer, "hf_config": tiny.hf_config}
        names |= {"num_steps": NUM_STEPS, "train_step": tiny.train_step}
        names["generate"] = lambda step: keep(model.embedding.word_embeddings.weight)
        python_blocks("docs/en/integration.md")[0].run(names)
        return kept
    create: Any = AutoModelForCausalLM.from_config
    served = create(hf_config(SPEC), dtype=torch.bfloat16)
    meet = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)
    receiver = attach_transformers(served, rendezvous=meet, engine_rank=ENGINE, settings=resolved.settings)
    for version in range(1, NUM_STEPS + 1):
        receiver.update_weights(version)
        keep(served.get_input_embeddings().weight)
    return kept


def test_the_page_on_the_configuration() -> None:
    settings, program = (
        next(block for block in blocks_of(ROOT / "docs/en/configuration.md") if block.language == language)
        for language in ("yaml", "python")
    )
    names: dict[str, Any] = {"data": yaml.safe_load(settings.code)}
    program.run(names)
    assert names["resolved"].settings == DeltaSettings(anchor_interval=20)


@pytest.mark.timeout(120)
def test_the_page_on_trainers() -> None:
    (found,) = run_ranks(_trainers_page, 1)
    assert found == ("0/decoder.final_layernorm.weight", "model.norm.weight")


def _trainers_page(me: Rank) -> tuple[str, str]:
    megatron, torch_adamw = python_blocks("docs/en/trainers.md")[:2]
    me.init_gloo(rank=0, world_size=1)
    tiny = build_trainer(SPEC)
    names: dict[str, Any] = {"model_chunks": tiny.chunks, "optimizer": tiny.optimizer}
    names |= {"hf_config": tiny.hf_config, "settings": DeltaSettings()}
    megatron.run(names)
    keys = [info.key for info in names["view"].weights()]

    create: Any = AutoModelForCausalLM.from_config
    model = create(hf_config(SPEC), dtype=torch.bfloat16)
    masters = {name: weight.detach().float() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-6)
    names = {"model": model, "masters": masters, "optimizer": optimizer, "settings": DeltaSettings()}
    torch_adamw.run(names)
    plain = [info.param for info in names["view"].weights()]
    return (
        next(key for key in keys if key.endswith("final_layernorm.weight")),
        next(name for name in plain if name == "model.norm.weight"),
    )


@pytest.mark.timeout(180)
def test_the_page_on_targets() -> None:
    store = host_store()
    trained, *served = run_ranks(_targets_rank, 4, store.port)
    for kept, name in zip(served, TARGETS, strict=True):
        assert torch.equal(kept, trained[name]), name


TARGETS = {"students": (0, 1, 2, 0, 1, 2), "judges": (0, 1), "teachers": (0, 1, 2)}
"""Versions that the two programs on the page send, to each target, with three steps in a loop."""


def _targets_rank(me: Rank, port: int) -> Any:
    """Rank 0 trains; each other one is an engine, and answers with the bits that it ends with."""
    meets = {n: Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port, name=n) for n in TARGETS}
    settings = DeltaSettings(timeout_seconds=60, connect_timeout_seconds=60)
    if me.rank:
        name = [*TARGETS][me.rank - 1]
        model = _serving_model()
        receiver = attach_transformers(model, rendezvous=meets[name], engine_rank=0, settings=settings)
        for version in TARGETS[name]:
            receiver.update_weights(version)
        return _embedding_bits(model.get_input_embeddings().weight)
    me.init_gloo(rank=0, world_size=1, name="trainer")
    tiny = build_trainer(SPEC)
    model = tiny.chunks[0].module
    weight: Any = model.embedding.word_embeddings.weight
    failures: list[object] = []
    names: dict[str, Any] = {"model_chunks": tiny.chunks, "optimizer": tiny.optimizer, "rank": 0}
    names |= {"hf_config": tiny.hf_config, "settings": settings, "host": "127.0.0.1", "port": port}
    names |= {"train_step": tiny.train_step, "steps": 3, "log": lambda *words: failures.append(words)}
    several, average = python_blocks("docs/en/targets.md")
    counts = {
        f"num_engine_ranks={n}, num_trainer_ranks=8": f"num_engine_ranks={min(n, 1)}, num_trainer_ranks=1"
        for n in (0, 8, 4)
    }
    several.run(names, counts | {"step % 100": "step % 2", "step // 100": "step // 2"})
    judged = _embedding_bits(weight)  # the judges' second version is the last step's
    names["teachers"] = meets["teachers"]
    average.run(names, {"alpha=0.01": "alpha=1.0"})  # so that the last policy is what teachers get
    assert failures == []
    return {"students": _embedding_bits(weight), "judges": judged, "teachers": _embedding_bits(weight)}


def _serving_model() -> Any:
    """A transformers model with random weights."""
    create: Any = AutoModelForCausalLM.from_config
    return create(hf_config(SPEC), dtype=torch.bfloat16)


def _embedding_bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().view(torch.int16).clone()


@pytest.mark.timeout(120)
def test_the_page_on_folders() -> None:
    (found,) = run_ranks(_disk_page, 1)
    served, trained = found
    assert torch.equal(served, trained)


@pytest.mark.timeout(120)
def test_the_program_on_the_page_on_folders(tmp_path: Path) -> None:
    *_, block = python_blocks("docs/en/disk.md")
    program = tmp_path / "folder.py"
    program.write_text(block.code, encoding="utf-8")
    said = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line for line in said.splitlines() if re.match(r"[1-4] ", line)]
    assert [line.split()[1].rstrip(",") for line in lines] == ["full", "delta", "delta", "delta"]
    assert all(line.endswith(f"{line[0]} True") for line in lines)


def _disk_page(me: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    settings_block = next(b for b in blocks_of(ROOT / "docs/en/disk.md") if b.language == "yaml")
    chosen = yaml.safe_load(settings_block.code) | {"weight_update_disk_url": str(me.folder / "run")}
    train = TrainEngineConfig.load({"backend": "megatron:d1", **chosen})
    settings = resolve(train, RolloutConfig(backend="vllm:d1")).settings
    writer, reader, _ = python_blocks("docs/en/disk.md")
    me.init_gloo(rank=0, world_size=1)
    tiny = build_trainer(SPEC)
    tiny.train_step()
    store = host_store()
    names: dict[str, Any] = {"model_chunks": tiny.chunks, "optimizer": tiny.optimizer}
    names |= {"hf_config": tiny.hf_config, "settings": settings, "host": "127.0.0.1", "port": store.port}
    names["version"] = 3
    writer.run(names, {"num_trainer_ranks=8": "num_trainer_ranks=1"})
    names["model"] = _serving_model()
    reader.run(names)
    model: Any = tiny.chunks[0].module
    return (
        _embedding_bits(names["model"].get_input_embeddings().weight),
        _embedding_bits(model.embedding.word_embeddings.weight),
    )


@pytest.mark.timeout(120)
def test_the_routers_on_the_page_on_the_gateway(tmp_path: Path) -> None:
    paths = run_ranks(_router_page, 1, tmp_path / "token")[0]
    assert all({"/connect", "/update_weights", "/disconnect"} <= set(found) for found in paths)


def _router_page(me: Rank, token_path: Path) -> list[list[str]]:
    read_token(token_path, create=True)
    me.init_gloo(rank=0, world_size=1)
    tiny = build_trainer(SPEC)
    names: dict[str, Any] = {"model_chunks": tiny.chunks, "optimizer": tiny.optimizer}
    names |= {"hf_config": tiny.hf_config, "token_path": token_path, "llm": _serving_model()}
    found = []
    for block in python_blocks("docs/en/gateway.md")[:2]:
        block.run(names)
        found.append([*names["app"].openapi()["paths"]])
    return found


@pytest.mark.timeout(300)  # three processes that load everything: 105 s on a machine with much else to do
def test_the_session_on_the_page_on_the_gateway(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = python_blocks("docs/en/gateway.md")[2]
    (tmp_path / "sides.py").write_text(program.code)
    servers, client = [b for b in blocks_of(ROOT / "docs/en/gateway.md") if b.language == "sh"][1:3]
    held = ExitStack()
    request.addfinalizer(held.close)
    ports = {printed: str(number_of(held.enter_context(hold_port()))) for printed in ("8090", "8101", "8102")}
    # The page's own text, on ports that are free here; the gateway's default has to be said then.
    started = servers.code.replace("awex-delta gateway", "awex-delta gateway --port 8090")
    # All at once: a port that was put in may look like one that is printed.
    started, asked = (
        re.sub("|".join(ports), lambda printed: ports[printed[0]], text) for text in (started, client.code)
    )
    script = f"""
        export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT} OMP_NUM_THREADS=1
        trap 'kill $(jobs -p)' EXIT
        {started}
        for port in {" ".join(ports.values())}; do
            until curl -s -o /dev/null http://127.0.0.1:$port/health; do sleep 0.3; done
        done
        {asked}
    """
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    answers = [*json_values(done.stdout)]
    updates = [answer for answer in answers if "kind" in answer]
    assert [(one["version"], one["kind"]) for one in updates] == [(0, "full"), (1, "delta")], done
    assert answers[-1]["state"] == "disconnected"


def json_values(text: str) -> Iterator[Any]:
    """All JSON objects in a text, however they are separated."""
    start = text.find("{")
    while start >= 0:
        value, end = json.JSONDecoder().raw_decode(text, start)
        yield value
        start = text.find("{", end)


def test_the_page_on_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    python, over_http = python_blocks("docs/en/sglang.md")
    engine = FakeEngine()
    monkeypatch.setattr(
        EngineControl, "publish", lambda _, version: engine.calls.append(("publish", version))
    )
    names: dict[str, Any] = {"engine": engine, "settings": DeltaSettings()}
    python.run(names)
    update = [("begin", "target"), ("update", 7, True), "end"]
    assert engine.calls == [("flush", 0.0), *update, ("publish", "7")]
    over_http.run(names)
    payloads = names["body"]["serialized_named_tensors"]
    assert len(payloads) == names["joining"].rendezvous.num_engine_ranks
    sent = pickle.loads(base64.b64decode(payloads[0]))  # noqa: S301 - made by the page
    engine.update_weights_from_tensor(sent, load_format=LOAD_FORMAT, flush_cache=True)
    assert engine.calls[-1] == ("update", 7, True)
    engine.loop.close()


def test_the_page_on_verl() -> None:
    (program,) = python_blocks("docs/en/verl.md")
    for block in (one for one in blocks_of(ROOT / "docs/en/verl.md") if one.language == "yaml"):
        config = yaml.safe_load(block.code)
        program.run({"config": config})
        config["actor_rollout_ref"]["rollout"]["data_parallel_size"] = 2
        with pytest.raises(ConfigError, match="more replicas"):
            program.run({"config": config})


def test_a_store_is_open_while_its_launcher_keeps_it() -> None:
    """What the README's comment on `host_store` says."""
    store = host_store()
    assert Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=store.port).world_size == 2


class _Sender:
    """Commits every update as a delta in which one layer changed."""

    changed_by = (PartCount(layer=3, kind="mlp", changed=5, owned=9),)

    def update_weights(self, version: int) -> UpdateStats:
        """Nothing is sent."""
        return UpdateStats(version=version, verdict=Verdict(kind=Kind.DELTA, reason=Reason.NONE))


def test_the_page_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log, tracked = python_blocks("docs/en/report.md")
    resolved = resolve(TrainEngineConfig(backend="megatron:d1"), RolloutConfig(backend="vllm:d1"))
    names: dict[str, Any] = {"resolved": resolved, "rank": 0, "world_size": 1, "num_steps": NUM_STEPS}
    names |= {"train_step": lambda: None, "sender": _Sender(), "mean_reward": 0.5}
    log.run(names)
    updates = read_run("RUN.jsonl").updates
    assert [(line.version, line.extra["reward"], line.changed_by[0].changed) for line in updates] == [
        (1, 0.5, 5),
        (2, 0.5, 5),
    ]
    pytest.importorskip("tensorboard")
    tracked.run(names, {', "wandb"': ","})  # tests/unit/test_trackers.py has both
    assert (tmp_path / "RUN.tensorboard").exists()
