"""Work during which nobody looks for cyclic garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """Collection is off from the first of several holders, of any thread, until the last one is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._holders += 1

    def end(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._was_enabled:
                gc.enable()


_PAUSE = _Pause()


@contextmanager
def uncollected() -> Iterator[None]:
    """Put the collection of cyclic garbage off, in the whole process, and set it back as it was.

    Plans and owned slices are a great many small objects without cycles. Making them sets collections off,
    each of which looks at every object of the training framework, too, and takes as long as all the work.
    Hold it around work, not around all of an update, in which a rank may wait long for another. It may be
    nested, and held by several threads at once.
    """
    _PAUSE.begin()
    try:
        yield
    finally:
        _PAUSE.end()
