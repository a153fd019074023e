"""`lockstep bench`: the benchmarks of collectives and of startup.

BENCHMARKS maps each name to the module of the command and to its description. The module is
imported when the benchmark runs. `bench_collective` makes one command per collective.
"""

from __future__ import annotations

import importlib

import click

from lockstep.bench.collectives import COLLECTIVES
from lockstep.launcher.termination import exiting_on_sigterm

__all__ = ["BENCHMARKS", "command"]

COLLECTIVE = "lockstep.commands.bench_collective"

# name -> module and description
BENCHMARKS: dict[str, tuple[str, str]] = {
    name: (COLLECTIVE, collective.description) for name, collective in COLLECTIVES.items()
}
BENCHMARKS["startup"] = (
    "lockstep.commands.bench_startup",
    "the time to start ranks and join a group, compared with torchrun",
)


class Benchmarks(click.Group):
    """The group of benchmarks, imported lazily."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
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
            formatter.write_dl(
                [(name, description) for name, (_, description) in BENCHMARKS.items()]
            )


@click.group(cls=Benchmarks)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Compare the backends of this machine with each other in one run."""
    ctx.with_resource(exiting_on_sigterm())
