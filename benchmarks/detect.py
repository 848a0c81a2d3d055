"""How fast detection is, against what memory allows and against the obvious eager code.

    python -m benchmarks.detect > detect.json

The data is that of a reinforcement-learning step: bf16 weights from N(0, 0.02), three AdamW steps of
lr 1e-6 and weight decay 0.01. Everything is timed in one process, in turns, with all of torch's threads,
and compared by medians. What is timed is `detect_changes` itself, on slices of several sizes. Beside it
stand the other methods: `capture` compares inside the step, `snapshot` with a copy.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from awex_delta.detection.accumulate import AccumulatedBaseline
from awex_delta.detection.adamw import AdamWStep, codes, invert
from awex_delta.detection.capture import StepCapture
from awex_delta.detection.invert import detect_changes
from awex_delta.detection.optimizers import SteppedParams
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.detection.snapshot import SnapshotBaseline
from benchmarks.digests import Digests, over_detect
from benchmarks.environment import environment_record

BYTES_READ = 4 + 4 + 4 + 2  # master, two moments, weight
BYTES_PER_ELEMENT = BYTES_READ + 1  # and a mark
STEP = AdamWStep(lr=1e-6, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, step=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A parameter after its last step, and the bf16 weights before that step."""

    main: torch.Tensor
    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    before: torch.Tensor

    @property
    def num_changed(self) -> int:
        """Elements whose bits the last step changed."""
        return int((self.before.view(torch.int16) != self.weight.view(torch.int16)).sum())

    def slices(self) -> list[OwnedSlice]:
        """The parameter cut into owned slices: large and small, beginning at odd places."""
        numel = self.main.numel()
        shares = (0, 0.5, 0.75, 0.8751, 0.95, 0.99, 0.9999, 1)
        cuts = [round(share * numel) for share in shares]
        return [self._slice(start, stop) for start, stop in itertools.pairwise(cuts)]

    def _slice(self, start: int, stop: int) -> OwnedSlice:
        return OwnedSlice(
            param=f"weight.{start}",
            chunk=0,
            start=0,
            stop=stop - start,
            begin=start,
            main=self.main[start:stop],
            weight=self.weight[start:stop],
            exp_avg=self.exp_avg[start:stop],
            exp_avg_sq=self.exp_avg_sq[start:stop],
            step=STEP.step,
        )


def train(num_elements: int) -> Training:
    """Take the steps, with gradients from N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    main = (torch.randn(num_elements, generator=generator) * 0.02).bfloat16().float()
    optimizer = torch.optim.AdamW(
        [main],
        lr=STEP.lr,
        weight_decay=STEP.weight_decay,
        betas=(STEP.beta1, STEP.beta2),
        eps=STEP.eps,
    )
    for _ in range(STEP.step):
        before = main.bfloat16()
        main.grad = torch.randn(num_elements, generator=generator)
        optimizer.step()
    main.grad = None
    state = optimizer.state[main]
    return Training(
        main=main,
        weight=main.bfloat16(),
        exp_avg=state["exp_avg"],
        exp_avg_sq=state["exp_avg_sq"],
        before=before,
    )


def detect(training: Training) -> Detection:
    """What the product does in every update."""
    return detect_changes(training.slices(), lambda _: STEP)


def reconstruct_cast_compare(training: Training) -> torch.Tensor:
    """What anyone would write first: fp32, eager, over the whole tensor, and without an error bound."""
    c1, c2 = 1 - STEP.beta1**STEP.step, 1 - STEP.beta2**STEP.step
    update = STEP.lr * (training.exp_avg / c1) / ((training.exp_avg_sq / c2).sqrt() + STEP.eps)
    old = (training.main + update) / (1 - STEP.lr * STEP.weight_decay)
    return (old.bfloat16() != training.weight).nonzero()


def reconstruct_with_bound(training: Training) -> torch.Tensor:
    """The same, but certified: the product's expression, eager and over the whole tensor."""
    coefficients = invert(STEP).coefficients(training.main.device)
    return codes(
        training.main, training.exp_avg, training.exp_avg_sq, training.weight, coefficients
    ).nonzero()


def snapshot(training: Training) -> SnapshotBaseline:
    """The other method, holding a copy of the weights before the last step."""
    slices = training.slices()
    baseline = SnapshotBaseline(lambda: slices)
    after = training.weight.clone()
    training.weight.copy_(training.before)
    baseline.committed()
    training.weight.copy_(after)
    return baseline


def missed(training: Training, detection: Detection) -> int:
    """Truly changed elements that were not found."""
    changed = training.before.view(torch.int16) != training.weight.view(torch.int16)
    changed[detection.changes.pos] = False
    return int(changed.sum())


def peak_extra_bytes(function: Callable[[], Detection]) -> int:
    """High-water mark of resident memory while a detection runs, less what it returns.

    The kernel counts it, so it covers every allocator. Freed memory that the allocator kept is handed
    back before, for otherwise a peak could hide in it. Linux only.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status_bytes("VmRSS")
    detection = function()
    peak = _status_bytes("VmHWM")
    changes = detection.changes
    tensors = (changes.pos, changes.code, changes.value)
    return peak - before - sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(timed: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, `repeats` times, after a round that warms up."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        for name, function in timed.items():
            elapsed = seconds(function)
            if repeat > 0:
                samples[name].append(elapsed)
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to find changes, as it was measured.

    seconds_in_step: while the optimizer steps. seconds_in_update: while engines wait, the commit included.
    bytes_per_element: what is read to find the changes.
    """

    detection: Detection
    seconds_in_step: float
    seconds_in_update: float
    bytes_per_element: int
    kept_bytes: int
    peak_extra_bytes: int

    def record(self, training: Training) -> dict[str, float]:
        """As JSON, judged against the weights before the step."""
        numel, num_changed = training.main.numel(), training.num_changed
        return {
            "elements_per_second": numel / (self.seconds_in_step + self.seconds_in_update),
            "bytes_per_element": self.bytes_per_element,
            "num_missed": missed(training, self.detection),
            "extra_share": (self.detection.num_changed - num_changed) / max(num_changed, 1),
            "seconds_in_step": self.seconds_in_step,
            "seconds_in_update": self.seconds_in_update,
            "kept_bytes_per_element": self.kept_bytes / numel,
            "peak_extra_bytes": self.peak_extra_bytes,
        }


