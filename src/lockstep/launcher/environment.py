"""The environment variables of a rank: what launchers set, read and written.

    launcher           rank                  world size            local rank          host
    lockstep run,      RANK                  WORLD_SIZE            LOCAL_RANK          GROUP_RANK
    torchrun, Ray,
    manual
    mpiexec (Open)     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_    -
                                                                   LOCAL_RANK
    mpiexec (MPICH,    PMI_RANK              PMI_SIZE              MPI_LOCALRANKID     -
    Intel MPI)
    srun               SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_LOCALID       SLURM_NODEID
    python             none: a world of one

The first row with a variable that is set applies, so a rank started by `lockstep run`
under `srun` belongs to `lockstep run`. A row that is only partly set is an error: a guess
could start a second world beside the intended one; so are several processes of a launcher in
UNREAD. What a launcher does not give ("-") is found out when the ranks have met
(`rendezvous_check.py`). This module opens no socket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.kernel.errors import LaunchEnvironmentError
from lockstep.launcher.listening_socket import strip_brackets
from lockstep.launcher.slurm import count_local_tasks, derive_port, find_store_address, is_in_step

__all__ = ["RankEnvironment", "RankInfo", "read_rank_info"]

# Set in every rank by Lockstep's own launcher, in addition to torchrun's variables.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# Set on a single host: "ADDRESS PORT PID FD INODE", the private store (PID FD INODE) to use
# instead of the store at ADDRESS and PORT. It is ignored if a script sets another address.
STORE = "LOCKSTEP_STORE"

# Set in the ranks of an elastic run (`lockstep.elastic`):
#     ELASTIC    1 in every rank
#     MEMBER     number of the process
#     JOIN       1 if the process joins others that are already running
#     ROUND      why the process replaces others, as JSON
#     HANDOVER   folder with the state that the surviving processes wrote
ELASTIC = "LOCKSTEP_ELASTIC"
MEMBER = "LOCKSTEP_MEMBER"
JOIN = "LOCKSTEP_JOIN"
ROUND = "LOCKSTEP_ROUND"
HANDOVER = "LOCKSTEP_HANDOVER"
OF_ELASTIC = (ELASTIC, MEMBER, JOIN, ROUND, HANDOVER)

# What a rank has unless the user has set it. With a seed of its own, each launch would iterate sets
# of strings in another order, such as the words of a vocabulary.
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def is_elastic_on_hosts(environ: Mapping[str, str]) -> bool:
    """Return whether this is a rank of an elastic run that may be on several hosts."""
    return ELASTIC in environ and environ.get("GROUP_WORLD_SIZE", "1") != "1"


LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Launchers that set variables of their own, by the variable that numbers their processes: the one
# with their number, and the launcher's name. Their processes need the variables of torchrun.
UNREAD = {
    "PET_NODE_RANK": ("PET_NNODES", "Kubeflow's trainer"),
    "SKYPILOT_NODE_RANK": ("SKYPILOT_NUM_NODES", "SkyPilot"),
    "JSM_NAMESPACE_RANK": ("JSM_NAMESPACE_SIZE", "jsrun"),
    "LSF_PM_TASKID": ("LSB_DJOB_NUMPROC", "blaunch"),
}


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
        launcher: "lockstep", "torchrun", "environment" (variables set by hand, Ray), "mpiexec",
            "srun" or "python" (alone).
        store: Address of a private store that replaces the one at `master_addr`
            (`private_store.py`); None if there is none.
        unknown: Which of `local_rank`, `local_world_size` and `host` the environment does not
            give. They have the values of a single host until the ranks have met.
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
    unknown: tuple[str, ...] = ()

    @property
    def is_single_host(self) -> bool:
        """Whether every rank is known to be on this host."""
        return self.local_world_size == self.world_size and not self.unknown

    @property
    def is_launched_on_one_host(self) -> bool:
        """Whether one launcher on this host has started every rank.

        Ranks that are started by hand also count as being on one host if they meet at the loopback
        interface, which may be that of several hosts (a tunnel).
        """
        return self.is_single_host and self.launcher != "environment"

    @property
    def store_location(self) -> str:
        """Where the ranks' store is, for messages."""
        if self.store is not None:
            return "a store that their launcher created"
        return f"{self.master_addr}:{self.master_port}"


@dataclass(frozen=True)
class VariableNames:
    """The variables that one kind of launcher sets; `setter` is its name in messages.

    A name is empty if the launcher sets no such variable.
    """

    launcher: str
    setter: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    host: str = ""


