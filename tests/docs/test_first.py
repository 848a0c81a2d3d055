"""The two programs of the page for newcomers, copied and run as it says, from an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ROOT, python_blocks
from tests.procs.ports import hold_port, number_of

PORT = "29600"


@pytest.mark.timeout(180)
def test_the_two_programs(tmp_path: Path) -> None:
    trainer, engine, quiet = (block.code for block in python_blocks("docs/en/first.md"))
    with hold_port() as held:
        port = str(number_of(held))
    for name, code in {"trainer.py": trainer, "engine.py": engine}.items():
        assert PORT in code
        (tmp_path / name).write_text(quiet + code.replace(PORT, port), encoding="utf-8")
    both = [
        subprocess.Popen(
            [sys.executable, name],
            cwd=tmp_path,
            env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("trainer.py", "engine.py")
    ]
    try:
        said = [process.communicate(timeout=170)[0].splitlines() for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    kinds = [line.split(";")[0].split(": ")[1].partition(",")[0] for line in said[0]]
    assert kinds == ["full", "delta", "delta", "delta", "delta"], said  # and no line of anybody else
    assert [line.partition(":")[0] for line in said[1]] == [f"version {version}" for version in range(1, 6)]
    trained, served = (torch.load(tmp_path / f"{side}.pt") for side in ("trainer", "engine"))
    assert trained.keys() == served.keys()
    for name, weight in trained.items():
        assert torch.equal(weight.view(torch.int16), served[name].view(torch.int16)), name
