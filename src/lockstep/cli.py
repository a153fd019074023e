"""The command `lockstep`: finds the subcommand, and prints errors without a traceback.

Subcommands are imported when they are called, so that `lockstep --help` does not import
torch.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # importing typing takes a third of the time until Ctrl-C is handled
if TYPE_CHECKING:
    from types import FrameType


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


class _ExitingOnInterrupt:
    """Makes Ctrl-C exit at once while the body imports modules, which some do not survive."""

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, _exit_at_once)
            except ValueError:  # in another thread than the main one
                return

    def __exit__(self, *exception: object) -> None:
        if signal.getsignal(signal.SIGINT) is _exit_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)


with _ExitingOnInterrupt():
    import importlib
    import sys
    import traceback

    import click

    from lockstep.kernel.errors import LockstepError, UsageError
    from lockstep.launcher.target import check_working_directory
    from lockstep.launcher.tracebacks import is_full
    from lockstep.messages import (
        LOST,
        discard_if_lost,
        escape_control,
        keep_printing,
        log,
        open_missing_streams,
    )
    from lockstep.name_conflict import find_conflict

COMMANDS = {
    "run": "run a script or module on N ranks",
    "scale": "change the number of ranks of an elastic run",
    "check": "compare the bits of a script in several layouts",
    "plan": "predict the memory of a script in each storage",
    "chaos": "kill ranks of a training at random and compare the bits",
    "worker": "serve a driver on another host with workers",
    "train": "train a recipe",
    "bench": "measure collectives and point-to-point messages",
    "schedule": "simulate and draw a pipeline schedule",
    "report": "render the record of a run as one HTML page",
    "replay": "compute a recorded step again and compare the bits",
    "audit": "check whether this machine computes the bits of a recorded run",
    "bisect": "find the first bit in which two runs differ",
    "compare": "compare the speed, results and settings of runs",
    "runs": "list the runs of a folder",
    "build": "compile the backend 'lockstep' for the installed torch",
    "doctor": "check whether this machine has what a run needs",
}


class Commands(click.Group):
    """The group of subcommands; each one is `command` in `lockstep.tools.commands.NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        with _ExitingOnInterrupt():
            command = importlib.import_module(f"lockstep.tools.commands.{cmd_name}").command
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
        open_missing_streams()
        keep_printing()
        status = _run(command)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):  # Ctrl-C
        status = 128 + signal.SIGINT
    except OSError as error:
        status = _explain_lost_stream(error)
    sys.exit(status)


def _run(command: click.Command) -> int:
    """Run a command; print the message of an error, and return the exit status."""
    try:
        if conflict := find_conflict():
            raise UsageError(conflict)
        check_working_directory()
        status = _call(command)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except LockstepError as error:
        if is_full():
            traceback.print_exception(error)
        for note in getattr(error, "__notes__", ()):  # a rank's traceback
            click.echo(escape_control(note), err=True)
        log(str(error))
        return error.exit_status
    return status if isinstance(status, int) else 0  # of --help, for example


def _call(command: click.Command) -> object:
    """Call a command; raise UsageError if its working directory is deleted meanwhile."""
    try:
        return command.main(standalone_mode=False)
    except FileNotFoundError:
        check_working_directory()
        raise


def _explain_lost_stream(error: OSError) -> int:
    """Explain that standard output, or /dev/null, cannot be used; return the exit status.

    Raises:
        OSError: The error is another one.
    """
    if error.filename == os.devnull:
        log(f"{os.devnull} cannot be opened ({error.strerror}): mount /dev")
        return 1
    if error.errno not in LOST or error.filename is not None:
        raise error
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as again:  # otherwise the interpreter fails when it exits
            discard_if_lost(stream, again)
    if isinstance(error, BrokenPipeError):  # as in: lockstep runs | head -1
        return 128 + signal.SIGPIPE
    log(f"the output cannot be written: {error.strerror}")
    return 1
