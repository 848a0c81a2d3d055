"""RUN.jsonl: what every update of a training did, one line each, for `awex-delta report` and your own tools.

A file belongs to one trainer rank, so that nothing has to be gathered: rank 0 writes RUN.jsonl, rank 3
RUN.rank3.jsonl beside it. Rank 0's lines hold the sums over all ranks already; only the counts by layer
and kind of tensor are each rank's own, and the reader adds those up. Lines are only ever appended.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from awex_delta._version import __version__
from awex_delta.errors import ConfigError
from awex_delta.observe.runlog.trackers import Trackers, checked_trackers
from awex_delta.protocol.stats import PartCount, UpdateStats
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require

FORMAT = 1
"""Version of the format, in every header. A reader ignores fields that it does not know."""

# What no training writes is refused as it is read, and not where it is drawn.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Time = Annotated[float, Field(ge=0, lt=2**37)]
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Plain = float | Whole | str | bool | None
_PACKAGES = ("torch", "megatron-core", "awex", "transformers")


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Part(_Line):
    """Changes of one kind of tensor in one layer, as `PartCount` counts them."""

    layer: Count | None
    kind: str
    changed: Count
    owned: Count


class RunHeader(_Line):
    """The first line of a life of a training: a restart appends another header and goes on."""

    type: Literal["run"] = "run"
    format: int = FORMAT
    started: Time
    """Seconds since 1970, as `time` below."""
    rank: int = 0
    num_ranks: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    model: str = ""
    topology: dict[str, str] = Field(default_factory=dict)
    """Any words on the layout of both sides, such as `trainer: megatron:d2t2`."""
    settings: dict[str, Plain] = Field(default_factory=dict)
    environment: dict[str, Plain] = Field(default_factory=dict)


class UpdateLine(_Line):
    """One attempt to update. The counts and bytes are those of `UpdateStats`."""

    type: Literal["update"] = "update"
    time: Time
    version: Whole
    kind: Literal["full", "delta", "aborted"]
    reason: str = Reason.NONE.name
    """Name of the `Reason`; of an aborted update the name of the exception."""
    text: str = ""
    """The reason in a sentence."""
    detail: str = ""
    seats: tuple[int, ...] = ()
    """Transfer ranks that gave the reason."""
    wire_bytes: Count = 0
    num_elements: Count = 0
    num_changed: Count = 0
    num_owned: Count = 0
    total_wire_bytes: Count = 0
    total_changed: Count = 0
    total_owned: Count = 0
    total_not_finite: Count = 0
    full_bytes: Count = 0
    verified: str = "off"
    seconds: dict[str, Seconds] = Field(default_factory=dict)
    changed_by: tuple[Part, ...] = ()
    digests: dict[str, str] = Field(default_factory=dict)
    extra: dict[str, Plain] = Field(default_factory=dict)
    """Whatever else the training measured, such as `reward`."""


class RunLog:
    """Appends the updates of one trainer rank to RUN.jsonl.

    Example:
        >>> log = RunLog("RUN.jsonl", settings=settings, rank=rank, num_ranks=4)       # doctest: +SKIP
        >>> stats = sender.update_weights(version)                                     # doctest: +SKIP
        >>> log.append(stats, changed_by=sender.changed_by, extra={"reward": reward})  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | Path,
        *,
        settings: DeltaSettings | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        model: str = "",
        topology: Mapping[str, str] | None = None,
        trackers: str | Sequence[str] = (),
    ) -> None:
        """Write the header: into a new file, or after what an earlier life of the training wrote.

        Args:
            path: of rank 0's file; another rank's stands beside it.
            settings: as resolved.
            rank, num_ranks: this trainer rank among all; ranks that write nothing are missed by the report
                only in the counts by layer and kind.
            model: a name for people.
            topology: words on the layout of both sides, such as {"trainer": "megatron:d2t2"}.
            trackers: "tensorboard", "wandb" or both: rank 0 writes the numbers there as well, under the
                names of the gateway's metrics.

        Raises:
            ConfigError: the file cannot be written, or a tracker is not known, not installed, or begins
                no run.
        """
        require((str, Path), "a path", path=path)
        require((DeltaSettings, type(None)), "what resolve(...).settings is", settings=settings)
        require(int, "a whole number", rank=rank, num_ranks=num_ranks)
        names = checked_trackers(trackers)
        self.path = rank_path(Path(path), rank)
        header = RunHeader(
            started=time.time(),
            rank=rank,
            num_ranks=num_ranks,
            model=model,
            topology=dict(topology or {}),
            settings=asdict(settings) if settings is not None else {},
            environment=environment_facts(),
        )
        try:
            self._write(header, begin="\n" if _ends_inside_a_line(self.path) else "")
        except OSError as error:
            raise ConfigError(
                f"path={str(self.path)!r}: cannot be written ({error.strerror}); "
                "give a file in a folder that exists"
            ) from error
        self._trackers = Trackers(names if rank == 0 else (), self.path)

    def append(
        self,
        stats: UpdateStats,
        *,
        changed_by: Iterable[PartCount] = (),
        digests: Mapping[str, str] | None = None,
        extra: Mapping[str, Plain] | None = None,
    ) -> None:
        """Add a line for an update that was committed.

        Args:
            stats: what `update_weights` returned.
            changed_by: `Sender.changed_by`.
            digests: of the weights, by any name.
            extra: plain numbers and words; one that is not finite is written as null.
        """
        verdict = stats.verdict
        self._add(
            UpdateLine(
                **{one.name: getattr(stats, one.name) for one in fields(stats) if one.name != "verdict"},
                time=time.time(),
                kind=verdict.kind.value,
                reason=verdict.reason.name,
                text=verdict.reason.text,
                detail=verdict.detail,
                seats=verdict.ranks,
                changed_by=tuple(Part(**asdict(part)) for part in changed_by),
                digests=dict(digests or {}),
                extra=dict(extra or {}),
            )
        )

    def append_failure(
        self, version: int, error: BaseException, *, extra: Mapping[str, Plain] | None = None
    ) -> None:
        """Add a line for an update that raised."""
        name, text = type(error).__name__, str(error)
        self._add(
            UpdateLine(
                time=time.time(),
                version=version,
                kind="aborted",
                reason=name,
                text=text,
                extra=dict(extra or {}),
            )
        )

    def _add(self, line: UpdateLine) -> None:
        self._write(line)
        self._trackers.append(line)

    def _write(self, line: RunHeader | UpdateLine, begin: str = "") -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{begin}{line.model_dump_json()}\n")


def _ends_inside_a_line(path: Path) -> bool:
    """True where a writer was killed in the middle of a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def rank_path(path: Path, rank: int) -> Path:
    """Where a rank writes: `path` itself for rank 0, else a file beside it."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def environment_facts() -> dict[str, Plain]:
    """The machine and the versions, as far as this process knows."""
    facts: dict[str, Plain] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "awex-delta": __version__,
    }
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    return facts
