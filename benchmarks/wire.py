"""How small and how fast each encoding is, beside zstd over an XOR of all weights and the entropy.

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
from typing import Any

import torch
import zstandard

from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.invert import detect_changes
from awex_delta.detection.slices import OwnedSlice
from awex_delta.lines.changes import Changes
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.wire.buckets import Bucket
from awex_delta.wire.codec import Codec, settle
from awex_delta.wire.frame import FrameIdentity, pack_frame, unpack_frame
from awex_delta.wire.registry import CODECS
from awex_delta.wire.spans import Span
from benchmarks.environment import environment_record, unheard

IDENTITY = FrameIdentity(
    run_id="0" * 32, base_version=0, target_version=1, pair=0, sender=1, receiver=0, dtype=torch.bfloat16
)
DEMO_LR, DEMO_STEPS = 3e-6, 4
STEP = AdamWStep(lr=1e-6, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, step=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update of a line: what changed in it, and all bf16 weights before and after."""

    changes: Changes
    before: torch.Tensor
    after: torch.Tensor

    @property
    def num_elements(self) -> int:
        """All of them."""
        return self.after.numel()

    @classmethod
    def of(cls, pos: torch.Tensor, code: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Update:
        """The update with these changes."""
        changes = Changes(pos=pos, code=code, value=after[pos])
        return cls(changes=changes, before=before, after=after)


def simulated(step: AdamWStep, num_elements: int) -> Update:
    """The last of three AdamW steps on random weights."""
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
    owned = OwnedSlice(
        param="weight",
        chunk=0,
        start=0,
        stop=num_elements,
        begin=0,
        main=main,
        weight=weight,
        exp_avg=state["exp_avg"],
        exp_avg_sq=state["exp_avg_sq"],
        step=step.step,
    )
    found = detect_changes([owned], lambda _: step).changes
    assert found.code is not None
    return Update.of(found.pos, found.code, before, weight)


def _train_demo(rank: Rank) -> list[Any]:
    """Of the trainer's line: positions, codes, bits before and after. Runs in a process of its own."""
    from awex_delta.testing.tiny_models import TinySpec, build_trainer
    from awex_delta.trainers.megatron import MegatronTrainer

    rank.init_gloo(rank=0, world_size=1)
    size = {"hidden": 128, "head_dim": 32, "ffn": 384}
    tiny = build_trainer(TinySpec(lr=DEMO_LR, vocab_size=256, **size))  # type: ignore[arg-type]
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=DeltaSettings())
    keys = [info.key for info in view.weights() if info.sparse]

    def line() -> torch.Tensor:
        return torch.cat([view.tensor(key).detach().reshape(-1) for key in keys]).view(torch.int16)

    before = line()
    for _ in range(DEMO_STEPS):
        view.committed()
        before = line()
        tiny.train_step()
    found = view.detect().changes
    assert found.code is not None
    return [found.pos.numpy(), found.code.numpy(), before.numpy(), line().numpy()]


def demo() -> Update:
    """The last step of a training like the demo's: a Qwen3 of 0.4 million weights on megatron-core."""
    (arrays,) = run_ranks(_train_demo, 1)
    pos, code, before, after = map(torch.from_numpy, arrays)
    return Update.of(pos, code, before.view(torch.bfloat16), after.view(torch.bfloat16))


def entropy_bytes(symbols: torch.Tensor) -> float:
    """Order-0 entropy of all symbols together."""
    _, counts = torch.unique(symbols, return_counts=True)
    share = counts.double() / max(symbols.numel(), 1)
    return -float((share * share.log2()).sum()) * symbols.numel() / 8


def entropy_of(changes: Changes) -> float:
    """Bytes that an ideal order-0 coder needs for gaps and steps, and the values that have no step."""
    code = torch.empty(0, dtype=torch.int8) if changes.code is None else changes.code
    gaps = torch.diff(changes.pos, prepend=torch.tensor([-1])) - 1
    return entropy_bytes(gaps) + entropy_bytes(code) + 2 * int((code == -128).sum())


