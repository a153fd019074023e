"""The environment variables of a rank: what launchers set, read and written.

    launcher          rank                    world size               local rank
    lockstep run,     RANK                    WORLD_SIZE               LOCAL_RANK
    torchrun, manual
    mpiexec (Open)    OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE     OMPI_COMM_WORLD_LOCAL_RANK
    mpiexec (MPICH)   PMI_RANK                PMI_SIZE                 MPI_LOCALRANKID
    srun              SLURM_PROCID            SLURM_STEP_NUM_TASKS     SLURM_LOCALID
    python            none: a world of one

The first row with a variable that is set applies, so a rank started by `lockstep run`
under `srun` belongs to `lockstep run`. A row that is only partly set is an error: a guess
could start a second world beside the intended one. This module opens no socket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import LaunchEnvironmentError
from lockstep.launcher.listening_socket import strip_brackets

__all__ = ["RankEnvironment", "RankInfo", "first_host", "read_rank_info"]

# Set in every rank by Lockstep's own launcher, in addition to torchrun's variables.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# Set on a single host: "ADDRESS PORT PID FD INODE", the private store (PID FD INODE) to use
# instead of the store at ADDRESS and PORT. It is ignored if a script sets another address.
STORE = "LOCKSTEP_STORE"

# Set in the ranks of an elastic run (`lockstep.elastic`):
#     ELASTIC    1 in every rank
#     MEMBER     number of the process
#     JOIN       1 if the process joins others that are already running
#     MIRROR     folder of mirrors
#     ROUND      why the process replaces others, as JSON
#     HANDOVER   folder with the state that the surviving processes wrote
ELASTIC, MEMBER = "LOCKSTEP_ELASTIC", "LOCKSTEP_MEMBER"
JOIN, MIRROR = "LOCKSTEP_JOIN", "LOCKSTEP_MIRROR"
ROUND, HANDOVER = "LOCKSTEP_ROUND", "LOCKSTEP_HANDOVER"
OF_ELASTIC = (ELASTIC, MEMBER, JOIN, MIRROR, ROUND, HANDOVER)

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Slurm gives steps that srun did not start (batch script, interactive shell, extern) the
# highest numbers: a shell inside an allocation has step variables, but is not a rank.
FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class RankInfo:
    """Rank, world size and master address of a process, as given by its environment.

    Attributes:
        rank: Global rank, from 0.
        world_size: Number of ranks on all hosts.
        local_rank: Rank within its host, from 0.
        local_world_size: Number of ranks on its host.
        host: Index of its host, from 0.
        master_addr: Address of the store; None if the environment names none.
        master_port: Port of the store; None if the environment names none.
        launcher: "lockstep", "torchrun", "environment" (variables set by hand), "mpiexec",
            "srun" or "python" (alone).
        store: Address of a private store that replaces the one at `master_addr`
            (`local_rendezvous.py`); None if there is none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "python"
    store: str | None = None

    @property
    def is_single_host(self) -> bool:
        """Whether every rank is on this host."""
        return self.local_world_size == self.world_size

    @property
    def store_location(self) -> str:
        """Where the ranks' store is, for messages."""
        if self.store is not None:
            return "a store that their launcher created"
        if self.master_addr is None:
            return "a file on this host"
        return f"{self.master_addr}:{self.master_port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the ranks meet on this host's loopback interface."""
        return self.master_addr is None or self.master_addr in LOOPBACK


@dataclass(frozen=True)
class VariableNames:
    """The variables that one kind of launcher sets; `setter` is its name in messages."""

    launcher: str
    setter: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    host: str


TORCH = VariableNames(
    "environment",
    "torchrun and lockstep run",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)
