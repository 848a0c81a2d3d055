"""What is used wrongly is refused by name, value and remedy, and leaves nothing behind.

Every public name of the package and every command is on one of the lists, or in `NOT_CALLED`.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch._C._distributed_c10d import HashStore
from transformers import Qwen3Config
from typer.testing import CliRunner

import awex_delta as awex
from awex_delta import DeltaSettings, Rendezvous, RolloutConfig, TrainEngineConfig
from awex_delta.cli.main import SUBCOMMANDS, app
from awex_delta.errors import AwexDeltaError, ConfigError, ConnectError
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.megatron import MegatronTrainer
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer

NAME = "model.embed_tokens.weight"
REMEDY = re.compile(
    r"Remedy: |[Gg]ive |did you mean|Did you mean|Possible|add --|repair|Try |write |pip install"
)
TRAIN = {"backend": "torch:d1", "enable_delta_weight_update": True}
ON = DeltaSettings()

NOT_CALLED = {
    *(name for name in awex.__all__ if name.endswith("Error")),
    "UpdateAborted",  # raised, never made by users
    *(
        "EngineTensor",
        "Kind",
        "PartCount",
        "Reason",
        "TargetsUpdate",
        "UpdateStats",
        "Verdict",
    ),  # records that are given back
    *("EngineView", "TrainerView"),  # to be implemented
    "SglangDriver",  # keeps what it is given, and calls it first in `connect`
    "__version__",
}


class Place:
    """Where a case runs: paths of all kinds, and things that work but for what the case makes wrong."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.file = folder / "file"
        self.file.write_text("plain text\n")
        self.secret = folder / "open-to-all"
        self.secret.write_text("a secret that everybody reads\n")
        self.secret.chmod(0o644)
        self.empty = folder / "empty"
        self.empty.mkdir()
        self.missing = folder / "missing" / "deeper"
        self.delta = folder / "run" / "weight_v000007"
        self.delta.mkdir(parents=True)
        manifest = {"metadata": {"awex_delta": {"kind": "delta", "version": 7, "base_version": 6}}}
        (self.delta / "model.safetensors.index.json").write_text(json.dumps(manifest))

    @property
    def both(self) -> Rendezvous:
        return Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, store=HashStore())

    @property
    def trainer(self) -> TorchAdamWTrainer:
        return TorchAdamWTrainer.create({NAME: (4, 2)})

    @property
    def engine(self) -> DictEngine:
        return DictEngine({NAME: (4, 2)})

    @property
    def sender(self) -> awex.Sender:
        return awex.Sender(self.trainer, self.both, 0, ON)

    def sender_at(self, host: str) -> awex.Sender:
        met = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, host=host, port=self.port)
        return awex.Sender(self.trainer, met, 0, ON)  # whose wait for others is 300 s

    @property
    def receiver(self) -> awex.Receiver:
        return awex.Receiver(self.engine, self.both, 0, "e", ON)

    def disk(self, url: object) -> DeltaSettings:
        return DeltaSettings(transport="disk", disk_url=url)  # type: ignore[arg-type]

    @property
    def targets(self) -> awex.Targets:
        trainers = Rendezvous(num_engine_ranks=0, num_trainer_ranks=1, store=HashStore())
        return awex.Targets(self.trainer, trainers=trainers, trainer_rank=0, settings=ON)


def closed(end: Any) -> Any:
    """An object after its `close`."""
    end.close()
    return end


def master_of(shape: tuple[int, ...]) -> TorchAdamWTrainer:
    """A trainer whose weight of shape (4, 2) has a master of another one."""
    weight, master = torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(shape, requires_grad=True)
    optimizer = torch.optim.AdamW([master])
    return TorchAdamWTrainer(weights={NAME: weight}, masters={NAME: master}, optimizer=optimizer, settings=ON)


def megatron_module() -> MegatronModule:
    """A module of Megatron's, in a process without Megatron's process groups."""
    return MegatronModule(config=None)


def attach_megatron(chunks: Any, optimizer: Any = None, config: Any = None) -> MegatronTrainer:
    return MegatronTrainer.attach(chunks, optimizer, config, settings=ON)


Call = Callable[[Place], object]
_rendezvous: Any = Rendezvous
_settings: Any = DeltaSettings

