"""The command `lockstep`: finds the subcommand, and turns errors into one sentence.

Subcommands are imported when they are called, so that `lockstep --help` answers
at once, without torch.
"""

from __future__ import annotations

import importlib
import sys

import click

from lockstep.errors import LockstepError
from lockstep.messages import escape_control, say

COMMANDS = {
    "run": "run a script or module on N ranks",
    "check": "compare the bits of a script in several layouts",
    "worker": "serve a driver on another host with workers",
    "train": "train a recipe on real data",
    "bench": "measure collectives, messages and start-up beside their peers",
    "schedule": "draw a pipeline's schedule, with its bubble",
    "report": "render a run's record as a page, Markdown or a picture",
    "compare": "compare runs: speed, digests, environment",
    "runs": "list the runs of a folder",
    "doctor": "test what is here, and say what would break a run",
}


class Commands(click.Group):
    """The subcommands by name; each lives in `lockstep.commands.NAME` as `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in reading order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"lockstep.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torch-lockstep", prog_name="lockstep")
def cli() -> None:
    """Train PyTorch models on many processes, with the same bits however many there are."""


def main() -> None:
    """Run the command line; exit with 0 (good), 1 (the work failed) or 2 (used wrongly)."""
    run(cli)


def run(command: click.Command) -> None:
    """Run a command; print an error of Lockstep as its sentence alone, and exit."""
    try:
        command.main(standalone_mode=True)
    except LockstepError as error:
        for note in getattr(error, "__notes__", ()):  # a rank's traceback
            click.echo(escape_control(note), err=True)
        say(str(error))
        sys.exit(error.exit_status)
