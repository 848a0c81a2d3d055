"""Our receiver in a live vLLM model, against a bare scatter and against vLLM's own sparse loader.

    python -m benchmarks.live > live.json

One process holds a real vLLM with weights drawn at random; another trains the same shapes with AdamW and
sends real deltas. After every delta the same elements are written again into the same live weights: by
`index_copy_` in plain torch, and by the sparse loader that vLLM's `sparse_nccl` backend uses. Without
vLLM the numbers are None and `reason` says so.
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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from awex_delta.engines.view import EngineTensor
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.verdict import Kind
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.fleet import Member
from awex_delta.testing.tiny_models import TinySpec, hf_config
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from benchmarks.temporaries import LargestNew

# A Qwen3 of 113 million parameters.
MODEL: Mapping[str, Any] = {
    "layers": 12,
    "hidden": 768,
    "heads": 12,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 2048,
    "vocab_size": 24576,
}
KEYS = ("apply_over_scatter", "vllm_sparse_over_apply", "pause_seconds")
SETTINGS = DeltaSettings(
    anchor_interval=0, timeout_seconds=120, connect_timeout_seconds=120, allow_any_world_size=True
)
# Set before vLLM is imported: its engine core then lives in this process, on as many cores as torch is given.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_PLUGINS": "awex_delta",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The elements of one HF tensor that an update changed: flat positions and new values."""

    entry: EngineTensor
    index: torch.Tensor
    value: torch.Tensor


def run(
    *, model: Mapping[str, Any], lr: float, repeats: int, timeout_seconds: float = 900.0
) -> dict[str, Any]:
    """Measure in a process of its own, and return one JSON-able record.

    Args:
        model: fields of `TinySpec`.
        lr: of the AdamW; sets the share of changed elements.
        repeats: measured deltas.
        timeout_seconds: of the whole run.

    Returns:
        apply_over_scatter: seconds of the receiver's writes over those of `index_copy_`.
        vllm_sparse_over_apply: seconds of vLLM's sparse loader over those of the receiver's writes.
        pause_seconds: from the first write to a receiver that is ready again; update_seconds: of the
            whole update, in which vLLM's worker computes nothing either.
        apply_largest_new_bytes, vllm_sparse_largest_new_bytes: of the largest tensor that each
            made; largest_tensor_bytes: of the model. apply_operations, vllm_sparse_operations: torch
            operations of one update.
        changed_share, num_changed, samples. reason: why the numbers are None, or "".

    Raises:
        RuntimeError: the process failed; carries its output.
    """
    if find_spec("vllm") is None:
        return {**dict.fromkeys(KEYS), "reason": "vLLM is not installed: make vllm"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "live.json"
        job = json.dumps({"model": dict(model), "lr": lr, "repeats": repeats, "path": str(path)})
        done = subprocess.run(  # noqa: S603 - this module, run by this Python
            [sys.executable, "-m", "benchmarks.live", "--job", job],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if not path.exists():
            raise RuntimeError(f"the live benchmark ended with {done.returncode}:\n{done.stdout[-4000:]}")
        record: dict[str, Any] = json.loads(path.read_text())
        return record


def _load(spec: TinySpec, folder: Path) -> Any:
    """A vLLM with weights drawn at random, kept live."""
    from vllm import LLM

    hf_config(spec).save_pretrained(folder)
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 24,
        block_size=32,
        weight_transfer_config={"backend": "awex_delta"},
    )


def train(port: int, shapes: Mapping[str, tuple[int, ...]], lr: float, versions: int) -> None:
    """The other side, in a process of its own: AdamW steps on the same shapes, each sent as a version."""
    trainer = TorchAdamWTrainer.create(shapes, lr=lr, settings=SETTINGS)
    sender = Sender(trainer, _rendezvous(port), 0, SETTINGS)
    sender.connect()
    for version in range(versions):
        trainer.train_step()
        sender.comm.gather(b"", width=8, phase="benchmark")
        sender.update_weights(version)


def _rendezvous(port: int) -> Rendezvous:
    return Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=port)