OPEN_MPI = VariableNames(
    "mpiexec",
    "Open MPI's mpiexec",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "LOCKSTEP_HOST",
)
MPICH = VariableNames(
    "mpiexec",
    "MPICH's mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "LOCKSTEP_HOST",
)
SLURM = VariableNames(
    "srun",
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "LOCKSTEP_LOCAL_WORLD_SIZE",
    "SLURM_NODEID",
)


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank and world that `environ` describes; a world of one if it describes none.

    Raises:
        LaunchEnvironmentError: Variables are missing, not numbers, or contradict each other.
            The message names the variable, its value, who normally sets it and the remedy.
    """
    for names in (TORCH, OPEN_MPI, MPICH):
        if any(name in environ for name in (names.rank, names.world_size, names.local_rank)):
            return _read(names, environ)
    if _inside_srun(environ):
        return _read(SLURM, environ)
    return RankInfo()


def _inside_srun(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def _read(names: VariableNames, environ: Mapping[str, str]) -> RankInfo:
    rank = _required(names, names.rank, names.world_size, environ)
    world_size = _required(names, names.world_size, names.rank, environ)
    if world_size < 1:
        raise LaunchEnvironmentError(
            f"{names.world_size} is {world_size}, but a world has at least one rank; "
            f"{names.setter} set it to the number of processes"
        )
    if rank >= world_size:
        raise LaunchEnvironmentError(
            f"{names.rank} is {rank}, but {names.world_size} is {world_size}: ranks count from 0 "
            f"to {world_size - 1}; {names.setter} set both: unset or correct the one set by hand"
        )
    local_world_size = _local_world_size(names, world_size, environ)
    local_rank = _number(names, names.local_rank, environ)
    if local_rank is None:
        local_rank = rank % local_world_size
    _check_local(names, local_rank, local_world_size, world_size)
    host = _number(names, names.host, environ)
    addr, port = _master(names, world_size, local_world_size, environ)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=rank // local_world_size if host is None else host,
        master_addr=addr,
        master_port=port,
        launcher=_launcher(names, environ),
        store=_store(addr, port, environ) if names is TORCH else None,
    )


def _store(addr: str | None, port: int | None, environ: Mapping[str, str]) -> str | None:
    """Return the address of the private store that replaces this address and port."""
    head = f"{addr} {port} "
    value = environ.get(STORE, "")
    return value.removeprefix(head) if value.startswith(head) else None


def _launcher(names: VariableNames, environ: Mapping[str, str]) -> str:
    if names is not TORCH:
        return names.launcher
    if LAUNCHER in environ:
        return "lockstep"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else names.launcher


def _number(names: VariableNames, name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise LaunchEnvironmentError(
            f"{name} is {text!r}, which is not an integer of at least 0; {names.setter} set it: "
            "unset it to run alone, or start the program with lockstep run"
        )
    return int(text)


def _required(names: VariableNames, name: str, partner: str, environ: Mapping[str, str]) -> int:
    value = _number(names, name, environ)
    if value is not None:
        return value
    there = next(n for n in (partner, names.local_rank) if n in environ)
    raise LaunchEnvironmentError(
        f"{there} is {environ[there]!r}, but {name} is not set; {names.setter} set both: "
        f"set {name} too, or unset {there} to run alone"
    )


def _local_world_size(names: VariableNames, world_size: int, environ: Mapping[str, str]) -> int:
    if names is SLURM:
        return _slurm_local_world_size(world_size, environ)
    value = _number(names, names.local_world_size, environ)
    return world_size if value is None else value


def _slurm_local_world_size(world_size: int, environ: Mapping[str, str]) -> int:
    """Read SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3", at this host's index."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return world_size
        counts += [int(match[1])] * int(match[2] or 1)
    host = int(environ.get("SLURM_NODEID", "0") or 0)
    return counts[host] if host < len(counts) else world_size


