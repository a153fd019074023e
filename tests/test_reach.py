"""Reach: what the kernel and the modules of a step import, directly or not.

A chain of imports in a message shows which one to cut: import a value or a protocol instead of the
module that holds the machinery, or pass it in.
"""

import ast
import sys

import pytest

from dev.house import (
    EXACT,
    LIMITS,
    SLACK,
    STEP,
    TRAINER,
    House,
    count_code_lines,
    count_nodes,
    find_exceeded,
    find_joined_assignments,
    find_packed_assignments,
    measure_classes,
)

HOUSE = House()
KERNEL = {module for module in HOUSE.sources if module.split(".")[0] == "kernel"}


def test_the_kernel_reaches_only_itself():
    beyond = HOUSE.find_closure(KERNEL) - KERNEL
    assert not beyond, [HOUSE.find_path(start, end) for start in KERNEL for end in beyond]


@pytest.mark.parametrize("module", sorted(KERNEL))
def test_the_kernel_imports_torch_and_the_standard_library_only(module):
    names = {
        (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
        for node in ast.walk(ast.parse(HOUSE.sources[module]))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names <= {"torch", "lockstep", *sys.stdlib_module_names}


def test_the_specification_uses_nothing_else_of_lockstep():
    assert HOUSE.find_closure(["kernel.spec"]) == {"kernel.spec"}
    assert [name for name in HOUSE.sources if "kernel.spec" in HOUSE.imports[name]] == []


@pytest.mark.parametrize(
    ("name", "modules"), [("step", STEP), ("ls.exact", EXACT), ("trainer", TRAINER)]
)
def test_the_reach_of_each_engine_is_limited(name, modules):
    reached = HOUSE.find_closure(modules)
    assert len(reached) <= LIMITS[f"{name}: modules reached"] * SLACK, sorted(reached)
    most = LIMITS.get(f"{name}: nodes reached", LIMITS["nodes in src"])
    assert sum(HOUSE.nodes[module] for module in reached) <= most * SLACK


def test_a_limit_that_is_exceeded_is_named():
    assert find_exceeded({"folders": LIMITS["folders"]}) == []
    (sentence,) = find_exceeded({"folders": 99})
    assert sentence.startswith("folders: 99")


def test_the_size_does_not_depend_on_how_a_statement_is_laid_out():
    assert count_nodes("x = [1, 2]") == count_nodes("x = [\n    1,\n    2,\n]\n# two\n")


def test_a_tuple_that_packs_two_assignments_is_found():
    source = "a, b = 1, 2\na, b = b, a\na, b = pair\na = 1, 2\na[0], b.c = b.c, a[0]\n"
    assert find_packed_assignments(source) == [1]
    assert find_packed_assignments("pair = a, b = b, 1\n(a, b), c = pair, b\n") == [1, 2]
    assert HOUSE.find_lines(find_packed_assignments) == []


def test_a_chained_or_starred_assignment_to_an_attribute_or_an_item_is_found():
    joined = ["self.a = b = 1", "a.b = c, d = e", "*a, self.b = c", "a = b[c] = d"]
    plain = ["a = b = 1", "*a, b = c", "self.a, self.b = c", "a[(*b, c)] = d", "self.a = 1"]
    assert find_joined_assignments("\n".join([*joined, *plain])) == [1, 2, 3, 4]
    assert HOUSE.find_lines(find_joined_assignments) == []


def test_a_large_class_says_why():
    attributes = "".join(f"    a{number}: int\n" for number in range(16))
    comments = {"": False, "# An aside.\n": False, "# It has many attributes: one\n# each.\n": True}
    for comment, has_reason in comments.items():
        (size,) = measure_classes(f"x = 1\n\n\n{comment}@final\nclass A:\n{attributes}")
        assert (size.is_large, size.has_reason) == (True, has_reason)


def test_what_a_class_inherits_counts_once():
    source = (
        "class A:\n    x: int\n    def f(self): self.y = 1\nclass B(A):\n    def f(self): ...\n"
    )
    sizes = {size.name: size for size in measure_classes(source)}
    whole = sizes["B"].inherit(sizes)
    assert (whole.methods, whole.attributes) == ({"f"}, {"x", "y"})


def test_a_public_class_name_that_occurs_twice_is_counted(tmp_path):
    package = tmp_path / "src/lockstep"
    package.mkdir(parents=True)
    for name in ("a", "b"):
        (package / f"{name}.py").write_text(f"class Twice: ...\nclass _Own: ...\nclass {name}: ...")
    assert House(tmp_path).list_repeated_names() == ([], ["Twice"])


def test_docstrings_comments_and_blank_lines_are_no_code():
    lines = ['"""A module."""', "", "x = (", "1)  # two lines", "", "def f():", '    "Do it."']
    source = "\n".join([*lines, "    # here", "    return 1"])
    assert count_code_lines(source) == 4
