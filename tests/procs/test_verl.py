"""verl trains and keeps replicas equal to its trainer, by its own registry, manager, workers and adapters.

What stands in is verl's platform (a CPU) and its vLLM servers; see `examples/verl_gsm8k`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make verl"),
]
Records = dict[str, list[dict[str, Any]]]


def run_module(module: str, *arguments: str) -> str:
    """Run a module of this repository as a program, and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stdout


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(["fsdp2", "1"], id="fsdp2"),
        pytest.param(["fsdp2", "2"], id="fsdp2 on two ranks", marks=pytest.mark.all),
        pytest.param(["megatron"], id="megatron on two ranks", marks=pytest.mark.all),
    ],
)
def records(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Records:
    """What one run of verl did, with one of its training engines."""
    out = tmp_path_factory.mktemp("verl") / "records.pt"
    run_module("tests.procs.verl_scenario", str(out), *request.param)
    saved = torch.load(out, weights_only=True)
    print(f"verl took {saved['cpu_seconds']:.0f} s of processors")
    found: Records = saved["records"]
    return found


def check_committed(record: dict[str, Any], *, version: int, full: bool) -> None:
    """Every server holds the bits that the trainer held, as `version`, and lets requests go on."""
    assert record["error"] == ""
    assert record["metrics"]["checkpoint_engine/version"] == version
    assert record["metrics"]["checkpoint_engine/full"] == full
    held, *others = record["held"]
    for weights in [*others, *(state["weights"] for state in record["states"])]:
        assert weights.keys() == held.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor.view(torch.int16), held[name].view(torch.int16)), name
    for state in record["states"]:
        assert (state["version"], state["stopped"]) == (version, False)


def test_versions_are_our_own_whatever_global_steps_says(records: Records) -> None:
    seen = records["versions"]
    for version, record in enumerate(seen, start=1):
        check_committed(record, version=version, full=version == 1)
        assert [state["reasons"][-1] for state in record["states"]] == [
            "FIRST_SYNC" if version == 1 else "NONE"
        ] * 2
    assert [[state["global_steps"] for state in record["states"]] for record in seen] == [
        [1, 1],
        [2, 2],
        [2, 2],
        [2, 2],  # missing: what the servers report stays
        [7, 7],
    ]
    assert [state["cache_drops"] for state in seen[-1]["states"]] == [5, 5]
    sent = [record["metrics"]["checkpoint_engine/payload_mbytes"] for record in seen]
    assert 0 < max(sent[1:]) < sent[0]
    before, after = seen[-2]["held"][0], seen[-1]["held"][0]
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was trained"


def test_one_failure_is_tried_again_as_a_full_sync_of_the_same_version(records: Records) -> None:
    [record] = records["one failure"]
    check_committed(record, version=6, full=True)
    assert [state["reasons"][-1] for state in record["states"]] == ["PREVIOUS_ABORTED"] * 2


def test_two_failures_are_an_error_that_leaves_requests_stopped(records: Records) -> None:
    failed, mended = records["two failures"]
    assert "InjectedFault: injected in phase 'prepare'" in failed["error"]
    assert [(state["stopped"], state["version"]) for state in failed["states"]] == [(True, 6)] * 2
    check_committed(mended, version=7, full=True)


def test_a_server_that_comes_back_gets_everything(records: Records) -> None:
    back, after = records["server back"]
    check_committed(back, version=8, full=True)
    check_committed(after, version=9, full=False)
    assert after["states"][0]["reasons"] == ["FIRST_SYNC", "NONE"]


def test_replicas_come_and_go(records: Records) -> None:
    alone, together, after = records["another set"]
    check_committed(alone, version=10, full=True)
    assert len(alone["states"]) == 1
    check_committed(together, version=11, full=True)
    check_committed(after, version=12, full=False)
    assert len(after["states"]) == 2


@pytest.mark.all
def test_the_example_ends_with_equal_replicas() -> None:
    said = run_module("examples.verl_gsm8k.tiny").splitlines()
    assert [line.partition(",")[0] for line in said if line.startswith("step ")] == [
        "step 1: full",
        *(f"step {step}: delta" for step in range(2, 6)),
    ]