def _check_local(
    names: VariableNames, local_rank: int, local_world_size: int, world_size: int
) -> None:
    if not 1 <= local_world_size <= world_size:
        raise LaunchEnvironmentError(
            f"{names.local_world_size} is {local_world_size}, but {names.world_size} is "
            f"{world_size}: a host has 1 to {world_size} of its ranks; {names.setter} set both"
        )
    if local_rank >= local_world_size:
        raise LaunchEnvironmentError(
            f"{names.local_rank} is {local_rank}, but this host has {local_world_size} of the "
            f"{world_size} ranks, counted from 0; {names.setter} set {names.local_rank} and "
            f"{names.local_world_size}: correct or unset the one set by hand"
        )


def _master(
    names: VariableNames, world_size: int, local_world_size: int, environ: Mapping[str, str]
) -> tuple[str | None, int | None]:
    addr = strip_brackets(environ.get("MASTER_ADDR", "")) or None
    port = _number(TORCH, "MASTER_PORT", environ)
    if port is not None and not 0 < port < 65536:
        raise LaunchEnvironmentError(
            f"MASTER_PORT is {port}, but a port is a number from 1 to 65535"
        )
    if addr is not None and port is not None:
        return addr, port
    if world_size == 1:
        return None, None
    if names is SLURM and local_world_size < world_size:
        return _slurm_master(addr, port, environ)
    if names is not TORCH and local_world_size == world_size:
        return None, None  # one host: the ranks use a rendezvous file
    missing = "MASTER_ADDR" if addr is None else "MASTER_PORT"
    raise LaunchEnvironmentError(
        f"{names.world_size} is {world_size}, but {missing} is not set, so the ranks cannot find "
        "each other; torchrun and lockstep run set it: set MASTER_ADDR to the address of rank 0's "
        "host and MASTER_PORT to a free port there"
    )


def _slurm_master(
    addr: str | None, port: int | None, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Return the step's first host, and a port derived from the job and step numbers."""
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    if addr is None and not hosts:
        raise LaunchEnvironmentError(
            "MASTER_ADDR and SLURM_STEP_NODELIST are not set; srun sets the latter"
        )
    job, step = (int(environ.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
    return addr or first_host(hosts), port or 20000 + (job * 31 + step) % 12000


def first_host(hosts: str) -> str:
    """Return the first name of Slurm's host list: "gpu[03-05,9],c1" gives "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise LaunchEnvironmentError(f"SLURM_STEP_NODELIST is {hosts!r}, which names no host")
    return match[1] + (match[2] or "") + (match[3] or "")


@dataclass(frozen=True)
class RankEnvironment:
    """The variables that Lockstep sets in the ranks of one host: torchrun's and its own two.

                  host 0         host 1
        LOCAL_RANK  0    1         0    1
        RANK        0    1         2    3      = GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK

    TORCHELASTIC_USE_AGENT_STORE tells torch that the launcher serves the store, so no rank
    binds a port that another program may have taken in the meantime. LOCKSTEP_STORE makes
    `lockstep.init()` use a store that other users cannot reach, if all ranks are on one host.

    Attributes:
        nprocs: Number of ranks on each host.
        master_addr: Address of the store.
        master_port: Port of the store.
        run_id: Name of the launch (torchrun: `--rdzv-id`).
        nnodes: Number of hosts.
        node_rank: Index of this host, from 0.
        role: Value of ROLE_NAME.
        store: Address of the private store; empty if there is none.
    """

    nprocs: int
    master_addr: str
    master_port: int
    run_id: str
    nnodes: int = 1
    node_rank: int = 0
    role: str = "default"
    store: str = ""

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables to add to the environment of this host's rank `local_rank`."""
        rank = str(self.nprocs * self.node_rank + local_rank)
        world_size = str(self.nprocs * self.nnodes)
        store = {STORE: f"{self.master_addr} {self.master_port} {self.store}"} if self.store else {}
        return {
            "RANK": rank,
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node_rank),
            "ROLE_RANK": rank,
            "ROLE_NAME": self.role,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            LAUNCHER: self.run_id,
            **store,
        }
