"""Imported once by the server from which processes fork, so that they start with what ranks usually need."""

import importlib
import warnings
from contextlib import suppress

_NEEDED = (
    "awex_delta.testing.tidy",
    "awex_delta.testing.procs",
    "awex_delta.testing.tiny_models",
    "awex_delta.trainers.fsdp",
    "awex_delta.trainers.megatron",
    "awex_delta.protocol.sender",
    "awex_delta.protocol.receiver",
    "awex_delta.engines.fused",
    "awex_delta.engines.transformers",
)

with warnings.catch_warnings():
    # Neither Transformer Engine nor Apex is needed; Megatron says in many modules that they are missing.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
    for _name in _NEEDED:
        with suppress(ImportError):  # a framework that is not installed; who needs it will say so
            importlib.import_module(_name)
