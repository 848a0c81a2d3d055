"""One run of the demo: train, update, judge, version by version, and break something on the way."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from awex_delta.demo.oracle import (
    Difference,
    count_changed,
    count_elements,
    distinct,
    engine_differences,
    trainer_hf_state,
)
from awex_delta.demo.scenario import DemoPlan, RoleName, Seat
from awex_delta.protocol.stats import UpdateStats
from awex_delta.protocol.verdict import Kind
from awex_delta.testing.fleet import Actions, Answer, Fleet, FleetError

PROMPT = "def main("
NUM_TOKENS = 24

# An update may wait once to connect and once in a phase; only then does the launcher lose patience.
_PATIENCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """What one attempt to update did. The field names are those of the JSON report.

    kind: full, delta or aborted.
    reason: name of the `Reason`, in lower case: none for a delta; or, of an aborted one, its error.
    numel: elements of the model.
    changed: elements whose bits the optimizer step changed, by a snapshot that only the judge keeps.
    sent: elements sent for one copy of the model, the one of the transformers engine.
    missed: elements that an engine holds with other bits than the trainer, over all engines.
    wire_bytes, full_bytes: payload to all engines; and what a full sync would take.
    identical: every engine holds the trainer's bits; None where nothing was committed.
    seconds: wall time by phase, on trainer rank 0.
    """

    version: int
    kind: str
    reason: str
    numel: int
    changed: int
    sent: int = 0
    missed: int = 0
    wire_bytes: int = 0
    full_bytes: int = 0
    identical: bool | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """All of one run.

    generation_equal: the transformers engine, and a model loaded from a checkpoint of the trainer's
        weights, continue a prompt with the same tokens; None where the run stopped before.
    text: that continuation.
    differences: what the judge found; the run stops at the first version that has any.
    error: what else stopped the run, in words.
    """

    versions: Sequence[VersionRecord]
    generation_equal: bool | None = None
    text: str = ""
    differences: Sequence[Difference] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        """The run came to its end without a difference, and generated what the trainer's weights say."""
        return self.generation_equal is True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One call of `update_weights` on all ranks: stats where it committed, else a rank's error.

    sent: elements that the transformers engine received.
    """

    stats: UpdateStats | None = None
    sent: int = 0
    failure: str = ""


class DemoRun:
    """Drives one fleet through one plan."""

    def __init__(
        self, plan: DemoPlan, fleet: Fleet, folder: Path, on_record: Callable[[VersionRecord], None]
    ) -> None:
        """Start nothing yet.

        The fleet has no members yet; `folder` is for files that the run's processes share; `on_record` is
        called after each attempt to update.
        """
        self._plan = plan
        self._fleet = fleet
        self._folder = folder
        self._on_record = on_record
        self._store_port = 0
        self._trainers = [f"trainer-{rank}" for rank in range(plan.num_trainer_ranks)]
        self._engines = [f"engine-{rank}" for rank in range(plan.num_engine_ranks)]
        self._records: list[VersionRecord] = []
        self._truth: dict[str, torch.Tensor] = {}

    def execute(self) -> RunResult:
        """Start the processes, train and update through all versions, and compare what is generated.

        A difference ends the run early, as does a process that died or did not answer, or a fault that did
        not have the effect that it must have.
        """
        try:
            self._start()
            for version in range(1, self._plan.steps + 1):
                self._ask(self._trainers, "train")
                differences = self._one_version(version)
                if differences:
                    return RunResult(versions=self._records, differences=differences)
            equal, text = self._generate()
        except (FleetError, ValueError) as error:
            return RunResult(versions=self._records, error=str(error))
        return RunResult(versions=self._records, generation_equal=equal, text=text)

    def _start(self) -> None:
        self._fleet.start({"store": self._seat("store", 0)}, _take)
        self._store_port = self._ask(["store"], "port")["store"].value
        trainers = {name: self._seat("trainer", rank) for rank, name in enumerate(self._trainers)}
        engines = {name: self._engine_seat(rank) for rank, name in enumerate(self._engines)}
        self._fleet.start({**trainers, **engines}, _take)

    def _one_version(self, version: int) -> list[Difference]:
        old, self._truth = self._truth, self._read_trainer()
        weights = distinct(self._plan, self._truth)
        changed = count_changed(old, weights) if old else count_elements(weights)
        struck, fault, victim = version == self._plan.fault_version, self._plan.fault, self._engines[-1]
        if struck:
            self._ask([victim], fault)
        attempt = self._update(version, doomed=victim if struck and fault == "drop-engine" else "")
        if attempt.stats is None:
            self._append(version, changed, attempt)
            if not struck:
                raise FleetError(f"version {version} was not committed: {attempt.failure}")
            self._recover(victim)
            attempt = self._update(version)
        elif struck and fault != "stale-engine":
            raise FleetError(f"version {version} was committed although {fault} struck in it")
        if attempt.stats is None:
            raise FleetError(f"version {version} was not committed after the fault: {attempt.failure}")
        if struck and attempt.stats.verdict.kind is not Kind.FULL:
            raise FleetError(f"version {version} was sent as a delta after {fault}")
        dumps = [answer.value for answer in self._ask(self._engines, "dump").values()]
        differences = engine_differences(self._plan, self._truth, dumps)
        self._append(version, changed, attempt, sum(difference.count for difference in differences))
        return differences

    def _recover(self, victim: str) -> None:
        """Replace an engine that was killed; check that one which failed while writing is not served."""
        if self._plan.fault == "drop-engine":
            self._fleet.end(victim)
            self._fleet.start({victim: self._engine_seat(self._engines.index(victim))}, _take)
        elif self._ask([victim], "ready")[victim].value:
            raise FleetError(f"{victim} failed while it wrote weights, yet says that it may be served")

    def _update(self, version: int, doomed: str = "") -> _Attempt:
        """Update all ranks together; either all of them commit, or none does."""
        names = [*self._trainers, *self._engines]
        answers = self._ask(names, "update", doomed=doomed, version=version)
        failures = [answers[name].failure for name in names if name != doomed and answers[name].failure]
        if not failures:
            first, unsharded = answers[self._trainers[0]].value, answers[self._engines[0]].value
            return _Attempt(stats=first, sent=unsharded.num_elements)
        if len(failures) < len(names) - bool(doomed):
            raise FleetError(f"version {version} was committed on some ranks, but not on all: {failures[0]}")
        return _Attempt(failure=failures[0])

    def _append(self, version: int, changed: int, attempt: _Attempt, missed: int = 0) -> None:
        numel, stats = count_elements(distinct(self._plan, self._truth)), attempt.stats
        if stats is None:
            record = VersionRecord(
                version=version, kind="aborted", reason=attempt.failure, numel=numel, changed=changed
            )
        else:
            record = VersionRecord(
                version=version,
                kind=stats.verdict.kind.value,
                reason=stats.verdict.reason.name.lower(),
                numel=numel,
                changed=changed,
                sent=attempt.sent,
                missed=missed,
                wire_bytes=stats.total_wire_bytes,
                full_bytes=stats.full_bytes,
                identical=missed == 0,
                seconds=dict(stats.seconds),
            )
        self._records.append(record)
        self._on_record(record)

    def _generate(self) -> tuple[bool, str]:
        """Whether the engine, and a model loaded from the trainer's weights, continue a prompt alike."""
        checkpoint = self._folder / "checkpoint"
        checkpoint.mkdir()
        save_file(self._truth, checkpoint / "model.safetensors", metadata={"format": "pt"})
        engine = self._engines[:1]
        prompt = list(PROMPT.encode())
        served = self._ask(engine, "generate", prompt=prompt, num_tokens=NUM_TOKENS)[engine[0]].value
        fresh = self._ask(
            engine, "generate_fresh", checkpoint=checkpoint, prompt=prompt, num_tokens=NUM_TOKENS
        )[engine[0]].value
        return served == fresh, "".join(chr(token) if 32 <= token < 127 else "." for token in served)

    def _read_trainer(self) -> dict[str, torch.Tensor]:
        dumps = [answer.value for answer in self._ask(self._trainers, "dump").values()]
        return trainer_hf_state(self._plan, dumps)

    def _ask(
        self, names: Sequence[str], action: str, *, doomed: str = "", **arguments: object
    ) -> dict[str, Answer]:
        timeout_seconds = _PATIENCE * self._plan.timeout_seconds
        return self._fleet.ask(names, action, timeout_seconds=timeout_seconds, doomed=doomed, **arguments)

    def _seat(self, role: RoleName, rank: int) -> Seat:
        return Seat(role=role, plan=self._plan, rank=rank, store_port=self._store_port, folder=self._folder)

    def _engine_seat(self, rank: int) -> Seat:
        return self._seat("sharded" if rank else "transformers", rank)


def _take(seat: Seat) -> Actions:
    """Build a member, in its process. By name, because the launcher has no use for the heavy module."""
    actions: Actions = importlib.import_module("awex_delta.demo.members").build(seat)
    return actions
