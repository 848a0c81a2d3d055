"""Collection is off while anyone holds it off, and as it was before afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from awex_delta.garbage import uncollected


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@uncollected()
def _fail() -> None:
    assert not gc.isenabled()
    raise ValueError("work failed")


@pytest.mark.parametrize("enabled", [True, False])
def test_it_comes_back_as_it_was_after_nesting_and_failures(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with uncollected():
        with pytest.raises(ValueError, match="work failed"):
            _fail()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_the_last_of_several_threads_sets_it_back() -> None:
    gc.enable()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with uncollected():
            entered.set()
            leave.wait(timeout=30)

    other = threading.Thread(target=hold)
    with uncollected():
        other.start()
        assert entered.wait(timeout=30)
    assert not gc.isenabled()
    leave.set()
    other.join(timeout=30)
    assert gc.isenabled()
