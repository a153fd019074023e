"""Measures the code base, and checks the limits that keep it readable.

    python dev/house.py [--check]

The size of Python code is the number of its syntax nodes, as `ast.walk` yields them, so nothing is
gained by packing a line. Imports are followed, also those in functions, under TYPE_CHECKING and
through importlib. A *closure* is everything that some modules import, directly or not: what a
reader of these modules may have to know. With `--check`, the exit status is 1 if a limit is
exceeded by more than `SLACK`; `make check` runs it, and tests/test_reach.py asserts the reach.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LIMITS = {
    "folders": 15,
    "nodes in src": 475_000,
    "nodes in tests": 582_000,
    "code lines in csrc": 13_400,
    "nodes per code line": 8.95,
    "tuple-to-tuple assignments": 0,
    "joined assignments to attributes": 0,
    "imports per module": 5.05,
    "kernel: nodes": 20_400,
    "kernel: modules reached": 0,
    "step: modules reached": 63,
    "step: nodes reached": 59_000,
    "ls.exact: modules reached": 98,
    "ls.exact: nodes reached": 99_000,
    "trainer: modules reached": 276,
    "large classes without a reason": 0,
    "repeated public class names": 0,
}
"""The largest values. A limit that would cost users something is raised: the commit says why."""

SLACK = 1.02
"""The largest ratio of a value to its limit, so that nobody counts the last nodes."""

STEP = ("kernel.step", "training.whole_model", "training.microbatch_loop")
"""The modules that compute a step."""

EXACT = ("training.script_loop.exact",)
"""The module of `ls.exact`."""

TRAINER = ("training.trainer",)
"""The module of the trainer."""

CHECKED = ("src", "pytest-lockstep", "dev", "tests", "benchmarks", "examples")
"""The folders whose assignments are checked."""

METHODS = 25
ATTRIBUTES = 15
"""A class with more, its own or inherited, has a comment before it that begins with `REASON`."""

REASON = "# It has many "

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_code_lines(source: str) -> int:
    """Return the number of lines with code in a Python source."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def count_nodes(source: str) -> int:
    """Return the number of syntax nodes of a Python source."""
    return sum(1 for _ in ast.walk(ast.parse(source)))


def find_packed_assignments(source: str) -> list[int]:
    """Return the lines that assign a tuple to a tuple, unless they exchange values."""
    packed = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        given = sorted(map(ast.unparse, node.value.elts))
        for target in node.targets:
            if isinstance(target, ast.Tuple) and sorted(map(ast.unparse, target.elts)) != given:
                packed.append(node.lineno)
    return packed


def find_joined_assignments(source: str) -> list[int]:
    """Return the lines whose assignment to an attribute or an item is chained or starred."""
    joined = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign):
            continue
        parts = [part for target in node.targets for part in ast.walk(target)]
        stored = {type(part) for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)}
        if stored & {ast.Attribute, ast.Subscript}:
            joined += [node.lineno] * (len(node.targets) > 1 or ast.Starred in stored)
    return joined


def count_cpp_lines(source: str) -> int:
    """Return the number of lines of a C++ source that are neither blank nor a comment."""
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    lines = (line.strip() for line in source.splitlines())
    return sum(bool(line) and not line.startswith("//") for line in lines)


def list_imported_names(node: ast.AST) -> Iterator[str]:
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


def find_imported_modules(source: str, modules: Iterable[str]) -> set[str]:
    """Return which of some modules a source imports, also inside functions and TYPE_CHECKING."""
    known = set(modules)
    imported = set[str]()
    for node in ast.walk(ast.parse(source)):
        for name in list_imported_names(node):
            if "*" in name and name.startswith("lockstep."):
                imported |= {module for module in known if fnmatchcase(module, name)}
            elif name in known:
                imported.add(name)
    return imported