# The public name; what is done wrong; and what the refusal names besides a remedy.
CALLS: list[tuple[str, Call, list[str]]] = [
    (
        "Rendezvous",
        lambda _: _rendezvous(num_engine_ranks="1", num_trainer_ranks=1),
        ["num_engine_ranks", "'1'"],
    ),
    (
        "Rendezvous",
        lambda _: _rendezvous(num_engine_ranks=1, num_trainer_ranks=True),
        ["num_trainer_ranks", "True"],
    ),
    (
        "Rendezvous",
        lambda _: Rendezvous(num_engine_ranks=-1, num_trainer_ranks=1),
        ["num_engine_ranks", "-1"],
    ),
    (
        "Rendezvous",
        lambda _: _rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port="80"),
        ["port", "'80'"],
    ),
    (
        "Rendezvous",
        lambda _: Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=70000),
        ["port", "70000"],
    ),
    (
        "Rendezvous",
        lambda _: _rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=80, host=5),
        ["host", "5"],
    ),
    (
        "Rendezvous",
        lambda _: _rendezvous(num_engine_ranks=1, num_trainer_ranks=1, store="x"),
        ["store", "'x'"],
    ),
    ("host_store", lambda at: awex.host_store("127.0.0.1", at.port), ["port", "127.0.0.1"]),
    ("host_store", lambda _: awex.host_store("192.0.2.7"), ["host", "192.0.2.7"]),
    ("host_store", lambda _: awex.host_store(5), ["host", "5"]),  # type: ignore[arg-type]
    ("host_store", lambda _: awex.host_store(port=-1), ["port", "-1"]),
    ("host_store", lambda _: awex.host_store(settings="on"), ["settings", "'on'"]),  # type: ignore[arg-type]
    ("TrainEngineConfig", lambda _: TrainEngineConfig.load([1]), ["data", "[1]"]),  # type: ignore[arg-type]
    ("TrainEngineConfig", lambda _: TrainEngineConfig.load(TRAIN | {"zzz": 1}), ["zzz", "1"]),
    (
        "TrainEngineConfig",
        lambda _: TrainEngineConfig.load({"backend": 8}),
        ["backend", "8", "megatron:d2p1t4"],
    ),
    ("RolloutConfig", lambda _: RolloutConfig.load("vllm:d1"), ["data", "vllm:d1"]),  # type: ignore[arg-type]
    ("RolloutConfig", lambda _: RolloutConfig.load({}), ["backend", "missing"]),
    ("DeltaSettings", lambda _: _settings(encoding="nope"), ["encoding", "'nope'", "write indices or gaps"]),
    ("DeltaSettings", lambda _: _settings(anchor_interval="5"), ["anchor_interval", "'5'"]),
    ("DeltaSettings", lambda _: _settings(timeout_seconds=-1.0), ["timeout_seconds", "-1.0"]),
    (
        "DeltaSettings",
        lambda _: _settings(secret_source="hunter2"),
        ["secret_source", "not shown", "file:PATH"],
    ),
    ("resolve", lambda _: awex.resolve(TRAIN, RolloutConfig(backend="vllm:d1")), ["train", "dict"]),  # type: ignore[arg-type]
    ("resolve", lambda _: awex.resolve(TrainEngineConfig.load(TRAIN), None), ["rollout", "None"]),  # type: ignore[arg-type]
    (
        "resolve",  # all that is wrong at once, the number of ranks too
        lambda _: awex.resolve(
            TrainEngineConfig.load(
                {**TRAIN, "backend": "torch:d2", "use_lora": True, "ppo_n_minibatches": 3}
            ),
            RolloutConfig(backend="vllm:d1"),
        ),
        ["use_lora = True", "ppo_n_minibatches = 3", "2 trainer + 1 engine ranks = 3"],
    ),
    ("worker_environment", lambda _: awex.worker_environment(ON), ["resolved", "DeltaSettings"]),  # type: ignore[arg-type]
    ("scrub_worker_environment", lambda _: awex.scrub_worker_environment(3), ["environ", "3"]),  # type: ignore[arg-type]
    ("settings_from_environment", lambda _: awex.settings_from_environment([]), ["environ", "[]"]),  # type: ignore[arg-type]
    (
        "settings_from_environment",
        lambda _: awex.settings_from_environment({"DTE_DELTA_TRANSFER": "maybe"}),
        ["DTE_DELTA_TRANSFER", "'maybe'"],
    ),
    ("Sender", lambda at: awex.Sender("view", at.both, 0, ON), ["view", "'view'"]),  # type: ignore[arg-type]
    ("Sender", lambda at: awex.Sender(at.trainer, "host:1", 0, ON), ["rendezvous", "'host:1'"]),  # type: ignore[arg-type]
    ("Sender", lambda at: awex.Sender(at.trainer, at.both, 4, ON), ["trainer_rank", "4"]),
    ("Sender", lambda at: awex.Sender(at.trainer, at.both, 0, None), ["settings", "None"]),  # type: ignore[arg-type]
    ("Sender", lambda at: at.sender.update_weights("1"), ["version", "'1'"]),  # type: ignore[arg-type]
    ("Sender", lambda at: closed(at.sender).update_weights(1), ["this Sender is closed", "close()"]),
    ("Sender", lambda at: closed(at.sender).connect(), ["this Sender is closed"]),
    (
        "Sender",
        lambda at: at.sender_at("no-such-host.invalid").connect(),
        ["no-such-host.invalid", "does not resolve"],
    ),
    ("Receiver", lambda at: awex.Receiver(object(), at.both, 0, "e", ON), ["view", "object"]),  # type: ignore[arg-type]
    ("Receiver", lambda at: awex.Receiver(at.engine, at.both, "0", "e", ON), ["engine_rank", "'0'"]),  # type: ignore[arg-type]
    ("Receiver", lambda at: awex.Receiver(at.engine, at.both, 0, 1, ON), ["engine", "1"]),  # type: ignore[arg-type]
    ("Receiver", lambda at: closed(at.receiver).update_weights(1), ["this Receiver is closed"]),
    ("Receiver", lambda at: closed(at.receiver).connect(), ["this Receiver is closed"]),
    ("Targets", lambda at: closed(at.targets).update_weights({"a": 1}), ["this Targets is closed"]),
    ("Targets", lambda at: at.targets.add(5, at.both), ["name", "5"]),  # type: ignore[arg-type]
    ("Targets", lambda at: at.targets["students"], ["'students'", "none"]),
    (
        "DiskWriter",
        lambda at: awex.DiskWriter(at.trainer, Rendezvous.alone(), 0, at.disk("")),
        ["disk_url", "''"],
    ),
    (
        "DiskWriter",
        lambda at: awex.DiskWriter(at.trainer, Rendezvous.alone(), 0, at.disk(5)),
        ["disk_url", "5"],
    ),
    (
        "DiskWriter",
        lambda at: closed(
            awex.DiskWriter(at.trainer, Rendezvous.alone(), 0, at.disk(str(at.empty)))
        ).update_weights(1),
        ["this DiskWriter is closed"],
    ),
    ("DiskReader", lambda at: awex.DiskReader("gpt2", at.disk(str(at.empty))), ["view", "'gpt2'"]),  # type: ignore[arg-type]
    ("DiskReader", lambda at: awex.DiskReader(at.engine, at.disk("no://x")), ["disk_url", "'no://x'"]),
    ("EmaShadow", lambda at: awex.EmaShadow(at.trainer, alpha=2.0), ["alpha", "2.0"]),
    ("EmaShadow", lambda _: awex.EmaShadow("view", alpha=0.5), ["view", "'view'"]),  # type: ignore[arg-type]
    ("RunLog", lambda _: awex.RunLog(5), ["path", "5"]),  # type: ignore[arg-type]
    ("RunLog", lambda at: awex.RunLog(at.missing), ["path", "missing"]),
    ("RunLog", lambda at: awex.RunLog(at.empty), ["path", "empty"]),
    ("read_run", lambda at: awex.read_run(at.missing), ["missing"]),
    ("read_run", lambda at: awex.read_run(at.file), ["file", "header"]),
    ("read_run", lambda _: awex.read_run(None), ["path", "None"]),  # type: ignore[arg-type]
    (
        "attach_transformers",
        lambda at: awex.attach_transformers("gpt2", rendezvous=at.both, engine_rank=0, settings=ON),  # type: ignore[arg-type]
        ["model", "'gpt2'"],
    ),
    (
        "attach_transformers_disk",
        lambda at: awex.attach_transformers_disk("gpt2", settings=at.disk(str(at.empty))),  # type: ignore[arg-type]
        ["model", "'gpt2'"],
    ),
    (
        "attach_fsdp",
        lambda at: awex.attach_fsdp([], None, None, rendezvous=at.both, settings=at.disk("/x")),  # type: ignore[arg-type]
        ["weight_update_transport", "'disk'", "attach_..._disk"],
    ),
    (
        "attach_fsdp_disk",
        lambda at: awex.attach_fsdp_disk([], None, None, rendezvous=at.both, settings=ON),  # type: ignore[arg-type]
        ["weight_update_transport", "'p2p'", "attach_megatron, attach_fsdp"],
    ),
    ("VllmDriver", lambda _: awex.VllmDriver(object(), running="stop"), ["running", "'stop'", "pause"]),  # type: ignore[arg-type]
    (
        "attach_megatron",
        lambda at: awex.attach_megatron([], None, None, rendezvous=at.both, settings=at.disk("/x")),
        ["weight_update_transport", "'disk'", "attach_..._disk"],
    ),
    (
        "attach_megatron_disk",
        lambda at: awex.attach_megatron_disk([], None, None, rendezvous=at.both, settings=ON),
        ["weight_update_transport", "'p2p'"],
    ),
    ("MegatronTrainer", lambda _: attach_megatron(torch.nn.Linear(2, 2)), ["model_chunks", "Linear"]),
    ("MegatronTrainer", lambda _: attach_megatron([torch.nn.Linear(2, 2)]), ["model_chunks", "Linear"]),
    ("MegatronTrainer", lambda _: attach_megatron([megatron_module()], None, 5), ["hf_config", "int"]),
    (
        "MegatronTrainer",
        lambda _: attach_megatron([megatron_module()], None, Qwen3Config(architectures=["Qwen3ForCausalLM"])),
        ["model_chunks", "initialize_model_parallel"],
    ),
    ("TorchAdamWTrainer", lambda _: master_of((2, 4)), [NAME, "(4, 2)", "(2, 4)"]),
    ("TorchAdamWTrainer", lambda _: master_of((8,)), [NAME, "(4, 2)", "(8,)"]),
]