def captured(training: Training, *, repeats: int) -> Method:
    """The same step again and again, with hooks that capture it, by an optimizer that does nothing else."""
    stepped = {owned.key: owned.main for owned in training.slices() if owned.main is not None}
    optimizer = torch.optim.SGD([training.main])
    baseline = StepCapture(training.slices, [SteppedParams(optimizer, stepped)]).add()
    after = training.weight.clone()
    in_step, in_update = list[float](), list[float]()
    for repeat in range(repeats + 2):
        training.weight.copy_(training.before)
        baseline.detect()  # it sees that weights were written by hand
        baseline.committed()
        if repeat > repeats:
            peak = peak_extra_bytes(lambda: _step_and_detect(training, optimizer, after, baseline))
            kept = baseline.num_bytes
            continue
        in_step.append(seconds(optimizer.step))
        training.weight.copy_(after)
        in_update.append(seconds(baseline.detect))
        detection = baseline.detect()
        in_update[-1] += seconds(baseline.committed)
    return Method(
        detection=detection,
        seconds_in_step=statistics.median(in_step[1:]),
        seconds_in_update=statistics.median(in_update[1:]),
        bytes_per_element=4 + 2,
        kept_bytes=kept,
        peak_extra_bytes=peak,
    )


def _step_and_detect(
    training: Training, optimizer: torch.optim.Optimizer, after: torch.Tensor, baseline: AccumulatedBaseline
) -> Detection:
    optimizer.step()
    training.weight.copy_(after)
    return baseline.detect()


def methods(
    training: Training, baseline: SnapshotBaseline, samples: Mapping[str, list[float]], *, repeats: int
) -> dict[str, dict[str, float]]:
    """All methods of detection side by side, of the same step."""
    committing = statistics.median(seconds(baseline.committed) for _ in range(repeats))
    baseline = snapshot(training)
    measured = {
        "adamw": Method(
            detection=detect(training),
            seconds_in_step=0.0,
            seconds_in_update=statistics.median(samples["detect"]),
            bytes_per_element=BYTES_READ,
            kept_bytes=0,
            peak_extra_bytes=peak_extra_bytes(lambda: detect(training)),
        ),
        "capture": captured(training, repeats=repeats),
        "snapshot": Method(
            detection=baseline.detect(),
            seconds_in_step=0.0,
            seconds_in_update=statistics.median(samples["snapshot"]) + committing,
            bytes_per_element=2 + 2,
            kept_bytes=baseline.num_bytes,
            peak_extra_bytes=peak_extra_bytes(baseline.detect),
        ),
    }
    return {name: method.record(training) for name, method in measured.items()}


def run(*, num_elements: int = 32_000_000, repeats: int = 5) -> dict[str, object]:
    """Measure detection on this machine's CPUs.

    Args:
        num_elements: owned elements; above 16 million the compiled pass is used.
        repeats: how often each thing is timed.

    Returns:
        ratio_to_copy_bound: elements per second, relative to the bandwidth of a memory copy (bytes read
            and written) over 15 bytes an element. speedup_over_eager: relative to
            `reconstruct_cast_compare`, speedup_over_certified_eager to `reconstruct_with_bound`.
            What `benchmarks.digests.over_detect` says.
            elements_per_second, peak_extra_bytes, changed_share, extra_share (sent
            without need, relative to changed), num_missed, samples in seconds, environment, config.
            methods: for `adamw`, `capture` and `snapshot` what `Method.record` says.
    """
    training = train(num_elements)
    target = torch.empty_like(training.main)
    baseline = snapshot(training)
    first_call = seconds(lambda: detect(training))
    detection = detect(training)
    digests = Digests.of(training.before, detection.changes)
    timed: Mapping[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(training.main),
        "detect": lambda: detect(training),
        "snapshot": baseline.detect,
        "eager": lambda: reconstruct_cast_compare(training),
        "certified_eager": lambda: reconstruct_with_bound(training),
        **digests.timed(),
    }
    samples = in_turns(timed, repeats)
    median = {name: statistics.median(values) for name, values in samples.items()}

    num_found, num_changed = detection.num_changed, training.num_changed
    bandwidth = 2 * training.main.nbytes / median["copy"]
    speed = num_elements / median["detect"]
    return {
        "ratio_to_copy_bound": speed / (bandwidth / BYTES_PER_ELEMENT),
        "speedup_over_eager": median["eager"] / median["detect"],
        "speedup_over_certified_eager": median["certified_eager"] / median["detect"],
        "elements_per_second": speed,
        "peak_extra_bytes": peak_extra_bytes(lambda: detect(training)),
        "changed_share": num_changed / num_elements,
        "extra_share": (num_found - num_changed) / max(num_changed, 1),
        "num_missed": missed(training, detection),
        **over_detect(median),
        "methods": methods(training, baseline, samples, repeats=repeats),
        "copy_bytes_per_second": bandwidth,
        "first_call_seconds": first_call,
        "samples": samples,
        "environment": environment_record(),
        "config": {"num_elements": num_elements, "repeats": repeats},
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-elements", type=int, default=32_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = run(num_elements=arguments.num_elements, repeats=arguments.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
