"""Which version each side holds. Values that change only when an update commits or aborts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from awex_delta.errors import ConfigError
from awex_delta.protocol.verdict import Kind, Reason


def check_version(version: int) -> None:
    """Refuse what no frame could carry as a version.

    Raises:
        ConfigError: not an int from 0 to 2^63 - 1.
    """
    if type(version) is not int or not 0 <= version < 2**63:
        raise ConfigError(f"version={version!r}: give an int of at least 0, one more at each update")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLedger:
    """What a trainer rank knows about its receivers.

    run_id: identity of this trainer's life; a restarted trainer has another.
    version: the last committed version (the watermark), None before the first.
    deltas: committed deltas since the last full sync.
    aborted: the last update did not commit, so the receivers' state is in doubt.
    """

    run_id: str
    version: int | None = None
    deltas: int = 0
    aborted: bool = False

    def doubt(self, version: int, anchor_interval: int) -> Reason:
        """Why `version` cannot be a delta on top of the watermark; NONE when it can.

        An interval of n means n committed deltas between two full syncs; 0 means no anchors.
        """
        if self.version is None:
            return Reason.FIRST_SYNC
        if self.aborted:
            return Reason.PREVIOUS_ABORTED
        if version != self.version + 1:
            return Reason.VERSION_GAP
        if 0 < anchor_interval <= self.deltas:
            return Reason.ANCHOR_DUE
        return Reason.NONE

    def commit(self, version: int, kind: Kind) -> TrainerLedger:
        """The ledger after `version` was committed everywhere."""
        deltas = self.deltas + 1 if kind is Kind.DELTA else 0
        return replace(self, version=version, deltas=deltas, aborted=False)

    def abort(self) -> TrainerLedger:
        """The ledger after a failed update: the version stands, the next sync is full."""
        return replace(self, aborted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLedger:
    """What an engine rank holds: nothing (version None), a version of a run, or a dirty mixture."""

    run_id: str = ""
    version: int | None = None
    dirty: bool = False

    @property
    def ready(self) -> bool:
        """True when the weights are exactly one committed version, so they may be served."""
        return self.version is not None and not self.dirty

    def doubt(self, run_id: str, base_version: int | None) -> Reason:
        """Why a delta on `base_version` of `run_id` cannot be applied here; NONE when it can."""
        if self.dirty:
            return Reason.ENGINE_DIRTY
        if self.version is None or self.version != base_version or self.run_id != run_id:
            return Reason.ENGINE_STALE
        return Reason.NONE

    def touch(self) -> EngineLedger:
        """The ledger from the first write of an update until its commit."""
        return replace(self, dirty=True)

    def commit(self, run_id: str, version: int) -> EngineLedger:
        """The ledger after `version` of `run_id` was committed everywhere."""
        return EngineLedger(run_id=run_id, version=version, dirty=False)
