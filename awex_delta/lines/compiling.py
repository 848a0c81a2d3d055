"""Expressions over tensors, compiled if a compiler works on this machine."""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

WORTH_COMPILING = 1 << 24
"""Compiling takes seconds, once in a process: fewer elements than this never earn them back."""

SHORTEST_COMPILED = 1 << 12
"""A compiled call has its price, too: for fewer elements than this, eager is as fast. And torch would compile
once more for each of the sizes 0 and 1."""

_COMPILER_FAILURES = (RuntimeError, OSError, ImportError, subprocess.SubprocessError)

_log = logging.getLogger(__name__)


def compiled_or_none(
    function: Callable[..., Any],
    calls: Iterable[tuple[torch.Tensor | None, ...]],
    *,
    what: str,
    options: Mapping[str, str | int | bool | Callable[..., object]] | None = None,
    **fixed: object,
) -> Callable[..., Any] | None:
    """Compile a function for tensors of all sizes, now; None, with a warning, if that fails.

    Args:
        function: given each of `calls` once, so that no later call waits for the compiler.
        calls: positional arguments, one tuple for each compilation. The tensors are distinct, as later: if
            one stood for several arguments, torch would compile for just that.
        what: begins the warning, such as "state digests run".
        options: of `torch.compile`.
        fixed: arguments by name, the same in every call.
    """
    try:
        compiled = torch.compile(function, dynamic=True, options=None if options is None else dict(options))
        faster = functools.partial(compiled, **fixed)
        for arguments in calls:
            faster(*arguments)
    except _COMPILER_FAILURES as error:
        cause = str(error).partition("\n")[0]
        _log.warning("%s uncompiled, several times slower: %s", what, cause)
        return None
    return faster
