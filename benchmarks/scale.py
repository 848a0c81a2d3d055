"""What an update costs by the tensor: a trainer rank and an engine rank of a mixture of experts, as threads.

    python -m benchmarks.scale > scale.json

The HF tensors are many and small, so that whatever is done once a tensor shows. Everything is the product's:
`torch.optim.AdamW` steps, detection from its state, the wire over Gloo, digests as configured by default.
Deltas and AWEX's full syncs alternate, in two sizes, so that the slope between them is the price of a tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from awex.transfer.transfer_plan import TransferPlan
from torch._C._distributed_c10d import HashStore

from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.ranks import ThreadRanks, results
from benchmarks.environment import environment_record, unheard
from benchmarks.experts import ExpertsEngine, ExpertsTrainer, Shape, identical

TENSORS, ELEMENTS, CHANGED = 18_867, 2048, 0.01
ENCODINGS = ("indices", "ulp_zstd")
STORAGES = ("fused", "one_a_tensor")
LR_FOR_ALL = 1e-4  # times the share that is to change: steps of 1e-6 change near one weight in a hundred
SETTINGS = DeltaSettings(anchor_interval=0, timeout_seconds=600, connect_timeout_seconds=600)

Sample = tuple[float, list[UpdateStats]]
"""Seconds of an update, and what the engine and the trainer say of it."""


class Run:
    """One trainer rank and one engine rank that meet, each in a thread of its own."""

    def __init__(self, trainer: ExpertsTrainer, engine: ExpertsEngine, encoding: str) -> None:
        """Connect. `seconds` is what that takes."""
        self.view = trainer.fork()
        rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, store=HashStore())
        settings = replace(SETTINGS, encoding=encoding)
        self.ends: tuple[Receiver, Sender] = (
            Receiver(engine, rendezvous, 0, "engine", settings),
            Sender(self.view, rendezvous, 0, settings),
        )
        if engine.tensors()[0].view.device.type != "cpu":
            copy_full_syncs(*self.ends)
        self._threads = ThreadRanks(2)
        begin = time.perf_counter()
        self._all(lambda end: end.connect())
        self.connect_seconds = time.perf_counter() - begin

    def update(self, version: int) -> tuple[float, list[UpdateStats]]:
        """Seconds until both ranks are done, and what each says: the engine first."""
        begin = time.perf_counter()
        stats = self._all(lambda end: end.update_weights(version))
        return time.perf_counter() - begin, stats

    def close(self) -> None:
        """Leave, and let the threads end."""
        self._all(lambda end: end.close())
        self._threads.close()
        self.view.detach()

    def _all(self, work: Any) -> list[Any]:
        return results(self._threads.run(lambda seat: work(self.ends[seat]), timeout_seconds=900))


def copy_full_syncs(receiver: Receiver, sender: Sender) -> None:
    """Copy the weights of full syncs from thread to thread: NCCL takes no two ranks on one device."""
    handed: SimpleQueue[dict[str, torch.Tensor]] = SimpleQueue()
    copied: SimpleQueue[None] = SimpleQueue()

    def send(tensors: dict[str, torch.Tensor], _: TransferPlan, *, phase: str) -> None:  # noqa: ARG001
        handed.put(tensors)
        copied.get(timeout=SETTINGS.timeout_seconds)

    def receive(tensors: dict[str, torch.Tensor], plan: TransferPlan, *, phase: str) -> None:  # noqa: ARG001
        sent = handed.get(timeout=SETTINGS.timeout_seconds)
        for op in (op for ops in plan.operations.values() for op in ops):
            target, source = (
                tensor[tuple(slice(o, o + n) for o, n in zip(offset, op.overlap_shape, strict=True))]
                for tensor, offset in (
                    (tensors[op.recv_shard_meta.name], op.recv_offset),
                    (sent[op.send_shard_meta.name], op.send_offset),
                )
            )
            target.copy_(source)
        copied.put(None)

    setattr(sender.comm, "send_weights", send)  # noqa: B010 - stands in for a method
    setattr(receiver.comm, "receive_weights", receive)  # noqa: B010


def measure(
    trainer: ExpertsTrainer,
    shape: Shape,
    *,
    storages: str,
    encoding: str,
    repeats: int,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """One row of the record.

    Args:
        trainer: of that shape; takes steps.
        shape: of the model.
        storages: one of `STORAGES`.
        encoding: of the deltas.
        repeats: measured deltas, and as many full syncs, after one of each.
        device: of all weights.

    Raises:
        RuntimeError: an update was not of the kind that was due.
    """
    engine = ExpertsEngine(shape, fused=storages == "fused", device=device)
    run = Run(trainer, engine, encoding)
    samples: dict[Kind, list[Sample]] = {Kind.DELTA: [], Kind.FULL: []}
    version = 1
    for _ in range(repeats + 1):
        for kind in (Kind.FULL, Kind.DELTA):
            trainer.train_step()
            # A version that does not follow the last one makes a full sync; a multiple of 1,000 checks all.
            version += 2 if kind is Kind.FULL else 1
            seconds, stats = run.update(version)
            if stats[0].verdict.kind is not kind:
                raise RuntimeError(f"version {version} was no {kind.value}: {stats[0].verdict}")
            samples[kind].append((seconds, stats))
    same = identical(engine, trainer)
    run.close()
    sizes = {"tensors": shape.tensors, "elements": shape.rows * shape.hidden}
    kinds = {"storages": storages, "encoding": encoding, "identical": same}
    return {**sizes, **kinds, "connect_seconds": run.connect_seconds, **_row(samples, shape.tensors)}


def _row(samples: Mapping[Kind, Sequence[Sample]], tensors: int) -> dict[str, Any]:
    """What the updates took. The first of each kind warmed up."""
    delta, full = samples[Kind.DELTA][1:], samples[Kind.FULL][1:]
    delta_seconds = statistics.median(seconds for seconds, _ in delta)
    full_seconds = _median(full, "prepare", "transfer")
    digest_seconds = _median(full, "digest")
    totals = [stats[1] for _, stats in delta]
    return {
        "changed_share": sum(s.total_changed for s in totals) / sum(s.total_owned for s in totals),
        "verified": str(totals[-1].verified),
        "delta_seconds": delta_seconds,
        "full_seconds": full_seconds,
        "delta_over_full_seconds": delta_seconds / full_seconds,
        "full_digest_seconds": digest_seconds,
        "full_digest_over_transfer": digest_seconds / _median(full, "transfer"),
        "full_update_seconds": statistics.median(seconds for seconds, _ in full),
        "microseconds_per_tensor": 1e6 * delta_seconds / tensors,
        "phases": {
            side: {kind: _phases(rows, seat) for kind, rows in (("delta", delta), ("full", full))}
            for seat, side in enumerate(("engine", "trainer"))
        },
        "samples": {"delta": [s for s, _ in delta], "full": [s for s, _ in full]},
    }


def run(
    *,
    tensors: int = TENSORS,
    elements: int = ELEMENTS,
    changed: float = CHANGED,
    encodings: Sequence[str] = ENCODINGS,
    repeats: int = 5,
    stage: Callable[[str], None] = unheard,
) -> dict[str, Any]:
    """Measure, and return one JSON-able record.

    Args:
        tensors: HF tensors of the larger size; the other has a quarter. What is nearest is taken.
        elements: of each tensor, a multiple of 64.
        changed: share of the weights that a step changes, about.
        encodings: of the deltas.
        repeats: measured deltas, and as many full syncs.
        stage: hears what is being measured.

    Returns:
        rows: one for each size, storages and encoding: what `measure` says. full_seconds is AWEX's own sync
            of the same tensors, without the digests and agreements that make an update of it.
        slopes: for each storages and encoding the seconds of a delta that one tensor more costs, both sides
            together, in millionths.
        identical: every engine held the bits of the trainer's conversion at the end.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank of many on a machine
    rows: list[dict[str, Any]] = []
    try:
        for size in (tensors // 4, tensors):
            stage(f"updates of {size:,} tensors")
            shape = Shape.of(size, elements)
            trainer = ExpertsTrainer(shape, LR_FOR_ALL * changed, SETTINGS)
            rows += [
                measure(trainer, shape, storages=storages, encoding=encoding, repeats=repeats)
                for encoding, storages in itertools.product(encodings, STORAGES)
            ]
    finally:
        torch.set_num_threads(threads)
    return {
        "rows": rows,
        "slopes": slopes(rows),
        "identical": all(row["identical"] for row in rows),
        "environment": environment_record(),
    }


def slopes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one tensor more costs, from rows of two sizes."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["storages"], row["encoding"]), []).append(row)
    return [
        {
            "storages": storages,
            "encoding": encoding,
            "slope_microseconds_per_tensor": 1e6
            * (large["delta_seconds"] - small["delta_seconds"])
            / (large["tensors"] - small["tensors"]),
        }
        for (storages, encoding), (small, large) in found.items()
    ]


def _median(samples: Sequence[Sample], *phases: str) -> float:
    """Seconds of the slower rank in some phases."""
    return statistics.median(
        max(sum(one.seconds.get(phase, 0.0) for phase in phases) for one in stats) for _, stats in samples
    )


def _phases(samples: Sequence[Sample], seat: int) -> dict[str, float]:
    seconds = [stats[seat].seconds for _, stats in samples]
    return {phase: statistics.median(one.get(phase, 0.0) for one in seconds) for phase in seconds[0]}


def main() -> None:
    """Print the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--changed", type=float, default=CHANGED)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(run(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
