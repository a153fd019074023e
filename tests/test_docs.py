"""The pages: links lead somewhere, commands and their options exist, code runs.

Code in a page runs in order, in one program with the page's line numbers:

    ```python                           runs, in the namespace of the blocks before it
    ```python title="train.py"          a complete script: runs on two ranks, and alone as well
                                        if it prints a digest; the page shows the same digest
    <!-- setup CODE -->                 runs, and is not shown
    <!-- not run: REASON -->            the block after it is only compiled
    <!-- ranks: 2 -->                   at the top of a page: its program runs on that many ranks

Of ```console blocks, indented ones, and `lockstep ...` in the text, commands are parsed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import warm
from lockstep.cli import cli
from lockstep.comm import backend

ROOT = Path(__file__).parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "benchmarks/*.md", ".github/**/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
HISTORY = {"LOG.md", "CHANGELOG.md"}  # of options that were renamed since
LAUNCH = [*warm.LOCKSTEP, "run"]


@dataclass
class Page:
    """What a page asks to be run: its program, with its own line numbers, and its scripts."""

    path: Path
    program: list[str] = field(default_factory=list)
    scripts: list[tuple[str, str]] = field(default_factory=list)
    compiled: list[tuple[int, str]] = field(default_factory=list)
    ranks: int = 1


@cache
def tokens(path: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(path.read_text())


def read_page(path: Path) -> Page:
    page = Page(path)
    text = path.read_text()
    page.program = [""] * len(text.splitlines())
    if "```python" not in text:
        return page
    is_run = True
    for token in tokens(path):
        begin = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            directive = re.fullmatch(r"<!-- (\w+(?: \w+)*)(.*)-->\s*", token.content, re.DOTALL)
            name, rest = directive.groups() if directive else ("", "")
            if name == "setup":
                place(page, begin, rest.strip("\n"))
            elif name == "not run":
                assert rest.strip(": \n"), f"{path}:{begin}: say why the block is not run"
                is_run = False
            elif name == "ranks":
                page.ranks = int(rest.strip(": "))
        elif token.type == "fence" and token.info.split(" ")[0] == "python":
            title = re.search(r'title="([^"]+\.py)"', token.info)
            if not is_run:
                page.compiled.append((begin, token.content))
            elif title:
                page.scripts.append((title[1], token.content))
            else:
                place(page, begin, token.content)
            is_run = True
    return page


def place(page: Page, line: int, code: str) -> None:
    """Put code at its lines of the program; a block inside a list is indented in the page."""
    lines = code.splitlines()
    page.program[line : line + len(lines)] = lines


READ = {str(path.relative_to(ROOT)): read_page(path) for path in PAGES}
PROGRAMS = [name for name, page in READ.items() if any(page.program)]
SCRIPTS = [(name, number) for name, page in READ.items() for number in range(len(page.scripts))]


def run(arguments: list[str], folder: Path) -> str:
    with warm.Popen(
        arguments, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    return str(printed)


@pytest.mark.parametrize("name", PROGRAMS)
def test_code_of_a_page_runs(name, tmp_path):
    page = READ[name]
    for line, code in page.compiled:
        compile("\n" * line + code, name, "exec")
    source = "\n".join(page.program)
    program = f"exec(compile({source!r}, {name!r}, 'exec'))"
    if page.ranks == 1:
        run([sys.executable, "-c", program], tmp_path)
    else:
        (tmp_path / "page.py").write_text(program)
        run([*LAUNCH, "-n", str(page.ranks), "page.py"], tmp_path)


@pytest.mark.parametrize(("name", "number"), SCRIPTS)
def test_script_of_a_page_runs_on_two_ranks_and_has_the_digest_of_one(name, number, tmp_path):
    file, source = READ[name].scripts[number]
    (tmp_path / file).write_text(source)
    alone = [sys.executable, "-c", f"import runpy; runpy.run_path({file!r}, None, '__main__')"]
    digests = list_digests(run([*LAUNCH, "-n", "2", file], tmp_path))
    if digests:
        assert list_digests(run(alone, tmp_path)) == digests
        shown = READ[name].path.read_text()
        if f"\n$ python {file}\n" in shown and backend.available():  # so bits are portable
            assert digests <= list_digests(shown)


def list_digests(printed: str) -> set[str]:
    return {*re.findall(r"\b[0-9a-f]{64}\b", printed)}


@pytest.mark.parametrize("name", READ)
def test_links_lead_somewhere(name):
    """Those between pages of the site, and to their headings, are also checked by `make docs`."""
    for target in re.findall(r"\]\(([^)\s]+)", READ[name].path.read_text()):
        path = target.partition("#")[0]
        if path and not re.match(r"https?://|mailto:", target):
            assert ((ROOT / name).parent / path).exists(), target


def commands(path: Path) -> Iterator[str]:
    """Return the commands of a page that begin with `lockstep`."""
    for token in tokens(path):
        if token.type in ("code_block", "fence"):
            lines = token.content.replace("\\\n", " ").splitlines()
            yield from (line.strip().removeprefix("$ ") for line in lines)
        for child in token.children or []:
            if child.type == "code_inline":
                yield child.content


@pytest.mark.parametrize("name", [name for name in READ if name not in HISTORY])
def test_commands_exist_with_their_options(name):
    for command in commands(READ[name].path):
        if not re.match(r"lockstep [a-z]+(?: |$)", command) or "..." in command:
            continue
        words = shlex.split(command.partition(" #")[0].partition("  ")[0], posix=True)[1:]
        words = words[: next((i for i, word in enumerate(words) if word in "|>&"), len(words))]
        context = click.Context(cli, info_name="lockstep")
        found = cli.get_command(context, words[0])
        assert found is not None, command
        while isinstance(found, click.Group) and len(words) > 1:
            inner = found.get_command(context, words[1])
            if inner is None:
                break
            found = inner
            words = words[1:]
        try:
            settings = click.Context(found, info_name=words[0], **found.context_settings)
            found.make_parser(settings).parse_args(words[1:])
        except click.UsageError as error:
            pytest.fail(f"{command}: {error.format_message()}")


def test_code_is_not_hidden_from_these_tests():
    """Markdown reads what is indented (in a tab, or an admonition) as text without a language."""
    for name, page in READ.items():
        for token in tokens(page.path):
            if token.type == "code_block":
                assert "```" not in token.content, f"{name}:{token.map[0] + 1}"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted(pages)
