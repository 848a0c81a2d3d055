"""How small and how fast each encoding is, beside zstd over a whole-tensor XOR and the entropy of a change.

    python -m benchmarks.wire > wire.json

Two scenarios simulate a reinforcement-learning step: bf16 weights from N(0, 0.02), three AdamW steps of
weight decay 0.01. The third is the training of `awex-delta demo`. Changes and codes come from the product's
own detection. Encoding begins with positions, codes and values as detection returns them, and ends with a
frame; decoding begins with the frame and ends with new values, computed from the old weights where the
encoding asks for it. What is timed runs in turns, and medians are compared. Torch has one thread, as
launchers give each rank; the compressor of the XOR has two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import zstandard

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.invert import detect_changes
from awex_delta.detection.slices import OwnedSlice
from awex_delta.lines.storages import gather_from
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.wire.codec import Codec, Context, RegionChange, settle
from awex_delta.wire.frame import FrameIdentity, pack_frame, unpack_bucket
from awex_delta.wire.registry import CODECS
from benchmarks.environment import environment_record

IDENTITY = FrameIdentity(
    run_id="0" * 32, base_version=0, target_version=1, plan=0, sender=1, receiver=0, dtype=torch.bfloat16
)
DEMO_LR, DEMO_STEPS = 3e-6, 4
STEP = AdamWStep(lr=1e-6, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, step=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update: what changed in each region, and the bf16 weights [numel] before and after it."""

    changes: list[RegionChange]
    before: list[torch.Tensor]
    after: list[torch.Tensor]

    @property
    def num_changed(self) -> int:
        """Elements that an update lists."""
        return sum(change.value.numel() for change in self.changes)

    @property
    def num_elements(self) -> int:
        """All of them."""
        return sum(change.numel for change in self.changes)


def simulated(step: AdamWStep, num_elements: int) -> Update:
    """The last of three AdamW steps on random weights, cut into regions of several sizes."""
    generator = torch.Generator().manual_seed(0)
    main = torch.randn(num_elements, generator=generator) * 0.02
    betas = (step.beta1, step.beta2)
    optimizer = torch.optim.AdamW([main], lr=step.lr, weight_decay=step.weight_decay, betas=betas)
    common = torch.randn(num_elements, generator=generator) * 3e-4  # gradients of successive steps resemble
    for _ in range(step.step):
        before = main.bfloat16()
        main.grad = common + torch.randn(num_elements, generator=generator) * 1e-3
        optimizer.step()
    state, weight = optimizer.state[main], main.bfloat16()
    cuts = [round(share * num_elements) for share in (0, 0.5, 0.75, 0.8751, 0.95, 0.99, 0.9999, 1)]
    bounds = list(pairwise(cuts))
    slices = [
        OwnedSlice(
            param=str(place),
            chunk=0,
            start=0,
            stop=stop - start,
            main=main[start:stop],
            weight=weight[start:stop],
            exp_avg=state["exp_avg"][start:stop],
            exp_avg_sq=state["exp_avg_sq"][start:stop],
            step=step.step,
        )
        for place, (start, stop) in enumerate(bounds)
    ]
    found = {changes.key: changes for changes in detect_changes(slices, lambda _: step).changes}
    changes = []
    for part in slices:
        here = found.get(part.key)
        index = torch.empty(0, dtype=torch.int64) if here is None else here.index
        code = torch.empty(0, dtype=torch.int8) if here is None else here.code
        changes.append(RegionChange(numel=part.stop, index=index, value=part.weight[index], code=code))
    return Update(
        changes=changes,
        before=[before[start:stop] for start, stop in bounds],
        after=[weight[start:stop] for start, stop in bounds],
    )


def _train_demo(rank: Rank) -> list[list[Any]]:
    """By parameter: positions, codes, bits before and after. Runs in a process of its own."""
    from awex_delta.testing.tiny_models import TinySpec, build_trainer
    from awex_delta.trainers.megatron import MegatronTrainer

    rank.init_gloo(rank=0, world_size=1)
    size = {"hidden": 128, "head_dim": 32, "ffn": 384}
    tiny = build_trainer(TinySpec(lr=DEMO_LR, vocab_size=256, **size))  # type: ignore[arg-type]
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=DeltaSettings())
    infos = {info.key: info for info in view.weights() if info.sparse}
    before = {}
    for _ in range(DEMO_STEPS):
        view.committed()
        before = {key: view.tensor(key).detach().reshape(-1).clone() for key in infos}
        tiny.train_step()
    return [
        [
            changes.index.numpy(),
            changes.code.numpy(),
            before[changes.key].view(torch.int16).numpy(),
            view.tensor(changes.key).detach().reshape(-1).view(torch.int16).numpy(),
        ]
        for changes in view.detect().changes
    ]


