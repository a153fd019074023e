"""`lockstep run`: run a script on every rank, with torchrun's options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from lockstep.comm.transport.secret import SECRET_FILE
from lockstep.kernel.errors import UsageError
from lockstep.launcher.environment import RankInfo, read_rank_info
from lockstep.launcher.hang_monitor import HangPolicy
from lockstep.launcher.launch_config import HOST_TIMEOUT, LaunchConfig
from lockstep.launcher.launch_script import launch_script
from lockstep.launcher.listening_socket import (
    DEFAULT_PORT,
    LOOPBACK,
    parse_endpoint,
    strip_brackets,
)
from lockstep.launcher.run_folder import RUNS, find_description, find_run, read_description
from lockstep.launcher.supervisor import STOP_GRACE
from lockstep.portable.variables import (
    PORTABLE,
    find_of_launch,
    read_portable_request,
)

__all__ = ["command"]

AUTO = "auto"  # the value of --resume that chooses the run by its command


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "PET",
        "token_normalize_func": lambda token: token.replace("_", "-"),  # torchrun has both
    }
)
@click.option(
    "-n",
    "--nproc-per-node",
    metavar="N",
    default=None,
    help="Number of ranks on this host: a number, cpu (one per core), gpu (one per GPU), or "
    "auto (gpu if there are any, else cpu). Default: 1.",
)
@click.option(
    "--min",
    metavar="A",
    type=int,
    default=None,
    help="Elastic run: continue with the remaining ranks when one is killed, as long as at least "
    "A are left on all hosts together; a new rank replaces it. Default with --max: 1.",
)
@click.option(
    "--max",
    metavar="B",
    type=int,
    default=None,
    help="Elastic run: number of ranks on all hosts together to start with, and to return to after "
    "one is killed. Default with --min: -n on each host.",
)
@click.option(
    "--host-timeout",
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    default=HOST_TIMEOUT,
    help="Elastic run on several hosts: seconds without a message after which a host counts as "
    f"lost; given on host 0. Default: {HOST_TIMEOUT:g}.",
)
@click.option("--nnodes", metavar="N", default="1", help="Number of hosts. Default: 1.")
@click.option(
    "--node-rank",
    metavar="K",
    type=click.IntRange(0),
    default=None,
    help="Index of this host, from 0 on the host with the address of --master-addr. Required with "
    "several hosts, unless srun or mpiexec started this command once on each.",
)
@click.option(
    "--master-addr",
    metavar="HOST",
    default="",
    help="Name or address of host 0. Required with several hosts, unless srun started this command "
    "once on each. Default on a single host: 127.0.0.1.",
)
@click.option(
    "--master-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on host 0. Default: a free port on a single host, 29500 with several hosts.",
)
@click.option(
    "--standalone",
    is_flag=True,
    help="Run on a single host at a free port; ignore options and variables for several hosts.",
)
@click.option(
    "-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for python -m."
)
@click.option("--no-python", is_flag=True, help="SCRIPT is a program to execute without Python.")
@click.option(
    "--portable/--no-portable",
    default=None,
    help="Compute the same bits on every x86-64 processor with AVX2, or with torch's own kernels. "
    "Default: as the variable LOCKSTEP_PORTABLE says (1 or 0); without it, portable bits on the "
    "CPU where a rank can compute them; with --resume, as before.",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    default=None,
    help="Folder in which the run's folder with its logs is made. Default: runs.",
)
@click.option(
    "--name",
    metavar="NAME",
    default=None,
    help="Name of this run's folder; NAME-2 if that exists. Default: SCRIPT, date and time.",
)
@click.option(
    "--local-ranks-filter",
    metavar="RANKS",
    default="",
    help="Show the output of these local ranks only, such as 0,2. Default: all.",
)
@click.option(
    "--resume",
    metavar="RUN",
    default=None,
    help="Continue a run, given by its folder or its name in --log-dir. Without SCRIPT, its "
    "command is run again in its working directory, with its -n unless you give one. auto "
    "continues the newest run of SCRIPT with these ARGUMENTS in this directory that did not "
    "succeed, or starts a new one.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=STOP_GRACE,
    help="Seconds that the ranks have to save a checkpoint and exit after SIGTERM, before "
    f"SIGKILL. Default: {STOP_GRACE:g}.",
)
@click.option(
    "--hang-timeout",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=HangPolicy.timeout,
    help="Seconds after which a rank that waits in one operation, or is stopped, is reported with "
    f"the state of all ranks; 0: never. Default: {HangPolicy.timeout:g}.",
)
@click.option(
    "--on-hang",
    type=click.Choice(["report", "end"]),
    metavar="ACTION",
    default="report",
    help="report: print where every rank is, and keep waiting; end: print it and end the launch "
    "with status 1. Default: report.",
)
@click.option(
    "--rdzv-id", metavar="NAME", default="", help="Name of this launch. Default: a random name."
)
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    default="",
    help="Same as --master-addr HOST --master-port PORT; the default port is 29500.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    default=None,
    help="Elastic run on several hosts: file with the secret that a launcher must have to take "
    "part; host 0 creates it, the other hosts need a copy. Default: LOCKSTEP_SECRET_FILE.",
)
@click.option(
    "--rdzv-backend", type=click.Choice(["static", "c10d"]), default="static", hidden=True
)
@click.option("--rdzv-conf", default="", hidden=True)
@click.option("--max-restarts", default=0, hidden=True)
@click.option("--monitor-interval", default=0.1, hidden=True)
@click.argument("script", required=False, type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: str | None, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with ARGUMENTS on every rank, as `python SCRIPT` does.

    The output of each rank is written to runs/NAME/rank-K.log, and line by line to the
    terminal, with the rank as prefix. When a rank fails, the others are ended; the failed
    rank's last lines and the path of its log are printed last. Every option can also be
    given as an environment variable: PET_NPROC_PER_NODE=4. SIGUSR1 to this process prints
    where every rank is.

    SIGTERM asks the ranks to save a checkpoint and exit with status 75.

    Exit status: 0 success, 1 a rank failed, 2 usage error, 75 stopped on request (continue
    with --resume), 128+N ended by signal N.
    """
    if script is None:
        script, arguments = recall_command(options)
    if (is_portable := _is_portable(options)) is not None:
        os.environ.update(find_of_launch(os.environ) if is_portable else {PORTABLE: "0"})
    config = make_config(script, arguments, options)
    if config.is_elastic:
        from lockstep.elastic.elastic_launch import launch_elastic  # other runs do not need it

        sys.exit(launch_elastic(config, exits=True))
    sys.exit(launch_script(config, exits=True))


