"""A delta against AWEX's full sync, in one run: two Megatron trainer ranks, two tensor-parallel engine ranks.

    python -m benchmarks.sync [--link 1gbit] [--encoding ulp_zstd] [--method capture] [--lr 3e-6] > sync.json

Deltas and full syncs alternate, after one warm-up of each. The time of an update is that of its slowest
rank, from a barrier of all ranks to its return. No digests are taken, as AWEX takes none: `bench detect` has
their cost. At the end every engine rank's weights are compared bit by bit with the trainer's conversion.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file

from awex_delta.engines.fused import FusedEngine, FusedRank
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.schema import DeltaMethod
from awex_delta.testing.procs import Rank
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer
from awex_delta.wire.choice import AUTO
from awex_delta.wire.registry import CODECS
from benchmarks import live
from benchmarks.collectives import CountTraffic
from benchmarks.environment import environment_record, unheard
from benchmarks.link import LOOPBACK, SPEEDS, arguments, environment, hosts

NUM_TRAINERS = NUM_ENGINES = 2
SETTINGS = DeltaSettings(anchor_interval=0, verify="off", timeout_seconds=300, connect_timeout_seconds=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank process is told.

    folder: shared by all ranks: the store's address, results, the final weights.
    versions: in order; a version that does not follow the last one makes a full sync.
    """

    role: str
    rank: int
    folder: str
    address: str
    versions: tuple[int, ...]
    lr: float
    encoding: str
    method: str
    model: Mapping[str, Any]

    @property
    def settings(self) -> DeltaSettings:
        """Of every rank of the run."""
        return replace(SETTINGS, encoding=self.encoding, method=self.method)


def versions_of(repeats: int) -> tuple[int, ...]:
    """A warm-up of each kind, then `repeats` times a full sync and a delta, then a delta that is counted."""
    versions = [0, 1]
    for _ in range(repeats):
        versions += [versions[-1] + 2, versions[-1] + 3]
    return (*versions, versions[-1] + 1)


def run(
    *,
    link: str = LOOPBACK,
    repeats: int = 3,
    lr: float = 1e-6,
    encoding: str = AUTO,
    method: str = "adamw",
    model: Mapping[str, Any] | None = None,
    timeout_seconds: float = 1500.0,
    stage: Callable[[str], None] = unheard,
) -> dict[str, Any]:
    """Measure, and return one JSON-able record.

    Args:
        link: "loopback", or a key of `benchmarks.link.SPEEDS`.
        repeats: measured deltas, and as many full syncs; afterwards as many deltas into a live vLLM.
        lr: of the AdamW; sets the share of changed elements.
        encoding: of the deltas; "auto" measures the link in the warm-up.
        method: how changes are found.
        model: fields of `TinySpec`; a Qwen3 of 113 million parameters by default.
        timeout_seconds: of the whole run.
        stage: hears what is being measured.

    Returns:
        What the two kinds of update cost, and from `benchmarks.live` what a live vLLM adds.

    Raises:
        NoLinkError: the link cannot be made here.
        RuntimeError: a rank failed; carries its output.
    """
    model = dict(model or live.MODEL)
    stage(f"deltas and full syncs over {link}")
    summary = _run_ranks(link, versions_of(repeats), lr, encoding, method, model, timeout_seconds)
    stage("deltas into a live vLLM")
    followed = live.run(model=model, lr=lr, repeats=repeats, timeout_seconds=timeout_seconds)
    return {**summary, **{key: followed[key] for key in live.KEYS}, "live": followed}


