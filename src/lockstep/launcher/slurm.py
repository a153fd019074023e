"""A step of Slurm by its variables: its hosts, and where its ranks meet.

    srun                first host of SLURM_STEP_NODELIST    a port from the numbers of job and step
    mpiexec in a job    first host of SLURM_JOB_NODELIST     a port from the number of the job

Rank 0 serves the store, on the first host. The port is computed, so that every rank finds the same
one and two jobs on one host rarely collide.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from lockstep.kernel.errors import LaunchEnvironmentError

__all__ = [
    "count_local_tasks",
    "derive_port",
    "find_first_host",
    "find_store_address",
    "is_in_step",
]

# below the ports that Linux gives to outgoing connections
FIRST_PORT = 20_000
PORTS = 12_000
# Slurm gives steps that srun did not start (batch script, interactive shell, extern) the
# highest numbers: a shell inside an allocation has step variables, but is not a rank.
FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# A name with ranges in brackets, such as gpu[01-02,07].
NAME = r"(?:[^\[\],\s]|\[[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*\])+"


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def find_store_address(environ: Mapping[str, str], is_step: bool) -> tuple[str, int] | None:
    """Return the address and port of the store of a step, or of the ranks of a job.

    Args:
        environ: The environment of the rank.
        is_step: Whether srun started the rank.

    Returns:
        None outside of a job.

    Raises:
        LaunchEnvironmentError: The list of hosts is missing or cannot be read.
    """
    hosts = environ.get("SLURM_STEP_NODELIST" if is_step else "SLURM_JOB_NODELIST", "")
    if not hosts and is_step:
        raise LaunchEnvironmentError(
            "MASTER_ADDR and SLURM_STEP_NODELIST are not set; srun sets the latter"
        )
    if not hosts:
        return None
    numbers = [environ.get("SLURM_JOB_ID", "0")]
    numbers += [environ.get("SLURM_STEP_ID", "0")] if is_step else []
    return find_first_host(hosts), derive_port(" ".join(numbers))


def derive_port(name: str) -> int:
    """Return the port of the store of a launch with this name."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def find_first_host(text: str) -> str:
    """Return the first host of a list as Slurm writes it: "gpu01" of "gpu[01-02,07],login".

    Raises:
        LaunchEnvironmentError: The text is not such a list.
    """
    if not re.fullmatch(f"{NAME}(?:,{NAME})*", text):
        raise LaunchEnvironmentError(
            f"{text!r} is not a list of hosts as Slurm writes it, such as gpu[01-04,07]"
        )
    first = re.match(NAME, text)
    assert first is not None
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])


def count_local_tasks(world_size: int, host: int, environ: Mapping[str, str]) -> int:
    """Return the number of tasks on a host: SLURM_STEP_TASKS_PER_NODE, "4(x2),3", at its index.

    Args:
        world_size: The number of tasks on all hosts.
        host: The index of the host.
        environ: The environment of a rank.

    Raises:
        LaunchEnvironmentError: The variables contradict each other.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        return world_size
    groups = [re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part) for part in text.split(",")]
    counts = [(int(group[1]), int(group[2] or 1)) for group in groups if group]
    if len(counts) < len(groups):
        raise LaunchEnvironmentError(
            f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is not a list such as 4(x2),3; it is "
            f"set by srun: unset the variables of Slurm to run alone"
        )
    total = sum(tasks * hosts for tasks, hosts in counts)
    if total != world_size:
        raise LaunchEnvironmentError(
            f"SLURM_STEP_TASKS_PER_NODE is {text!r}, {total} tasks, but SLURM_STEP_NUM_TASKS is "
            f"{world_size}; both are set by srun: correct or unset the one set by hand"
        )
    before = 0
    for tasks, hosts in counts:
        before += hosts
        if host < before:
            return tasks
    raise LaunchEnvironmentError(
        f"SLURM_NODEID is {host}, but SLURM_STEP_TASKS_PER_NODE is {text!r}, {before} hosts "
        f"counted from 0; both are set by srun: correct or unset the one set by hand"
    )
