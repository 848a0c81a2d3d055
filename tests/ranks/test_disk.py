"""Updates through a folder that succeed: bits, kinds and files, version by version."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.errors import AwexDeltaError, ChainError, ConfigError, LayoutError, UpdateAborted
from awex_delta.folder.chain import Catalogue
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.manifest import Manifest
from awex_delta.folder.pull import LocalCheckpoint
from awex_delta.folder.reader import DiskReader
from awex_delta.folder.writer import DiskWriter
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.ranks import results
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import TrainerLayout, WeightInfo
from tests.pairing import differing
from tests.ranks.conftest import BIAS, CUT, DOWN, EMBED, SHAPES
from tests.ranks.disk import SETTINGS as DISK_SETTINGS
from tests.ranks.disk import Engine, Trainers, files_below

Build = Callable[..., Any]


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder on a disk, and one in memory."""
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("encoding", ["ulp_zstd", "indices"])
def test_engines_at_two_speeds_and_a_late_joiner_hold_the_bits_of_every_version(
    build: Build, url: str, encoding: str
) -> None:
    trainers = build(Trainers, url, encoding=encoding)
    cut = build(Engine, trainers, num_ranks=2, name="cut")
    slow = build(Engine, trainers, name="slow")
    for version in range(8):
        trainers.write(version)
        assert cut.read() == version
        assert cut.wrong(trainers.history[version]) == [{}, {}]
        if version % 3 == 2:
            assert slow.read() == version
            assert slow.holds(trainers.history[version])
    assert trainers.kinds == "FDDDFDDD"
    late = build(Engine, trainers, num_ranks=2, name="late")
    assert late.read(6) == 6
    assert late.holds(trainers.history[6])
    assert late.read() == 7
    assert late.holds(trainers.history[7])
    assert slow.read() == 7
    assert slow.holds(trainers.history[7])
    assert [view.published for view in cut.views] == [list(range(8))] * 2
    assert late.views[0].published == [6, 7]  # not the links in between


@pytest.mark.parametrize("verify", ["touched", "full"])
def test_a_tensor_without_elements_is_part_of_every_checkpoint(
    build: Build, tmp_path: Path, verify: str
) -> None:
    empty = "model.layers.0.mlp.experts.unused.weight"
    shapes = {**SHAPES, empty: (0, 8)}
    settings = replace(DISK_SETTINGS, verify=verify)
    views = [
        TorchAdamWTrainer.create(shapes, dp_rank=rank, dp_size=2, settings=settings, lr=1e-5)
        for rank in range(2)
    ]
    trainers = build(Trainers, str(tmp_path), views=views, verify=verify)
    engine = build(Engine, trainers, shapes=shapes)
    for version in range(3):
        trainers.write(version)
        assert engine.read() == version
        assert engine.holds(trainers.history[version])
    assert trainers.kinds == "FDD"
    files = sorted((tmp_path / version_name(0)).glob("model-*.safetensors"))
    (found,) = [tensors[empty] for tensors in map(load_file, files) if empty in tensors]
    assert found.shape == (0, 8)


def test_an_older_version_can_be_asked_for(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0, 1, 2)
    engine = build(Engine, trainers)
    assert engine.read() == 2
    assert engine.read(1) == 1
    assert engine.holds(trainers.history[1])
    assert engine.reader.latest() == 2


