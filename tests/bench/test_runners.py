"""Runners: real ranks that answer requests, and errors."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from lockstep.kernel.errors import RankError, UsageError, WorkError
from lockstep.launcher.world import cpu_backend
from lockstep.record.run_environment import count_usable_cores
from lockstep.tools.bench import runners
from lockstep.tools.bench.measured_collectives import COLLECTIVES
from lockstep.tools.bench.runners import (
    MpiRunner,
    Rendezvous,
    TorchRunner,
    find_mpiexec,
)
from lockstep.tools.bench.workload import Workload

WORKLOADS = [
    *(Workload(name, 0 if name == "barrier" else 1500) for name in COLLECTIVES),
    Workload("memcpy", 1500),
]


needs_mpi = pytest.mark.skipif(
    not importlib.util.find_spec("mpi4py")
    or not Path(sys.executable).with_name("mpiexec").exists(),
    reason="mpi4py and MPICH are not installed",
)


def one_block(runner, workload, calls=3):
    """Return why it cannot, or the number wrong, after checking the form of the answers."""
    answers = runner.ask({"prepare": "key", "workload": asdict(workload)})
    if "error" in answers[0]:
        return answers[0]["error"]
    answers = runner.ask({"block": "key", "calls": calls})
    for answer in answers:
        assert len(answer["times"]) == calls, answer
        assert min(answer["times"]) > 0
    runner.ask({"drop": "key"})
    return sum(answer["wrong"] for answer in answers)


@pytest.fixture
def rendezvous():
    with closing(Rendezvous(3, timeout=20.0)) as made:
        yield made
    assert not os.path.exists(made.folder)


def test_gloo_is_correct_for_every_workload(rendezvous):
    with closing(Ending(TorchRunner("gloo", rendezvous))) as ending:
        assert ending.runner.library.startswith("torch ")
        assert {
            workload: one_block(ending.runner, workload) for workload in WORKLOADS
        } == dict.fromkeys(WORKLOADS, 0)
        unable = {"collective": "all_reduce", "count": -1}
        answers = ending.runner.ask({"prepare": "unable", "workload": unable})
        assert all("negative" in answer["error"] for answer in answers)


def test_lockstep_is_correct_in_shared_memory(rendezvous):
    if cpu_backend() != "lockstep":
        pytest.skip("the backend lockstep is not built")
    with closing(Ending(TorchRunner("lockstep", rendezvous))) as ending:
        workload = Workload("all_reduce", 1500, shared_memory=True)
        assert one_block(ending.runner, workload) == 0


class Ending:
    """Ends a runner, as `closing` wants it."""

    def __init__(self, runner):
        self.runner = runner

    def close(self):
        self.runner.end()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of cores here")
@pytest.mark.parametrize("ranks", [1, 2, count_usable_cores() + 1])
def test_bind_gives_each_rank_its_own_core_if_there_are_enough(ranks):
    with (
        closing(Rendezvous(ranks, 20.0)) as met,
        closing(Ending(TorchRunner("gloo", met))) as ending,
    ):
        pids = ending.runner._launched.processes
        allowed = sorted(os.sched_getaffinity(pids[0]))
        assert ending.runner.ask({"bind": True}) == [{}] * ranks
        bound = [os.sched_getaffinity(pid) for pid in pids]
        enough = ranks <= len(allowed)
        assert bound == [{core} for core in allowed[:ranks]] if enough else [set(allowed)] * ranks


def test_error_names_killed_rank(rendezvous):
    runner = TorchRunner("gloo", rendezvous)
    try:
        os.kill(runner._launched.processes[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            one_block(runner, WORKLOADS[0], calls=1)
    finally:
        runner.end()


def test_unknown_backend_raises(rendezvous):
    with pytest.raises(RankError, match="nosuch"):
        TorchRunner("nosuch", rendezvous)


@needs_mpi
def test_mpi_is_correct_for_every_workload(rendezvous):
    runner = MpiRunner(rendezvous)
    with closing(Ending(runner)):
        said = {workload: one_block(runner, workload) for workload in WORKLOADS}
    assert said == dict.fromkeys(WORKLOADS, 0)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_mpi
def test_error_contains_last_output_of_mpiexec(rendezvous, tmp_path, monkeypatch):
    program = script(tmp_path / "mpiexec", "echo started; echo 'no slots available' >&2; exit 1")
    monkeypatch.setattr(runners, "find_mpiexec", lambda: str(program))
    with pytest.raises(WorkError, match=r"mpi: ranks \[0, 1, 2\] .* output: no slots available"):
        MpiRunner(rendezvous)


@needs_mpi
def test_ranks_of_another_mpi_than_that_of_mpi4py_are_refused(rendezvous, tmp_path, monkeypatch):
    program = script(tmp_path / "mpiexec", 'shift 2\nexec "$@"')
    monkeypatch.setattr(runners, "find_mpiexec", lambda: str(program))
    with pytest.raises(WorkError, match="each of the 3 ranks is alone in MPICH"):
        MpiRunner(rendezvous)


def test_mpiexec_beside_python_is_preferred_and_a_missing_one_named(tmp_path, monkeypatch):
    program = script(tmp_path / "mpiexec", "exit 0")
    (tmp_path / "mpi4py.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_mpiexec() == str(program)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="pip install mpi4py mpich"):
        find_mpiexec()
