"""What connecting costs one trainer rank and one engine rank of a large run, from descriptions alone.

    python -m benchmarks.plans qwen3_30b_a3b:8+64 > plan.json

The descriptions of all ranks are made first. Then each side, in a fresh process, does what a rank does with
them when it connects: it reads them and plans its own transfers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from awex_delta.plan.announce import Announced, announced, dump_spec, layout_digest, load_layout
from awex_delta.plan.rank import Plan, plan_rank
from awex_delta.plan.world import make_world
from benchmarks.descriptions import Shape, Sizes
from benchmarks.environment import environment_record
from benchmarks.prove import status_bytes

_QWEN3_30B_A3B = Sizes(
    layers=48, experts=128, hidden=2048, inter=768, heads=32, kv_heads=4, head_dim=128, vocab=151_936
)
_LARGE = Sizes(
    layers=61, experts=384, hidden=7168, inter=2048, heads=64, kv_heads=8, head_dim=128, vocab=163_840
)
_TINY = Sizes(layers=1, experts=4, hidden=8, inter=4, heads=4, kv_heads=2, head_dim=2, vocab=8)
SHAPES: Mapping[str, Shape] = {
    "tiny:2+4": Shape(sizes=_TINY, trainers=2, instances=2, engine_tp=2),
    "qwen3_30b_a3b:8+8": Shape(sizes=_QWEN3_30B_A3B, trainers=8, instances=2, engine_tp=4),
    "qwen3_30b_a3b:8+64": Shape(sizes=_QWEN3_30B_A3B, trainers=8, instances=16, engine_tp=4),
    "large:64+128": Shape(sizes=_LARGE, trainers=64, instances=16, engine_tp=8, expert_parallel=True),
}
_WARM = "tiny:2+4"
SIDES = ("engine", "trainer")

Blobs = tuple[list[bytes], dict[str, tuple[str, bytes]]]
"""What each rank alone says, by seat; and by its digest the role and the bytes of each layout, once."""


def exchange(shape: Shape) -> Blobs:
    """What travels when all ranks connect."""
    alone, layouts = list[bytes](), dict[str, tuple[str, bytes]]()
    for spec in shape.describe():
        mine, layout = dump_spec(spec)
        alone.append(mine)
        layouts.setdefault(layout_digest(layout), (spec.role, layout))
    return alone, layouts


def connect(blobs: Blobs, num_engines: int, seat: int) -> tuple[Plan, dict[str, float]]:
    """What one rank does with the descriptions of all, and seconds of each part."""
    begin = time.perf_counter()
    alone, travelled = blobs
    told = [announced(number, blob) for number, blob in enumerate(alone)]
    ranks = [one for one in told if isinstance(one, Announced)]
    layouts = {digest: load_layout(role, blob, digest) for digest, (role, blob) in travelled.items()}
    world = make_world([rank.complete(layouts) for rank in ranks], num_engines)
    parsed = time.perf_counter()
    plan = plan_rank(world, seat)
    return plan, {"parse_seconds": parsed - begin, "plan_seconds": time.perf_counter() - parsed}


def measure(name: str, side: str, folder: Path) -> dict[str, Any]:
    """One rank, in this process, which should have done nothing before. Linux only.

    Args:
        name: one of `SHAPES`.
        side: one of `SIDES`: rank 0 of it.
        folder: holds what `exchange` gave, as `write` left it.

    Returns:
        description_bytes: all that the ranks tell each other, which each of them receives.
        cpu_seconds: of parsing and planning, in all threads.
        peak_bytes: resident memory beyond what there was before, descriptions included.
    """
    shape = SHAPES[name]
    connect(exchange(SHAPES[_WARM]), SHAPES[_WARM].num_engines, 0)  # loads what AWEX loads late
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    resident = status_bytes("VmRSS")
    blobs = _read(folder)
    begin = time.process_time()
    plan, seconds = connect(blobs, shape.num_engines, 0 if side == "engine" else shape.num_engines)
    seconds["cpu_seconds"] = time.process_time() - begin
    peak = status_bytes("VmHWM") - resident
    return {
        "side": side,
        "description_bytes": sum(map(len, blobs[0])) + sum(len(blob) for _, blob in blobs[1].values()),
        **seconds,
        "peak_bytes": peak,
        "pairs": len(plan.pairs),
        "boxes": sum(pair.sent.rows.numel() for pair in plan.pairs.values()),
        "operations": sum(map(len, plan.dense.operations.values())),
    }


def run(name: str) -> dict[str, Any]:
    """Measure both sides.

    Args:
        name: one of `SHAPES`.

    Returns:
        JSON-able: rows, one a side, as `measure` says; shape, ranks, layouts that travel, environment.

    Raises:
        RuntimeError: a side failed; carries its output.
    """
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        blobs = exchange(shape)
        _write(blobs, Path(folder))
        rows = [_in_fresh_process(name, side, folder) for side in SIDES]
    return {
        "shape": name,
        "engines": shape.num_engines,
        "trainers": shape.trainers,
        "layouts": len(blobs[1]),
        "rows": rows,
        "environment": environment_record(),
    }


def _in_fresh_process(name: str, side: str, folder: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.plans",
        name,
        "--side",
        side,
        "--folder",
        folder,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads((Path(folder) / f"{side}.json").read_text())
    return row


def _write(blobs: Blobs, folder: Path) -> None:
    for seat, blob in enumerate(blobs[0]):
        (folder / f"seat{seat}").write_bytes(blob)
    for digest, (role, blob) in blobs[1].items():
        (folder / f"{role}-{digest}").write_bytes(blob)


def _read(folder: Path) -> Blobs:
    seats = range(len(list(folder.glob("seat*"))))
    layouts = [path for path in sorted(folder.iterdir()) if path.name.startswith(SIDES) and "-" in path.name]
    parts = {path: path.name.split("-") for path in layouts}
    return [(folder / f"seat{seat}").read_bytes() for seat in seats], {
        digest: (role, path.read_bytes()) for path, (role, digest) in parts.items()
    }


def main() -> None:
    """Print the record as JSON; or (`--side`) one side of it, into the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        row = measure(given.shape, given.side, given.folder)
        (given.folder / f"{given.side}.json").write_text(json.dumps(row))
        return
    print(json.dumps(run(given.shape), indent=2))


if __name__ == "__main__":
    main()
