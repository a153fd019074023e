"""`lockstep bench`: one benchmark per collective, made by `bench_collective`."""

from __future__ import annotations

import click

from lockstep.bench.collectives import COLLECTIVES
from lockstep.launcher.termination import exiting_on_sigterm

__all__ = ["command"]


class Benchmarks(click.Group):
    """The group of benchmarks, imported lazily."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(COLLECTIVES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one benchmark."""
        from lockstep.commands.bench_collective import make

        return make(cmd_name) if cmd_name in COLLECTIVES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the benchmarks without importing them."""
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, one.description) for name, one in COLLECTIVES.items()])


@click.group(cls=Benchmarks)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Compare the backends of this machine with each other in one run."""
    ctx.with_resource(exiting_on_sigterm())
