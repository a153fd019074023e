"""`lockstep bench`: a benchmark by name, each in a module of its own.

A benchmark is a line of BENCHMARKS: its name, the module that holds it as
`command`, and its sentence. It is imported when it is called. The collectives
share a module, which makes one command for each of them.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from types import FrameType

import click

from lockstep.bench.collectives import COLLECTIVES

__all__ = ["BENCHMARKS", "command"]

COLLECTIVE = "lockstep.commands.bench_collective"

# name -> the module that holds it, and what it measures
BENCHMARKS: dict[str, tuple[str, str]] = {
    name: (COLLECTIVE, collective.sentence) for name, collective in COLLECTIVES.items()
}
BENCHMARKS["startup"] = (
    "lockstep.commands.bench_startup",
    "ranks that join a group and leave it, beside torchrun",
)


class Benchmarks(click.Group):
    """The benchmarks by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in reading order."""
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one benchmark."""
        if cmd_name not in BENCHMARKS:
            return None
        name = BENCHMARKS[cmd_name][0]
        module = importlib.import_module(name)
        found = module.make(cmd_name) if name == COLLECTIVE else module.command
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the benchmarks without importing them."""
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in BENCHMARKS.items()])


@click.group(cls=Benchmarks)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure, beside the peers, in one run."""
    if threading.current_thread() is threading.main_thread():
        former = signal.signal(signal.SIGTERM, leave)
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, former))


def leave(number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C: with the ranks ended and their folders removed."""
    sys.exit(128 + number)
