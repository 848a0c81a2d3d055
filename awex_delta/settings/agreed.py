"""What both sides of one pairing agree on, and how each part of it is written elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from awex_delta.settings.arguments import require
from awex_delta.settings.schema import TrainEngineConfig

_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field of `DeltaSettings` is written elsewhere.

    name: of the setting of `TrainEngineConfig` that says it, with its default and its documentation.
    variable: of the environment, through which a worker process gets it.
    local: each rank may have its own; a setting that is not local must be equal on all ranks.
    true_for: the value of the setting for which a flag is True; None when the field has the setting's value.
    """

    name: str
    variable: str
    local: bool = False
    true_for: str | None = None

    @property
    def annotation(self) -> Any:
        """The type of the setting."""
        return TrainEngineConfig.model_fields[self.name].annotation

    def means(self, written: object) -> Any:
        """The value of the field, when the setting has the value `written`."""
        return written if self.true_for is None else written == self.true_for

    def written(self, value: object) -> Any:
        """What the setting has to be for the field to have this value."""
        if self.true_for is None or not isinstance(value, bool):
            return value
        return self.true_for if value else TrainEngineConfig.model_fields[self.name].default


def _setting(
    name: str, variable: str, *, local: bool = False, true_for: str | None = None, default: object = None
) -> Any:
    """A field of `DeltaSettings`; without a `default` of its own it has that of its setting."""
    setting = Setting(name=name, variable=variable, local=local, true_for=true_for)
    if default is None:
        default = setting.means(TrainEngineConfig.model_fields[name].default)
    return field(default=default, metadata={_KEY: setting})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """What both sides of one pairing must agree on, and what each rank decides for itself. Made by `resolve`.

    Each field means what the setting that it names means, and has its default, but for `enabled`: settings
    that are made by hand have deltas on.
    """

    enabled: bool = _setting("enable_delta_weight_update", "DTE_DELTA_TRANSFER", default=True)
    anchor_interval: int = _setting("weight_update_anchor_interval", "DTE_DELTA_ANCHOR_INTERVAL")
    encoding: str = _setting("weight_update_delta_encoding", "DTE_DELTA_ENCODING")
    verify: str = _setting("weight_update_verify", "DTE_VERIFY")
    verify_interval: int = _setting("weight_update_verify_interval", "DTE_VERIFY_INTERVAL")
    bucket_bytes: int = _setting("weight_update_bucket_bytes", "DTE_BUCKET_BYTES")
    allow_any_world_size: bool = _setting("world_size_policy", "DTE_ALLOW_ANY_WORLD_SIZE", true_for="any")
    method: str = _setting("weight_update_delta_method", "DTE_DELTA_METHOD", local=True)
    accumulate: bool = _setting("weight_update_delta_accumulate", "DTE_DELTA_ACCUMULATE", local=True)
    release_grad_buffers: bool = _setting(
        "weight_update_release_grad_buffers", "DTE_RELEASE_GRAD_BUFFERS", local=True
    )
    timeout_seconds: float = _setting("weight_update_timeout_seconds", "DTE_TIMEOUT_SECONDS", local=True)
    connect_timeout_seconds: float = _setting(
        "weight_update_connect_timeout_seconds", "DTE_CONNECT_TIMEOUT_SECONDS", local=True
    )
    secret_source: str = _setting("weight_update_secret_source", "DTE_SECRET_SOURCE", local=True)
    not_finite: str = _setting("weight_update_not_finite", "DTE_NOT_FINITE", local=True)
    transport: str = _setting("weight_update_transport", "DTE_TRANSPORT")
    disk_url: str = _setting("weight_update_disk_url", "DTE_DISK_URL")
    disk_kind: str = _setting("weight_update_disk_kind", "DTE_DISK_KIND")
    keep_anchors: int = _setting("weight_update_keep_anchors", "DTE_KEEP_ANCHORS")
    read_workers: int = _setting("weight_update_read_workers", "DTE_READ_WORKERS", local=True)

    def __post_init__(self) -> None:
        """Refuse what the settings that the fields stand for would refuse, but for the limits of counts.

        Below those an update costs more, and is right: buckets of a few hundred bytes, for one.
        """
        given = {name: getattr(self, name) for name in SETTINGS}
        counts = {name for name, kept in SETTINGS.items() if kept.annotation is int}
        require(int, "a whole number", **{name: given[name] for name in sorted(counts)})
        written = {SETTINGS[n].name: SETTINGS[n].written(given[n]) for n in SETTINGS.keys() - counts}
        TrainEngineConfig(backend="", **written)

    @classmethod
    def of(cls, train: TrainEngineConfig) -> Self:
        """What the trainer's settings say; nothing is checked here."""
        return cls(**{name: kept.means(getattr(train, kept.name)) for name, kept in SETTINGS.items()})

    def shared(self) -> dict[str, Any]:
        """The fields that must be equal on every rank, by name, with JSON values."""
        return {name: getattr(self, name) for name, kept in SETTINGS.items() if not kept.local}


SETTINGS: Mapping[str, Setting] = {part.name: part.metadata[_KEY] for part in fields(DeltaSettings)}
"""How each field of `DeltaSettings` is written elsewhere, in their order."""
