"""What pages and docstrings name in backticks exists: paths, modules, classes and their methods.

`src/lockstep/kernel/step.py`, `kernel/step.py`     a file or folder of the repository
`step_hooks.py`                                     of this name, in the project's own pages
`lockstep.kernel.tree`, `ls.Trainer.step(batch)`    a module, or an attribute of one
`trainer.step`, `exact.batches(...)`                a method of `ls.Trainer`, or of the handle
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

import lockstep as ls
from lockstep.training.script_loop.exact import Exact

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/lockstep"
HISTORY = {"LOG.md", "CHANGELOG.md"}  # of files that are gone
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
    if path.name not in HISTORY
)
FOLDERS = ("src/lockstep", "pytest-lockstep/src", "tests", "benchmarks", "dev", "examples")
OF_THE_PROJECT = ("docs/project/", "docs/concepts/kernel.md", "CONTRIBUTING.md")
OF_FRAMEWORKS = re.compile("lightning|huggingface|transformers|integrations|frameworks")
ENDING = re.compile(r"\.(py|cpp|h|inc|md|svg)$|/$")
HANDLES = {"trainer": ls.Trainer, "exact": Exact}
FOREIGN = {
    "tests/unittests/bases/test_ddp.py",  # of torchmetrics
    "lockstep.comm._native",  # compiled by `lockstep build`
}
EXAMPLES = {"train.py", "script.py", "job.py", "a.py", "mine.py"}  # a user's


def folders() -> set[str]:
    own = {"src", "tests", "docs", "benchmarks", "examples", "dev", "pytest-lockstep"}
    return own | {path.name for path in PACKAGE.iterdir() if path.is_dir()}


@cache
def file_names() -> set[str]:
    tops = ("src", "tests", "docs", "benchmarks", "examples", "dev", "pytest-lockstep")
    return {path.name for top in tops for path in (ROOT / top).rglob("*.*")}


def quoted(path: Path) -> Iterator[str]:
    """Yield what a page, or the docstring of a module, has in backticks."""
    text = path.read_text()
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
        yield from re.findall(r"`([^`\n]+)`", docstring)
        return
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or []:
            if child.type == "code_inline":
                yield child.content


def find_missing(text: str, path: Path) -> str | None:
    """Return why what a text names does not exist; None if it does, or names nothing of ours."""
    name = path.relative_to(ROOT).as_posix()
    if text in FOREIGN:
        return None
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", text):
        first = text.partition("/")[0]
        if first in folders() and (ENDING.search(text) or (ROOT / first).is_dir()):
            places = (ROOT, PACKAGE, path.parent)
            return None if any((place / text).exists() for place in places) else "no such file"
    if re.fullmatch(r"\w+\.(py|cpp|h|inc)", text):
        is_own = path.suffix == ".py" or name.startswith(OF_THE_PROJECT)
        return "no such file" if is_own and text not in file_names() | EXAMPLES else None
    match = re.fullmatch(r"(\w+)((?:\.[a-z_]\w*|\.[A-Z]\w*)+)(\(.*\))?", text)
    if match is None:
        return None
    first = match[1]
    rest = match[2][1:].split(".")
    if first == "lockstep":
        return resolve(rest)
    if first == "ls":
        return find_attribute(ls, rest)
    if first in ls.__all__ and first[0].isupper():
        return find_attribute(ls, [first, *rest])
    if first in HANDLES and not OF_FRAMEWORKS.search(name):
        return find_attribute(HANDLES[first], rest[:1])
    return None


def resolve(names: list[str]) -> str | None:
    """Import the longest module, and look for the rest in it."""
    value: Any = ls
    for number in range(len(names), 0, -1):
        try:
            value = importlib.import_module(".".join(["lockstep", *names[:number]]))
        except ModuleNotFoundError:
            continue
        return find_attribute(value, names[number:])
    return find_attribute(value, names)


def find_attribute(value: Any, names: list[str]) -> str | None:
    for name in names:
        if hasattr(value, name):
            value = getattr(value, name)
        elif not (inspect.isclass(value) and is_set(value, name)):
            return f"{getattr(value, '__name__', value)} has no {name}"
        else:
            return None
    return None


def is_set(kind: type, name: str) -> bool:
    """Return whether instances have an attribute: a field, or one that a method sets."""
    fields = {key for base in kind.__mro__ for key in getattr(base, "__annotations__", {})}
    sources = [inspect.getsource(base) for base in kind.__mro__ if base.__module__[:4] == "lock"]
    pattern = rf"self\.{name}\b|^        {name}: "
    return name in fields or any(re.search(pattern, source, re.MULTILINE) for source in sources)


def list_missing(path: Path) -> dict[str, str]:
    reasons = {text: find_missing(text, path) for text in quoted(path)}
    return {text: why for text, why in reasons.items() if why is not None}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_names_exists(path):
    assert not list_missing(path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_docstrings_of_modules_name_exists(folder):
    paths = (ROOT / folder).rglob("*.py")
    assert not {path: missing for path in paths if (missing := list_missing(path))}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("src/lockstep/replay", "no such file"),
        ("training/exact_step.py", "no such file"),
        ("host_messages.py", "no such file"),
        ("lockstep.training.exact_step", "lockstep.training has no exact_step"),
        ("lockstep.kernel.tree.TreeAccumulator.sink", "TreeAccumulator has no sink"),
        ("ls.Trainer.train(batch)", "Trainer has no train"),
        ("CheckpointConfig.interval", "CheckpointConfig has no interval"),
        ("exact.collect", "Exact has no collect"),
        ("kernel/step.py", None),
        ("ls.Trainer.model", None),
        ("CheckpointConfig.every_steps", None),
        ("exact.batches(dataset, 8)", None),
        ("runs/mine/record.jsonl", None),
        ("torch.optim.SGD", None),
    ],
)
def test_a_stale_name_is_found(text, why):
    assert find_missing(text, ROOT / "docs/project/architecture.md") == why
