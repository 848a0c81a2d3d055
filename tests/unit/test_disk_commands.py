"""`pull` and `inspect`, HF loaders on what they and the trainers write, and an S3 server."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from typer.testing import CliRunner, Result

from awex_delta.attach import attach_transformers, attach_transformers_disk
from awex_delta.cli.main import app
from awex_delta.errors import ChainError, ConfigError
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.patch import JOURNAL
from awex_delta.folder.pull import LocalCheckpoint
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.ranks.disk import Engine, Trainers, delta_file, files_below, flip, model_file

Build = Callable[..., Any]
CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
    initializer_range=0.3,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


@pytest.fixture
def build() -> Iterator[Build]:
    """Build anything that has to be closed when the test ends."""
    built: list[Any] = []

    def construct(kind: type[Any], *args: Any, **options: Any) -> Any:
        built.append(kind(*args, **options))
        return built[-1]

    yield construct
    for one in built:
        one.close()


def trained_model(build: Build, url: str, **options: Any) -> tuple[PreTrainedModel, Trainers]:
    """A small Qwen3 in bf16 that an AdamW trains, and its writer."""
    torch.manual_seed(0)
    build_model: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = build_model(CONFIG, dtype=torch.bfloat16)
    weights = {name: param.detach() for name, param in model.named_parameters()}
    masters = {name: tensor.float().requires_grad_() for name, tensor in weights.items()}
    settings = build(Trainers, "memory://settings").settings
    view = TorchAdamWTrainer(
        weights=weights,
        masters=masters,
        optimizer=torch.optim.AdamW(masters.values(), lr=1e-2),
        settings=settings,
        tied_embeddings=False,
    )
    config = model.config.to_json_string().encode()
    return model, build(Trainers, url, views=[view], extra_files={"config.json": config}, **options)


def generated(model: PreTrainedModel) -> list[int]:
    """What a model makes of the prompt, greedily."""
    return list(model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist())  # type: ignore[operator]


def loaded(path: Path) -> PreTrainedModel:
    """A checkpoint as transformers loads it; nothing may be missing or left over."""
    loader: Any = AutoModelForCausalLM
    model, report = loader.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert isinstance(model, PreTrainedModel)
    return model


def test_transformers_loads_anchors_and_generates_the_same_after_replay(build: Build, tmp_path: Path) -> None:
    model, trainers = trained_model(build, str(tmp_path / "run"), anchor_interval=2)
    trainers.write(0)
    first = generated(model)
    served = loaded(tmp_path / "run" / version_name(0))
    assert generated(served) == first
    reader = attach_transformers_disk(served, settings=trainers.settings)
    trainers.write(1, 2)
    assert trainers.kinds == "FDD"
    assert reader.update_weights().version == 2
    assert generated(model) != first  # training moved it
    assert generated(served) == generated(model)
    checkpoint = tmp_path / "local"
    pulled = invoke("pull", str(tmp_path / "run"), str(checkpoint))
    assert pulled.stdout.startswith("version 2: 3 applied")
    assert pulled.stderr == ""  # no bar in a pipe
    assert invoke("pull", str(tmp_path / "run"), str(checkpoint)).stdout == "version 2: nothing to do\n"
    again = json.loads(invoke("pull", str(tmp_path / "run"), str(checkpoint), "--json").stdout)
    assert again == {
        "version": 2,
        "applied": 0,
        "in_place": False,
        "bytes_read": 0,
        "bytes_written": 0,
        "problems": [],
    }
    assert generated(loaded(checkpoint)) == generated(model)
    with pytest.raises(ValueError, match=r"config\.json"):
        loaded(tmp_path / "run" / version_name(2))  # changes are not taken for weights


def test_attaching_with_the_settings_of_the_other_transport_is_refused() -> None:
    model: Any = None
    with pytest.raises(ConfigError, match="weight_update_transport='p2p': this call is for 'disk'"):
        attach_transformers_disk(model, settings=DeltaSettings())
    settings = DeltaSettings(transport="disk", disk_url="memory://x")
    with pytest.raises(ConfigError, match="weight_update_transport='disk': this call is for 'p2p'"):
        attach_transformers(model, rendezvous=Rendezvous.alone(), engine_rank=0, settings=settings)


def invoke(*arguments: str, code: int = 0) -> Result:
    """Run the command line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_pull_replaces_a_checkpoint_of_one_file(build: Build, tmp_path: Path) -> None:
    model, trainers = trained_model(build, str(tmp_path / "run"))
    local = tmp_path / "local"
    model.save_pretrained(local)
    (local / "tokenizer.json").write_text("{}")
    assert (local / "model.safetensors").exists()
    trainers.write(0)
    done = LocalCheckpoint(local, Folder(str(tmp_path / "run"))).pull()
    assert done.problems == ("model.safetensors is of no version that is known: whole shards are written",)
    assert files_below(local) == [
        f"{JOURNAL}/lock",
        "config.json",
        "generation_config.json",
        shards_of(local)[0].name,
        INDEX,
        "tokenizer.json",
    ]
    assert generated(loaded(local)) == generated(model)