def _run_ranks(
    link: str,
    versions: tuple[int, ...],
    lr: float,
    encoding: str,
    method: str,
    model: Mapping[str, Any],
    timeout_seconds: float,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, hosts(link) as (trainer_host, engine_host):
        jobs = [
            Job(
                role=role,
                rank=rank,
                folder=folder,
                address=trainer_host.address,
                versions=versions,
                lr=lr,
                encoding=encoding,
                method=method,
                model=model,
            )
            for role, count in (("trainer", NUM_TRAINERS), ("engine", NUM_ENGINES))
            for rank in range(count)
        ]
        processes = []
        for job in jobs:
            host = trainer_host if job.role == "trainer" else engine_host
            command = [sys.executable, "-m", "benchmarks.sync", "--job", json.dumps(asdict(job))]
            log = (Path(folder) / f"{job.role}{job.rank}.log").open("w")
            processes.append(
                subprocess.Popen(  # noqa: S603 - this module, run by this Python
                    arguments(host, command), stdout=log, stderr=log, env=environment(host, dict(os.environ))
                )
            )
        _join(processes, jobs, timeout_seconds)
        return _summary(jobs, link)


def _join(processes: list[subprocess.Popen[bytes]], jobs: list[Job], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    try:
        for process in processes:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, job in zip(processes, jobs, strict=True):
        if process.returncode != 0:
            log = (Path(job.folder) / f"{job.role}{job.rank}.log").read_text()
            raise RuntimeError(f"{job.role} {job.rank} ended with {process.returncode}:\n{log[-4000:]}")


def _summary(jobs: list[Job], link: str) -> dict[str, Any]:
    records = [json.loads((Path(j.folder) / f"{j.role}{j.rank}.json").read_text()) for j in jobs]
    trainers = [record for record in records if record["role"] == "trainer"]
    samples: dict[str, list[dict[str, Any]]] = {"delta": [], "full": []}
    for place in range(len(jobs[0].versions) - 1):  # the last one was counted, not timed
        rows = [record["updates"][place] for record in records]
        slowest = max(rows, key=lambda row: row["wall_seconds"])
        first = trainers[0]["updates"][place]
        elements = sum(trainer["updates"][place]["num_elements"] for trainer in trainers)
        samples[first["kind"]].append(
            {
                **first,
                "wall_seconds": slowest["wall_seconds"],
                "total_elements": elements,
            }
        )
    deltas, fulls = samples["delta"][1:], samples["full"][1:]  # without the warm-up
    changed = sum(row["total_changed"] for row in deltas)
    delta_seconds = statistics.median(row["wall_seconds"] for row in deltas)
    full_seconds = statistics.median(row["wall_seconds"] for row in fulls)
    wire = sum(row["total_wire_bytes"] for row in deltas)
    return {
        "parameters": trainers[0]["parameters"],
        "changed_share": changed / sum(row["total_owned"] for row in deltas),
        "bytes_per_change": wire / sum(row["total_elements"] for row in deltas),
        "wire_bytes": wire / len(deltas),
        "full_bytes": fulls[0]["full_bytes"],
        "delta_over_full_bytes": wire / len(deltas) / fulls[0]["full_bytes"],
        "delta_over_full_seconds": delta_seconds / full_seconds,
        "delta_seconds": delta_seconds,
        "full_seconds": full_seconds,
        "link": link,
        "encoding": jobs[0].encoding,
        "method": jobs[0].method,
        "phases": {kind: _phases(rows) for kind, rows in (("delta", deltas), ("full", fulls))},
        "training_collective_bytes": sum(record["collective_bytes"] for record in trainers),
        "identical": all(record["identical"] for record in records if record["role"] == "engine"),
        "samples": samples,
        "environment": environment_record(),
    }


def _phases(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {phase: statistics.median(row["seconds"][phase] for row in rows) for phase in rows[0]["seconds"]}


def _rendezvous(job: Job) -> tuple[Rendezvous, object]:
    """Trainer 0 hosts the store and writes its port where the others read it."""
    note, store = Path(job.folder) / "port", None
    if (job.role, job.rank) == ("trainer", 0):
        store = host_store(job.address)
        note.with_suffix(".tmp").write_text(str(store.port))
        note.with_suffix(".tmp").rename(note)
    deadline = time.monotonic() + SETTINGS.connect_timeout_seconds
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("trainer 0 opened no store")
        time.sleep(0.05)
    rendezvous = Rendezvous(
        num_engine_ranks=NUM_ENGINES,
        num_trainer_ranks=NUM_TRAINERS,
        host=job.address,
        port=int(note.read_text()),
    )
    return rendezvous, store


def _row(stats: UpdateStats, wall_seconds: float) -> dict[str, Any]:
    fields = ("version", "num_elements", "total_wire_bytes", "total_changed", "total_owned", "full_bytes")
    own = {field: getattr(stats, field) for field in fields}
    return {**own, "kind": stats.verdict.kind, "seconds": dict(stats.seconds), "wall_seconds": wall_seconds}


def _timed(end: Sender | Receiver, version: int) -> dict[str, Any]:
    end.connect()
    end.comm.gather(b"", width=8, phase="benchmark")
    begin = time.perf_counter()
    stats = end.update_weights(version)
    return _row(stats, time.perf_counter() - begin)


def _trainer(job: Job) -> dict[str, Any]:
    rendezvous, store = _rendezvous(job)
    seat = Rank(rank=job.rank, world_size=NUM_TRAINERS, folder=Path(job.folder))
    seat.init_gloo(rank=job.rank, world_size=NUM_TRAINERS, timeout_seconds=SETTINGS.timeout_seconds)
    tiny = build_trainer(TinySpec(lr=job.lr, weight_decay=0.01, **job.model))
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=job.settings)
    sender = Sender(view, rendezvous, job.rank, job.settings)
    updates = []
    for version in job.versions[:-1]:
        tiny.train_step()
        updates.append(_timed(sender, version))
    tiny.train_step()
    with CountTraffic() as traffic:
        updates.append(_timed(sender, job.versions[-1]))
    if updates[-1]["kind"] != "delta":
        raise RuntimeError(f"the counted update was not a delta: {updates[-1]}")
    if job.rank == 0:
        weights = {}
        for info in view.weights():
            for name, tensor in view.convert(info.key, view.tensor(info.key)):
                weights[name] = tensor.detach().clone().contiguous()
        save_file(weights, Path(job.folder) / "final.safetensors")
    sender.comm.gather(b"", width=8, phase="final")
    sender.comm.gather(b"", width=8, phase="end")  # trainer 0 keeps the store open until all have read
    parameters = sum(torch.Size(info.shape).numel() for info in view.weights())
    del store
    return {"updates": updates, "parameters": parameters, "collective_bytes": sum(traffic.num_bytes.values())}


def _engine(job: Job) -> dict[str, Any]:
    rendezvous, _ = _rendezvous(job)
    config = hf_config(TinySpec(lr=job.lr, **job.model))
    engine = FusedEngine(config, FusedRank(tp_rank=job.rank, tp_size=NUM_ENGINES))
    receiver = Receiver(engine, rendezvous, job.rank, "engine", job.settings)
    updates = [_timed(receiver, version) for version in job.versions]
    receiver.comm.gather(b"", width=8, phase="final")
    weights = load_file(Path(job.folder) / "final.safetensors")
    identical = True
    for entry in engine.tensors():
        cut = tuple(slice(o, o + n) for o, n in zip(entry.global_offset, entry.view.shape, strict=True))
        want = weights[entry.name][cut].contiguous().view(torch.int16)
        identical &= torch.equal(entry.view.contiguous().view(torch.int16), want)
    receiver.comm.gather(b"", width=8, phase="end")
    return {"updates": updates, "identical": identical}


def _work(job: Job) -> None:
    torch.set_num_threads(1)
    record = _trainer(job) if job.role == "trainer" else _engine(job)
    (Path(job.folder) / f"{job.role}{job.rank}.json").write_text(json.dumps({"role": job.role, **record}))


def main() -> None:
    """Command line: a whole run, or (`--job`) one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--link", choices=[LOOPBACK, *SPEEDS], default=LOOPBACK)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--encoding", choices=[AUTO, *CODECS], default=AUTO)
    parser.add_argument("--method", choices=get_args(DeltaMethod), default="adamw")
    given = parser.parse_args()
    if given.job:
        _work(Job(**json.loads(given.job)))
        return
    options = {name: getattr(given, name) for name in ("link", "repeats", "lr", "encoding", "method")}
    record = run(**options)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
