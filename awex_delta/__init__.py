"""Keep inference engines bit-identical to a Megatron trainer by sending only what an AdamW step changed.

Names are loaded when they are first used, so that importing the package has no effect and costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from awex_delta._version import __version__

if TYPE_CHECKING:
    from awex_delta.attach import (
        attach_megatron,
        attach_megatron_disk,
        attach_transformers,
        attach_transformers_disk,
    )
    from awex_delta.config import RolloutConfig, TrainEngineConfig, resolve
    from awex_delta.environment import (
        scrub_worker_environment,
        settings_from_environment,
        worker_environment,
    )
    from awex_delta.errors import (
        AwexDeltaError,
        ConfigError,
        ConnectError,
        LockstepError,
        PeerError,
        UpdateAborted,
        UpdateError,
    )
    from awex_delta.receiver import Receiver
    from awex_delta.rendezvous import Rendezvous, host_store
    from awex_delta.runlog.reader import read_run
    from awex_delta.runlog.writer import RunLog
    from awex_delta.sender import Sender
    from awex_delta.targets import Targets, TargetsUpdate
    from awex_delta.trainers.ema import EmaShadow
    from awex_delta.transports.disk.reader import DiskReader
    from awex_delta.transports.disk.writer import DiskWriter
    from awex_delta.types import DeltaSettings, EngineTensor, EngineView, TrainerView, UpdateStats
    from awex_delta.verdict import Kind, Reason, Verdict

_HOMES = {
    "attach": (
        *("attach_megatron", "attach_megatron_disk"),
        *("attach_transformers", "attach_transformers_disk"),
    ),
    "config": ("RolloutConfig", "TrainEngineConfig", "resolve"),
    "environment": ("scrub_worker_environment", "settings_from_environment", "worker_environment"),
    "errors": (
        *("AwexDeltaError", "ConfigError", "ConnectError"),
        *("LockstepError", "PeerError", "UpdateAborted", "UpdateError"),
    ),
    "runlog.reader": ("read_run",),
    "receiver": ("Receiver",),
    "rendezvous": ("Rendezvous", "host_store"),
    "runlog.writer": ("RunLog",),
    "sender": ("Sender",),
    "targets": ("Targets", "TargetsUpdate"),
    "transports.disk.reader": ("DiskReader",),
    "transports.disk.writer": ("DiskWriter",),
    "trainers.ema": ("EmaShadow",),
    "types": (*("DeltaSettings", "EngineTensor", "EngineView", "TrainerView", "UpdateStats"),),
    "verdict": ("Kind", "Reason", "Verdict"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AwexDeltaError",
    "ConfigError",
    "ConnectError",
    "DeltaSettings",
    "DiskReader",
    "DiskWriter",
    "EmaShadow",
    "EngineTensor",
    "EngineView",
    "Kind",
    "LockstepError",
    "PeerError",
    "Reason",
    "Receiver",
    "Rendezvous",
    "RolloutConfig",
    "RunLog",
    "Sender",
    "Targets",
    "TargetsUpdate",
    "TrainEngineConfig",
    "TrainerView",
    "UpdateAborted",
    "UpdateError",
    "UpdateStats",
    "Verdict",
    "__version__",
    "attach_megatron",
    "attach_megatron_disk",
    "attach_transformers",
    "attach_transformers_disk",
    "host_store",
    "read_run",
    "resolve",
    "scrub_worker_environment",
    "settings_from_environment",
    "worker_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
