"""Run logs in TensorBoard and Weights & Biases: what arrives there, under which names, what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from awex_delta.errors import ConfigError
from awex_delta.gateway.metrics import Metrics
from awex_delta.gateway.models import UpdateAnswer
from awex_delta.observe.runlog.writer import RunLog
from tests.unit.test_runlog import FULL, stats

EXPECTED: dict[int, dict[str, float]] = {
    1: {
        "awex_delta_updates_total/full/STEP_GAP": 1,
        "awex_delta_wire_bytes_total/full": 15,
        "awex_delta_version": 1,
        "awex_delta_changed_share": 16 / 17,
        "awex_delta_phase_seconds/detect": 0.25,
        "awex_delta_phase_seconds/apply": 0.5,
    },
    2: {
        "reward": 0.75,
        "awex_delta_updates_total/full/STEP_GAP": 1,
        "awex_delta_updates_total/delta/NONE": 1,
        "awex_delta_wire_bytes_total/full": 15,
        "awex_delta_wire_bytes_total/delta": 15,
        "awex_delta_version": 2,
    },
    3: {"awex_delta_failures_total/update": 1, "awex_delta_updates_total/delta/NONE": 1},
}
"""By version, of `run`."""


def run(log: RunLog) -> None:
    log.append(stats(1, FULL))
    log.append(stats(2), extra={"reward": 0.75, "tokens": "ab12"})
    log.append_failure(3, TimeoutError("late"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.teardown()


def test_tensorboard_gets_the_numbers_by_version(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(RunLog(tmp_path / "RUN.jsonl", trackers="tensorboard"))
    RunLog(tmp_path / "RUN.jsonl", rank=1, trackers="tensorboard").append(stats(9))  # rank 0 writes alone
    seen = events.EventAccumulator(str(tmp_path / "RUN.tensorboard")).Reload()
    found: dict[int, dict[str, float]] = {}
    for name in seen.Tags()["scalars"]:
        for one in seen.Scalars(name):
            found.setdefault(one.step, {})[name] = one.value
    assert found.keys() == EXPECTED.keys()
    for version, numbers in EXPECTED.items():
        assert numbers == pytest.approx({name: found[version].get(name) for name in numbers}, rel=1e-6)


def test_weights_and_biases_gets_them_in_a_run_of_its_own(tmp_path: Path, offline: Any) -> None:
    run(RunLog(tmp_path / "RUN.jsonl", trackers=["wandb"]))
    assert (offline.run.project, offline.run.name) == ("awex-delta", "RUN")
    summary = dict(offline.run.summary)
    offline.finish()
    expected = {**EXPECTED[1], **EXPECTED[2], **EXPECTED[3]}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_a_run_that_the_training_opened_is_joined_at_its_own_step(tmp_path: Path, offline: Any) -> None:
    mine = offline.init(project="mine", dir=str(tmp_path))
    log = RunLog(tmp_path / "RUN.jsonl", trackers=("wandb",))
    for step in (3, 4):
        mine.log({"loss": 2.5 / step}, step=step)
        log.append(stats(step))
        log.append(stats(10 * step))  # a second update in one step of the training
    assert mine.step == 4
    mine.log({"loss": 0.5}, step=5, commit=True)
    summary = dict(mine.summary)
    mine.finish()
    assert (summary["loss"], summary["_step"], summary["awex_delta_version"]) == (0.5, 5, 40)


def test_names_are_those_of_the_gateways_metrics() -> None:
    metrics = Metrics()
    for kind, reason in (("full", "STEP_GAP"), ("delta", "NONE")):
        answer: dict[str, Any] = {"pair": "a", "version": 2, "kind": kind, "reason": reason, "bytes": 15}
        answer |= {"changed_share": 0.5, "phases": {"detect": 0.25, "apply": 0.5}}
        metrics.updated(UpdateAnswer.model_construct(**answer))
    metrics.failed("a", "update")
    shown = set()
    for name, labels in re.findall(r"^(awex_delta_\w+)\{([^}]*)\}", metrics.text().decode(), re.MULTILINE):
        values = [value for label, value in re.findall(r'(\w+)="([^"]*)"', labels) if label != "pair"]
        shown.add("/".join([name.removesuffix("_sum"), *values]))
    assert set().union(*EXPECTED.values()) - {"reward"} <= shown


@pytest.mark.parametrize("trackers", ["mlflow", ("wandb", "mlflow")])
def test_a_tracker_that_is_not_known_is_refused(trackers: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trackers=.*'mlflow' is none of tensorboard, wandb; give one"):
        RunLog(tmp_path / "RUN.jsonl", rank=3, trackers=trackers)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tracker", "module", "there"),
    [
        ("tensorboard", "torch.utils.tensorboard", None),
        ("wandb", "wandb", None),
        ("wandb", "wandb", ModuleType("wandb")),  # the folder `wandb` that runs leave behind
    ],
)
def test_a_tracker_that_is_not_installed_is_refused(
    tracker: str, module: str, there: ModuleType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, there)
    with pytest.raises(ConfigError, match=rf"{tracker} is not installed; pip install .*\[{tracker}\]"):
        RunLog(tmp_path / "RUN.jsonl", trackers=tracker)
    assert not list(tmp_path.iterdir())
