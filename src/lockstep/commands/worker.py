"""`lockstep worker`: workers for a driver on another host."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.errors import UsageError
from lockstep.launcher.plan import endpoint

__all__ = ["command"]


@click.command()
@click.option("--connect", metavar="HOST:PORT", required=True, help="Where the driver listens.")
@click.option("--nprocs", "-n", metavar="N", default=1, help="Workers on this host.")
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The driver's key; otherwise LOCKSTEP_DRIVER_KEY.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    default=300.0,
    help="How long to wait for the driver, and for a sign of life of it.",
)
def command(connect: str, nprocs: int, key_file: Path | None, timeout: float) -> None:
    """Serve a driver on another host with N workers, until it ends.

    There: `ls.Driver(nprocs=2, remote=2, listen="HOST:PORT", key_file="driver.key")`.
    Copy the key file here; whoever has it can run any code on both hosts. What the
    workers print appears where the driver runs.

    Exit status: 0 the driver ended, 1 it was lost or did not come, 2 used wrongly.
    """
    from lockstep.remote.key import find_key
    from lockstep.remote.node_agent import NodeAgent

    if nprocs < 1 or timeout <= 0:
        raise UsageError(f"--nprocs {nprocs} --timeout {timeout:g}: both are positive numbers")
    address, port = endpoint(connect, "--connect")
    NodeAgent(address, port, find_key(key_file), nprocs, timeout).serve()
