"""Whatever reads from outside: no input crashes it, fills the memory, or raises what is no AwexDeltaError."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

DAILY_SECONDS, LONG_SECONDS = 3, 60

has_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this platform"
)


def fuzz(folder: Path, seconds: int) -> Path:
    """Run all targets; what is left of them in `folder`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.run", str(folder), str(seconds)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def daily(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz(tmp_path_factory.mktemp("daily"), DAILY_SECONDS)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz(tmp_path_factory.mktemp("long"), LONG_SECONDS)


def assert_well(name: str, folder: Path) -> None:
    """Otherwise says why a target is not, with the inputs that show it."""
    found = [one.read_text() for one in sorted(folder.glob(f"{name}.broken-*"))]
    for kind in ("crash", "oom", "timeout"):
        found += [f"{kind}, input: {one.read_bytes().hex()}" for one in folder.glob(f"{name}.{kind}-*")]
    assert not found, "\n".join(found)
    assert (folder / f"{name}.end").read_text() == "0", (folder / f"{name}.log").read_text()[-3000:]


@has_atheris
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_some_seconds_breaks_a_reader(daily: Path, name: str) -> None:
    assert_well(name, daily)


@has_atheris
@pytest.mark.all
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_a_minute_breaks_a_reader(long: Path, name: str) -> None:
    assert_well(name, long)


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_product_wrote_is_read(name: str) -> None:
    target = TARGETS[name]()
    assert target.seeds
    for seed in target.seeds:
        target.run(seed)