def test_each_rank_writes_its_share_and_a_full_version_is_a_plain_checkpoint(
    build: Build, tmp_path: Path
) -> None:
    trainers = build(Trainers, str(tmp_path), extra_files={"config.json": b'{"a": 1}'})
    trainers.write(0, 1)
    assert files_below(tmp_path / version_name(0)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    index = json.loads((tmp_path / version_name(0) / INDEX).read_text())
    loaded: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(tmp_path / version_name(0) / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == shard.keys()
        loaded |= shard
    truth = trainers.history[0]
    assert loaded.keys() == truth.keys()
    assert all(torch.equal(loaded[name], truth[name]) for name in truth)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in truth.values())
    manifest = Catalogue(Folder(str(tmp_path))).get(1)
    assert isinstance(manifest, Manifest)
    assert [file.name for file in manifest.files] == [
        "delta-00001-of-00002.safetensors",
        "delta-00002-of-00002.safetensors",
    ]
    changed = sum(int((truth[n] != trainers.history[1][n]).sum()) for n in SHAPES)
    assert changed <= manifest.changed <= changed * 1.01 + 2
    assert manifest.owned == sum(truth[n].numel() for n in SHAPES)


def test_no_step_is_an_empty_delta_that_exists(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0)
    for view in trainers.views:
        view.train_step({})  # every parameter sits it out
    results(trainers.threads.run(lambda rank: trainers.writers[rank].update_weights(1)))
    results(trainers.threads.run(lambda rank: trainers.writers[rank].wait()))
    engine = build(Engine, trainers)
    assert engine.read() == 1
    assert engine.holds(trainers.history[0])


def test_update_weights_returns_before_the_version_exists(build: Build, tmp_path: Path) -> None:
    gate = threading.Event()
    trainers = build(
        Trainers, str(tmp_path), num_trainers=1, on_step=lambda step: gate.wait(20) if INDEX in step else None
    )
    (stats,) = results(trainers.begin(0))
    assert stats.verdict.kind is Kind.FULL
    engine = build(Engine, trainers)
    assert engine.reader.latest() is None
    trainers.views[0].train_step()  # training goes on, in place, while the version is written
    gate.set()
    trainers.writers[0].wait()
    assert engine.read() == 0
    assert engine.holds(trainers.history[0])


def test_every_version_is_full_where_engines_know_nothing_else(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), disk_kind="full")
    trainers.write(0, 1, 2)
    assert trainers.kinds == "FFF"
    for version in range(3):
        folder = tmp_path / version_name(version)
        loaded = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        assert all(torch.equal(loaded[n], tensor) for n, tensor in trainers.history[version].items())


def test_a_jump_of_the_version_is_full(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0, 1)
    (stats, _) = trainers.write(5)
    assert stats.verdict.reason is Reason.VERSION_GAP
    engine = build(Engine, trainers)
    assert engine.read() == 5
    assert engine.holds(trainers.history[5])


def test_a_trainer_that_starts_again_withdraws_what_followed(build: Build, tmp_path: Path) -> None:
    first = build(Trainers, str(tmp_path))
    first.write(0, 1, 2, 3)
    engine = build(Engine, first, num_ranks=2)
    assert engine.read() == 3
    first.close()
    again = build(Trainers, str(tmp_path), seed=7)
    again.write(1)
    assert Catalogue(Folder(str(tmp_path))).get(2) is None
    assert engine.read() == 1  # of the new run, although the number is smaller
    assert engine.holds(again.history[1])
    again.write(2)
    assert engine.read() == 2
    assert engine.holds(again.history[2])


def test_a_trainer_that_goes_back_is_another_run_to_readers(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0, 1, 2, 3)
    ahead, behind = build(Engine, trainers), build(Engine, trainers)
    assert (ahead.read(), behind.read(1)) == (3, 1)
    trainers.write(1, 2)
    for engine in (ahead, behind):  # one is past the new versions, the other holds an old one of that number
        assert engine.read() == 2
        assert engine.holds(trainers.history[2])


