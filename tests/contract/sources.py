"""The source files of this repository, parsed, for the contract tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "awex_delta"
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ".json"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One parsed Python file. name: dotted module name, such as `awex_delta.wire.codec`."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def inner(self) -> str:
        """The name below the package: `wire.codec`, or empty for the package itself."""
        return self.name.partition(".")[2]

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def sources(*folders: str) -> list[Source]:
    """All Python files under the folders of the repository, in a stable order."""
    return [_read(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def package_sources() -> list[Source]:
    """All modules of the package."""
    return sources(PACKAGE)


def repository_texts() -> list[Path]:
    """All text files that a reader of the repository sees."""
    folders = [PACKAGE, "tests", "docs", "benchmarks", "examples", "scripts", ".ci"]
    nested = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    top = [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != "LICENSE"]
    named = {"Makefile", "run", ".gitattributes", ".gitignore"}
    return [p for p in [*top, *nested] if p.is_file() and (p.suffix in TEXT_SUFFIXES or p.name in named)]


def _read(path: Path) -> Source:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Source(path=path, name=name, text=text, tree=ast.parse(text))


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement anywhere in the file, with each module that it may name.

    `from a import b` yields `a.b`, because `b` may be a module.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def dotted_names(source: Source) -> Iterator[tuple[ast.Attribute, str]]:
    """Every attribute access that is a plain chain of names, such as `os.environ`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            yield node, name


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def functions(source: Source) -> Iterator[Function]:
    """Every function and method in the file, nested ones included."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """True when the dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
