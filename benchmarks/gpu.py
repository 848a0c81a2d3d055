"""What only a device can show, in one run of some minutes: `make gpu`, which writes build/gpu.json.

    python -m benchmarks.gpu --out build/gpu.json [--device cpu --elements 100000 --tensors 96]

Detection and digests against a memory copy, mapping and writing of a model of many tensors, whole updates of
a trainer and an engine on the same device, and how often the host waits for the device in each of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.invert import detect_changes
from awex_delta.detection.slices import OwnedSlice
from awex_delta.lines.boxes import Boxes, BoxMap
from awex_delta.lines.storages import Storages
from awex_delta.wire.digest import sum_whole
from benchmarks.environment import environment_record
from benchmarks.experts import ExpertsEngine, ExpertsTrainer, Shape
from benchmarks.scale import CHANGED, ELEMENTS, ENCODINGS, LR_FOR_ALL, SETTINGS, STORAGES, TENSORS, measure

GOAL = 0.85  # of the copy bound
STEP = AdamWStep(lr=1e-6, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, step=3)
_BYTES_AN_ELEMENT = 4 + 4 + 4 + 2 + 1  # master, two moments and weight are read, and a mark is written
_SLICES = 64


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `work`, until the device is done, after two calls that warm up."""
    samples = []
    for _ in range(repeats + 2):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[2:])


def host_waits(work: Callable[[], object], device: torch.device) -> int | None:
    """How often the host waits for the device in `work`, as torch counts; None where it cannot."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def detection(device: torch.device, elements: int, repeats: int) -> dict[str, Any]:
    """Detection and a digest of all weights, each against the time that a copy of as many bytes takes."""
    generator = torch.Generator(device).manual_seed(0)
    main = (torch.randn(elements, generator=generator, device=device) * 0.02).bfloat16().float()
    optimizer = torch.optim.AdamW([main], lr=STEP.lr, weight_decay=STEP.weight_decay)
    before = main.bfloat16()
    for _ in range(STEP.step):
        before = main.bfloat16()
        main.grad = torch.randn(elements, generator=generator, device=device)
        optimizer.step()
    main.grad = None
    state, weight = optimizer.state[main], main.bfloat16()
    edges = [elements * place // _SLICES for place in range(_SLICES + 1)]
    slices = [
        OwnedSlice(
            param=f"weight{number}",
            chunk=0,
            start=0,
            stop=stop - start,
            begin=start,
            main=main[start:stop],
            weight=weight[start:stop],
            exp_avg=state["exp_avg"][start:stop],
            exp_avg_sq=state["exp_avg_sq"][start:stop],
            step=STEP.step,
        )
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    found = detect_changes(slices, lambda _: STEP)
    changed = before.view(torch.int16) != weight.view(torch.int16)
    missed = changed.clone()
    missed[found.changes.pos] = False
    source, target = torch.empty_like(main), torch.empty_like(main)
    copied = timed(lambda: target.copy_(source), device, repeats)
    bytes_per_second = 2 * main.nbytes / copied
    seconds = timed(lambda: detect_changes(slices, lambda _: STEP), device, repeats)
    digest_seconds = timed(lambda: sum_whole(weight, 1), device, repeats)
    return {
        "elements": elements,
        "changed_share": int(changed.sum()) / elements,
        "extra_share": found.num_changed / max(int(changed.sum()), 1) - 1,
        "num_missed": int(missed.sum()),
        "copy_bytes_per_second": bytes_per_second,
        "seconds": seconds,
        "ratio_to_copy_bound": _BYTES_AN_ELEMENT * elements / bytes_per_second / seconds,
        "goal": GOAL,
        "digest_seconds": digest_seconds,
        "digest_ratio_to_copy_bound": weight.nbytes / bytes_per_second / digest_seconds,
        "host_waits": host_waits(lambda: detect_changes(slices, lambda _: STEP), device),
    }


def mapping(device: torch.device, shape: Shape, changed: float, repeats: int) -> list[dict[str, Any]]:
    """Positions of a line of many tensors mapped to another, and values written there, for each storages."""
    size, count = shape.rows * shape.hidden, shape.tensors
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    ones, width = torch.ones(count, dtype=torch.int64), torch.full((count,), size)
    table = BoxMap(
        Boxes(
            source=torch.arange(count) * size,
            source_pitch=width,
            target=order * size,
            target_pitch=width,
            rows=ones,
            width=width,
        )
    )
    pos = (torch.rand(count * size, generator=torch.Generator().manual_seed(0)) < changed).nonzero().view(-1)
    value = torch.randn(pos.numel(), generator=torch.Generator().manual_seed(0)).bfloat16()
    pos, value = pos.to(device), value.to(device)
    rows = []
    for kind in STORAGES:
        tensors = [one.view for one in ExpertsEngine(shape, fused=kind == "fused", device=device).tensors()]
        storages = Storages(tensors)

        def write(storages: Storages = storages) -> None:
            there, pick = table.map(pos)
            storages.scatter(there, value[pick])

        seconds = timed(write, device, repeats)
        there, pick = table.map(pos)
        exact = torch.equal(storages.gather(there, torch.bfloat16), value[pick])
        where = order.to(device)[pos // size] * size + pos % size
        rows.append(
            {
                "tensors": count,
                "storages": kind,
                "changed": pos.numel(),
                "seconds": seconds,
                "microseconds_per_tensor": 1e6 * seconds / count,
                "identical": exact and torch.equal(where[pick], there) and pick.numel() == pos.numel(),
                "host_waits": host_waits(write, device),
            }
        )
    return rows


def run(device: torch.device, *, elements: int, tensors: int, repeats: int) -> dict[str, Any]:
    """Measure, and return one JSON-able record.

    Args:
        device: of all weights.
        elements: of the weights in which detection looks for changes.
        tensors: HF tensors of the mixture of experts.
        repeats: samples of each kind.

    Returns:
        detection, mapping, updates (rows of `benchmarks.scale`); passed: nothing was missed, every bit
        arrived, and, on a device, detection reached the goal.
    """
    shape = Shape.of(tensors, ELEMENTS)
    found = detection(device, elements, repeats)
    moved = mapping(device, shape, CHANGED, repeats)
    trainer = ExpertsTrainer(shape, LR_FOR_ALL * CHANGED, SETTINGS, device)
    updates = [
        measure(trainer, shape, storages=storages, encoding=encoding, repeats=repeats, device=device)
        for storages, encoding in ((STORAGES[0], ENCODINGS[0]), (STORAGES[0], ENCODINGS[1]))
    ]
    exact = found["num_missed"] == 0 and all(row["identical"] for row in (*moved, *updates))
    return {
        "device": str(device),
        "passed": exact and (device.type == "cpu" or found["ratio_to_copy_bound"] >= GOAL),
        "detection": found,
        "mapping": moved,
        "updates": updates,
        "environment": environment_record(),
    }


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main() -> int:
    """Measure and write; without a device say so, and end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=1 << 29)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here")
        return 0
    record = run(device, elements=given.elements, tensors=given.tensors, repeats=given.repeats)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2))
    ratio = record["detection"]["ratio_to_copy_bound"]
    print(
        f"{'passed' if record['passed'] else 'FAILED'}: detection at {ratio:.2f} of a copy; see {given.out}"
    )
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
