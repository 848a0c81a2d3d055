"""Leases: a reader says from which version on it reads, and the writer removes nothing of that.

A reader writes its lease, then looks at manifests. A writer withdraws manifests, then looks for leases, and
what has a lease by then gets its manifest back. So a manifest that is there after a lease was written keeps
its files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from awex_delta.folder.chain import Catalogue, Chain, Held, find_chain
from awex_delta.folder.folder import Folder, Step, told, version_name

logger = logging.getLogger(__name__)


class Lease:
    """What keeps the versions that one reader reads from being removed. Never fails a read."""

    def __init__(self, folder: Folder, holder: str, seconds: float) -> None:
        """Remember for whom; nothing is written. `holder` is a name of this reader alone.

        The versions stay for `seconds` if this reader dies; the lease is renewed while it reads.
        """
        self._folder = folder
        self._holder = holder
        self._seconds = seconds
        self._oldest: int | None = None
        self._renewed = 0.0

    def covers(self, version: int) -> bool:
        """True while nothing from `version` on is removed."""
        return self._oldest is not None and self._oldest <= version

    def begin(self, oldest: int) -> None:
        """Keep everything from `oldest` on."""
        self._oldest = oldest
        self._put()

    def renew(self) -> None:
        """Keep it for longer, where a good part of the time is over."""
        if self._oldest is not None and time.monotonic() - self._renewed > self._seconds / 4:
            self._put()

    def end(self) -> None:
        """Keep nothing."""
        if self._oldest is not None:
            self._oldest = None
            try:
                self._folder.release(self._holder)
            except OSError as error:
                logger.warning("a lease was not removed, it ends by itself: %s", error)

    def _put(self) -> None:
        self._renewed = time.monotonic()
        try:
            self._folder.lease(self._holder, self._oldest or 0, self._seconds)
        except OSError as error:  # a folder that one may only read
            logger.warning(
                "no lease on %s, old versions may go while they are read: %s", self._folder.url, error
            )


def leased_chain(
    folder: Folder,
    lease: Lease,
    held: Held | None,
    *,
    target: int | None = None,
    refused: Collection[str] = (),
) -> Chain:
    """As `find_chain`, with a lease on every link before anything of it is read."""
    while True:
        chain = find_chain(Catalogue(folder), held, target=target, refused=refused)
        if not chain.links or lease.covers(chain.links[0].version):
            return chain
        lease.begin(chain.links[0].version)


def retire(folder: Folder, versions: Sequence[int], step: Step) -> None:
    """Remove versions that nobody reads. What is stuck keeps nothing else; the next call tries it again."""
    folder.empty_trash()
    withdrawn = []
    for version in versions:
        step(f"retire {version_name(version)}")
        with told():
            folder.withdraw(version)
            withdrawn.append(version)
    oldest_leased = folder.oldest_leased() if withdrawn else None
    for version in withdrawn:
        with told():
            if oldest_leased is not None and version >= oldest_leased:
                folder.restore(version)
            else:
                folder.discard(version)