def encode(codec: Codec, update: Update) -> torch.Tensor:
    """What a sender does with changes: one frame of all of them."""
    span = Span(0, update.num_elements)
    bucket = Bucket(span=span, first=0, last=update.changes.num_changed)
    return pack_frame(IDENTITY, codec, bucket, update.changes, lambda start, stop: update.after[start:stop])


def decode(frame: torch.Tensor, codec: Codec, update: Update) -> Changes:
    """What a receiver does with a frame before it writes."""

    def read(start: int, stop: int) -> torch.Tensor:
        return update.before[start:stop]

    found = unpack_frame(frame, IDENTITY, [codec], begin=0, numel=update.num_elements, read=read)
    if found.changes is None:
        raise RuntimeError(f"{codec.name}: a frame of changes came back as one of all values")
    return settle(found.changes, lambda pos: update.before[pos])


def xor_encode(update: Update) -> bytes:
    """The weights XORed with their base, zstd level 1 with two workers."""
    delta = update.before.view(torch.int16) ^ update.after.view(torch.int16)
    return zstandard.ZstdCompressor(level=1, threads=2).compress(delta.numpy().data)


def xor_decode(packed: bytes, update: Update) -> torch.Tensor:
    """Undo `xor_encode`: the patterns after the step, int16."""
    delta = torch.empty(update.num_elements, dtype=torch.int16)
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        reader.readinto(delta.numpy().data.cast("B"))
    return update.before.view(torch.int16) ^ delta


def check(update: Update) -> None:
    """Every encoding, the compared one included, gives the bits after the step.

    Raises:
        RuntimeError: one does not.
    """
    after = update.after.view(torch.int16)
    for codec in CODECS.values():
        got = decode(encode(codec, update), codec, update)
        made = update.before.clone()
        made[got.pos] = update.before[:0] if got.value is None else got.value
        if not torch.equal(made.view(torch.int16), after):
            raise RuntimeError(f"{codec.name} is not lossless")
    if not torch.equal(xor_decode(xor_encode(update), update), after):
        raise RuntimeError("the XOR is not lossless")


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(scenario: str, update: Update, repeats: int) -> list[dict[str, Any]]:
    """One row an encoding, and one for XOR and zstd."""
    check(update)
    packed: dict[str, Any] = {name: encode(codec, update) for name, codec in CODECS.items()}
    packed["xor_zstd"] = xor_encode(update)
    timed: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        name: (
            lambda codec=codec: encode(codec, update),  # type: ignore[misc]
            lambda codec=codec, name=name: decode(packed[name], codec, update),  # type: ignore[misc]
        )
        for name, codec in CODECS.items()
    }
    timed["xor_zstd"] = lambda: xor_encode(update), lambda: xor_decode(packed["xor_zstd"], update)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        for name, (pack, undo) in timed.items():
            pair = seconds(pack), seconds(undo)
            if repeat > 0:  # the first round warms up
                samples[name].append(pair)
    num_changed = update.changes.num_changed
    entropy = entropy_of(update.changes) / num_changed
    return [
        {
            "scenario": scenario,
            "encoding": name,
            "changed_share": num_changed / update.num_elements,
            "bytes_per_change": len(packed[name]) / num_changed,
            "entropy_bytes_per_change": entropy,
            "encode_changes_per_second": num_changed / statistics.median(e for e, _ in samples[name]),
            "decode_changes_per_second": num_changed / statistics.median(d for _, d in samples[name]),
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


def run(
    *,
    num_elements: int = 32_000_000,
    repeats: int = 7,
    with_demo: bool = True,
    stage: Callable[[str], None] = unheard,
) -> dict[str, Any]:
    """Measure every encoding on this machine's CPUs.

    Args:
        num_elements: weights of the simulated scenarios.
        repeats: how often each thing is timed.
        with_demo: train the demo's model as well.
        stage: hears what is being measured.

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
        stage(f"all encodings of simulated changes, lr {lr:g}")
        rows += measure(f"simulated, lr {lr:g}", simulated(replace(STEP, lr=lr), num_elements), repeats)
    if with_demo:
        stage("all encodings of changes that the demo's training made")
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
