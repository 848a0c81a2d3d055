"""The shape of the code: sizes, which module may import which, and where foreign powers are used."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator

import pytest

from tests.contract.sources import (
    PACKAGE,
    Function,
    Source,
    dotted_names,
    functions,
    imports,
    package_sources,
    sources,
    within,
)

MAX_MODULE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4

# An import goes to the same floor or a lower one. The longest matching name counts.
FLOORS = {
    "errors": 0,
    "_version": 0,
    "garbage": 0,
    "disk": 0,
    "protocol.verdict": 0,
    "settings": 0,
    "lines": 1,
    "wire": 1,
    "detection": 2,
    "trainers.view": 2,
    "engines.view": 2,
    "plan": 2,
    "presets": 2,
    "conversion": 3,
    "observe": 4,
    "protocol": 4,
    "trainers": 5,
    "engines": 5,
    "folder": 5,
    "attach": 6,
    "gateway": 6,
    "integrations": 6,
    "": 6,  # the package itself re-exports public names
    "testing": 7,  # public fakes of what stands below
    "demo": 8,  # runs on those fakes
    "cli": 9,
}
# `attach` offers adapters of frameworks that may not all be installed.
LATE_IMPORTS_ALLOWED = ("trainers", "engines", "testing", "demo", "cli", "attach", "gateway.adapters")
PURE = ("lines", "wire", "plan", "detection.adamw")
COMPILING = ("lines.compiling",)  # warns where no compiler works
IMPURE_MODULES = (
    "asyncio",
    "datetime",
    "logging",
    "os",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
)

# Who may use what. `trainers.megatron_layout` is the part of the adapter that reads Megatron's layout, and
# `trainers.fsdp_layout` that which reads FSDP2's.
MEGATRON_USERS = ("trainers.megatron", "trainers.megatron_layout", "testing")
DISTRIBUTED_USERS = ("protocol.comm", "trainers.fsdp_layout", *MEGATRON_USERS)
ENVIRONMENT_USERS = ("settings.environment", "testing")
ENVIRONMENT_NAMES = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")

UNPICKLING = (
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "torch.load",
)
PACKAGE_SOURCES = package_sources()
KNOWN_MODULES = {source.name for source in PACKAGE_SOURCES}
ALL_SHIPPED = sources(PACKAGE, "benchmarks", "examples", "scripts")


def floor_of(inner: str) -> int:
    """The floor of a module, named below the package."""
    names = [name for name in FLOORS if name and within(inner, (name,))]
    if inner and not names:
        pytest.fail(f"{inner} stands on no floor: add it to FLOORS in tests/contract/test_floors.py")
    return FLOORS[max(names, key=len, default="")]


def internal_imports(source: Source) -> set[str]:
    """Modules of the package that a module imports, named below the package."""
    found = set()
    for _, name in imports(source):
        if within(name, (PACKAGE,)):
            module = name if name in KNOWN_MODULES else name.rpartition(".")[0]
            found.add(module.partition(".")[2])
    return found


def nesting(body: list[ast.stmt]) -> int:
    """Depth of control flow; `elif` is no deeper than its `if`, and an inner function counts by itself."""
    return max((_depth(statement) for statement in body), default=0)


def _depth(node: ast.AST) -> int:
    if isinstance(node, Function | ast.ClassDef):
        return 0
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + nesting(node.body), _depth(node.orelse[0]))
    own = isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try)
    own = own or isinstance(node, ast.TryStar | ast.Match)
    inner = [_depth(child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return int(own) + max(inner, default=0)


def test_sizes() -> None:
    for source in ALL_SHIPPED:
        lines = len(source.text.splitlines())
        assert lines <= MAX_MODULE_LINES, f"{source} has {lines} lines"
        for function in functions(source):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            where = f"{source}:{function.lineno} {function.name}"
            assert length <= MAX_FUNCTION_LINES, f"{where} has {length} lines"
            depth = nesting(function.body)
            assert depth <= MAX_NESTING, f"{where} nests {depth} deep"


def test_the_nesting_rule_counts_what_it_should() -> None:
    text = """
def function():
    for a in b:
        if a:
            pass
        elif b:
            with c:
                def inner():
                    while True:
                        pass
        else:
            try:
                pass
            except ValueError:
                while d:
                    pass
"""
    function = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    assert nesting(function.body) == 4


def test_imports_go_down() -> None:
    for source in PACKAGE_SOURCES:
        own = floor_of(source.inner)
        for target in sorted(internal_imports(source)):
            assert floor_of(target) <= own, (
                f"{source} (floor {own}) imports {target} (floor {floor_of(target)})"
            )


def test_imports_have_no_cycle() -> None:
    graph = {source.inner: internal_imports(source) - {source.inner} for source in PACKAGE_SOURCES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_imports_stand_at_the_top() -> None:
    for source in PACKAGE_SOURCES:
        if within(source.inner, LATE_IMPORTS_ALLOWED):
            continue
        for function in functions(source):
            late = [
                node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            assert not late, f"{source} imports inside {function.name}, lines {late}"


def uses(source: Source, *names: str) -> Iterator[str]:
    """Where a file imports one of the dotted names, or reaches it through attributes."""
    for node, name in imports(source):
        if within(name, names):
            yield f"{source}:{node.lineno} imports {name}"
    for attribute, name in dotted_names(source):
        if within(name, names):
            yield f"{source}:{attribute.lineno} uses {name}"


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        pytest.param(("torch.distributed",), DISTRIBUTED_USERS, id="torch.distributed"),
        pytest.param(("megatron",), MEGATRON_USERS, id="megatron"),
        pytest.param(ENVIRONMENT_NAMES, ENVIRONMENT_USERS, id="os.environ"),
    ],
)
def test_foreign_powers_stay_in_their_place(names: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    others = [source for source in PACKAGE_SOURCES if not within(source.inner, allowed)]
    assert [use for source in others for use in uses(source, *names)] == []


def test_pure_modules_have_no_clock_log_or_environment() -> None:
    for source in [s for s in PACKAGE_SOURCES if within(s.inner, PURE)]:
        allowed = {"logging", "subprocess"} if within(source.inner, COMPILING) else set()
        names = [name for name in IMPURE_MODULES if name not in allowed]
        assert list(uses(source, *names, "torch.cuda.synchronize")) == []


def test_nothing_from_a_peer_is_unpickled() -> None:
    for source in PACKAGE_SOURCES:
        if within(source.inner, ("testing",)):
            continue
        assert list(uses(source, *UNPICKLING)) == []
        pickling = [
            n.attr for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and "_object" in n.attr
        ]
        assert not [name for name in pickling if name.endswith(("_object", "_object_list"))]


def test_a_missing_upstream_attribute_is_never_read_as_supported() -> None:
    for source in PACKAGE_SOURCES:
        defaults = [
            node.lineno
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if node.func.id == "getattr" and len(node.args) > 2
        ]
        assert not defaults, (
            f"{source}: getattr with a default, lines {defaults}; read the attribute, or name what is missing"
        )


MAKES_TENSORS = frozenset(
    {
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones"),
        *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
        "zeros",
    }
)
INTEGERS = frozenset({"arange", "randint", "randperm", "tril_indices", "triu_indices"})


def test_tensors_name_their_device_and_dtype() -> None:
    """A process may have other defaults, and change them between two updates."""
    found = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKES_TENSORS:
                needed = {"device"} if node.func.attr in INTEGERS else {"device", "dtype"}
                if needed - {keyword.arg for keyword in node.keywords}:
                    found.append(f"{source}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