TORCH = VariableNames(
    launcher="environment",
    setter="torchrun and lockstep run",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    host="GROUP_RANK",
)
OPEN_MPI = VariableNames(
    "mpiexec",
    "Open MPI's mpiexec",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = VariableNames(
    "mpiexec",
    "mpiexec of MPICH or Intel MPI",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
SLURM = VariableNames(
    "srun",
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    host="SLURM_NODEID",
)


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank and world that `environ` describes; a world of one if it describes none.

    Raises:
        LaunchEnvironmentError: Variables are missing, not numbers, or contradict each other.
            The message names the variable, its value, who normally sets it and the remedy.
    """
    names = _choose_names(environ)
    return RankInfo() if names is None else _read(names, environ)


def _choose_names(environ: Mapping[str, str]) -> VariableNames | None:
    """Return the variables of the launcher that started this process; None for plain python."""
    is_step = is_in_step(environ)
    for names in (TORCH, OPEN_MPI, HYDRA):
        # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, but no local rank: its own row says more.
        if names is HYDRA and is_step and HYDRA.local_rank not in environ:
            continue
        if any(name in environ for name in (names.rank, names.world_size, names.local_rank)):
            return names
    if is_step:
        return SLURM
    for name, (size, setter) in UNREAD.items():
        if name in environ and environ.get(size, "1").strip() not in ("", "1", "1:1"):
            raise LaunchEnvironmentError(
                f"{size} is {environ[size]}: {setter} started this process as one of several, "
                f"whose ranks Lockstep does not read; start the script with lockstep run on each "
                f"host, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset {name} to run "
                f"alone"
            )
    return None


def _read(names: VariableNames, environ: Mapping[str, str]) -> RankInfo:
    rank, world_size = _read_rank(names, environ)
    location = None
    given = strip_brackets(environ.get("MASTER_ADDR", "")) or None, _read_port(environ)
    local = _read_local(names, rank, world_size, given[0], environ)
    unknown = tuple(name for name, value in local.items() if value is None)
    local_world_size = local["local_world_size"] or world_size
    is_single_host = local_world_size == world_size and not unknown
    if world_size > 1 or None not in given:
        location = _locate_store(names, given, is_single_host, environ)
    addr, port = location or (None, None)
    local_rank = local["local_rank"]
    host = local["host"]
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        host=rank // local_world_size if host is None else host,
        master_addr=addr,
        master_port=port,
        launcher=_name_launcher(names, environ),
        store=_find_private_store(addr, port, environ) if names is TORCH else None,
        unknown=unknown,
    )


def _find_private_store(
    addr: str | None, port: int | None, environ: Mapping[str, str]
) -> str | None:
    """Return the address of the private store that replaces this address and port."""
    head = f"{addr} {port} "
    value = environ.get(STORE, "")
    return value.removeprefix(head) if value.startswith(head) else None


def _name_launcher(names: VariableNames, environ: Mapping[str, str]) -> str:
    if names is not TORCH:
        return names.launcher
    if LAUNCHER in environ:
        return "lockstep"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else names.launcher


# --- rank and world size -------------------------------------------------------------------


def _read_rank(names: VariableNames, environ: Mapping[str, str]) -> tuple[int, int]:
    rank = _read_required(names, names.rank, names.world_size, environ)
    world_size = _read_required(names, names.world_size, names.rank, environ)
    if world_size < 1:
        raise LaunchEnvironmentError(
            f"{names.world_size} is {world_size}, but a world has at least one rank; "
            f"it is set by {names.setter} to the number of processes"
        )
    if not 0 <= rank < world_size:
        raise LaunchEnvironmentError(
            f"{names.rank} is {rank}, but {names.world_size} is {world_size}: ranks count "
            f"from 0 to {world_size - 1}; both are set by {names.setter}: unset or "
            f"correct the one set by hand"
        )
    return rank, world_size


def _read_number(names: VariableNames, name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d{1,18}\s*", text, re.ASCII):
        raise LaunchEnvironmentError(
            f"{name} is {text!r}, which is not an integer of at least 0; it is set by "
            f"{names.setter}: unset it to run alone, or start the program with lockstep run"
        )
    return int(text)


def _read_required(
    names: VariableNames, name: str, partner: str, environ: Mapping[str, str]
) -> int:
    value = _read_number(names, name, environ)
    if value is not None:
        return value
    there = next(n for n in (partner, names.local_rank) if n in environ)
    raise LaunchEnvironmentError(
        f"{there} is {environ[there]!r}, but {name} is not set; both are set by {names.setter}: "
        f"set {name} too, or unset {there} to run alone"
    )


# --- place within the hosts ----------------------------------------------------------------


def _read_local(
    names: VariableNames,
    rank: int,
    world_size: int,
    master_addr: str | None,
    environ: Mapping[str, str],
) -> dict[str, int | None]:
    """Return local rank, number of ranks on this host, and index of the host; None if unknown."""
    local_rank = _read_number(names, names.local_rank, environ)
    host = _read_number(names, names.host, environ)
    if names is TORCH and host is None:
        host = _read_number(names, "NODE_RANK", environ)  # Ray Train
    local_world_size = _read_number(names, names.local_world_size, environ)
    if names is SLURM:
        local_world_size = count_local_tasks(world_size, host or 0, environ)
    if local_world_size is None and (world_size == 1 or master_addr in LOOPBACK):
        local_world_size = world_size
    if local_world_size == world_size:
        local_rank = rank if local_rank is None else local_rank
        host = 0 if host is None else host
    if local_world_size is not None:
        _check_local(names, local_rank or 0, local_world_size, world_size)
    return {"local_rank": local_rank, "local_world_size": local_world_size, "host": host}


def _check_local(
    names: VariableNames, local_rank: int, local_world_size: int, world_size: int
) -> None:
    size_name = names.local_world_size or "SLURM_STEP_TASKS_PER_NODE"
    if not 1 <= local_world_size <= world_size:
        raise LaunchEnvironmentError(
            f"{size_name} is {local_world_size}, but {names.world_size} is {world_size}: a host "
            f"has 1 to {world_size} of its ranks; both are set by {names.setter}"
        )
    if local_rank >= local_world_size:
        raise LaunchEnvironmentError(
            f"{names.local_rank} is {local_rank}, but this host has {local_world_size} of the "
            f"{world_size} ranks, counted from 0; {names.local_rank} and {size_name} are set by "
            f"{names.setter}: correct or unset the one set by hand"
        )


# --- where the store is --------------------------------------------------------------------


def _read_port(environ: Mapping[str, str]) -> int | None:
    port = _read_number(TORCH, "MASTER_PORT", environ)
    if port is not None and not 0 < port < 65536:
        raise LaunchEnvironmentError(
            f"MASTER_PORT is {port}, but a port is a number from 1 to 65535"
        )
    return port


def _locate_store(
    names: VariableNames,
    given: tuple[str | None, int | None],
    is_single_host: bool,
    environ: Mapping[str, str],
) -> tuple[str, int]:
    """Return address and port of the store."""
    addr, port = given
    if addr is not None and port is not None:
        return addr, port
    if is_single_host and names is not TORCH:
        return addr or LOOPBACK[0], port or derive_port(_name_launch(environ))
    derived = None if names is TORCH else find_store_address(environ, names is SLURM)
    if derived is not None:
        return addr or derived[0], port or derived[1]
    missing = "MASTER_ADDR" if addr is None else "MASTER_PORT"
    size = f"{names.world_size} is {environ[names.world_size]}"
    if names is TORCH:
        raise LaunchEnvironmentError(
            f"{size}, but {missing} is not set, so the ranks cannot find each other; it is set by "
            "torchrun and lockstep run: set MASTER_ADDR to the address of rank 0's host and "
            "MASTER_PORT to a free port there"
        )
    advice = {
        OPEN_MPI: ", for example mpiexec -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
        HYDRA: ", for example mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
    }
    raise LaunchEnvironmentError(
        f"{size} on several hosts, but {missing} is not set, and no variable of {names.setter} "
        f"says where rank 0 is: set MASTER_ADDR to the address of rank 0's host and MASTER_PORT to "
        f"a free port there{advice.get(names, '')}"
    )


def _name_launch(environ: Mapping[str, str]) -> str:
    """Return a name that the ranks of one launch on this host share, and others have not."""
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return f"{environ['SLURM_JOB_ID']} {environ['SLURM_STEP_ID']}"
    if "PMIX_NAMESPACE" in environ:
        return environ["PMIX_NAMESPACE"]
    import psutil  # needed here only

    return f"{os.getppid()} {psutil.Process(os.getppid()).create_time():.2f}"


@dataclass(frozen=True)
class RankEnvironment:
    """The variables that Lockstep sets in the ranks of one host: torchrun's and its own two.

                  host 0         host 1
        LOCAL_RANK  0    1         0    1
        RANK        0    1         2    3      = GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK

    TORCHELASTIC_USE_AGENT_STORE tells torch whether the launcher serves the store, or rank 0.
    LOCKSTEP_STORE makes `lockstep.init()` use a store that other users cannot reach, if all ranks
    are on one host.

    Attributes:
        nprocs: Number of ranks on this host.
        master_addr: Address of the store.
        master_port: Port of the store.
        run_id: Name of the launch (torchrun: `--rdzv-id`).
        nnodes: Number of hosts.
        node_rank: Index of this host, from 0.
        store: Address of the private store; empty if there is none.
        is_served: Whether the launcher serves the store at `master_addr`, instead of rank 0.
    """

    nprocs: int
    master_addr: str
    master_port: int
    run_id: str
    nnodes: int = 1
    node_rank: int = 0
    store: str = ""
    is_served: bool = False

    def variables(self, local_rank: int, place: tuple[int, int] | None = None) -> dict[str, str]:
        """Return the variables to add to the environment of a rank of this host.

        Args:
            local_rank: Its rank on this host.
            place: Its rank and the number of ranks, if hosts may have different numbers of them.
        """
        even = self.nprocs * self.node_rank + local_rank, self.nprocs * self.nnodes
        rank, world_size = map(str, place or even)
        store = {STORE: f"{self.master_addr} {self.master_port} {self.store}"} if self.store else {}
        return {
            "RANK": rank,
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node_rank),
            "ROLE_RANK": rank,
            "ROLE_NAME": "default",
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(self.is_served),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            LAUNCHER: self.run_id,
            **store,
        }
