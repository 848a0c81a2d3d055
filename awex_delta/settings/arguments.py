"""Arguments of a wrong type, refused by name before anything is made of them."""

from __future__ import annotations

import reprlib
from typing import Any

from awex_delta.errors import ConfigError

_SHOWN = reprlib.Repr()  # a value may be a whole model
_SHOWN.maxother = _SHOWN.maxstring = 80


def require(kind: type | tuple[type, ...], remedy: str, **given: Any) -> None:
    """Refuse an argument that is no `kind`. True and False are no numbers.

    Args:
        kind: a class or several; a runtime-checkable protocol counts as one.
        remedy: what to give instead, after "give".
        given: the arguments, by name.

    Raises:
        ConfigError: names the argument, its value and its type.
    """
    for name, value in given.items():
        is_flag_for_number = isinstance(value, bool) and kind in (int, float)
        if is_flag_for_number or not isinstance(value, kind):
            said = _SHOWN.repr(value).partition("\n")[0]
            raise ConfigError(f"{name} = {said} is a {type(value).__name__}. Remedy: give {remedy}")
