"""`lockstep worker`: workers for a driver on another host."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.kernel.errors import UsageError
from lockstep.launcher.listening_socket import parse_endpoint

__all__ = ["command"]


@click.command()
@click.option(
    "--connect",
    metavar="HOST:PORT",
    required=True,
    help="Address at which the driver listens; the default port is 29500.",
)
@click.option(
    "--nprocs", "-n", metavar="N", default=1, help="Number of workers on this host. Default: 1."
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with the driver's key. Default: the key in the variable LOCKSTEP_DRIVER_KEY.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    default=300.0,
    help="Seconds to wait for the driver, and seconds of silence after which it counts as lost. "
    "Default: 300.",
)
def command(connect: str, nprocs: int, key_file: Path | None, timeout: float) -> None:
    """Serve a driver on another host with N workers, until it exits.

    On the driver's host: `ls.Driver(nprocs=2, remote=2, listen="HOST:PORT",
    key_file="driver.key")`. Copy the key file to this host; anyone who has it can run code on
    both hosts. The output of the workers appears here.

    Exit status: 0 the driver exited; 1 the driver was lost, refused the workers or could not be
    reached; 2 usage error.
    """
    from lockstep.comm.transport.secret import read_key
    from lockstep.tools.remote.host_workers import serve_driver

    if nprocs < 1 or timeout <= 0:
        raise UsageError(f"--nprocs {nprocs} --timeout {timeout:g}: both must be positive")
    address, port = parse_endpoint(connect, "--connect")
    serve_driver(address, port, read_key(key_file), nprocs, timeout)
