"""The layers: imports point in one direction and form no cycle."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from dev.house import House, find_imported_modules

# From the bottom up; a module imports from its own line and from the lines before.
LAYERS = [
    {"kernel"},
    {
        "call_checks",
        "errors",
        "files",
        "foreign_messages",
        "formatting",
        "devices",
        "checksum",
        "compiled_wrapper",
        "malloc",
        "messages",
        "processor_core",
        "name_conflict",
        "redaction",
        "sharded_tensors",
        "user_code",
        "version",
    },
    {"comm"},
    {"portable"},
    {"launcher"},
    {"elastic"},
    {"data"},
    {"record"},
    {"model"},
    {"data_parallel"},
    {"pipeline"},
    {"audit"},
    {"checkpoint"},
    {"training.one_pass"},
    {"training"},
    {"integrations"},
    # Tools: nothing above this line imports them.
    {"tools", "tools.check"},
    {"tools.plan"},
    {"tools.remote"},
    {"tools.report"},
    {"tools.recipes", "tools.bench"},
    {"tools.replay"},
    {"tools.commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


HOUSE = House()


def package_of(module: str) -> str:
    first, *others = module.split(".")
    inner = f"{first}.{others[0]}" if others else first
    return inner if first == "tools" or inner in LEVEL else first


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle of a graph; an empty list if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("module", HOUSE.sources)
def test_imports_point_one_way(module):
    own = package_of(module)
    assert own in LEVEL, f"{own} has no place in the layers"
    packages = {package_of(imported) for imported in HOUSE.imports[module]}
    above = {name for name in packages if LEVEL[name] > LEVEL[own]}
    assert not above, f"{own} imports {above} from above"


def test_modules_import_each_other_in_no_cycle():
    assert not find_cycle(HOUSE.imports)


def test_packages_import_each_other_in_no_cycle():
    graph: dict[str, set[str]] = {}
    for module, imported in HOUSE.imports.items():
        own = package_of(module)
        graph.setdefault(own, set()).update({package_of(name) for name in imported} - {own})
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
    assert find_imported_modules(source, modules) == modules - {"lockstep.f"}
    assert find_cycle({"a": {"b"}, "b": {"a"}})


def test_no_file_is_larger_than_one_idea():
    """A file is as long as its one idea; past this length it almost certainly holds two."""
    assert not {module: nodes for module, nodes in HOUSE.nodes.items() if nodes > 4_050}


@pytest.mark.parametrize("module", HOUSE.sources)
def test_no_module_imports_the_package_itself(module):
    # The package's names lead back up, to all of its modules.
    names = {
        alias.name
        for node in ast.walk(ast.parse(HOUSE.sources[module]))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "lockstep" not in names
