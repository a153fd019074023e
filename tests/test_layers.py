"""The layers: imports point in one direction and form no cycle."""

import ast
import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent

# From the bottom up; a module imports from its own line and from the lines before.
LAYERS = [
    {"kernel"},
    {
        "errors",
        "files",
        "formatting",
        "devices",
        "randomness",
        "checksum",
        "messages",
        "redaction",
        "version",
    },
    {"transport"},
    {"native"},
    {"comm"},
    {"launcher"},
    {"elastic"},
    {"data"},
    {"record"},
    {"model"},
    {"data_parallel"},
    {"pipeline"},
    {"checkpoint"},
    {"training"},
    {"check"},
    {"remote"},
    {"report"},
    {"recipes", "bench"},
    {"replay"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def name_of(path: Path) -> str:
    """Return the name of the module in a file."""
    parts = ("lockstep", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement or call imports; "*" stands for any name."""
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
        name = function.id if isinstance(function, ast.Name) else function
        if name in ("import_module", "__import__"):
            argument = node.args[0]
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in parts)


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """Return the modules that a source imports, also inside functions and TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for name in imported_names(node):
            if "*" in name and name.startswith("lockstep."):
                found |= {each for each in modules if fnmatchcase(each, name)}
            elif name in modules:
                found.add(name)
    return found


@functools.cache
def imports_of(module: str) -> set[str]:
    """Return what a module imports; read when it is asked for, not when tests are collected."""
    return imported_modules(MODULES[module].read_text(), {*MODULES})


def package_of(module: str) -> str:
    return module.split(".")[1]


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle of a graph; an empty list if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    own = package_of(module)
    assert own in LEVEL, f"{own} has no place in the layers"
    packages = {package_of(each) for each in imports_of(module)}
    above = {name for name in packages if LEVEL[name] > LEVEL[own]}
    assert not above, f"{own} imports {above} from above"


def test_modules_import_each_other_in_no_cycle():
    # A module imports its own package's __init__ by being imported; those are empty.
    assert not find_cycle({name: imports_of(name) - {name} for name in MODULES})


def test_packages_import_each_other_in_no_cycle():
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        own, found = package_of(module), imports_of(module)
        graph.setdefault(own, set()).update({package_of(each) for each in found} - {own})
    assert not find_cycle(graph)


def test_every_kind_of_import_is_found():
    source = """
from typing import TYPE_CHECKING
import importlib
if TYPE_CHECKING:
    from lockstep.a import x
def later(name):
    import lockstep.b
    importlib.import_module("lockstep.c")
    importlib.import_module(f"lockstep.d.{name}")
    from lockstep import e
"""
    modules = {f"lockstep.{name}" for name in ("a", "b", "c", "d.one", "d.two", "e", "f")}
    assert imported_modules(source, modules) == modules - {"lockstep.f"}
    assert find_cycle({"a": {"b"}, "b": {"a"}})


def count_docstring_lines(tree: ast.AST) -> int:
    """Return how many lines the docstrings take, also those under an assignment."""
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    texts = (
        each.value
        for body in bodies
        if isinstance(body, list)
        for each in body
        if isinstance(each, ast.Expr)
    )
    return sum(
        each.end_lineno - each.lineno + 1 for each in texts if isinstance(each, ast.Constant)
    )


def test_no_file_is_longer_than_500_lines_without_its_docstrings():
    """A file is as long as its one idea; past this length it almost certainly holds two."""
    long = {}
    for path in FILES:
        source = path.read_text()
        count = len(source.splitlines()) - count_docstring_lines(ast.parse(source))
        if count > 500:
            long[str(path.relative_to(SOURCE))] = count
    assert not long


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_the_package_itself(module):
    # The package's names lead back up, to all of its modules.
    names = {
        alias.name
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "lockstep" not in names
