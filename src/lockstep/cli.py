"""The command `lockstep`: finds the subcommand, and prints errors without a traceback.

Subcommands are imported when they are called, so that `lockstep --help` does not import
torch.
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback

import click

from lockstep.errors import LockstepError
from lockstep.launcher.target import check_working_directory
from lockstep.launcher.tracebacks import is_full
from lockstep.messages import escape_control, say

COMMANDS = {
    "run": "run a script or module on N ranks",
    "scale": "change the number of ranks of an elastic run",
    "check": "compare the bits of a script in several layouts",
    "chaos": "kill ranks of a training at random and compare the bits",
    "worker": "serve a driver on another host with workers",
    "train": "train a recipe",
    "bench": "measure collectives, point-to-point messages and startup",
    "schedule": "simulate and draw a pipeline schedule",
    "report": "render the record of a run as HTML, Markdown or an image",
    "replay": "compute a recorded step again and compare the bits",
    "bisect": "find the first bit in which two runs differ",
    "compare": "compare the speed, results and settings of runs",
    "runs": "list the runs of a folder",
    "build": "compile the backend 'lockstep' for the installed torch",
    "doctor": "check whether this machine has what a run needs",
}


class Commands(click.Group):
    """The group of subcommands; each one is `command` in the module `lockstep.commands.NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
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
    """Train PyTorch models on any number of processes, with bit-identical results."""


def main() -> None:
    """Run the command line, and exit with its status."""
    run(cli)


def run(command: click.Command) -> None:
    """Run a command; print the message of an error without a traceback, and exit."""
    try:
        check_working_directory()
        status = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C
        sys.exit(128 + signal.SIGINT)
    except LockstepError as error:
        if is_full():
            traceback.print_exception(error)
        for note in getattr(error, "__notes__", ()):  # a rank's traceback
            click.echo(escape_control(note), err=True)
        say(str(error))
        sys.exit(error.exit_status)
    sys.exit(status if isinstance(status, int) else 0)  # of --help, for example
