"""Every exception of awex_delta.

    AwexDeltaError
    ├── ConfigError            a setting is refused (also a ValueError)
    ├── ConnectError           the two sides do not fit together; nothing was written
    │   ├── LayoutError        a tensor is missing, or has another shape or dtype
    │   └── OwnershipError     the optimizer shards do not tile a parameter exactly once
    ├── UnsupportedError       an upstream object lacks something that is needed
    ├── DiskError              a file system refused a call (also an OSError)
    ├── NumericsError          a formula was asked for outside its domain (also a ValueError)
    ├── WireError              bytes from a peer cannot be used
    │   ├── CorruptFrameError  the bytes are damaged
    │   ├── StaleFrameError    the bytes are whole, but of another run, version or plan
    │   └── FrameOrderError    the bytes are whole and ours, but not the next ones
    │       ├── RepeatedFrameError  they came before
    │       └── MissingFrameError   some that belong before them did not come
    ├── DriftError             an engine's live weights are not the base of a delta
    └── UpdateError            an update did not commit; the next one is a full sync, but for WeightsAwayError
        ├── UpdateAborted      a rank reported a failure, all ranks gave the update up
        │   ├── VerificationError  an engine's live weights are not the trainer's
        │   └── WeightsAwayError   a rank's weights cannot be read now; nothing was begun
        ├── LockstepError      ranks disagree about what they are doing
        ├── PeerError          a peer did not answer in time, or went away
        └── ChainError         no chain of versions in the folder leads where it was asked to

That an update is a full sync is a value (`protocol.verdict.Verdict`), never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_LISTED = 8


def listed(names: Sequence[str]) -> str:
    """The first names of a list for a message, and how many more there are."""
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


class AwexDeltaError(Exception):
    """Base of everything that awex_delta raises on purpose."""


class ConfigError(AwexDeltaError, ValueError):
    """A setting is refused. Names the field, its value and the remedy."""


class ConnectError(AwexDeltaError):
    """Trainer and engines do not fit together. Raised on every rank, before any weight moves."""


class LayoutError(ConnectError):
    """A tensor is missing on one side, or has another shape or dtype there."""


class OwnershipError(ConnectError):
    """Optimizer shards leave a hole in a parameter, or overlap."""


class UnsupportedError(AwexDeltaError):
    """An upstream object (optimizer, model, converter) lacks something that is needed."""


class DiskError(AwexDeltaError, OSError):
    """A file system, or an object store, refused a call. Names the path and the remedy."""

    def __str__(self) -> str:
        return str(self.strerror)


class NumericsError(AwexDeltaError, ValueError):
    """A formula was asked for outside its domain, such as a step below 1."""


class WireError(AwexDeltaError):
    """Bytes received from a peer cannot be used. Nothing was written."""


class CorruptFrameError(WireError):
    """A frame is damaged: cut short, a wrong checksum, an index out of range."""


class StaleFrameError(WireError):
    """A frame is whole, but belongs to another run, base version or plan."""


class FrameOrderError(WireError):
    """A frame is whole and of this update, but not the next of its sender."""


class RepeatedFrameError(FrameOrderError):
    """A frame came a second time."""


class MissingFrameError(FrameOrderError):
    """A frame came before another that belongs in front of it, or that one never came."""


class DriftError(AwexDeltaError):
    """Live weights of an engine are not those that the trainer takes for its base. Nothing was written."""


class UpdateError(AwexDeltaError):
    """An update did not commit, or an engine rank could not publish it. The next one is a full sync."""


class UpdateAborted(UpdateError):
    """A rank reported a failure, so every rank gave the update up together."""


class VerificationError(UpdateAborted):
    """After the writes an engine's live weights were not the trainer's. Names the tensors."""


class WeightsAwayError(UpdateAborted):
    """Live weights of a rank were freed, moved or replaced. Nothing was read, sent or written.

    With the weights of a trainer rank back, the next update is a delta if it would have been one. An engine
    rank whose own weights are away is not ready until a full sync; the other ledgers stand as they did.
    """


class LockstepError(UpdateError):
    """Ranks disagree about the version, the configuration or the plan."""


class PeerError(UpdateError):
    """A peer did not answer in time, or went away. Names the rank and the phase."""


class ChainError(UpdateError):
    """No chain of versions in the folder leads to the one asked for. Says which link is missing."""


UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)
"""What plain code raises that takes foreign JSON apart: JSON may nest too deep, and has an infinity."""
