"""What the code says about itself, and that the pages generated from it are current."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator

import pytest
import yaml

from awex_delta import errors
from awex_delta._version import __version__
from awex_delta.settings.environment import worker_environment
from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig, resolve
from scripts.configuration_page import page
from tests.contract.sources import (
    PACKAGE,
    ROOT,
    Function,
    Source,
    package_sources,
    repository_texts,
    sources,
    within,
)

PACKAGE_SOURCES = package_sources()
ALL_SOURCES = sources(PACKAGE, "benchmarks", "examples", "scripts", "tests")

# In these rooms, whoever enters a collective says over which ranks; whoever enters none need say nothing.
RUNS_ON_RANKS = ("protocol", "folder", "trainers")
SAYS_COLLECTIVE = re.compile(r"\bCollective:? (?!no\b)")

# A comment gives a reason that stands alone. These point at something that a reader does not have.
POINTERS_ELSEWHERE = {
    "a number of a ticket": re.compile(
        r"(?<![\w&])#\d+|\b(issue|ticket|PR|pull request)s?\s*#?\d+", re.IGNORECASE
    ),
    "a date": re.compile(r"\b20\d\d-[01]\d(-[0-3]\d)?\b"),
    "a commit": re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b"),
    "unfinished work": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "an entry of a private list": re.compile(r"\b[A-F](?!16|32|64)[0-4]\d\b"),
}
# With one letter of each in brackets, so that this file does not match itself.
MACHINE_PATHS = re.compile(r"/(w[o]rk|r[o]ot|h[o]me|U[s]ers|o[p]t)/|\.\./s[h]ared")


def public_definitions(source: Source) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Public classes, functions and methods, with their dotted name inside the module."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")

    return walk(source.tree.body, "")


def documented_methods() -> dict[str, set[str]]:
    """The methods that each class of the package documents, by the name of the class."""
    found: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, list[str]] = defaultdict(list)
    for source in PACKAGE_SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, Function)]
                found[node.name] |= {one.name for one in methods if ast.get_docstring(one)}
                bases[node.name] += [base.id for base in node.bases if isinstance(base, ast.Name)]
    for name, above in bases.items():  # a base is made before what derives from it
        found[name] |= {method for base in above for method in found.get(base, ())}
    return found


def inherited_docs(source: Source, documented: dict[str, set[str]]) -> set[str]:
    """Methods, by dotted name inside the module, that a base class of the package documents."""
    return {
        f"{node.name}.{method}"
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
        for method in documented.get(base.id, ())
    }


def test_everything_public_is_documented() -> None:
    documented = documented_methods()
    for source in PACKAGE_SOURCES:
        assert ast.get_docstring(source.tree), f"{source} has no docstring"
        silent = {name for name, node in public_definitions(source) if not ast.get_docstring(node)}
        silent -= inherited_docs(source, documented)
        assert not silent, f"{source}: no docstring on {', '.join(sorted(silent))}"


def collective_names() -> set[str]:
    """Names that public functions of the package share only if each of them says that it is collective."""
    said: dict[str, set[bool]] = defaultdict(set)
    for source in PACKAGE_SOURCES:
        for _, node in public_definitions(source):
            if not isinstance(node, ast.ClassDef):
                said[node.name].add(bool(SAYS_COLLECTIVE.search(ast.get_docstring(node) or "")))
    return {name for name, answers in said.items() if answers == {True}}


def called(function: Function) -> set[str]:
    """Last names of what a function calls."""
    targets = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {
        target.attr if isinstance(target, ast.Attribute) else target.id
        for target in targets
        if isinstance(target, ast.Attribute | ast.Name)
    }


def test_functions_that_enter_a_collective_say_so() -> None:
    names = collective_names()
    assert {"agree", "exchange_counts", "gather_json", "propose"} <= names
    silent = [
        f"{source}: {name} calls {', '.join(sorted(called(node) & names))}"
        for source in PACKAGE_SOURCES
        if within(source.inner, RUNS_ON_RANKS)
        for name, node in public_definitions(source)
        if not isinstance(node, ast.ClassDef) and called(node) & names
        if not SAYS_COLLECTIVE.search(ast.get_docstring(node) or "")
    ]
    assert silent == []


def test_the_tree_of_errors_is_complete_and_right() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    (?P<lead>[│├└─ ]*)(?P<name>[A-Z]\w+)", line)
        if match is None:
            continue
        depth = len(match["lead"]) // 4
        above = [*above[:depth], match["name"]]
        drawn[match["name"]] = above[depth - 1] if depth else "Exception"
    real = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert drawn == real


def comments_and_docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of everything written for a reader rather than for Python."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def test_comments_stand_alone() -> None:
    for source in ALL_SOURCES:
        found = [
            f"{source}:{line}: {what}: {match[0]!r}"
            for line, text in comments_and_docstrings(source)
            for what, pattern in POINTERS_ELSEWHERE.items()
            if (match := pattern.search(text))
        ]
        assert found == []


@pytest.mark.parametrize(
    ("text", "flagged"),
    [
        ("see #12", True),
        ("fixed in issue 7", True),
        ("since 2024-05-01", True),
        ("as of 0c1f3ab9d", True),
        ("TODO later", True),
        ("the case of C09", True),
        ("bf16 and fp32, F32 and E4M3", False),
        ("issues two sends, facade, deadbeef", False),
        ("2**-24 of 1e-3 at version 3", False),
    ],
)
def test_the_rule_on_comments_flags_what_it_should(text: str, flagged: bool) -> None:
    assert any(pattern.search(text) for pattern in POINTERS_ELSEWHERE.values()) is flagged


def test_no_file_names_a_path_of_one_machine() -> None:
    for path in repository_texts():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [f"{n}: {line}" for n, line in enumerate(lines, 1) if MACHINE_PATHS.search(line)] == []


def test_the_example_on_the_configuration_page_resolves() -> None:
    match = re.search(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert match is not None
    data = yaml.safe_load(match[1])
    resolved = resolve(TrainEngineConfig.load(data["train"]), RolloutConfig.load(data["rollout"]))
    assert resolved.settings.enabled
    for variable in worker_environment(resolved):
        assert f"`{variable}`" in page()


def test_the_configuration_page_lists_every_variable() -> None:
    settings = ROOT / "awex_delta" / "settings"
    source = "".join(
        (settings / name).read_text(encoding="utf-8") for name in ("agreed.py", "environment.py")
    )
    assert set(re.findall(r"^\| `(DTE_\w+)`", page(), re.MULTILINE)) == set(
        re.findall(r'"(DTE_\w+)"', source)
    )


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert headings[0] == __version__
    assert len(set(headings)) == len(headings)


def test_dependencies_come_from_a_package_index() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    assert [text for group in groups for text in group if re.search(r"[@/]", text)] == []


def test_the_entry_point_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["awex-delta"].partition(":")
    assert callable(vars(importlib.import_module(module))[name])
