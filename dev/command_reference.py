"""Writes docs/reference/commands.md from the help of the commands.

    click group ──> render ──> the text between two markers of the page

    python dev/command_reference.py

The rest of the page is written by hand. A test fails while the page differs from the help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from lockstep.cli import cli

__all__ = ["PAGE", "render", "update"]

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/commands.md"
BEGIN = "<!-- begin of the text that dev/command_reference.py writes -->"
END = "<!-- end of that text -->"

EXIT_STATUS = "Exit status: "
DEFAULT = re.compile(
    r"(?:\s*\[default(?P<a> [^:\]]+)?: (?P<b>.*?)\]"
    r"|(?:(?<=\. )|^)Default(?P<c> [^:]+)?: (?P<d>.*)\.)$"
)
OPTION = r"--?[a-zA-Z][\w-]*(?:[ =](?:[A-Z]{2,}|[A-Z]|\d+)\b)?"
CODE = re.compile(
    rf"(?<![\w`/-])(?:{OPTION}(?: {OPTION})*"
    r"|(?:~|\$\w+)?/?(?:[\w.*]+/)+[\w.*-]*\w"  # a path
    r"|\$?[A-Z]{2,}(?:_[A-Z]+)+(?:=\w+)?)"  # an environment variable
)
LITERAL = re.compile(r"[\w,.-]*\d[\w,.-]*|[A-Z]+|[a-z]+/\w+")  # a default that is a value
METAVARS = {"INTEGER": "N", "FLOAT": "X", "TEXT": "TEXT", "PATH": "FILE"}


def render(group: click.Group, name: str) -> str:
    """Return the reference of the commands of a group as Markdown."""
    context = click.Context(group, info_name=name)
    sections = [_table_of_commands(group, context)]
    for command in group.list_commands(context):
        sections += _describe(_get_context(group, command, context))
    return "\n\n".join(sections)


def update(page: str, text: str) -> str:
    """Return a page with the text between its markers replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def _get_context(group: click.Group, name: str, parent: click.Context) -> click.Context:
    command = group.get_command(parent, name)
    assert command is not None, name
    return click.Context(command, parent=parent, info_name=name)


def _table_of_commands(group: click.Group, context: click.Context) -> str:
    rows = []
    for name in group.list_commands(context):
        command = _get_context(group, name, context)
        path = command.command_path
        shown = f"[`{path}`](#{_anchor(path)})" if context.parent is None else f"`{path}`"
        rows.append((shown, _code(_paragraphs(command)[0], _arguments(command))))
    return _table(("command", "purpose"), rows)


def _describe(context: click.Context) -> Iterator[str]:
    """Yield the section of a command: its usage, help and options, or its subcommands."""
    yield f"## {context.command_path} {{: #{_anchor(context.command_path)} }}"
    if not isinstance(context.command, click.Group):
        yield _usage(context)
        yield from _describe_help(context, _paragraphs(context))
        yield from _table_of_options([context])
        return
    yield from _describe_help(context, _paragraphs(context))
    yield _table_of_commands(context.command, context)
    names = context.command.list_commands(context)
    inner = [_get_context(context.command, name, context) for name in names]
    for details, alike in groupby(inner, lambda each: _paragraphs(each)[1:]):
        found = list(alike)
        title = found[0].command_path if len(found) == 1 else f"{context.command_path} COLLECTIVE"
        yield f"### {title} {{: #{_anchor(title)} }}"
        yield _usage(found[0], title)
        yield from _describe_help(found[0], details)
        yield from _table_of_options(found)


def _anchor(path: str) -> str:
    return path.replace(" ", "-").lower()


def _usage(context: click.Context, path: str = "") -> str:
    pieces = context.command.collect_usage_pieces(context)
    return f"```console\n$ {' '.join([path or context.command_path, *pieces])}\n```"


def _paragraphs(context: click.Context) -> list[str]:
    text = re.split(r"\n\s*\n", (context.command.help or "").strip())
    return [" ".join(paragraph.split()) for paragraph in text]


