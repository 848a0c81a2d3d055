"""Who writes to a folder: one run at a time, as far as a store without locks can tell.

`writer.json` in the folder names the run that writes, and a random beat that it renews. Who finds another
run there watches: a beat that changes is a writer that lives, one that stands still for as long as the file
says is of one that died, whose folder may be taken over. Clocks are not compared.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError

from awex_delta.folder.folder import Folder

logger = logging.getLogger(__name__)

_NAME = "writer.json"
_REMEDY = "stop one of the two trainers, or give it another weight_update_disk_url"
MAX_SECONDS = 30.0
"""A writer that shows no sign for this long is taken for dead, or earlier where it says so."""


class _Sign(BaseModel):
    """What the file says. seconds: how long the beat may stay the same."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    run_id: str
    beat: str
    seconds: NonNegativeFloat


class Claim:
    """One run's right to write to a folder; of trainer rank 0."""

    def __init__(self, folder: Folder, seconds: float) -> None:
        """Remember where; nothing is read or written.

        seconds: after which a sign of life that did not come means death; at most `MAX_SECONDS`.
        """
        self._folder = folder
        self._seconds = min(seconds, MAX_SECONDS)
        self._run_id = ""  # as which the folder was taken
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, run_id: str) -> str:
        """Take the folder for a run, where it does not have it yet, and show signs of life from then on.

        Waits while it is not known whether another writer lives, for as long as that one gave itself. Returns
        why the run may not write there, empty where it may. Raises OSError if the folder cannot be used.
        """
        if self._run_id == run_id:
            return self.check()
        self._rest()
        other = self._read()
        if other is not None and other.run_id != run_id and self._lives(other):
            return f"run {other.run_id} writes to {self._folder.url} and is alive: {_REMEDY}"
        self._show(run_id)
        self._run_id = run_id
        if problem := self.check():  # another one came at the same moment
            return problem
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, args=(run_id, self._stop), daemon=True)
        self._thread.start()
        return ""

    def check(self) -> str:
        """Why the run that took the folder may not write there any more; empty where it may."""
        now = self._read()
        if now is None or now.run_id == self._run_id:
            return ""
        mine, self._run_id = self._run_id, ""
        return f"run {now.run_id} took {self._folder.url} over from this run {mine}: {_REMEDY}"

    def release(self) -> None:
        """Give the folder back, if it was taken: the next writer need not wait."""
        self._rest()
        mine, self._run_id = self._run_id, ""
        if not mine:
            return
        try:
            now = self._read()
            if now is not None and now.run_id == mine:
                self._folder.remove(_NAME)
        except OSError as error:
            logger.warning("%s was not given back, the next writer waits: %s", self._folder.url, error)

    def _rest(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _lives(self, other: _Sign) -> bool:
        """True where another writer shows a sign of life; False after a time without one, or if it left."""
        wait = min(other.seconds, MAX_SECONDS)
        until = time.monotonic() + wait
        while time.monotonic() < until:
            time.sleep(wait / 20)
            now = self._read()
            if now != other:
                return now is not None
        logger.warning("run %s, which wrote to %s, is taken for dead", other.run_id, self._folder.url)
        return False

    def _keep_showing(self, run_id: str, stop: threading.Event) -> None:
        while not stop.wait(self._seconds / 4):
            try:
                now = self._read()
                if now is not None and now.run_id != run_id:
                    return  # `check` says so before the next version
                self._show(run_id)
            except OSError as error:
                logger.warning("no sign of life could be given in %s: %s", self._folder.url, error)

    def _show(self, run_id: str) -> None:
        sign = _Sign(run_id=run_id, beat=uuid.uuid4().hex, seconds=self._seconds)
        self._folder.put(_NAME, [sign.model_dump_json().encode()])

    def _read(self) -> _Sign | None:
        try:
            return _Sign.model_validate_json(self._folder.read(_NAME))
        except (FileNotFoundError, ValidationError):
            return None  # free, or no sign of a writer
