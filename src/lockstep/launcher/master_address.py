"""Where the ranks of several hosts meet if no MASTER_ADDR says so: what each launcher gives.

    launcher            address                                          port
    srun                first host of SLURM_STEP_NODELIST                from job and step
    mpiexec in Slurm    first host of SLURM_JOB_NODELIST                 from the job
    mpiexec in LSF      first host of LSB_HOSTS or LSB_MCPU_HOSTS        from the job
    blaunch             the same                                         from the job
    jsrun               second host of LSB_MCPU_HOSTS, after the launch  from the job
                        host, on which jsrun starts no ranks
    Kubeflow            PET_MASTER_ADDR or PET_RDZV_ENDPOINT             PET_MASTER_PORT, or 29500
    SkyPilot            first line of SKYPILOT_NODE_IPS                  from the task

Rank 0 serves the store, on the first host of these lists. A port "from the job" is computed from
its number, so that every rank finds the same one and two jobs on one host rarely collide.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from lockstep.kernel.errors import LaunchEnvironmentError
from lockstep.launcher.host_list import expand_host_list
from lockstep.launcher.listening_socket import DEFAULT_PORT, parse_endpoint, strip_brackets

__all__ = ["derive"]

FIRST_PORT, PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections


def derive(launcher: str, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address and port of the store that a launcher's variables imply.

    Args:
        launcher: As `RankInfo.launcher`.
        environ: The environment of the rank.

    Returns:
        Address and port; None if the variables do not name the host of rank 0.

    Raises:
        LaunchEnvironmentError: A variable that names hosts is missing or cannot be read.
    """
    if launcher == "srun":
        return _derive_from_step(environ)
    if launcher == "mpiexec":
        return _derive_from_slurm_job(environ) or _derive_from_lsf(environ, 0)
    if launcher == "blaunch":
        return _derive_from_lsf(environ, 0)
    if launcher == "jsrun":
        return _derive_from_lsf(environ, 1)
    if launcher == "kubernetes":
        return _derive_from_pet(environ)
    if launcher == "skypilot":
        return _derive_from_skypilot(environ)
    return None


def _derive_from_step(environ: Mapping[str, str]) -> tuple[str, int]:
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    if not hosts:
        raise LaunchEnvironmentError(
            "MASTER_ADDR and SLURM_STEP_NODELIST are not set; srun sets the latter"
        )
    job, step = (environ.get(f"SLURM_{name}_ID", "0") for name in ("JOB", "STEP"))
    return next(expand_host_list(hosts)), _choose_port(job, step)


def _derive_from_slurm_job(environ: Mapping[str, str]) -> tuple[str, int] | None:
    hosts = environ.get("SLURM_JOB_NODELIST", "")
    if not hosts:
        return None
    return next(expand_host_list(hosts)), _choose_port(environ.get("SLURM_JOB_ID", ""))


def _derive_from_lsf(environ: Mapping[str, str], index: int) -> tuple[str, int] | None:
    # LSB_MCPU_HOSTS is "HOST SLOTS HOST SLOTS"; LSB_HOSTS, one name per slot, is left out by
    # LSF when it would be too long.
    names = environ.get("LSB_MCPU_HOSTS", "").split()[::2] or environ.get("LSB_HOSTS", "").split()
    hosts = list(dict.fromkeys(names))
    if len(hosts) <= index:
        return None
    port = _choose_port(environ.get("LSB_JOBID", ""), environ.get("LSB_JOBINDEX", "0"))
    return hosts[index], port


def _derive_from_pet(environ: Mapping[str, str]) -> tuple[str, int] | None:
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    if endpoint:
        address, number = parse_endpoint(endpoint, "PET_RDZV_ENDPOINT")
        name, port = "PET_RDZV_ENDPOINT", str(number)
    else:
        address = strip_brackets(environ.get("PET_MASTER_ADDR", ""))
        name, port = "PET_MASTER_PORT", environ.get("PET_MASTER_PORT", str(DEFAULT_PORT)).strip()
    if not address:
        return None
    if not (port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        raise LaunchEnvironmentError(
            f"{name} is {environ[name]!r}, but a port is a number from 1 to 65535"
        )
    return address, int(port)


def _derive_from_skypilot(environ: Mapping[str, str]) -> tuple[str, int] | None:
    hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
    if not hosts:
        return None
    return hosts[0], _choose_port(environ.get("SKYPILOT_TASK_ID", ""))


def _choose_port(*names: str) -> int:
    """Return a port that depends only on the names of a job, a step or a task."""
    return FIRST_PORT + zlib.crc32(" ".join(names).encode()) % PORTS