class TensorParallel(TorchAdamWTrainer):
    """One of two tensor-parallel ranks: it owns alone what it holds of the weights that are cut."""

    @classmethod
    def cut(cls, rank: int, settings: Any, **options: Any) -> TensorParallel:
        """Cut the weights of `SHAPES` as Megatron does: rows, rows, columns; norms are on both."""
        whole = TorchAdamWTrainer.create(SHAPES, settings=settings, lr=1e-5)
        tensors = {info.param: whole.tensor(info.key) for info in whole.weights()}
        weights = {
            name: tensor.chunk(2, CUT[name])[rank].clone() if name in CUT else tensor.clone()
            for name, tensor in tensors.items()
        }
        masters = {name: tensor.float().requires_grad_() for name, tensor in weights.items()}
        made = cls(
            weights=weights,
            masters=masters,
            optimizer=torch.optim.AdamW(masters.values(), lr=1e-5),
            settings=settings,
            **options,
        )
        made.tp_rank = rank
        return made

    tp_rank: int

    def layout(self) -> TrainerLayout:
        base = super().layout()
        info = {
            **base.rank_info,
            "tp_rank": self.tp_rank,
            "tp_size": 2,
            "attn_tp_rank": self.tp_rank,
            "attn_tp_size": 2,
            "world_size": 2,
            "global_rank": self.tp_rank,
            "local_rank": self.tp_rank,
        }
        return TrainerLayout(
            architecture=base.architecture, rank_info=info, vocab_size=self.vocab, tied_embeddings=False
        )

    vocab = SHAPES[EMBED][0]

    def weights(self) -> list[WeightInfo]:
        return [replace(info, owners=(self.tp_rank,)) for info in super().weights()]


def joined(trainers: Trainers) -> dict[str, torch.Tensor]:
    """The whole weights of two tensor-parallel ranks."""
    ranks = [{info.param: view.tensor(info.key) for info in view.weights()} for view in trainers.views]
    return {
        name: torch.cat([rank[name] for rank in ranks], CUT[name]) if name in CUT else tensor
        for name, tensor in ranks[0].items()
    }


def test_tensor_parallel_trainers_write_whole_tensors_once(build: Build, tmp_path: Path) -> None:
    settings = build(Trainers, str(tmp_path)).settings
    views = [TensorParallel.cut(rank, settings) for rank in range(2)]
    trainers = build(Trainers, str(tmp_path), views=views)
    shapes = dict(SHAPES)
    whole, cut = build(Engine, trainers, shapes=shapes), build(Engine, trainers, num_ranks=2, shapes=shapes)
    for version in range(3):
        trainers.write(version)
        for engine in (whole, cut):
            assert engine.read() == version
            assert engine.holds({name: tensor.clone() for name, tensor in joined(trainers).items()})
    assert trainers.kinds == "FDD"
    manifest = Catalogue(Folder(str(tmp_path))).get(0)
    assert isinstance(manifest, Manifest)
    assert sorted(entry.name for entry in manifest.tensors) == sorted(SHAPES)
    by_file = {entry.file for entry in manifest.tensors}
    assert len(by_file) == 2  # the work is shared
    delta = Catalogue(Folder(str(tmp_path))).get(2)
    assert isinstance(delta, Manifest)
    assert [line.boxes.file for line in delta.lines] == [file.name for file in delta.files]
    assert len(delta.lines) == 2
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    assert sum(line.numel for line in delta.lines) == numel  # replicas write once


def test_lines_that_hold_an_element_twice_are_refused_on_all_ranks(build: Build, tmp_path: Path) -> None:
    settings = build(Trainers, str(tmp_path)).settings
    views = [TensorParallel.cut(rank, settings) for rank in range(2)]
    for view in views:
        view.tp_rank = 0  # both say that they hold the first half
    trainers = build(Trainers, str(tmp_path), views=views)
    errors = trainers.threads.run(lambda rank: trainers.writers[rank].connect())
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, LayoutError) for error in errors), errors
    assert "the trainer's owners send 128 of them" in str(errors[0])