# The command line; its exit code; and what is said besides a remedy.
COMMANDS: list[tuple[Callable[[Place], list[object]], int, list[str]]] = [
    (lambda _: ["nonsense"], 2, ["nonsense"]),
    (lambda _: ["plan", "--nonsense"], 2, ["--nonsense"]),
    (lambda _: ["demo", "--model", "gpt"], 2, ["--model", "gpt"]),
    (lambda _: ["demo", "--train", "dp=x"], 2, ["--train", "dp=x"]),
    (lambda _: ["demo", "--steps", "0"], 2, ["--steps", "0"]),
    (lambda _: ["demo", "--fault", "fire"], 2, ["--fault", "fire"]),
    (lambda _: ["demo", "--lr", "nan"], 2, ["--lr", "nan"]),
    (lambda at: ["demo", "--secret-file", at.missing], 2, ["missing"]),
    (lambda at: ["demo", "--secret-file", at.secret], 2, ["open-to-all", "chmod 600"]),
    (lambda _: ["bench", "detect", "--elements", "1"], 2, ["--elements", "1"]),
    (lambda _: ["bench", "sync", "--link", "smoke"], 2, ["--link", "smoke", "loopback"]),
    (lambda _: ["bench", "sync", "--method", "guess"], 2, ["--method", "guess"]),
    (lambda _: ["bench", "sync", "--encoding", "guess"], 2, ["--encoding", "guess"]),
    (lambda _: ["bench", "wire", "--repeats", "many"], 2, ["--repeats", "many"]),
    (lambda _: ["bench", "scale", "--elements", "65"], 2, ["--elements", "65"]),
    (lambda _: ["bench", "scale", "--plan", "gpt"], 2, ["--plan", "gpt"]),
    (lambda at: ["plan", at.missing], 2, ["missing", "qwen3_30b_a3b"]),
    (lambda at: ["plan", at.empty], 2, ["empty"]),
    (lambda at: ["plan", at.file], 2, ["file", "sections"]),
    (lambda _: ["plan", "tiny_cpu", "model.hf_path=x"], 2, ["section model", "hf_path = 'x'"]),
    (lambda _: ["plan", "tiny_cpu", "actor.backend=x"], 2, ["actor.backend=x", "train"]),
    (lambda _: ["gateway", "--port", "0"], 2, ["--port", "0"]),
    (lambda at: ["gateway", "--no-token", "--port", at.port], 2, ["port", "cannot listen there"]),
    (lambda _: ["gateway", "--host", "192.0.2.7"], 2, ["--host", "192.0.2.7"]),
    (lambda at: ["gateway", "--side-token-file", at.missing], 2, ["missing"]),
    (lambda at: ["gateway", "--side-token-file", at.secret], 2, ["open-to-all", "chmod 600"]),
    (lambda at: ["verify", at.missing, at.missing], 2, ["TRAINER", "missing"]),
    (lambda at: ["verify", at.empty, at.empty], 2, ["TRAINER", "empty"]),
    (lambda at: ["verify", at.delta, at.empty], 2, ["TRAINER", "delta on version 6", "pull"]),
    (lambda at: ["report", at.missing], 2, ["missing"]),
    (lambda at: ["report", at.empty], 2, ["empty"]),
    (lambda at: ["report", at.file, "--output", at.missing], 2, ["--output", "missing"]),
    (lambda at: ["report", at.file, "--output", at.file], 2, ["--output", "file"]),
    (lambda at: ["pull", "", at.empty], 2, ["disk_url", "''"]),
    (lambda at: ["pull", "no://x", at.empty], 2, ["no://x"]),
    (lambda at: ["pull", at.empty, at.empty / "x", "--workers", "0"], 2, ["--workers", "0"]),
    (lambda at: ["pull", at.file, at.empty / "x"], 1, ["file"]),
    (lambda at: ["inspect", at.missing], 2, ["missing"]),
    (lambda at: ["inspect", at.file], 2, ["file"]),
    (lambda at: ["inspect", at.empty, "--workers", "x"], 2, ["--workers", "x"]),
    (lambda _: ["inspect", ""], 2, ["disk_url", "''"]),
]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place to be in, in which nothing may appear."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        place = Place(tmp_path, used.getsockname()[1])
        monkeypatch.chdir(tmp_path)
        before = left(tmp_path)
        yield place
        assert left(tmp_path) == before


