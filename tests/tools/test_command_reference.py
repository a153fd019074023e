"""The page of the commands: as `python tools/command_reference.py` writes it, and complete."""

from __future__ import annotations

import click
import pytest

from lockstep.cli import cli
from tools.command_reference import PAGE, render, update


def commands(command, path):
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), f"{path} {name}")


ALL = dict(commands(cli, "lockstep"))


def test_the_page_is_what_the_program_writes():
    page = PAGE.read_text()
    assert update(page, render(cli, "lockstep")) == page, "run python tools/command_reference.py"


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
            name = (each.metavar or each.name.upper()).split()[0]
            assert name in command.help, f"{name}: name the argument in the help of the command"
        else:
            assert each.hidden or each.help, each


def make_group():
    @click.group()
    def group():
        """Tools."""

    @group.command("one")
    @click.argument("thing")
    @click.option("--kind", type=click.Choice(["a", "b"]), help="Kind.  [default: a]")
    @click.option("--rate", default=2.0, show_default=True, help="Items per second, or --kind b.")
    @click.option("--wait", type=int, default=0, help="Seconds to wait. Default with --rate: 3.")
    @click.option("--secret", hidden=True)
    def one(**flags):
        """Do THING to a|b.

        Writes runs/NAME/out.

        Exit status: 0 done, 1 failed (see --rate), 2 usage error.
        """

    return group


def test_help_becomes_usage_text_statuses_and_a_table():
    text = render(make_group(), "tool")
    assert "| [`tool one`](#tool-one) | Do `THING` to a\\|b. |" in text
    assert "## tool one {: #tool-one }" in text
    assert "$ tool one [OPTIONS] THING\n" in text
    assert "Writes `runs/NAME/out`." in text
    assert "- `1`: failed (see `--rate`)\n- `2`: usage error" in text
    assert "| `--kind KIND` | Kind: `a`, `b`. | a |" in text
    assert "| `--rate X` | Items per second, or `--kind` b. | `2` |" in text
    assert "| `--wait N` | Seconds to wait. | with `--rate`: 3 |" in text
    assert "secret" not in text


def test_options_of_commands_with_the_same_help_are_one_table():
    @click.group()
    def group():
        """Tools."""

    for name in ("x", "y", "z"):
        command = click.Command(name, help=f"Do {name}.\n\nAs all others.")
        command.params.append(click.Option(["--both"], help="Both."))
        if name != "z":
            command.params.append(click.Option(["--most"], help="Most."))
        if name == "x":
            command.params.append(click.Option(["--only"], help="Only."))
        group.add_command(command)

    @click.group()
    def outer():
        """Outer."""

    outer.add_command(group, "inner")
    text = render(outer, "tool")
    assert text.count("As all others.") == text.count("--both") == 1
    assert "| Most. Not for `z`. |" in text
    assert "| Only. Only for `x`. |" in text


def test_the_text_outside_of_the_markers_stays():
    page = update(PAGE.read_text(), "new")
    assert "\n\nnew\n\n" in page
    assert page.partition("<!--")[0] == PAGE.read_text().partition("<!--")[0]
    assert page.rpartition("-->")[2] == PAGE.read_text().rpartition("-->")[2]
