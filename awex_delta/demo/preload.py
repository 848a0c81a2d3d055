"""Imported once by the demo's fork server, so that its processes start with everything loaded."""

import importlib
import warnings

with warnings.catch_warnings():
    # The demo needs neither Transformer Engine nor Apex; Megatron says in many modules that they are missing.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
    importlib.import_module("awex_delta.demo.members")