def publish_again(trainers: Trainers, version: int) -> None:
    """A full version of the weights as they are, without a step."""
    stats = results(trainers.threads.run(lambda rank: trainers.writers[rank].update_weights(version)))
    results(trainers.threads.run(lambda rank: trainers.writers[rank].wait()))
    assert {one.verdict.kind for one in stats} == {Kind.FULL}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_follower_reads_of_an_anchor_what_it_does_not_hold(
    build: Build, tmp_path: Path, num_ranks: int
) -> None:
    trainers = build(Trainers, str(tmp_path))
    engine = build(Engine, trainers, num_ranks=num_ranks)
    trainers.write(0, 1)
    weights = trainers.history[1]
    assert engine.read() == 1
    publish_again(trainers, 5)
    stats = results(engine.try_read())
    assert [(one.version, one.wire_bytes, one.verified) for one in stats] == [(5, 0, "full")] * num_ranks
    assert all(reader.ready for reader in engine.readers)
    assert engine.holds(weights)
    # A bit that drifted, on one rank: every rank that holds a part of this tensor reads it, and no other one.
    engine.views[-1].tensors_by_name[DOWN].view(torch.int16)[3, 5] ^= 1
    publish_again(trainers, 7)
    stats = results(engine.try_read())
    whole = weights[DOWN].numel() * weights[DOWN].element_size()
    assert [(one.version, one.wire_bytes) for one in stats] == [(7, whole)] * num_ranks
    assert engine.holds(weights)
    # A rank that holds nothing reads everything; what it has a part of, the others read too.
    engine.readers[-1].invalidate()
    publish_again(trainers, 9)
    stats = results(engine.try_read())
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    assert stats[-1].wire_bytes == total
    cut = sum(weights[name].numel() * 2 for name in CUT)
    assert [one.wire_bytes for one in stats[:-1]] == [cut] * (num_ranks - 1)
    assert engine.holds(weights)
    trainers.write(11)  # trained since: nothing is what it was
    assert engine.read() == 11
    assert engine.holds(trainers.history[11])


def test_without_digests_every_anchor_is_read(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), verify="off")
    engine = build(Engine, trainers)
    trainers.write(0)
    assert engine.read() == 0
    publish_again(trainers, 5)
    (stats,) = results(engine.try_read())
    weights = trainers.history[0].values()
    assert stats.wire_bytes == sum(tensor.numel() * tensor.element_size() for tensor in weights)


@pytest.mark.parametrize(("sample", "encoding"), [(1, "ulp_zstd"), (1 << 20, "indices")])
def test_the_encoding_is_chosen_by_the_speed_of_writing(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int, encoding: str
) -> None:
    monkeypatch.setattr("awex_delta.folder.publish.MIN_SAMPLE_BYTES", sample)
    slow = build(
        Trainers,
        str(tmp_path),
        encoding="auto",
        on_step=lambda step: time.sleep(0.1) if step.startswith("sync weight_v000000/model-") else None,
    )
    slow.write(0)  # some hundred bytes in a tenth of a second, where that counts as a measurement
    rates = [writer._publisher.bytes_per_second for writer in slow.writers]
    assert all(rate is not None and rate < 1e5 for rate in rates) if sample == 1 else rates == [None, None]
    slow.write(1)
    manifest = Catalogue(Folder(slow.url)).get(1)
    assert isinstance(manifest, Manifest)
    encodings = {body.encoding for line in manifest.lines for body in line.bodies}
    assert encodings - {"whole"} == {encoding}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("cut", [False, True], ids=["data parallel", "tensor parallel"])
