"""Import megatron-core 0.18 and later beside a torch that is built for CPUs, and on Python 3.11.

One of its modules imports Triton whatever is installed, for kernels that only a GPU runs. So does the
package of its Muon, which also takes a name from `typing` that came with Python 3.12. Those modules alone
get stand-ins, with which they can be imported; their kernels then fail when they are called. For all other
modules, those of torch among them, Triton stays absent.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import typing_extensions

# The first stands in 0.18, the second in later releases.
_MODULES = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
_PACKAGE = "emerging_optimizers"
_NO_TRITON = SimpleNamespace(
    jit=lambda kernel: kernel,
    autotune=lambda **_: lambda kernel: kernel,
    Config=dict,
    language=SimpleNamespace(constexpr=int),
)
_STAND_INS: dict[str, Any] = {"typing": typing_extensions}
if importlib.machinery.PathFinder.find_spec("triton") is None:
    _STAND_INS["triton"] = _NO_TRITON


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a module whose imports may give stand-ins."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in _MODULES and name.partition(".")[0] != _PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """Let megatron-core be imported from now on. May be called again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _import(name: str, *args: Any) -> Any:
    stand_in = _STAND_INS.get(name.partition(".")[0])
    return __import__(name, *args) if stand_in is None else stand_in
