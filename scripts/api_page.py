"""docs/en/api.md: every public name with its module, its signature and its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum

from pydantic import BaseModel

import awex_delta

HEAD = """# API

Every public name, importable from `awex_delta`, with the module that it lives in. The page is made from the
docstrings (`make docs`). Settings have [their own page](configuration.md), and so have
[reasons and exceptions](reasons.md).
"""


def page() -> str:
    """The whole page."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": []}
    for name in sorted(awex_delta.__all__, key=str.lower):
        value = getattr(awex_delta, name)
        if not inspect.isclass(value):
            if callable(value):
                kinds["Functions"].append(_entry(name, value))
        elif issubclass(value, Exception):
            kinds["Exceptions"].append(_entry(name, value, signature=False))
        else:
            kinds["Classes"].append(_entry(name, value) + "".join(_members(value)))
    parts = [f"## {kind}\n\n" + "\n".join(entries) for kind, entries in kinds.items()]
    return HEAD + "\n" + "\n".join(parts)


def _entry(name: str, value: object, *, signature: bool = True) -> str:
    module = getattr(value, "__module__", "")
    shown = f"```text\n{name}{_signature(value)}\n```\n\n" if signature else ""
    return f"### {name}\n\n`{module}.{name}`\n\n{shown}{_text(value)}\n"


def _members(value: type) -> Iterator[str]:
    """The public methods and properties of a class, as far as this package defines them; not of records."""
    if issubclass(value, Enum | BaseModel):
        return
    if is_dataclass(value):
        rows = [f"* `{field.name}`: `{field.type}`" for field in fields(value)]
        yield "\nFields:\n\n" + "\n".join(rows) + "\n"
    own = [base for base in reversed(value.__mro__) if base.__module__.startswith("awex_delta.")]
    members = {name: member for base in own for name, member in vars(base).items()}
    for name, member in members.items():
        if name.startswith("_") or not (callable(member) or isinstance(member, property | classmethod)):
            continue
        function = getattr(member, "__func__", member)
        signature = "" if isinstance(member, property) else _signature(function)
        yield f"\n```text\n{value.__name__}.{name}{signature}\n```\n\n{_text(member)}\n"


def _signature(value: object) -> str:
    if inspect.isclass(value) and issubclass(value, Enum | BaseModel):
        return ""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    kept = [one for one in signature.parameters.values() if one.name != "self"]
    shown = str(signature.replace(parameters=kept)).replace("awex_delta.", "")
    shown = re.sub(r"<function (\w+) at 0x\w+>", r"\1", shown)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", shown)  # annotations are kept as text


def _text(value: object) -> str:
    """A docstring: its words as they are, its sections and examples as blocks."""
    doc = inspect.getdoc(value)
    if not doc:
        return ""
    head, *rest = doc.split("\n\n", 1)
    return head + (f"\n\n```text\n{rest[0]}\n```" if rest else "")
