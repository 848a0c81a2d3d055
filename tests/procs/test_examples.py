"""The examples, run as a person runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_train_and_serve_ends_with_equal_bits() -> None:
    result = subprocess.run(
        [sys.executable, "examples/train_and_serve.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r"^version (\d+): (full|delta)\b.*; ([\d,]+) bytes", result.stdout, re.MULTILINE)
    assert [(number, kind) for number, kind, _ in found] == [
        ("1", "full"),
        ("2", "delta"),
        ("3", "delta"),
        ("4", "delta"),
    ]
    sizes = [int(size.replace(",", "")) for _, _, size in found]
    assert 0 < max(sizes[1:]) < sizes[0]
    assert "the engine continues 'def main(' with" in result.stdout
    assert "trainer and engine hold the same embedding bits" in result.stdout