def recall_command(options: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the recorded script and arguments of the run to resume.

    Changes to its working directory, and adds the other recorded settings to the options.

    Args:
        options: The options of the command, changed in place.

    Raises:
        UsageError: There is no such run, or its command cannot be repeated.
    """
    name = options["resume"]
    if name is None:
        raise click.UsageError("Missing argument 'SCRIPT'.")
    if name == AUTO:
        raise UsageError("--resume auto needs SCRIPT: it looks for the runs of that command")
    if options["module"] or options["no_python"]:
        raise UsageError("--module and --no-python need SCRIPT")
    folder = find_run(name, Path(options["log_dir"] or RUNS))
    again = f"give it again: lockstep run --resume {folder} SCRIPT"
    recorded = read_description(folder)
    if recorded is None:
        raise UsageError(f"{folder} has no launch.json, so its command is not known; {again}")
    if recorded.is_redacted:
        raise UsageError(
            f"the command of {folder} contained a secret, which is not stored; {again}"
        )
    if recorded.cwd != os.getcwd():
        options["resume"] = str(folder.resolve())
        try:
            os.chdir(recorded.cwd)
        except OSError as error:
            raise UsageError(
                f"{folder} ran in {recorded.cwd}, which cannot be entered ({error.strerror}); give "
                f"the command again in another directory: "
                f"lockstep run --resume {folder.resolve()} SCRIPT"
            ) from None
    options["module"] = recorded.kind == "module"
    options["no_python"] = recorded.kind == "program"
    if options["nproc_per_node"] is None and options["max"] is None:
        options["nproc_per_node"] = str(recorded.nprocs)
    if options["min"] is None:
        options["min"] = recorded.min_nprocs
    return recorded.target, recorded.arguments


def _find_resumed(options: Mapping[str, Any]) -> Path | None:
    """Return the folder of the run that --resume names; None if it names none."""
    name = options["resume"]
    return None if name in (None, AUTO) else find_run(name, Path(options["log_dir"] or RUNS))


def _is_portable(options: Mapping[str, Any]) -> bool | None:
    """Return whether portable bits are asked for, as in a resumed run; None if nothing is.

    Raises:
        UsageError: The run to resume was started otherwise.
    """
    folder = _find_resumed(options)
    requested: bool | None = options["portable"]
    if requested is None:
        requested = read_portable_request(os.environ)
    recorded = None if folder is None else find_description(folder)
    if recorded is None or requested == recorded.portable:
        return requested
    if requested is None:
        return recorded.portable
    given = "--portable" if requested else "--no-portable"
    raise UsageError(
        f"{given}: the run {folder} was started without it, and would continue with other bits: "
        f"omit it and unset {PORTABLE}, or start a new run"
    )


def make_config(script: str, arguments: tuple[str, ...], options: dict[str, Any]) -> LaunchConfig:
    """Return the settings of the launch that the options describe.

    Raises:
        UsageError: The options contradict each other, or a value is not valid.
    """
    if options["module"] and options["no_python"]:
        raise UsageError("--module and --no-python cannot be combined")
    if options["max_restarts"]:
        raise UsageError(
            f"--max-restarts {options['max_restarts']}: lockstep run does not restart all ranks; "
            "omit this option, or use --min 1 to continue when a rank is killed"
        )
    nnodes = 1 if options["standalone"] else parse_nnodes(options["nnodes"])
    nprocs, min_nprocs = _choose_nprocs(options, nnodes)
    started_by = _read_task(options, nnodes)
    master_addr, master_port = _choose_master(options, nnodes, started_by)
    return LaunchConfig(
        target=script,
        arguments=arguments,
        kind="module" if options["module"] else "program" if options["no_python"] else "script",
        nprocs=nprocs,
        nnodes=nnodes,
        node_rank=_choose_node_rank(options, nnodes, started_by),
        master_addr=master_addr,
        master_port=master_port,
        run_id=options["rdzv_id"],
        secret_file=options["secret_file"] or os.environ.get(SECRET_FILE),
        log_dir=options["log_dir"],
        name=options["name"],
        shown=parse_local_ranks(options["local_ranks_filter"]),
        grace=options["grace"],
        resumed_run=_find_resumed(options),
        resumes_newest=options["resume"] == AUTO,
        hang_policy=HangPolicy(
            options["hang_timeout"], options["on_hang"] == "end", has_other_hosts=nnodes > 1
        ),
        min_nprocs=min_nprocs,
        max_nprocs=options["max"],
        host_timeout=options["host_timeout"],
    )


def _choose_nprocs(options: dict[str, Any], nnodes: int) -> tuple[int, int | None]:
    """Return the largest number of ranks on a host, and the smallest of an elastic run."""
    nprocs = options["nproc_per_node"]
    least = options["min"]
    most = options["max"]
    if most is not None and nprocs not in (None, str(most)):
        raise UsageError(
            f"-n {nprocs} and --max {most}: both are the number of ranks to begin with; give one"
        )
    if most is not None:
        return -(-most // nnodes), 1 if least is None else least
    return parse_nprocs(nprocs or "1", _count_gpus), least


def _read_task(options: dict[str, Any], nnodes: int) -> RankInfo | None:
    """Return this task of srun or mpiexec, if it started this command once on each host."""
    has_address = bool(options["master_addr"] or options["rdzv_endpoint"])
    is_complete = has_address and options["node_rank"] is not None
    # PyTorchJob sets RANK, and the PET_ variables that are options of this command.
    if nnodes == 1 or is_complete or {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    if has_address:
        environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(DEFAULT_PORT)}  # not needed then
    task = read_rank_info(environ)
    return task if task.world_size == nnodes else None


def _choose_master(
    options: dict[str, Any], nnodes: int, started_by: RankInfo | None
) -> tuple[str, int]:
    address = strip_brackets(options["master_addr"])
    port = options["master_port"]
    if options["standalone"]:
        return LOOPBACK, 0
    if options["rdzv_endpoint"]:
        address, port = parse_endpoint(options["rdzv_endpoint"])
    if nnodes == 1:
        return address or LOOPBACK, port
    if started_by is not None and not address and started_by.master_addr is not None:
        return started_by.master_addr, port or started_by.master_port or DEFAULT_PORT
    if not address:
        raise UsageError(
            f"--nnodes {nnodes} needs --master-addr, the name or address of host 0, on every host"
        )
    return address, port or DEFAULT_PORT


def _choose_node_rank(options: dict[str, Any], nnodes: int, started_by: RankInfo | None) -> int:
    if options["standalone"]:
        return 0
    node_rank: int | None = options["node_rank"]
    if node_rank is not None or nnodes == 1:
        return node_rank or 0
    if started_by is not None:
        return started_by.rank
    raise UsageError(
        f"--nnodes {nnodes} needs --node-rank (PET_NODE_RANK) on every host: its index, from 0 "
        f"on the host with the address of --master-addr to {nnodes - 1}"
    )


def _count_gpus() -> int:
    from lockstep.devices import count_devices, find_accelerator

    kind = find_accelerator()
    return 0 if kind is None else count_devices(kind)


def parse_nprocs(text: str, count_gpus: Callable[[], int]) -> int:
    """Return the number of ranks on a host: a number, "cpu" (cores), "gpu" or "auto"."""
    word = text.strip().lower()
    if re.fullmatch(r"-?\d+", word):
        return int(word)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if word == "cpu":
        return cores or 1
    if word in ("gpu", "auto"):
        count = count_gpus()
        if word == "gpu" and not count:
            raise UsageError("--nproc-per-node gpu: this host has no GPU; give a number")
        return count or cores or 1
    raise UsageError(f"--nproc-per-node {text}: expected a number, auto, cpu or gpu")


def parse_nnodes(text: str) -> int:
    """Return the number of hosts; torchrun's range MIN:MAX only if both are the same."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None or not int(match[1]):
        raise UsageError(f"--nnodes {text}: expected the number of hosts, 1 or more")
    if match[2] is not None and match[2] != match[1]:
        raise UsageError(
            f"--nnodes {text}: lockstep run starts a fixed number of hosts; give one number, and "
            f"--min and --max for a variable number of ranks"
        )
    return int(match[1])


def parse_local_ranks(text: str) -> frozenset[int] | None:
    """Return the local ranks in "0,2"; None, for all of them, if it is empty."""
    if not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"--local-ranks-filter {text}: expected local ranks, such as 0,2")
    return frozenset(map(int, parts))