def _arguments(context: click.Context) -> list[str]:
    """Return the names of the arguments as in the usage line, without brackets."""
    return [
        word
        for parameter in context.command.params
        if isinstance(parameter, click.Argument)
        for word in re.findall(r"[A-Z_]+", parameter.metavar or (parameter.name or "").upper())
    ]


def _describe_help(context: click.Context, paragraphs: Sequence[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        if paragraph.startswith(EXIT_STATUS):
            yield _list_statuses(paragraph.removeprefix(EXIT_STATUS).rstrip("."))
        else:
            yield _code(paragraph, _arguments(context))


def _list_statuses(text: str) -> str:
    """Return a list of exit statuses; `text` is "0 success, 1 a rank failed"."""
    found = (each.split(" ", 1) for each in re.split(r"[,;] (?=\d)", text))
    rows = (f"- `{status}`: {_code(meaning)}" for status, meaning in found)
    return "\n".join(["Exit status:", "", *rows])


def _table_of_options(contexts: Sequence[click.Context]) -> Iterator[str]:
    """Yield the table of all options of some commands; it says which commands lack an option."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    for context in contexts:
        for option in context.command.params:
            if isinstance(option, click.Option) and not option.hidden:
                row = _describe_option(option, context)
                owners.setdefault(row, []).append(str(context.info_name))
    rows = []
    for (name, meaning, default), names in owners.items():
        if len(names) < len(contexts):
            meaning += f" Only for {', '.join(f'`{each}`' for each in names)}."
            if len(names) == len(contexts) - 1:
                (other,) = {str(each.info_name) for each in contexts} - {*names}
                meaning = meaning.partition(" Only for `")[0] + f" Not for `{other}`."
        rows.append((name, meaning, default))
    if rows:
        yield _table(("option", "meaning", "default"), rows)


def _describe_option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    """Return the cells of an option: its names and value, its meaning, its default."""
    names = option.opts
    meaning, default = _split_default(option.help or "")
    if option.is_flag:
        value = ""
    elif isinstance(option.type, click.Choice) and option.metavar is None:
        value = f" {(option.name or '').upper().replace('_', '-')}"
        if not all(str(choice) in meaning for choice in option.type.choices):
            choices = ", ".join(f"`{choice}`" for choice in option.type.choices)
            meaning = f"{meaning.rstrip('.')}: {choices}."
    else:
        kind = str(option.make_metavar(context)).removesuffix(" RANGE")
        value = f" {METAVARS.get(kind, kind)}"
    if option.required:
        default = "required"
    elif not default and not option.is_flag and option.show_default:
        default = (
            f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
        )
    default = f"`{default}`" if LITERAL.fullmatch(default) else _code(default)
    return f"`{', '.join(names)}{value}`", _code(meaning, _arguments(context)), default


def _split_default(text: str) -> tuple[str, str]:
    """Return a help text without its default, and the default; "" if there is none."""
    defaults: list[str] = []
    while match := DEFAULT.search(text):
        when = (match["a"] or match["c"] or "").strip()
        value = match["b"] or match["d"]
        defaults.insert(0, f"{when}: {value}" if when else value)
        text = text[: match.start()].rstrip()
    return text, "; ".join(defaults)


def _code(text: str, names: Sequence[str] = ()) -> str:
    """Return a text as Markdown, with options, variables, paths and `names` as code."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        pieces = CODE.sub(lambda match: f"`{match[0]}`", parts[i]).split("`")
        if names:
            known = re.compile(rf"(?<![\w-])(?:{'|'.join(names)})(?![\w-])")
            pieces[::2] = [known.sub(lambda match: f"`{match[0]}`", each) for each in pieces[::2]]
            pieces = "`".join(pieces).split("`")
        pieces[::2] = [re.sub(r"([*_<\[])", r"\\\1", each) for each in pieces[::2]]
        parts[i] = "`".join(pieces)
    return "`".join(parts)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [[each.replace("|", "\\|") for each in line] for line in (heads, *rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]])


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(), render(cli, "lockstep")))
