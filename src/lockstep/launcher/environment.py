"""Who is this process? Read from the environment variables, without asking anybody.

    launcher          rank                    world size               local rank
    lockstep run,     RANK                    WORLD_SIZE               LOCAL_RANK
    torchrun, hand
    mpiexec (Open)    OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE     OMPI_COMM_WORLD_LOCAL_RANK
    mpiexec (MPICH)   PMI_RANK                PMI_SIZE                 MPI_LOCALRANKID
    srun              SLURM_PROCID            SLURM_STEP_NUM_TASKS     SLURM_LOCALID
    python            none of these: alone

The first row that is there decides; a rank started by `lockstep run` under
`srun` is therefore lockstep's. A row that is there by half is an error: guessing
would start a second world beside the right one. Nothing here opens a socket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import PlaceError

__all__ = ["LAUNCHER", "STORE", "Place", "first_host", "place"]

# Set by lockstep's own launcher in every rank, beside torchrun's variables.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# Set by it on one host: "ADDRESS PORT PID FD INODE", the store that takes the place of the
# one at this address and port. A script that sets others gets what it asks for.
STORE = "LOCKSTEP_STORE"

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Slurm numbers the steps that srun did not start (batch script, interactive shell, extern)
# from the top: a shell inside an allocation has variables of a step and is no rank.
FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class Place:
    """Where a process stands in its world, as its environment tells it.

    `host` is the index of its machine, counted from 0. `master_addr` and
    `master_port` are where the ranks meet, None where the environment names no
    place. `store` is the address of a private store that takes their place
    (`launcher/private_store.py`). `launcher` is "lockstep", "torchrun", "environment" (set by
    hand), "mpiexec", "srun", or "python" (alone).
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
    def one_host(self) -> bool:
        """Whether every rank is on this machine."""
        return self.local_world_size == self.world_size

    @property
    def meeting(self) -> str:
        """Where the ranks meet, in words."""
        if self.store is not None:
            return "a store that their launcher created"
        if self.master_addr is None:
            return "a file on this host"
        return f"{self.master_addr}:{self.master_port}"

    @property
    def loopback(self) -> bool:
        """Whether the ranks meet on this machine's loopback interface."""
        return self.master_addr is None or self.master_addr in LOOPBACK


@dataclass(frozen=True)
class Names:
    """The variables one kind of launcher sets; `setter` says who normally does."""

    launcher: str
    setter: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    host: str


TORCH = Names(
    "environment",
    "torchrun and lockstep run",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)
OPEN_MPI = Names(
    "mpiexec",
    "Open MPI's mpiexec",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "LOCKSTEP_HOST",
)
MPICH = Names(
    "mpiexec",
    "MPICH's mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "LOCKSTEP_HOST",
)
SLURM = Names(
    "srun",
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "LOCKSTEP_LOCAL_WORLD_SIZE",
    "SLURM_NODEID",
)


def place(environ: Mapping[str, str]) -> Place:
    """Return the place that `environ` gives this process; alone where it gives none.

    Raises PlaceError where variables are missing, are no numbers, or contradict
    each other: the variable, its value, who normally sets it, what to do.
    """
    for names in (TORCH, OPEN_MPI, MPICH):
        if any(name in environ for name in (names.rank, names.world_size, names.local_rank)):
            return _read(names, environ)
    if _inside_srun(environ):
        return _read(SLURM, environ)
    return Place()


def _inside_srun(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def _read(names: Names, environ: Mapping[str, str]) -> Place:
    rank = _required(names, names.rank, names.world_size, environ)
    world_size = _required(names, names.world_size, names.rank, environ)
    if world_size < 1:
        raise PlaceError(
            f"{names.world_size} is {world_size}, but a world has at least one rank; "
            f"{names.setter} set it to the number of processes"
        )
    if rank >= world_size:
        raise PlaceError(
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
    return Place(
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
    """Return the address of the private store that stands for this address and port."""
    head = f"{addr} {port} "
    value = environ.get(STORE, "")
    return value.removeprefix(head) if value.startswith(head) else None


def _launcher(names: Names, environ: Mapping[str, str]) -> str:
    if names is not TORCH:
        return names.launcher
    if LAUNCHER in environ:
        return "lockstep"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else names.launcher


def _number(names: Names, name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise PlaceError(
            f"{name} is {text!r}, which is not a whole number from 0; {names.setter} set it: "
            f"unset it to run alone, or start the program with lockstep run"
        )
    return int(text)


def _required(names: Names, name: str, partner: str, environ: Mapping[str, str]) -> int:
    value = _number(names, name, environ)
    if value is not None:
        return value
    there = next(n for n in (partner, names.local_rank) if n in environ)
    raise PlaceError(
        f"{there} is {environ[there]!r}, but {name} is not set; {names.setter} set both: "
        f"set {name} too, or unset {there} to run alone"
    )


def _local_world_size(names: Names, world_size: int, environ: Mapping[str, str]) -> int:
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


def _check_local(names: Names, local_rank: int, local_world_size: int, world_size: int) -> None:
    if not 1 <= local_world_size <= world_size:
        raise PlaceError(
            f"{names.local_world_size} is {local_world_size}, but {names.world_size} is "
            f"{world_size}: a host has 1 to {world_size} of its ranks; {names.setter} set both"
        )
    if local_rank >= local_world_size:
        raise PlaceError(
            f"{names.local_rank} is {local_rank}, but this host has {local_world_size} of the "
            f"{world_size} ranks, counted from 0; {names.setter} set {names.local_rank} and "
            f"{names.local_world_size}: correct or unset the one set by hand"
        )


def _master(
    names: Names, world_size: int, local_world_size: int, environ: Mapping[str, str]
) -> tuple[str | None, int | None]:
    addr, port = environ.get("MASTER_ADDR") or None, _number(TORCH, "MASTER_PORT", environ)
    if port is not None and not 0 < port < 65536:
        raise PlaceError(f"MASTER_PORT is {port}, but a port is a number from 1 to 65535")
    if addr is not None and port is not None:
        return addr, port
    if world_size == 1:
        return None, None
    if names is SLURM and local_world_size < world_size:
        return _slurm_master(addr, port, environ)
    if names is not TORCH and local_world_size == world_size:
        return None, None  # one host: its ranks meet in a file
    missing = "MASTER_ADDR" if addr is None else "MASTER_PORT"
    raise PlaceError(
        f"{names.world_size} is {world_size}, but {missing} is not set, so the ranks cannot meet; "
        f"torchrun and lockstep run set it: set MASTER_ADDR to the address of rank 0's host and "
        f"MASTER_PORT to a free port there"
    )


def _slurm_master(
    addr: str | None, port: int | None, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Meet on the step's first host, at a port that job and step choose."""
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    if addr is None and not hosts:
        raise PlaceError("MASTER_ADDR and SLURM_STEP_NODELIST are not set; srun sets the latter")
    job, step = (int(environ.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
    return addr or first_host(hosts), port or 20000 + (job * 31 + step) % 12000


def first_host(hosts: str) -> str:
    """Return the first name of Slurm's host list: "gpu[03-05,9],c1" gives "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise PlaceError(f"SLURM_STEP_NODELIST is {hosts!r}, which names no host")
    return match[1] + (match[2] or "") + (match[3] or "")
