"""The layers: imports point one way, so that each can be read without the ones above."""

import ast
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent

# From the bottom up; a module imports from its own line and from the lines before.
LAYERS = [
    {"errors", "files", "formatting", "randomness", "checksum", "messages", "redaction"},
    {"comm"},
    {"launcher"},
    {"data"},
    {"record"},
    {"model", "data_parallel"},
    {"pipeline"},
    {"check"},
    {"training"},
    {"remote"},
    {"report"},
    {"recipes", "bench"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the packages of lockstep that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("lockstep.")]
    return {part[1] for part in parts if part[1] in LEVEL}


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    own = package_of(path)
    assert own in LEVEL, f"{own} has no place in the layers"
    above = {name for name in imported(path) if LEVEL[name] > LEVEL[own]}
    assert not above, f"{own} imports {above} from above"


def test_no_file_is_longer_than_600_lines():
    """A file is as long as its one idea; past this length it almost certainly holds two."""
    long = {
        str(path.relative_to(SOURCE)): count
        for path in FILES
        if (count := len(path.read_text().splitlines())) > 600
    }
    assert not long
