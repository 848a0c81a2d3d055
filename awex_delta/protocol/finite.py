"""NaN and infinity among the weights that an update is about to send: counted, told of, or refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from awex_delta.errors import NumericsError
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings

logger = logging.getLogger(__name__)


class FiniteCheck:
    """What one trainer rank finds, in one update after the other."""

    def __init__(self, settings: DeltaSettings) -> None:
        """settings: `not_finite` says whether such an update is refused."""
        self._refuses = settings.not_finite == "refuse"
        self._warned = False

    def count(self, found: Mapping[str, int]) -> int:
        """The sum of what was found, by name of tensor.

        Raises NumericsError if there is any and the settings refuse it. Nothing was sent yet.
        """
        total = sum(found.values())
        if total and self._refuses:
            raise NumericsError(
                f"weight_update_not_finite = 'refuse': {total} of the values to be sent are NaN or infinite, "
                f"in {', '.join(list(found)[:4])}. Remedy: go back to a checkpoint, or set "
                "weight_update_not_finite: warn"
            )
        return total

    def tell(self, stats: UpdateStats, rank: int) -> None:
        """Warn, the first time that an update sent such values; rank 0 speaks for all."""
        if stats.total_not_finite and not self._warned and rank == 0:
            logger.warning(
                "version %d: %d of the values that were sent are NaN or infinite. This is said once; "
                "UpdateStats.total_not_finite counts them, and weight_update_not_finite: refuse stops them",
                stats.version,
                stats.total_not_finite,
            )
        self._warned = self._warned or bool(stats.total_not_finite)
