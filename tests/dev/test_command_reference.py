"""The page of the commands: as `python dev/command_reference.py` writes it, and complete."""

from __future__ import annotations

import click
import pytest

from dev.command_reference import PAGE, render, update
from lockstep.cli import cli


def commands(command, path):
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), f"{path} {name}")


ALL = dict(commands(cli, "lockstep"))


def test_the_page_is_what_the_program_writes():
    page = PAGE.read_text()
    assert update(page, render(cli, "lockstep")) == page, "run python dev/command_reference.py"


@pytest.mark.parametrize("path", [path for path in ALL if path.count(" ") == 1])
def test_the_page_has_every_command_and_option(path):
    section = PAGE.read_text().partition(f"\n## {path} ")[2].partition("\n## ")[0]
    assert section
    for inner, command in ALL.items():
        if inner == path or inner.startswith(f"{path} "):
            for each in command.params:
                if isinstance(each, click.Option) and not each.hidden:
                    assert max(each.opts, key=len).replace("_", "-") in section, each


@pytest.mark.parametrize("path", ALL)
def test_every_parameter_has_a_help_text(path):
    command = ALL[path]
    for each in command.params:
        if isinstance(each, click.Argument):
            name = (each.metavar or each.name.upper()).split()[0].strip("[]")
            assert name in command.help, f"{name}: name the argument in the help of the command"
        else:
            assert each.hidden or each.help, each