def demo() -> Update:
    """The last step of a training like the demo's: a Qwen3 of 0.4 million weights on megatron-core."""
    (parameters,) = run_ranks(_train_demo, 1)
    changes, befores, afters = [], [], []
    for arrays in parameters:
        index, code, before, after = (torch.from_numpy(array) for array in arrays)
        befores.append(before.view(torch.bfloat16))
        afters.append(after.view(torch.bfloat16))
        changes.append(RegionChange(numel=len(after), index=index, value=afters[-1][index], code=code))
    return Update(changes=changes, before=befores, after=afters)


def entropy_bytes(symbols: torch.Tensor) -> float:
    """Order-0 entropy of all symbols together."""
    _, counts = torch.unique(symbols, return_counts=True)
    share = counts.double() / max(symbols.numel(), 1)
    return -float((share * share.log2()).sum()) * symbols.numel() / 8


def entropy_of(update: Update) -> float:
    """Bytes that an ideal order-0 coder needs for gaps and steps, and the values that have no step."""
    gaps = [
        torch.diff(c.index, prepend=torch.tensor([-1])) - 1 for c in update.changes if c.index is not None
    ]
    code = torch.cat([change.code for change in update.changes if change.code is not None])
    return entropy_bytes(torch.cat(gaps)) + entropy_bytes(code) + 2 * int((code == -128).sum())


def context(weights: torch.Tensor) -> Context:
    """One side's view of a region that the sender owns whole."""
    return Context(owned=((0, weights.numel()),), read=lambda start, stop: weights[start:stop])


def with_context(update: Update) -> list[RegionChange]:
    """The changes, and on which weights the sender has them."""
    return [
        replace(change, context=context(after))
        for change, after in zip(update.changes, update.after, strict=True)
    ]


def decode(frame: torch.Tensor, codec: Codec, update: Update) -> list[RegionChange]:
    """What a receiver does with a frame before it writes."""
    numels = [change.numel for change in update.changes]
    contexts = [context(before) for before in update.before]
    found = unpack_bucket(frame, IDENTITY, [codec], numels, begin=0, contexts=contexts)
    return [
        change
        if change.code is None or change.index is None
        else settle(change, gather_from(old, change.index))
        for change, old in zip(found.changes, update.before, strict=True)
    ]


def xor_encode(update: Update) -> bytes:
    """Whole tensors XORed with their base, zstd level 1 with two workers."""
    pairs = zip(update.before, update.after, strict=True)
    delta = torch.cat([old.view(torch.int16) ^ new.view(torch.int16) for old, new in pairs])
    return zstandard.ZstdCompressor(level=1, threads=2).compress(delta.numpy().data)


def xor_decode(packed: bytes, update: Update) -> list[torch.Tensor]:
    """Undo `xor_encode`."""
    delta = torch.empty(update.num_elements, dtype=torch.int16)
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        reader.readinto(delta.numpy().data.cast("B"))
    parts = torch.split(delta, [old.numel() for old in update.before])
    return [old.view(torch.int16) ^ part for old, part in zip(update.before, parts, strict=True)]


