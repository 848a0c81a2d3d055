"""What every test gets: fixed seeds, one torch thread, no deadlines, and fixtures for the environment."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import awex_delta.testing  # noqa: F401 - tests may import megatron-core where there is no Triton

# How long an example takes says nothing: cores are shared. The same examples come each time, so a change
# is judged by what it changed; to look for new ones: pytest --hypothesis-profile=explore
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", CALM)
settings.register_profile("tests", CALM, derandomize=True)
settings.load_profile("tests")

FIRST = ("procs", "fuzz", "numerics", "ranks")
"""Folders in the order of how long their files take."""


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    """Ranks run as threads and processes beside each other; each using all cores only slows the rest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test that fails once fails again."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process environment without this package's variables; use it to set some for one test."""
    for name in list(os.environ):
        if name.upper().startswith("DTE_"):
            monkeypatch.delenv(name)
    return monkeypatch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first, so that no worker has a long one left when the other is done.

    Tests marked `gpu` are skipped where there is none; the summary names them.
    """
    items.sort(
        key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST)
    )
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
