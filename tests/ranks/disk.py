"""A world of thread ranks around a folder: two trainers that own halves, and engines that read."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from awex_delta.folder.folder import Folder, Step, ignore_step, version_name
from awex_delta.folder.publish import Job, Publisher, Ranks
from awex_delta.folder.reader import DiskReader
from awex_delta.folder.writer import DiskWriter
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.ranks import ThreadRanks, results
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import TrainerView
from tests.pairing import differing
from tests.ranks.conftest import BIAS, CUT, SHAPES

ENGINE_SHAPES = {**SHAPES, BIAS: (4,)}
SETTINGS = DeltaSettings(
    anchor_interval=3,
    encoding="ulp_zstd",
    timeout_seconds=20.0,  # a busy disk may take seconds to sync a file
    connect_timeout_seconds=20.0,
    transport="disk",
    keep_anchors=100,
)
Weights = dict[str, torch.Tensor]


def any_name() -> str:
    """A name for a rendezvous: groups of one thread must not share it."""
    return uuid.uuid4().hex


class Trainers:
    """Trainer ranks that write.

    Attributes:
        history: by version, a copy of the weights as they were when it was written.
        kinds: one letter a version: F or D.
    """

    def __init__(
        self,
        url: str,
        *,
        num_trainers: int = 2,
        views: Sequence[TrainerView] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Build the ranks; options are settings, or those of DiskWriter."""
        fields = {name: options.pop(name) for name in list(options) if name in DeltaSettings.__slots__}
        self.settings = replace(SETTINGS, disk_url=url, **fields)
        self.url = url
        self.views = list(views) or [
            TorchAdamWTrainer.create(
                SHAPES,
                dp_rank=rank,
                dp_size=num_trainers,
                settings=self.settings,
                lr=1e-5,
                buffers={BIAS: (4,)},
                seed=seed,
            )
            for rank in range(num_trainers)
        ]
        self.rendezvous = Rendezvous(
            num_engine_ranks=0, num_trainer_ranks=len(self.views), store=HashStore(), name=any_name()
        )
        self.threads = ThreadRanks(len(self.views))
        self.faults = [FaultPlan() for _ in self.views]
        self.writers = [
            DiskWriter(view, self.rendezvous, r, self.settings, on_phase=self.faults[r].on_phase, **options)
            for r, view in enumerate(self.views)
        ]
        self.history: dict[int, Weights] = {}
        self.kinds = ""
        self.closed = False

    def weights(self) -> Weights:
        """A copy of the trainer's whole weights, by HF name."""
        view = self.views[0]
        return {info.param: view.tensor(info.key).clone() for info in view.weights()}

    def begin(self, version: int) -> list[UpdateStats | BaseException]:
        """One optimizer step on every rank, then one version; not waited for."""
        for view in self.views:
            view.train_step()  # type: ignore[attr-defined]
        self.history[version] = self.weights()
        return list(self.threads.run(lambda rank: self.writers[rank].update_weights(version)))

    def write(self, *versions: int) -> list[UpdateStats]:
        """One step and one version that must exist, again and again; the stats of the last one."""
        stats: list[UpdateStats] = []
        for version in versions:
            stats = results(self.begin(version))
            results(self.threads.run(lambda rank: self.writers[rank].wait()))
            self.kinds += stats[0].verdict.kind.value[0].upper()
        return stats

    def close(self) -> None:
        """Leave on every rank, once."""
        if not self.closed:
            self.closed = True
            self.threads.run(lambda rank: self.writers[rank].close())
            self.threads.close()


class Engine:
    """The ranks of one engine that read; the tensors of `CUT` are shared among them."""

    def __init__(
        self, trainers: Trainers, *, num_ranks: int = 1, name: str = "engine", **options: Any
    ) -> None:
        """Build the ranks; options are settings, or those of DiskReader."""
        fields = {key: options.pop(key) for key in list(options) if key in DeltaSettings.__slots__}
        settings = replace(trainers.settings, **fields)
        shapes = options.pop("shapes", ENGINE_SHAPES)
        self.views = [
            DictEngine(
                shapes,
                dtypes={BIAS: torch.float32},
                cut=CUT if num_ranks > 1 else {},
                rank=rank,
                num_ranks=num_ranks,
            )
            for rank in range(num_ranks)
        ]
        meeting = Rendezvous(
            num_engine_ranks=num_ranks, num_trainer_ranks=0, store=HashStore(), name=any_name()
        )
        self.threads = ThreadRanks(num_ranks)
        self.faults = [FaultPlan() for _ in self.views]
        self.readers = [
            DiskReader(
                view,
                settings,
                engine=name,
                rendezvous=meeting if num_ranks > 1 else None,
                engine_rank=rank,
                on_phase=self.faults[rank].on_phase,
                **options,
            )
            for rank, view in enumerate(self.views)
        ]

    @property
    def reader(self) -> DiskReader:
        """Rank 0."""
        return self.readers[0]

    def try_read(self, version: int | None = None) -> list[UpdateStats | BaseException]:
        """One update on all ranks."""
        return list(self.threads.run(lambda rank: self.readers[rank].update_weights(version)))

    def read(self, version: int | None = None) -> int:
        """One update that must succeed on every rank; the version that they hold then."""
        stats = results(self.try_read(version))
        (held,) = {one.version for one in stats}
        assert all(reader.ready and reader.version == held for reader in self.readers)
        return held

    def wrong(self, weights: Weights) -> list[dict[str, int]]:
        """By rank, the tensors whose bits differ."""
        return [differing(view, weights) for view in self.views]

    def holds(self, weights: Weights) -> bool:
        """True where every rank holds exactly these bits."""
        return not any(self.wrong(weights))

    def close(self) -> None:
        """Leave on every rank."""
        self.threads.run(lambda rank: self.readers[rank].close())
        self.threads.close()


def recorded_jobs(num_versions: int) -> tuple[Trainers, list[Job]]:
    """What a trainer of one rank would write as versions F0 D1 F2 D3 ..., and the trainer."""
    trainers = Trainers("memory://recorded", num_trainers=1, anchor_interval=1)
    writer, jobs = trainers.writers[0], list[Job]()
    real = writer._publisher

    class Recorder:
        bytes_per_second = None

        def publish(self, job: Job) -> str:
            jobs.append(job)
            return real.publish(job)

    writer._publisher = Recorder()  # type: ignore[assignment]
    trainers.write(*range(num_versions))
    trainers.close()  # its thread that shows signs of life must hold no lock while a child forks
    return trainers, jobs


def publisher(path: Path, step: Step = ignore_step) -> Publisher:
    """A writer of one rank that keeps one anchor."""
    return Publisher(Folder(str(path)), Ranks(Rendezvous.alone(), 0, 5.0), 1, step)


Make = Callable[..., Any]


def flip(folder: Folder, name: str, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(folder.read(name))
    content[position] ^= 0x10
    folder.put(name, [bytes(content)])


def delta_file(version: int, rank: int = 0, num_ranks: int = 2) -> str:
    """Where a rank's changes lie."""
    return f"{version_name(version)}/delta-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def model_file(version: int, rank: int = 0, num_ranks: int = 2) -> str:
    """Where a rank's share of a full version lies."""
    return f"{version_name(version)}/model-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def files_below(path: Path) -> list[str]:
    """Every file, relative."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