class _Follower:
    """A receiver on vLLM's live model."""

    def __init__(self, model: torch.nn.Module, port: int) -> None:
        from awex_delta.engines.vllm.adapter import VllmEngine

        self.model = model
        self.view = VllmEngine(model)
        self.entries = [entry for entry in self.view.tensors() if entry.tied_to is None]
        self.marks: dict[str, float] = {}
        self.watched: list[LargestNew] = []
        self._watching: LargestNew | None = None
        self._stack = ExitStack()
        # The view's last duty in an update is to wait for the device: then everything is written.
        wait = self.view.synchronize

        def synchronize() -> None:
            wait()
            self._written()

        self.view.synchronize = synchronize  # type: ignore[method-assign]
        self.receiver = Receiver(self.view, _rendezvous(port), 0, "vllm", SETTINGS, on_phase=self._on_phase)

    def update(self, version: int, *, watch: bool = False) -> dict[str, float]:
        """One update; seconds of its writes, its pause and its whole."""
        self._watching = LargestNew() if watch else None
        self.receiver.connect()
        self.receiver.comm.gather(b"", width=8, phase="benchmark")
        begin = time.perf_counter()
        stats = self.receiver.update_weights(version)
        end = time.perf_counter()
        kind = Kind.FULL if version == 0 else Kind.DELTA
        if stats.verdict.kind is not kind:
            raise RuntimeError(f"version {version} is {stats.verdict}, not a {kind}")
        return {
            "apply": self.marks["written"] - self.marks["apply"],
            "pause": end - self.marks["apply"],
            "update": end - begin,
        }

    def _on_phase(self, phase: str) -> None:
        if phase == "apply":
            if self._watching is not None:
                self._stack.enter_context(self._watching)
            self.marks["apply"] = time.perf_counter()

    def _written(self) -> None:
        self.marks["written"] = time.perf_counter()
        if self._watching is not None:
            self._stack.close()
            self.watched.append(self._watching)
            self._watching = None

    def held(self) -> list[torch.Tensor]:
        """Bits of all weights, copied."""
        return [entry.view.view(torch.int16).clone() for entry in self.entries]

    def changes(self, before: list[torch.Tensor]) -> list[Change]:
        """What differs from `before`."""
        found = []
        for entry, old in zip(self.entries, before, strict=True):
            index = (entry.view.view(torch.int16) != old).view(-1).nonzero().view(-1)
            found.append(Change(entry=entry, index=index, value=entry.view.reshape(-1).take(index)))
        return found


def scatter(changes: list[Change]) -> None:
    """What no receiver can do without: the elements written by plain torch."""
    for change in changes:
        change.entry.view.view(-1).index_copy_(0, change.index, change.value)


def sparse_load(model: torch.nn.Module, changes: list[Change]) -> None:
    """vLLM's own way to write the same elements."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = [
        CheckpointWeightPatch(
            name=change.entry.name,
            shape=change.entry.global_shape,
            dtype=change.value.dtype,
            values=change.value,
            indices=change.index.int(),
        )
        for change in changes
    ]
    load_checkpoint_weight_patches(model, patches)


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(follower: _Follower, repeats: int) -> dict[str, Any]:
    """A full sync, a delta to warm up and to look for temporaries, then `repeats` timed deltas."""
    follower.update(0)
    before = follower.held()
    follower.update(1, watch=True)
    changes = follower.changes(before)
    with LargestNew() as theirs:
        sparse_load(follower.model, changes)
    (ours,) = follower.watched
    samples: dict[str, list[float]] = {}
    counts = []
    for version in range(2, repeats + 2):
        before = follower.held()
        row = follower.update(version)
        changes, after = follower.changes(before), follower.held()
        row["scatter"] = _seconds(partial(scatter, changes))
        row["vllm_sparse"] = _seconds(partial(sparse_load, follower.model, changes))
        if not all(map(torch.equal, after, follower.held())):
            raise RuntimeError("the three ways to write the same elements do not agree")
        counts.append(sum(change.index.numel() for change in changes))
        for name, value in row.items():
            samples.setdefault(name, []).append(value)
    median = {name: statistics.median(values) for name, values in samples.items()}
    total = sum(entry.view.numel() for entry in follower.entries)
    return {
        "apply_over_scatter": median["apply"] / median["scatter"],
        "vllm_sparse_over_apply": median["vllm_sparse"] / median["apply"],
        "pause_seconds": median["pause"],
        "update_seconds": median["update"],
        "apply_largest_new_bytes": ours.num_bytes,
        "apply_operations": ours.num_operations,
        "vllm_sparse_largest_new_bytes": theirs.num_bytes,
        "vllm_sparse_operations": theirs.num_operations,
        "largest_tensor_bytes": max(entry.view.nbytes for entry in follower.entries),
        "num_changed": statistics.median(counts),
        "changed_share": statistics.median(counts) / total,
        "samples": samples,
        "reason": "",
    }


def _work(job: Mapping[str, Any]) -> None:
    path = Path(job["path"])
    llm = _load(TinySpec(**job["model"]), path.parent / "model")
    torch.set_num_threads(1)
    # The engine core lives in this process, so a worker may hand out its model itself.
    (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    store = host_store()
    follower = _Follower(model, store.port)
    shapes = {entry.name: entry.global_shape for entry in follower.entries}
    trainer = Member()
    trainer.send(train, store.port, shapes, job["lr"], job["repeats"] + 2)
    try:
        path.write_text(json.dumps(measure(follower, job["repeats"])))
    finally:
        trainer.end()


def main() -> None:
    """Command line: a whole run, or (`--job`) the process that holds vLLM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    if given.job:
        _work(json.loads(given.job))
        os._exit(0)  # vLLM's threads and torch's groups need not be taken down one by one
    print(json.dumps(run(model=MODEL, lr=1e-6, repeats=given.repeats), indent=2))


if __name__ == "__main__":
    main()