@dataclass(frozen=True)
class ClassSize:
    """The methods of a class, and the attributes that it declares or assigns."""

    name: str
    bases: tuple[str, ...]
    methods: frozenset[str]
    attributes: frozenset[str]
    has_reason: bool

    @property
    def is_large(self) -> bool:
        """Whether it has more methods or attributes than a class should have."""
        return len(self.methods) > METHODS or len(self.attributes) > ATTRIBUTES

    def inherit(self, classes: Mapping[str, ClassSize]) -> ClassSize:
        """Return the class with what it inherits from others; what it overrides counts once."""
        bases = [classes[name].inherit(classes) for name in self.bases if name in classes]
        return replace(
            self,
            methods=self.methods.union(*(base.methods for base in bases)),
            attributes=self.attributes.union(*(base.attributes for base in bases)),
        )


def measure_classes(source: str) -> Iterator[ClassSize]:
    """Yield the size of every class of a source."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        attributes = {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        attributes |= {
            part.attr
            for method in methods
            for part in ast.walk(method)
            if isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        }
        first = node.decorator_list[0].lineno - 1 if node.decorator_list else node.lineno - 1
        while first > 0 and lines[first - 1].startswith("#"):
            first -= 1
        has_reason = lines[first].startswith(REASON)
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        yield ClassSize(
            node.name,
            tuple(base.id for base in bases if isinstance(base, ast.Name) and base.id != node.name),
            frozenset(method.name for method in methods),
            frozenset(attributes),
            has_reason,
        )


class House:
    """The sources of a clone.

    Attributes:
        sources: The source of each module of the package, by its name without "lockstep.".
        statements: The sources whose assignments are checked, by their paths.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._package = root / "src/lockstep"
        paths = {self._name(path): path for path in sorted(self._package.rglob("*.py"))}
        self.sources = {name: path.read_text() for name, path in paths.items() if name}
        self.statements = {
            str(path.relative_to(root)): path.read_text()
            for folder in CHECKED
            for path in sorted((root / folder).rglob("*.py"))
        }

    def _name(self, path: Path) -> str:
        name = ".".join(path.relative_to(self._package).with_suffix("").parts)
        return name.removesuffix("__init__").removesuffix(".")

    @cached_property
    def nodes(self) -> dict[str, int]:
        """The number of syntax nodes of each module."""
        return {name: count_nodes(source) for name, source in self.sources.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules that each module imports; the package of a module does not count."""
        full = {f"lockstep.{name}": name for name in self.sources}
        return {
            name: {full[found] for found in find_imported_modules(source, full)} - {name}
            for name, source in self.sources.items()
        }

    def find_closure(self, modules: Iterable[str]) -> set[str]:
        """Return some modules and all that they import, directly or not."""
        reached = set[str]()
        waiting = list(modules)
        while waiting:
            if (module := waiting.pop()) not in reached:
                reached.add(module)
                waiting += self.imports[module]
        return reached

    def find_path(self, start: str, end: str) -> list[str]:
        """Return a shortest chain of imports between two modules; empty if there is none."""
        before: dict[str, str] = {start: ""}
        waiting = [start]
        for module in waiting:
            for imported in sorted(self.imports[module] - before.keys()):
                before[imported] = module
                waiting.append(imported)
        chain = [end] if end in before else []
        while chain and chain[0] != start:
            chain.insert(0, before[chain[0]])
        return chain

    def measure(self) -> dict[str, float]:
        """Return what `LIMITS` limits."""
        kernel = {name for name in self.sources if name.split(".")[0] == "kernel"}
        step = self.find_closure(STEP)
        exact = self.find_closure(EXACT)
        tests = (self._root / "tests").rglob("*.py")
        cpp = [path for end in ("cpp", "h", "inc") for path in self._package.rglob(f"*.{end}")]
        edges = sum(len(imported) for imported in self.imports.values())
        nodes = sum(self.nodes.values())
        lines = sum(map(count_code_lines, self.sources.values()))
        return {
            "folders": sum((path / "__init__.py").exists() for path in self._package.iterdir()),
            "nodes in src": nodes,
            "nodes in tests": sum(count_nodes(path.read_text()) for path in tests),
            "code lines in csrc": sum(count_cpp_lines(path.read_text()) for path in cpp),
            "nodes per code line": round(nodes / lines, 2),
            "tuple-to-tuple assignments": len(self.find_lines(find_packed_assignments)),
            "joined assignments to attributes": len(self.find_lines(find_joined_assignments)),
            "imports per module": round(edges / len(self.imports), 2),
            "kernel: nodes": sum(self.nodes[name] for name in kernel),
            "kernel: modules reached": len(self.find_closure(kernel) - kernel),
            "step: modules reached": len(step),
            "step: nodes reached": sum(self.nodes[name] for name in step),
            "ls.exact: modules reached": len(exact),
            "ls.exact: nodes reached": sum(self.nodes[name] for name in exact),
            "trainer: modules reached": len(self.find_closure(TRAINER)),
            "large classes without a reason": sum(
                size.is_large and not size.has_reason for _, size in self.list_classes()
            ),
            "repeated public class names": len(self.list_repeated_names()[1]),
        }

    def find_lines(self, find: Callable[[str], list[int]]) -> list[str]:
        """Return the lines that a function finds in the checked sources, as "path:line"."""
        return [
            f"{path}:{line}" for path, source in self.statements.items() for line in find(source)
        ]

    def list_repeated_names(self) -> tuple[list[str], list[str]]:
        """Return the names of files and of public classes that occur more than once."""
        files = Counter(name.split(".")[-1] for name in self.sources if "." in name)
        names = [size.name for _, size in self.list_classes()]
        classes = Counter(name for name in names if not name.startswith("_"))
        return (
            sorted(name for name, count in files.items() if count > 1),
            sorted(name for name, count in classes.items() if count > 1),
        )

    def list_classes(self) -> list[tuple[str, ClassSize]]:
        """Return the classes with what they inherit and their modules, the largest first."""
        sizes = [
            (module, size)
            for module, source in self.sources.items()
            for size in measure_classes(source)
        ]
        known = {size.name: size for _, size in sizes}
        whole = [(module, size.inherit(known)) for module, size in sizes]
        return sorted(whole, key=lambda pair: -len(pair[1].methods) - len(pair[1].attributes))


def find_exceeded(measured: Mapping[str, float]) -> list[str]:
    """Return a sentence for each value that exceeds its limit and the slack."""
    return [
        f"{name}: {value:g}, and the limit is {LIMITS[name]:g}"
        for name, value in measured.items()
        if value > LIMITS[name] * SLACK
    ]


def main(arguments: list[str]) -> int:
    """Print the measurements; return 1 if a limit is exceeded and `--check` is given."""
    house = House()
    measured = house.measure()
    exceeded = find_exceeded(measured)
    if "--check" in arguments:
        print("\n".join(exceeded), end="\n" if exceeded else "", file=sys.stderr)
        return bool(exceeded)
    for name, value in measured.items():
        print(f"{name:34}{value:10,}   limit {LIMITS[name]:,}")
    packages = Counter[str]()
    for module, nodes in house.nodes.items():
        packages[module.split(".")[0]] += nodes
    print("\nnodes:", ", ".join(f"{name} {nodes:,}" for name, nodes in packages.most_common()))
    for module, size in house.list_classes():
        if not size.is_large:
            continue
        note = "" if size.has_reason else ", without a reason"
        methods = len(size.methods)
        attributes = len(size.attributes)
        print(f"{module}.{size.name}: {methods} methods, {attributes} attributes{note}")
    print("tuple-to-tuple assignments:", ", ".join(house.find_lines(find_packed_assignments)))
    print("joined assignments:", ", ".join(house.find_lines(find_joined_assignments)))
    files, classes = house.list_repeated_names()
    print(f"repeated file names: {', '.join(files)}\nrepeated class names: {', '.join(classes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