def check(update: Update) -> None:
    """Every encoding, the compared one included, gives the bits after the step.

    Raises:
        RuntimeError: one does not.
    """
    for codec in CODECS.values():
        for got, old, new in zip(
            decode(pack_frame(IDENTITY, codec, with_context(update)), codec, update),
            update.before,
            update.after,
            strict=True,
        ):
            made = old.view(torch.int16).clone()
            made[got.index] = got.value.view(torch.int16)
            if not torch.equal(made, new.view(torch.int16)):
                raise RuntimeError(f"{codec.name} is not lossless")
    for made, new in zip(xor_decode(xor_encode(update), update), update.after, strict=True):
        if not torch.equal(made, new.view(torch.int16)):
            raise RuntimeError("the XOR is not lossless")


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(scenario: str, update: Update, repeats: int) -> list[dict[str, Any]]:
    """One row an encoding, and one for XOR and zstd."""
    check(update)
    packed: dict[str, Any] = {
        name: pack_frame(IDENTITY, codec, with_context(update)) for name, codec in CODECS.items()
    }
    packed["xor_zstd"] = xor_encode(update)
    timed: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        name: (
            lambda codec=codec: pack_frame(IDENTITY, codec, with_context(update)),  # type: ignore[misc]
            lambda codec=codec, name=name: decode(packed[name], codec, update),  # type: ignore[misc]
        )
        for name, codec in CODECS.items()
    }
    timed["xor_zstd"] = lambda: xor_encode(update), lambda: xor_decode(packed["xor_zstd"], update)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        for name, (encode, undo) in timed.items():
            pair = seconds(encode), seconds(undo)
            if repeat > 0:  # the first round warms up
                samples[name].append(pair)
    entropy = entropy_of(update) / update.num_changed
    return [
        {
            "scenario": scenario,
            "encoding": name,
            "changed_share": update.num_changed / update.num_elements,
            "bytes_per_change": len(packed[name]) / update.num_changed,
            "entropy_bytes_per_change": entropy,
            "encode_changes_per_second": update.num_changed / statistics.median(e for e, _ in samples[name]),
            "decode_changes_per_second": update.num_changed / statistics.median(d for _, d in samples[name]),
        }
        for name in timed
    ]


def against_xor(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By scenario, how many times better `ulp_zstd` is than `xor_zstd`."""
    by_name = {(row["scenario"], row["encoding"]): row for row in rows}
    ratios = {}
    for scenario in {row["scenario"]: None for row in rows}:
        ours, theirs = by_name[scenario, "ulp_zstd"], by_name[scenario, "xor_zstd"]
        ratios[scenario] = {
            "bytes": theirs["bytes_per_change"] / ours["bytes_per_change"],
            "encode_time": ours["encode_changes_per_second"] / theirs["encode_changes_per_second"],
            "decode_time": ours["decode_changes_per_second"] / theirs["decode_changes_per_second"],
            "time": _seconds_per_change(theirs) / _seconds_per_change(ours),
            "bytes_over_entropy": ours["bytes_per_change"] / ours["entropy_bytes_per_change"],
        }
    return ratios


def _seconds_per_change(row: dict[str, Any]) -> float:
    return float(1 / row["encode_changes_per_second"] + 1 / row["decode_changes_per_second"])


def run(*, num_elements: int = 32_000_000, repeats: int = 7, with_demo: bool = True) -> dict[str, Any]:
    """Measure every encoding on this machine's CPUs.

    Args:
        num_elements: weights of the simulated scenarios.
        repeats: how often each thing is timed.
        with_demo: train the demo's model as well.

    Returns:
        rows: scenario, encoding, changed_share, bytes_per_change, entropy_bytes_per_change (ideal order-0
            coding of gaps and steps), encode_changes_per_second, decode_changes_per_second.
        ulp_zstd_over_xor_zstd: ratios by scenario. environment, config.

    Raises:
        RuntimeError: an encoding is not lossless.
    """
    threads, rows = torch.get_num_threads(), list[dict[str, Any]]()
    torch.set_num_threads(1)
    for lr in (1e-6, 3e-6):
        rows += measure(f"simulated, lr {lr:g}", simulated(replace(STEP, lr=lr), num_elements), repeats)
    if with_demo:
        rows += measure(f"demo, lr {DEMO_LR:g}", demo(), repeats)
    # What else runs on the cores shows here: compare speeds of one record only.
    environment = {**environment_record(), "load_average": os.getloadavg()[0]}
    torch.set_num_threads(threads)
    if not all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float)):
        raise RuntimeError(f"a measurement is not a number: {rows}")
    return {
        "rows": rows,
        "ulp_zstd_over_xor_zstd": against_xor(rows),
        "environment": environment,
        "config": {"num_elements": num_elements, "repeats": repeats},
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-elements", type=int, default=32_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(json.dumps(run(num_elements=arguments.num_elements, repeats=arguments.repeats), indent=2))


if __name__ == "__main__":
    main()