def test_positions_among_weights_of_one_exponent_are_read_back(
    build: Build, tmp_path: Path, cut: bool
) -> None:
    options: dict[str, Any] = {"encoding": "ulp_context", "anchor_interval": 4}
    if cut:
        settings = replace(DISK_SETTINGS, encoding="ulp_context")
        options["views"] = [TensorParallel.cut(rank, settings) for rank in range(2)]
    trainers = build(Trainers, str(tmp_path / "run"), **options)
    engine = build(Engine, trainers, shapes=SHAPES) if cut else build(Engine, trainers)
    local = LocalCheckpoint(tmp_path / "local", Folder(trainers.url))
    for version in range(5):
        trainers.write(version)
        weights = joined(trainers) if cut else trainers.history[version]
        assert engine.read() == version
        assert engine.holds({name: tensor.clone() for name, tensor in weights.items()})
        assert local.pull().in_place is (version > 0)
        found = {k: v for file in local.path.glob("*.safetensors") for k, v in load_file(file).items()}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert trainers.kinds == "FDDDD"
    late = build(Engine, trainers, shapes=SHAPES) if cut else build(Engine, trainers)
    assert late.read() == 4  # every link after the other, each on the weights of the one before
    assert late.holds({name: tensor.clone() for name, tensor in weights.items()})
    manifest = Catalogue(Folder(trainers.url)).get(4)
    assert isinstance(manifest, Manifest)
    packed = [body for line in manifest.lines for body in line.bodies if body.encoding == "ulp_context"]
    assert {body.file for body in packed} == {file.name for file in manifest.files}


def test_a_rank_that_holds_a_part_cannot_read_positions_among_weights(build: Build, tmp_path: Path) -> None:
    trainers = build(Trainers, str(tmp_path), encoding="ulp_context", anchor_interval=1)
    engine = build(Engine, trainers, num_ranks=2)
    trainers.write(0)
    assert engine.read() == 0
    trainers.write(1)
    for error in engine.try_read():
        assert isinstance(error, UpdateAborted)
        assert "set weight_update_delta_encoding: ulp_zstd on the trainer" in str(error)
    assert engine.holds(trainers.history[0])
    assert all(reader.ready for reader in engine.readers)
    trainers.write(2)  # an anchor
    assert engine.read() == 2
    assert engine.holds(trainers.history[2])


def test_rows_of_vocabulary_padding_are_not_written(build: Build, tmp_path: Path) -> None:
    settings = build(Trainers, str(tmp_path)).settings
    view = TorchAdamWTrainer.create(SHAPES, settings=settings, lr=1e-5, vocab_size=11)
    trainers = build(Trainers, str(tmp_path), views=[view])
    engine = build(Engine, trainers, shapes={**SHAPES, EMBED: (11, 8)})
    for version in range(2):
        trainers.write(version)
        assert engine.read() == version
        weights = trainers.history[version]
        assert engine.holds({**weights, EMBED: weights[EMBED][:11]})


def test_a_tied_head_is_stored_once_and_fills_an_engine_that_keeps_it_apart(
    build: Build, tmp_path: Path
) -> None:
    settings = build(Trainers, str(tmp_path)).settings
    view = TorchAdamWTrainer.create(SHAPES, settings=settings, lr=1e-5, tied_embeddings=True)
    trainers = build(Trainers, str(tmp_path), views=[view])
    apart = build(Engine, trainers, shapes={**SHAPES, "lm_head.weight": SHAPES[EMBED]})
    for version in range(3):
        trainers.write(version)
        assert apart.read() == version
        weights = trainers.history[version]
        assert apart.holds({**weights, "lm_head.weight": weights[EMBED]})
    manifest = Catalogue(Folder(str(tmp_path))).get(0)
    assert isinstance(manifest, Manifest)
    assert "lm_head.weight" not in {entry.name for entry in manifest.tensors}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**SHAPES, BIAS: (4,), "model.extra.weight": (2,)}, "does not hold.*model.extra.weight"),
        (
            {**SHAPES, BIAS: (4,), DOWN: (8, 12)},
            r"down_proj.*\[8, 24\], the engine serves bfloat16 \[8, 12\]",
        ),
    ],
)
def test_an_engine_of_another_layout_is_refused_before_a_write(
    build: Build, tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0)
    engine = build(Engine, trainers, shapes=shapes)
    (error,) = engine.try_read()
    assert isinstance(error, UpdateAborted)
    with pytest.raises(UpdateAborted, match=message):
        raise error
    assert all(not tensor.any() for tensor in engine.views[0].tensors_by_name.values())
    assert not engine.reader.ready
    assert not engine.reader.dirty


