"""Which MPI is used, and whether it fits the program that started the rank."""

import re
import sys
import types

import pytest

from lockstep.comm.mpi import library as mpi_library
from lockstep.kernel.errors import LaunchEnvironmentError, UsageError

MPICH, OPEN = "MPICH 5.0.2", "Open MPI v5.0.11"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x", MPICH),
        ("Open MPI v5.0.11, package: Open MPI user@localhost", OPEN),
        ("Intel(R) MPI Library 2021.19 for Linux* OS", "Intel(R) MPI Library"),
    ],
)
def test_name_of_the_library(said, name):
    assert mpi_library.library_name(types.SimpleNamespace(Get_library_version=lambda: said)) == name


@pytest.mark.parametrize(
    ("environ", "library", "ranks", "words"),
    [
        ({}, MPICH, 1, None),
        ({"PMI_SIZE": "1"}, MPICH, 1, None),
        ({"PMI_SIZE": "4"}, MPICH, None, None),
        ({"PMI_SIZE": "4"}, MPICH, 4, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, OPEN, 4, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, OPEN, None, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, MPICH, None, "mpiexec of Open MPI started 4 .* uses MPICH"),
        ({"PMI_SIZE": "2"}, OPEN, 1, "mpiexec of MPICH or Intel MPI started 2 .* uses Open MPI v5"),
    ],
)
def test_mpiexec_of_another_mpi(environ, library, ranks, words):
    found = mpi_library.find_mismatch(environ, library, ranks)
    assert (found is None) == (words is None)
    if words is not None:
        assert re.search(words, found)


def world(rank, size):
    comm = types.SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)
    return types.SimpleNamespace(COMM_WORLD=comm, Get_library_version=lambda: "MPICH Version: 5.0")


def test_ranks_of_mpi_are_those_of_the_environment():
    mpi_library.check_ranks(world(1, 2), 1, 2)
    with pytest.raises(LaunchEnvironmentError, match=r"rank 1 of 4 is alone in MPICH 5.0: .* mpi"):
        mpi_library.check_ranks(world(0, 1), 1, 4)
    with pytest.raises(LaunchEnvironmentError, match=r"rank 0 of 1 .*, but rank 1 of 2 in MPICH"):
        mpi_library.check_ranks(world(1, 2), 0, 1)


def test_without_mpi4py_or_an_mpi_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"not installed: pip install mpi4py mpich"):
        mpi_library.load.__wrapped__()
    module = types.SimpleNamespace(rc=types.SimpleNamespace(initialize=True, finalize=None))
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(UsageError, match=r"mpi4py finds none .*: pip install"):
        mpi_library.load.__wrapped__()
    assert (module.rc.initialize, module.rc.finalize) == (True, None)


def test_threads_are_required(monkeypatch):
    mpi = types.SimpleNamespace(
        THREAD_MULTIPLE=3, Query_thread=lambda: 0, Is_initialized=lambda: True,
        Get_library_version=lambda: "MPICH Version: 5.0",
    )  # fmt: skip
    module = types.SimpleNamespace(rc=types.SimpleNamespace(initialize=True, finalize=None))
    modules = {"mpi4py": module, "mpi4py.MPI": mpi}
    monkeypatch.setattr(mpi_library.importlib, "import_module", modules.__getitem__)
    with pytest.raises(UsageError, match=r"needs MPI_THREAD_MULTIPLE, .* MPICH 5.0 was"):
        mpi_library.load.__wrapped__()