def left(folder: Path) -> dict[str, set[Any]]:
    """What a process may leave behind."""
    process = psutil.Process()
    return {
        "files": {str(path) for path in folder.rglob("*") if ".awex_delta" not in str(path)},
        "threads": {thread.name for thread in threading.enumerate() if thread.is_alive()},
        "processes": {child.pid for child in process.children(recursive=True)},
        "sockets": {one.laddr for one in process.net_connections() if one.status == psutil.CONN_LISTEN},
        "groups": {dist.is_initialized()},
    }


@pytest.mark.parametrize(("name", "call", "said"), CALLS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CALLS)])
def test_a_call_is_refused(name: str, call: Call, said: list[str], at: Place) -> None:
    with pytest.raises(AwexDeltaError) as caught:
        call(at)
    text = str(caught.value)
    assert not [part for part in said if part not in text], text
    assert REMEDY.search(text) or isinstance(caught.value, awex.UpdateError), text
    assert isinstance(caught.value, ConfigError | ConnectError) or name == "TorchAdamWTrainer"


@pytest.mark.parametrize(("words", "code", "said"), COMMANDS)
def test_a_command_is_refused(
    words: Callable[[Place], list[object]], code: int, said: list[str], at: Place
) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words(at)], env={"COLUMNS": "200"})
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert not [part for part in said if part not in result.output], result.output
    assert REMEDY.search(result.output), result.output


def test_the_audit_leaves_nothing_out(at: Place) -> None:
    audited = {name for name, *_ in CALLS}
    assert set(awex.__all__) == (audited - {"MegatronTrainer"}) | NOT_CALLED
    assert {words(at)[0] for words, *_ in COMMANDS} == {*SUBCOMMANDS, "nonsense"}
