"""The environment of worker processes, through which a launcher hands them the settings.

No other module reads the process environment, and nothing in the package writes it: `worker_environment`
returns what a launcher must set.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from typing import Any, get_args

from awex_delta.errors import ConfigError
from awex_delta.settings.agreed import SETTINGS, DeltaSettings, Setting
from awex_delta.settings.arguments import require
from awex_delta.settings.resolve import ResolvedDelta
from awex_delta.settings.schema import TrainEngineConfig

_DEFAULTS = DeltaSettings()
_TRANSFER = SETTINGS["enabled"].variable
_SECRET_SOURCE = SETTINGS["secret_source"].variable

# What a worker must have said whenever deltas are on.
_ALWAYS = (
    # Trainer and engine workers are separate processes that form one group for updates.
    "DTE_SEPARATION_WEIGHT_UPDATE",
    # Changes are found slice by slice; a reconstructed copy of all old weights is never held.
    "DTE_STREAMING_RECONSTRUCT",
    # After the first full sync, updates carry only what changed.
    _TRANSFER,
)
_VARIABLES = (*_ALWAYS, *(setting.variable for setting in SETTINGS.values()))
_FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "true", "True"), True),
    **dict.fromkeys(("0", "false", "False", ""), False),
}


def worker_environment(resolved: ResolvedDelta) -> dict[str, str]:
    """The variables that a launcher must set for every trainer and engine worker: all of them, always.

    So nothing that a worker inherits changes what it reads: `os.environ | worker_environment(resolved)`, or
    `scrub_worker_environment() | worker_environment(resolved)`. `settings_from_environment` rebuilds the same
    settings from them.
    """
    require(ResolvedDelta, "what resolve() returned", resolved=resolved)
    settings = resolved.settings
    every = {setting.variable: str(getattr(settings, field)) for field, setting in SETTINGS.items()}
    return every | dict.fromkeys(_ALWAYS, str(int(settings.enabled)))


def scrub_worker_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Copy an environment, by default this process's, without the package's variables.

    So inherited ones mean nothing.
    """
    source = _environ(environ)
    return {name: value for name, value in source.items() if name not in _VARIABLES}


def variable(name: str) -> str | None:
    """One variable of this process, which a setting names; None if it is not set."""
    return os.environ.get(name)


def settings_from_environment(environ: Mapping[str, str] | None = None) -> DeltaSettings:
    """Read what `worker_environment` wrote for this worker, by default from this process's environment.

    Without `DTE_DELTA_TRANSFER` deltas are off, and of the other variables only that of the secret is read.

    Raises:
        ConfigError: a value cannot be read, the set is incomplete, or a name looks like a misspelling of
            one of ours. Other names that begin with `DTE_` are left alone.
    """
    source = _environ(environ)
    _refuse_misspelled(source)
    if not _flag(source, _TRANSFER):
        return DeltaSettings(enabled=False, secret_source=source.get(_SECRET_SOURCE, ""))
    for variable in _ALWAYS:
        if not _flag(source, variable):
            raise _refused(source, variable, f"it must be on while {_TRANSFER} is")
    values: dict[str, Any] = {}
    for field, setting in SETTINGS.items():
        if field == "anchor_interval" or setting.variable in source:
            values[field] = _value(source, setting, getattr(_DEFAULTS, field))
    return DeltaSettings(**values)


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    require((Mapping, type(None)), "a mapping of names to texts, or None", environ=environ)
    return os.environ if environ is None else environ


def _flag(source: Mapping[str, str], variable: str) -> bool:
    value = source.get(variable, "")
    if value not in _FLAGS:
        raise _refused(source, variable, "a flag is one of 1, true, True, 0, false, False, or empty")
    return _FLAGS[value]


def _count(source: Mapping[str, str], variable: str) -> int:
    value = source.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,10}", value):
        raise _refused(source, variable, "it must be a whole number of 0 or more")
    return int(value)


def _value(source: Mapping[str, str], setting: Setting, default: object) -> object:
    """Read a variable as the type of its field's default."""
    variable = setting.variable
    if isinstance(default, bool):
        return _flag(source, variable)
    if isinstance(default, int):
        return _count(source, variable)
    if isinstance(default, float):
        return _seconds(source, variable)
    choices = get_args(TrainEngineConfig.model_fields[setting.name].annotation)
    if choices and source[variable] not in choices:
        raise _refused(source, variable, f"it must be one of {', '.join(choices)}")
    return source[variable]


def _seconds(source: Mapping[str, str], variable: str) -> float:
    try:
        seconds = float(source[variable])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise _refused(source, variable, "it must be a positive number of seconds")
    return seconds


def _refused(source: Mapping[str, str], variable: str, why: str) -> ConfigError:
    value = repr(source[variable]) if variable in source else "not set"
    return ConfigError(
        f"environment variable {variable} is {value}: {why}. Remedy: start workers with exactly what "
        f"worker_environment() returns, or set {_TRANSFER}=0"
    )


def _refuse_misspelled(source: Mapping[str, str]) -> None:
    """A name of ours with a letter wrong would otherwise be ignored on this side only."""
    for name in source:
        if name in _VARIABLES or not name.upper().startswith("DTE_"):
            continue
        close = difflib.get_close_matches(name.upper(), _VARIABLES, n=1, cutoff=0.9)
        if close:
            raise ConfigError(
                f"environment variable {name} is not known. Remedy: rename it to {close[0]}, or unset it"
            )
