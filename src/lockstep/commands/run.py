"""`lockstep run`: a whole script on every rank; torchrun's flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from lockstep.errors import UsageError
from lockstep.launcher import plan as plans
from lockstep.launcher.plan import Plan

__all__ = ["command"]


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Flag(click.Option):
    """An option whose help shows its names with dashes alone."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the two columns of the help."""
        names = self.opts
        self.opts = [name for name in names if "_" not in name]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


def flag(name: str, *more: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """Return an option by its dashed name, which is accepted with underscores too."""
    parameter = name.replace("-", "_")
    names = dict.fromkeys([*more, f"--{name}", f"--{parameter}", parameter])
    return click.option(*names, cls=Flag, **settings)


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "PET",
        "help_option_names": ["-h", "--help"],
    }
)
@flag(
    "nproc-per-node",
    "-n",
    metavar="N",
    default="1",
    help="Ranks on this host: a number, auto, cpu or gpu.",
)
@flag("nnodes", metavar="N", default="1", help="Hosts.")
@flag("node-rank", metavar="N", default=0, help="This host's number, from 0.")
@flag("master-addr", metavar="A", default="", help="Address of host 0; loopback on one host.")
@flag(
    "master-port",
    metavar="P",
    default=0,
    help="Port on host 0; a free one on one host, else 29500.",
)
@flag("standalone", is_flag=True, help="One host, whatever the variables say.")
@flag("module", "-m", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@flag("no-python", is_flag=True, help="SCRIPT is a program to execute.")
@flag("start-method", type=click.Choice(["forkserver", "spawn"]), default="forkserver",
      help="Fork from a preloaded process, or a fresh interpreter each.")  # fmt: skip
@flag(
    "log-dir", metavar="DIR", default=None, help="Where the run's folder goes, in place of ./runs."
)
@flag(
    "redirects",
    "-r",
    metavar="S",
    default="0",
    help="Streams for the log only: 1 stdout, 2 stderr, 3 both.",
)
@flag(
    "tee",
    "-t",
    metavar="S",
    default="3",
    help="Of these, streams shown all the same; 0:1,1:3 by rank.",
)
@flag("local-ranks-filter", metavar="K,L", default="", help="Show only these local ranks: 0,2.")
@flag("role", metavar="WORD", default="default", help="Word for ROLE_NAME.")
@flag("rdzv-id", metavar="WORD", default="", help="The job's name, in place of a random one.")
@flag(
    "rdzv-endpoint",
    metavar="A:P",
    default="",
    help="HOST:PORT, in place of --master-addr and --master-port.",
)
@flag("rdzv-backend", type=click.Choice(["static", "c10d"]), default="static", hidden=True)
@flag("rdzv-conf", default="", hidden=True)
@flag("max-restarts", default=0, hidden=True)
@flag("monitor-interval", default=0.1, hidden=True)
@flag("run-path", is_flag=True, hidden=True)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT with ARGUMENTS on every rank, as `python SCRIPT` would.

    Every rank's output goes to runs/NAME/rank-K.log, and line by line, with the
    rank before it, to the terminal. The first rank that fails ends the others;
    its last lines and its log are the last thing on the screen. Every flag can
    be given as a variable: PET_NPROC_PER_NODE=4.

    Exit status: 0 good, 1 a rank failed, 2 used wrongly, 128+N ended by signal N.
    """
    from lockstep.launcher.script import Interrupted, run_plan

    try:
        run_plan(make_plan(script, arguments, flags))
    except Interrupted as interruption:
        sys.exit(128 + interruption.number)


def make_plan(script: str, arguments: tuple[str, ...], flags: dict[str, Any]) -> Plan:
    """Return what the flags ask for; UsageError for what cannot be."""
    if flags["module"] and flags["no_python"]:
        raise UsageError("--module and --no-python exclude each other")
    if flags["max_restarts"]:
        raise UsageError(
            f"--max-restarts {flags['max_restarts']}: lockstep run does not restart ranks; leave it"
        )
    nprocs = plans.processes(flags["nproc_per_node"], _gpus)
    hosts = 1 if flags["standalone"] else plans.hosts(flags["nnodes"])
    host = 0 if flags["standalone"] else flags["node_rank"]
    address, port = _meeting(flags, hosts)
    kind = "module" if flags["module"] else "program" if flags["no_python"] else "script"
    return Plan(
        target=script,
        arguments=arguments,
        kind=kind,
        nprocs=nprocs,
        hosts=hosts,
        host=host,
        address=address,
        port=port,
        run=flags["rdzv_id"],
        role=flags["role"],
        fresh=flags["start_method"] == "spawn",
        log_dir=flags["log_dir"],
        redirects=plans.streams("--redirects", flags["redirects"], nprocs),
        tee=plans.streams("--tee", flags["tee"], nprocs),
        shown=plans.ranks_filter(flags["local_ranks_filter"]),
    )


def _meeting(flags: dict[str, Any], hosts: int) -> tuple[str, int]:
    address, port = flags["master_addr"], flags["master_port"]
    if flags["standalone"]:
        return plans.LOOPBACK, 0
    if flags["rdzv_endpoint"]:
        address, port = plans.endpoint(flags["rdzv_endpoint"])
    if hosts == 1:
        return address or plans.LOOPBACK, port
    if not address:
        raise UsageError(
            f"--nnodes {hosts} needs --master-addr: the name or address of host 0, for every host"
        )
    return address, port or plans.DEFAULT_PORT


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
