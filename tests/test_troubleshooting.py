"""The page of error messages quotes them as they are printed, and that of hangs their reports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from markdown_it import MarkdownIt

import warm

ROOT = Path(__file__).parent.parent
MESSAGES = ROOT / "docs" / "reference" / "troubleshooting.md"
HANGS = ROOT / "docs" / "guides" / "hangs.md"
SOURCES = ("src/lockstep/**/*.py", "pytest-lockstep/src/**/*.py")
CORE = ("src/lockstep/csrc/**/*.cpp", "src/lockstep/csrc/**/*.h")
LAUNCH = warm.LOCKSTEP
ANYTHING = "\0"  # a value that a message contains
MARK = "*Printed by "  # begins the paragraph below a message that is not ours


# --- headings are messages --------------------------------------------------------------------


@cache
def python_texts() -> tuple[str, ...]:
    """Return every message of the sources, with `ANYTHING` for values of f-strings."""
    return tuple(
        text
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
        if path.name != "foreign_messages.py"
        for text in strings(ast.parse(path.read_text()))
    )


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else ANYTHING
                for part in node.values
            )


@cache
def core_texts() -> tuple[str, ...]:
    """Return the strings of each C++ file, those of one statement joined with `ANYTHING`."""
    found = []
    for pattern in CORE:
        for path in ROOT.glob(pattern):
            for statement in re.split(r"[;{}]\s*\n", path.read_text()):
                found.append(ANYTHING.join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', statement)))
    return tuple(found)


def occurs(quoted: str, text: str) -> bool:
    """Return whether the parts of a message between "..." occur in a text, in this order."""
    at = 0
    for part in quoted.split("..."):
        at = text.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


def is_example(quoted: str, text: str) -> bool:
    """Return whether a message is a clause of a text, with words of its own for its values."""
    return any(pattern.fullmatch(quoted) for pattern in clauses(text))


@cache
def clauses(text: str) -> tuple[re.Pattern[str], ...]:
    """Return a pattern for each clause of a text that has more than three words."""
    return tuple(
        re.compile(".+".join(map(re.escape, clause.split(ANYTHING))), re.DOTALL)
        for clause in re.split(r"[;:] ", text)
        if len(clause.replace(ANYTHING, " ").split()) > 3
    )


def headings() -> list[tuple[str, bool]]:
    """Return the messages of the page, and whether each is one of ours."""
    tokens = MarkdownIt().parse(MESSAGES.read_text())
    found = []
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h3":
            below = next(
                tokens[n + 1]
                for n in range(number, len(tokens))
                if tokens[n].type == "paragraph_open"
            )
            messages = [
                child.content
                for child in tokens[number + 1].children or []
                if child.type == "code_inline"
            ]
            assert messages, tokens[number + 1].content
            is_ours = not below.content.startswith(MARK)
            found += [(message, is_ours) for message in messages]
    return found


@pytest.mark.parametrize("message", [text for text, is_ours in headings() if is_ours])
def test_a_message_of_the_page_is_in_the_sources(message):
    texts = (*python_texts(), *core_texts())
    assert any(occurs(message, text) for text in texts) or any(
        is_example(message, text) for text in texts
    )


def test_messages_of_others_are_marked():
    """They are not looked up in the sources, so the mark must be true."""
    for message, is_ours in headings():
        if not is_ours:
            assert not any(occurs(message, text) for text in python_texts()), message


def test_no_message_is_listed_twice():
    messages = [message for message, _ in headings()]
    assert len(messages) == len(set(messages))


# --- reports of hangs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A script of the page, the options that it is run with, and what that prints."""

    file: str
    source: str
    options: tuple[str, ...]
    output: str


def examples() -> list[Example]:
    found = []
    script = None
    for token in MarkdownIt().parse(HANGS.read_text()):
        if token.type != "fence":
            continue
        if title := re.search(r'python title="([^"]+)"', token.info):
            script = (title[1], token.content)
        elif script and token.info == "console":
            command, _, output = token.content.partition("\n")
            words = command.removeprefix("$ ").split()
            assert words[0] == "lockstep", command
            assert words[-1] == script[0], command
            found.append(Example(*script, tuple(words[1:]), output))
            script = None
    return found


def normalize(output: str) -> str:
    """Return a report without what differs from run to run, on one line."""
    output = re.sub(
        r"\n    (?!torch/)\S+:\d+ in \S+", "", output
    )  # what starts a program in a test
    output = re.sub(r"process \d+|-CONT \d+", "process N", output)
    output = re.sub(r"(?<=-)\d{4}-\d\d-\d\d-\d{4}(-\d+)?", "DATE", output)
    output = re.sub(r"\d+ s\b", "T s", output)
    output = re.sub(r"(?<=torch/)(\S+):\d+", r"\1:N", output)
    return " ".join(output.split())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """Return what each script of the page has printed; three run at a time, as most only wait."""

    def run(example: Example) -> CompletedProcess[str]:
        folder = tmp_path_factory.mktemp(Path(example.file).stem)
        (folder / example.file).write_text(example.source)
        return warm.run([*LAUNCH, *example.options], cwd=folder, timeout=60, text=True)

    with ThreadPoolExecutor(3) as pool:
        return dict(zip([each.file for each in examples()], pool.map(run, examples()), strict=True))


@pytest.mark.parametrize("example", examples(), ids=lambda each: each.file)
def test_a_script_of_the_page_gets_the_report_of_the_page(example, reports):
    done = reports[example.file]
    printed = normalize(done.stdout + done.stderr)
    assert done.returncode == 1
    for part in example.output.split("\n..."):
        assert normalize(part) in printed