def local_weights(path: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, by its index."""
    index = json.loads((path / INDEX).read_text())
    shards = {name: load_file(path / name) for name in sorted(set(index["weight_map"].values()))}
    return {name: shards[file][name] for name, file in index["weight_map"].items()}


def shards_of(path: Path) -> list[Path]:
    """The shards that loaders find, by name."""
    return sorted(path.glob("*.safetensors"))


def same(path: Path, weights: dict[str, torch.Tensor]) -> bool:
    """True where a checkpoint has exactly these bits."""
    found = local_weights(path)
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_pull_follows_versions_and_repairs_a_damaged_checkpoint(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path / "run"), anchor_interval=2)
    local = LocalCheckpoint(tmp_path / "local", Folder(trainers.url))
    trainers.write(0, 1)
    assert local.pull().version == 1
    assert same(local.path, trainers.history[1])
    trainers.write(2)
    done = local.pull()
    assert [link.version for link in done.links] == [2]
    assert same(local.path, trainers.history[2])
    assert local.pull().links == ()
    shard = shards_of(local.path)[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    trainers.write(3, 4)
    assert local.pull(4).version == 4
    flip(Folder(trainers.url), delta_file(4), -2)
    shards_of(local.path)[1].unlink()
    trainers.write(5)
    assert trainers.kinds == "FDDFDD"
    with pytest.raises(ChainError, match="version 4"):
        local.pull(5)
    trainers.write(6)
    done = local.pull()
    assert [link.version for link in done.links] == [6]
    assert same(local.path, trainers.history[6])


def test_pull_finds_a_damaged_base_and_begins_at_the_anchor(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path / "run"))
    local = LocalCheckpoint(tmp_path / "local", Folder(trainers.url))
    trainers.write(0)
    local.pull()
    shard = shards_of(local.path)[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    trainers.write(1)
    done = local.pull()
    assert "is not what was written there" in done.problems[0]
    assert [link.version for link in done.links] == [0, 1]
    assert same(local.path, trainers.history[1])


def test_pull_follow_takes_new_versions_until_it_is_stopped(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = build(Trainers, str(tmp_path / "run"))
    pauses = iter(range(3))

    def pause(_: float) -> None:
        number = next(pauses)
        if number == 2:
            raise KeyboardInterrupt
        trainers.write(number)

    monkeypatch.setattr("awex_delta.cli.pull._pause", pause)
    result = CliRunner().invoke(app, ["pull", trainers.url, str(tmp_path / "local"), "--follow"])
    assert f"there is no version in {trainers.url}" in result.output  # not yet, and it goes on
    assert "version 0: 1 applied" in result.output
    assert "version 1: 1 applied" in result.output
    assert same(tmp_path / "local", trainers.history[1])


def test_pull_says_why_it_cannot(tmp_path: Path) -> None:
    result = invoke("pull", str(tmp_path), str(tmp_path / "x"), code=1)
    assert f"there is no version in {tmp_path}" in result.output
    assert "nosuch://x" in invoke("pull", "nosuch://x", str(tmp_path / "x"), code=2).output


def test_a_folder_that_is_not_there_is_none_that_is_whole(tmp_path: Path) -> None:
    result = invoke("inspect", str(tmp_path / "typo"), code=2)
    assert f"{str(tmp_path / 'typo')!r} does not exist. Remedy: give the folder" in result.output
    assert f"no version in {tmp_path}" in invoke("inspect", str(tmp_path)).output
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in invoke("inspect", str(tmp_path / "file"), code=2).output
    assert json.loads(invoke("inspect", str(tmp_path), "--json").stdout)["versions"] == []


def test_inspect_shows_the_chain_and_what_is_wrong_with_it(build: Build, tmp_path: Path) -> None:
    trainers = build(
        Trainers, str(tmp_path), anchor_interval=2, extra_files={"config.json": b'{"model_type": "x"}'}
    )
    stats = trainers.write(0, 1, 2, 3, 4)
    folder = Folder(str(tmp_path))
    found = json.loads(invoke("inspect", str(tmp_path), "--json").stdout)
    assert [one["kind"] for one in found["versions"]] == ["full", "delta", "delta", "full", "delta"]
    assert [one["base"] for one in found["versions"]] == [None, 0, 1, None, 3]
    assert {one["state"] for one in found["versions"]} == {"whole"}
    assert (found["newest"], found["reachable"], found["problems"]) == (4, 4, [])
    assert found["versions"][4]["density"] == stats[0].total_changed / stats[0].total_owned
    assert found["versions"][3]["size"] == sum(
        (tmp_path / version_name(3) / name).stat().st_size
        for name in folder.names(version_name(3))
        if name != INDEX
    )
    table = invoke("inspect", str(tmp_path), "--no-verify").stdout
    assert "newest version 4, newest that an engine can reach 4" in table
    assert "unverified" in table

    flip(folder, model_file(3, 1), -1)
    flip(folder, f"{version_name(0)}/config.json", 3)
    folder.remove(delta_file(1))
    flip(folder, f"{version_name(2)}/{INDEX}", 400)
    found = json.loads(invoke("inspect", str(tmp_path), "--json", code=1).stdout)
    assert [one["state"] for one in found["versions"]] == [
        "damaged",
        "damaged",
        "damaged",
        "damaged",
        "whole",
    ]
    assert (found["newest"], found["reachable"]) == (4, None)
    problems = "\n".join(found["problems"])
    assert f"{model_file(3, 1)} is damaged: model." in problems  # names the tensor
    assert "config.json is damaged: outside of its tensors" in problems
    assert f"{delta_file(1)} is gone" in problems
    assert "the manifest of version 2" in problems
    folder.remove(f"{version_name(3)}/{INDEX}")
    found = json.loads(invoke("inspect", str(tmp_path), "--json", code=1).stdout)
    assert found["versions"][3]["state"] == "unfinished"
    assert "builds on version 3, which does not exist" in found["versions"][4]["problems"][0]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on an S3 server of this process."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = uuid.uuid4().hex  # the server keeps buckets for as long as the process lives
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/run"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_whole_life_on_s3(s3: str, build: Build, tmp_path: Path) -> None:
    # The server comes first, so that it goes last: who leaves takes its files away.
    trainers = build(Trainers, s3, anchor_interval=2, keep_anchors=1, timeout_seconds=20.0)
    engine = build(Engine, trainers, num_ranks=2)
    for version in range(5):
        trainers.write(version)
        assert engine.read() == version
        assert engine.holds(trainers.history[version])
    assert trainers.kinds == "FDDFD"
    folder = Folder(s3)
    assert folder.versions() == [3, 4]
    assert folder.names("leases") == []
    assert not [name for v in folder.versions() for name in folder.names(version_name(v)) if ".tmp" in name]
    assert "version 4: 2 applied" in invoke("pull", s3, str(tmp_path / "local")).output
    assert same(tmp_path / "local", trainers.history[4])
    assert json.loads(invoke("inspect", s3, "--json").stdout)["reachable"] == 4
    folder.remove(delta_file(4))
    late = build(Engine, trainers)
    assert late.read() == 3
    assert late.holds(trainers.history[3])


def test_a_store_that_cannot_be_reached_is_an_os_error_whatever_its_library_says() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # held, so that nobody else gets it, and nobody listens there
        config = {"retries": {"max_attempts": 0}}
        options = {
            "endpoint_url": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "key": "k",
            "secret": "s",
            "config_kwargs": config,
        }
        folder = Folder("s3://bucket/run", options)
        for use in (
            lambda: folder.read("x"),
            lambda: folder.put("x", [b"x"]),
            lambda: folder.names(""),
            lambda: folder.remove("x"),
        ):
            with pytest.raises(OSError, match=r"s3://bucket/run: .*onnect"):
                use()


def test_an_upload_that_fails_leaves_no_object(s3: str) -> None:
    folder = Folder(s3)

    def chunks() -> Iterator[bytes]:
        yield b"a" * (6 << 20)  # a part of its own
        raise OSError("the link is gone")

    with pytest.raises(OSError, match="the link is gone"):
        folder.put("weight_v000000/model.safetensors", chunks())
    assert folder.names("weight_v000000") == []
