"""Keep inference engines bit-identical to a Megatron or FSDP2 trainer by sending only what a step changed.

Names are loaded when they are first used, so that importing the package has no effect and costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from awex_delta._version import __version__

if TYPE_CHECKING:
    from awex_delta.attach import (
        attach_fsdp,
        attach_fsdp_disk,
        attach_megatron,
        attach_megatron_disk,
        attach_transformers,
        attach_transformers_disk,
    )
    from awex_delta.engines.sglang.driver import SglangDriver
    from awex_delta.engines.view import EngineTensor, EngineView
    from awex_delta.engines.vllm.driver import VllmDriver
    from awex_delta.errors import (
        AwexDeltaError,
        ChainError,
        ConfigError,
        ConnectError,
        CorruptFrameError,
        DiskError,
        DriftError,
        FrameOrderError,
        LayoutError,
        LockstepError,
        MissingFrameError,
        NumericsError,
        OwnershipError,
        PeerError,
        RepeatedFrameError,
        StaleFrameError,
        UnsupportedError,
        UpdateAborted,
        UpdateError,
        VerificationError,
        WeightsAwayError,
        WireError,
    )
    from awex_delta.folder.reader import DiskReader
    from awex_delta.folder.writer import DiskWriter
    from awex_delta.observe.runlog.reader import read_run
    from awex_delta.observe.runlog.writer import RunLog
    from awex_delta.protocol.receiver import Receiver
    from awex_delta.protocol.rendezvous import Rendezvous, host_store
    from awex_delta.protocol.sender import Sender
    from awex_delta.protocol.stats import PartCount, UpdateStats
    from awex_delta.protocol.targets import Targets, TargetsUpdate
    from awex_delta.protocol.verdict import Kind, Reason, Verdict
    from awex_delta.settings.agreed import DeltaSettings
    from awex_delta.settings.environment import (
        scrub_worker_environment,
        settings_from_environment,
        worker_environment,
    )
    from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig, resolve
    from awex_delta.trainers.ema import EmaShadow
    from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
    from awex_delta.trainers.view import TrainerView

_HOMES = {
    "attach": (
        *("attach_fsdp", "attach_fsdp_disk"),
        *("attach_megatron", "attach_megatron_disk"),
        *("attach_transformers", "attach_transformers_disk"),
    ),
    "engines.sglang.driver": ("SglangDriver",),
    "engines.view": ("EngineTensor", "EngineView"),
    "engines.vllm.driver": ("VllmDriver",),
    "errors": (
        *("AwexDeltaError", "ChainError", "ConfigError", "ConnectError", "CorruptFrameError"),
        *("DiskError", "DriftError", "FrameOrderError", "LayoutError", "LockstepError"),
        *("MissingFrameError", "NumericsError", "OwnershipError", "PeerError", "RepeatedFrameError"),
        *("StaleFrameError", "UnsupportedError", "UpdateAborted", "UpdateError", "VerificationError"),
        *("WeightsAwayError", "WireError"),
    ),
    "folder.reader": ("DiskReader",),
    "folder.writer": ("DiskWriter",),
    "observe.runlog.reader": ("read_run",),
    "observe.runlog.writer": ("RunLog",),
    "protocol.receiver": ("Receiver",),
    "protocol.rendezvous": ("Rendezvous", "host_store"),
    "protocol.sender": ("Sender",),
    "protocol.stats": ("PartCount", "UpdateStats"),
    "protocol.targets": ("Targets", "TargetsUpdate"),
    "protocol.verdict": ("Kind", "Reason", "Verdict"),
    "settings.agreed": ("DeltaSettings",),
    "settings.environment": (
        *("scrub_worker_environment", "settings_from_environment", "worker_environment"),
    ),
    "settings.resolve": ("RolloutConfig", "TrainEngineConfig", "resolve"),
    "trainers.ema": ("EmaShadow",),
    "trainers.torch_adamw": ("TorchAdamWTrainer",),
    "trainers.view": ("TrainerView",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AwexDeltaError",
    "ChainError",
    "ConfigError",
    "ConnectError",
    "CorruptFrameError",
    "DeltaSettings",
    "DiskError",
    "DiskReader",
    "DiskWriter",
    "DriftError",
    "EmaShadow",
    "EngineTensor",
    "EngineView",
    "FrameOrderError",
    "Kind",
    "LayoutError",
    "LockstepError",
    "MissingFrameError",
    "NumericsError",
    "OwnershipError",
    "PartCount",
    "PeerError",
    "Reason",
    "Receiver",
    "Rendezvous",
    "RepeatedFrameError",
    "RolloutConfig",
    "RunLog",
    "Sender",
    "SglangDriver",
    "StaleFrameError",
    "Targets",
    "TargetsUpdate",
    "TorchAdamWTrainer",
    "TrainEngineConfig",
    "TrainerView",
    "UnsupportedError",
    "UpdateAborted",
    "UpdateError",
    "UpdateStats",
    "Verdict",
    "VerificationError",
    "VllmDriver",
    "WeightsAwayError",
    "WireError",
    "__version__",
    "attach_fsdp",
    "attach_fsdp_disk",
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
