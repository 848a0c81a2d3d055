"""The examples, run as a person runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str) -> tuple[list[tuple[str, str]], list[int], str]:
    """Number and kind of each version, its bytes, and all that was printed."""
    result = subprocess.run(
        [sys.executable, f"examples/{name}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r"^version (\d+): (full|delta)\b.*; ([\d,]+) bytes", result.stdout, re.MULTILINE)
    sizes = [int(size.replace(",", "")) for _, _, size in found]
    return [(number, kind) for number, kind, _ in found], sizes, result.stdout


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train_and_serve.py", "trainer and engine hold the same embedding bits"),
        ("train_and_serve_fsdp.py", "trainer and engines hold the same bits of all weights"),
    ],
)
def test_train_and_serve_ends_with_equal_bits(name: str, said: str) -> None:
    versions, sizes, printed = run(name)
    assert versions == [("1", "full"), ("2", "delta"), ("3", "delta"), ("4", "delta")]
    assert 0 < max(sizes[1:]) < sizes[0]
    assert "engine continues 'def main(' with" in printed
    assert said in printed
