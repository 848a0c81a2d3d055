"""What users may rely on, as literals: a change here is a decision, and has a line in the changelog."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from pydantic import BaseModel

import awex_delta
from awex_delta import errors
from awex_delta.settings.resolve import RolloutConfig, SchedulingStrategy, TrainEngineConfig
from tests.contract.sources import PACKAGE, ROOT, package_sources

PUBLIC_NAMES = {
    "__version__",
    *("attach_fsdp", "attach_fsdp_disk"),
    *("attach_megatron_disk", "attach_transformers_disk", "DiskReader", "DiskWriter"),
    *("attach_megatron", "attach_transformers", "Sender", "Receiver", "Rendezvous", "host_store"),
    *("RunLog", "read_run"),
    *("Targets", "TargetsUpdate", "EmaShadow"),
    *("TrainEngineConfig", "RolloutConfig", "resolve", "worker_environment"),
    *("scrub_worker_environment", "settings_from_environment"),
    *("TrainerView", "EngineView", "EngineTensor"),
    *("DeltaSettings", "UpdateStats", "Verdict", "Kind", "Reason"),
    *("PartCount", "SglangDriver", "VllmDriver", "TorchAdamWTrainer"),
    *(name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)),
}

TRAIN_SETTINGS = {
    "backend": None,
    "version": "v2",
    "weight_update_mode": "awex",
    "enable_delta_weight_update": False,
    "weight_update_delta_method": "adamw",
    "weight_update_anchor_interval": 20,
    "weight_update_delta_encoding": "indices",
    "weight_update_delta_accumulate": False,
    "weight_update_verify": "touched",
    "weight_update_verify_interval": 0,
    "weight_update_bucket_bytes": 64 << 20,
    "world_size_policy": "power_of_two",
    "weight_update_timeout_seconds": 300.0,
    "weight_update_connect_timeout_seconds": 300.0,
    "weight_update_release_grad_buffers": False,
    "weight_update_secret_source": "",
    "weight_update_transport": "p2p",
    "weight_update_disk_url": "",
    "weight_update_disk_kind": "delta",
    "weight_update_keep_anchors": 2,
    "weight_update_not_finite": "warn",
    "weight_update_read_workers": 4,
    "use_lora": False,
    "ppo_n_minibatches": 1,
}
ROLLOUT_SETTINGS = {"backend": None, "version": "v2", "scheduling_strategy": SchedulingStrategy()}
STRATEGY_SETTINGS = {"type": "separation", "target": None}

# Packages that a user may lack, and the modules that exist for them alone.
OPTIONAL_PACKAGES = (
    *("apex", "matplotlib", "numba", "ray", "sglang", "transformer_engine", "verl", "vllm"),
    *("fastapi", "httpx", "prometheus_client", "uvicorn"),
)
NEED_AN_OPTIONAL_PACKAGE = (
    "awex_delta.engines.sglang.adapter",
    "awex_delta.engines.vllm.adapter",
    "awex_delta.engines.vllm.backend",
    "awex_delta.engines.vllm.proof",
    "awex_delta.gateway",
    *(f"awex_delta.integrations.verl.{name}" for name in ("backend", "engines", "rollout")),
    "awex_delta.observe.report.figures",
    "awex_delta.observe.report.page",
    "awex_delta.observe.report.svg",
    "awex_delta.wire.walk",
)


def test_public_names() -> None:
    assert set(vars(awex_delta).get("__all__", ())) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(awex_delta, name) is not None


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (TrainEngineConfig, TRAIN_SETTINGS),
        (RolloutConfig, ROLLOUT_SETTINGS),
        (SchedulingStrategy, STRATEGY_SETTINGS),
    ],
)
def test_settings_and_their_defaults(model: type[BaseModel], settings: dict[str, object]) -> None:
    defaults = {n: None if f.is_required() else f.default for n, f in model.model_fields.items()}
    assert defaults == settings


@pytest.mark.parametrize("model", [TrainEngineConfig, RolloutConfig, SchedulingStrategy])
def test_settings_are_frozen_strict_and_documented(model: type[BaseModel]) -> None:
    assert model.model_config.get("frozen")
    assert model.model_config.get("strict")
    assert model.model_config.get("extra") == "forbid"
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name} has no documentation under it"


def test_records_are_frozen_slotted_and_keyword_only() -> None:
    for source in package_sources():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                call = decorator if isinstance(decorator, ast.Call) else None
                name = call.func if call is not None else decorator
                if isinstance(name, ast.Name) and name.id == "dataclass":
                    given = {k.arg for k in call.keywords if _is_true(k.value)} if call is not None else set()
                    assert {"frozen", "slots", "kw_only"} <= given, f"{source}:{node.lineno} {node.name}"


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def run_python(code: str) -> None:
    """Run code in a new interpreter, which must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


IMPORT_WITHOUT_EFFECT = """
import logging, os, signal, sys, threading, warnings
import pydantic, torch, typer

def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    return {
        "environment": dict(os.environ),
        "logging": [(logger.name, logger.level, list(logger.handlers)) for logger in loggers
                    if logger.handlers or logger.level],
        "threads": [thread.name for thread in threading.enumerate()],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "warnings": list(warnings.filters),
        "cuda": torch.cuda.is_initialized(),
        "default dtype": torch.get_default_dtype(),
        "torch threads": torch.get_num_threads(),
        "path": list(sys.path),
    }

before, loaded = state(), set(sys.modules)
import awex_delta
after = state()
assert before == after, {key: (before[key], after[key]) for key in before if before[key] != after[key]}
assert not after["cuda"]
heavy = {"awex", "megatron", "transformers", "vllm", "sglang", "aiohttp"}
new = {name.partition(".")[0] for name in set(sys.modules) - loaded}
assert not heavy & new, heavy & new
"""


def test_importing_the_package_has_no_effect() -> None:
    run_python(IMPORT_WITHOUT_EFFECT)


IMPORT_WITHOUT_OPTIONAL_PACKAGES = f"""
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL_PACKAGES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
# A trainer under FSDP2 needs Megatron for `import awex` alone.
importlib.import_module({PACKAGE + ".trainers.fsdp"!r})
assert not [name for name in sys.modules if name.partition(".")[0] in ("awex", "megatron")]
package = importlib.import_module({PACKAGE!r})
for module in pkgutil.walk_packages(package.__path__, {PACKAGE + "."!r}):
    if module.name not in {NEED_AN_OPTIONAL_PACKAGE!r}:
        importlib.import_module(module.name)
"""


@pytest.mark.timeout(180)
def test_optional_packages_are_optional() -> None:
    run_python(IMPORT_WITHOUT_OPTIONAL_PACKAGES)