def test_a_folder_without_versions_says_so(build: Build, tmp_path: Path) -> None:
    engine = build(Engine, build(Trainers, str(tmp_path)))
    (error,) = engine.try_read()
    assert isinstance(error, ChainError)
    assert f"there is no version in {tmp_path}" in str(error)
    shutil.rmtree(tmp_path)
    assert isinstance(engine.try_read(3)[0], ChainError)


def test_what_cannot_work_is_refused_at_once(build: Build) -> None:
    trainers = build(Trainers, "memory://refused")
    view = build(Engine, trainers).views[0]
    with pytest.raises(ConfigError, match="weight_update_disk_url='': give a folder"):
        Trainers("")
    with pytest.raises(ConfigError, match="weight_update_disk_url='nosuch://x' cannot be opened"):
        Trainers("nosuch://x")
    with pytest.raises(ConfigError, match="engine_rank=1: give the rendezvous"):
        DiskReader(view, trainers.settings, engine_rank=1)
    with pytest.raises(ConfigError, match="num_trainer_ranks=1: readers of a folder meet without trainers"):
        DiskReader(
            view, trainers.settings, rendezvous=Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=1)
        )


@pytest.mark.parametrize(
    "url", ["simplecache::s3://bucket/run", "filecache::file:///run", "blockcache://run"]
)
def test_a_folder_behind_a_cache_is_refused_before_anything_is_opened(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    view, opened = build(Engine, build(Trainers, "memory://settings")).views[0], list[str]()
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: opened.append(url))
    said = "which keeps files that were written again since: give the URL behind it"
    with pytest.raises(ConfigError, match=said):
        DiskReader(view, replace(DISK_SETTINGS, disk_url=url))
    with pytest.raises(ConfigError, match=said):
        Trainers(url)
    for command in (["pull", url, str(tmp_path / "local")], ["inspect", url]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "give the URL behind it" in result.output
    result = CliRunner().invoke(app, ["verify", url, url])
    assert result.exit_code == 2
    assert "give the folder of a HF checkpoint" in result.output
    assert opened == []
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_read_again_together_meet_whoever_began_alone(
    build: Build, tmp_path: Path, early: int
) -> None:
    trainers = build(Trainers, str(tmp_path))
    trainers.write(0, 1)
    engine = build(Engine, trainers, num_ranks=2, timeout_seconds=1.5, connect_timeout_seconds=1.5)
    for leave in (False, False, True):  # before they met, after they did, and after they left
        if leave:
            engine.threads.run(lambda rank: engine.readers[rank].close())
        alone = engine.threads.run(
            lambda rank: engine.readers[rank].update_weights() if rank == early else None
        )
        assert isinstance(alone[early], AwexDeltaError)
        if any(isinstance(one, AwexDeltaError) for one in engine.try_read()):
            engine.read()
        assert engine.holds(trainers.history[1])
        assert all(reader.ready for reader in engine.readers)


def test_two_writers_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    settings = replace(DISK_SETTINGS, disk_url=str(tmp_path / "a"))
    views = [TorchAdamWTrainer.create(SHAPES, settings=settings, lr=1e-5, seed=seed) for seed in range(2)]
    urls = [str(tmp_path / name) for name in "ab"]
    writers = [
        DiskWriter(view, Rendezvous.alone(), 0, replace(settings, disk_url=url))
        for view, url in zip(views, urls, strict=True)
    ]
    for version in range(3):
        for view, writer in zip(views, writers, strict=True):
            view.train_step()
            stats = writer.update_weights(version)
            assert stats.verdict.kind is (Kind.DELTA if version else Kind.FULL)
    for view, writer, url in zip(views, writers, urls, strict=True):
        writer.close()
        engine = DictEngine(SHAPES)
        reader = DiskReader(engine, replace(settings, disk_url=url))
        assert reader.update_weights().version == 2
        assert differing(engine, {info.param: view.tensor(info.key) for info in view.weights()}) == {}
        reader.close()
