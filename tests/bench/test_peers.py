"""Peers: real ranks that wait for orders, and what is said when they cannot."""

from __future__ import annotations

import os
import signal
import stat
import sys
from contextlib import closing
from dataclasses import asdict

import pytest

from lockstep.bench.collectives import COLLECTIVES
from lockstep.bench.lineup import cores
from lockstep.bench.measure import Order
from lockstep.bench.peers import CopyPeer, Meeting, MpiPeer, TorchPeer, mpi_python, mpiexec
from lockstep.errors import RankError, UsageError, WorkError

ORDERS = [
    *(Order(name, 0 if name == "barrier" else 1500, "float32", "SUM") for name in COLLECTIVES),
    *(
        Order(name, 1500, "float32", "SUM", in_place=True)
        for name, one in COLLECTIVES.items()
        if one.can_alias
    ),
    Order("all_reduce", 1500, "float32", "AVG"),
    Order("all_reduce", 1500, "int32", "BXOR"),
]


def one_block(peer, order, calls=3):
    """Return why it cannot, or the number wrong, after checking the form of the answers."""
    answers = peer.ask({"prepare": "key", "order": asdict(order)})
    if "cannot" in answers[0]:
        return answers[0]["cannot"]
    answers = peer.ask({"block": "key", "calls": calls})
    for answer in answers:
        assert len(answer["times"]) == calls, answer
        assert min(answer["times"]) > 0
    peer.ask({"drop": "key"})
    return sum(answer["wrong"] for answer in answers)


@pytest.fixture
def meeting():
    with closing(Meeting(3, patience=20.0)) as made:
        yield made
    assert not os.path.exists(made.folder)


def test_gloo_gives_right_answers_to_every_order(meeting):
    with closing(Ending(TorchPeer("gloo", meeting))) as ending:
        assert ending.peer.library.startswith("torch ")
        assert {order: one_block(ending.peer, order) for order in ORDERS} == dict.fromkeys(
            ORDERS, 0
        )
        unable = Order("all_reduce", 5, "int16", "SUM")
        ending.peer.ask({"prepare": "int16", "order": asdict(unable)})
        answers = ending.peer.ask({"block": "int16", "calls": 1})
        assert all("Invalid scalar type" in answer["cannot"] for answer in answers)


class Ending:
    """Ends a peer, as `closing` wants it."""

    def __init__(self, peer):
        self.peer = peer

    def close(self):
        self.peer.end()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of cores here")
@pytest.mark.parametrize("ranks", [1, 2, cores() + 1])
def test_bound_ranks_stay_on_cores_of_their_own_where_there_are_enough(ranks):
    with closing(Meeting(ranks, 20.0)) as met, closing(Ending(TorchPeer("gloo", met))) as ending:
        pids = ending.peer._launched.processes
        allowed = sorted(os.sched_getaffinity(pids[0]))
        assert ending.peer.ask({"bind": True}) == [{}] * ranks
        bound = [os.sched_getaffinity(pid) for pid in pids]
        enough = ranks <= len(allowed)
        assert bound == [{core} for core in allowed[:ranks]] if enough else [set(allowed)] * ranks


def test_a_rank_that_is_killed_is_named(meeting):
    peer = TorchPeer("gloo", meeting)
    try:
        os.kill(peer._launched.processes[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            one_block(peer, ORDERS[0], calls=1)
    finally:
        peer.end()


def test_an_unknown_backend_is_said(meeting):
    with pytest.raises(RankError, match="nosuch"):
        TorchPeer("nosuch", meeting)


def test_a_copy_can_be_measured():
    peer = CopyPeer()
    assert one_block(peer, ORDERS[0]) == 0
    assert "numpy has no bfloat16" in one_block(peer, Order("broadcast", 5, "bfloat16", "SUM"))


@pytest.mark.skipif(
    "LOCKSTEP_MPI_PYTHON" not in os.environ,
    reason="LOCKSTEP_MPI_PYTHON names no Python with mpi4py",
)
def test_mpi_gives_right_answers_to_every_order(meeting):
    peer = MpiPeer(mpi_python(None), meeting)
    with closing(Ending(peer)):
        said = {order: one_block(peer, order) for order in ORDERS}
    unable = {order: why for order, why in said.items() if why}
    assert {(order.collective, order.op) for order in unable} == {
        ("reduce_scatter", "SUM"),
        ("all_reduce", "AVG"),
    }
    assert all("MPI has no" in why for why in unable.values())


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_mpiexecs_last_words_are_told(meeting, tmp_path):
    script(tmp_path / "mpiexec", "echo started; echo 'no slots available' >&2; exit 1")
    with pytest.raises(WorkError, match=r"mpi: ranks \[0, 1, 2\] .* words: no slots available"):
        MpiPeer(str(tmp_path / "python"), meeting)


def test_without_an_mpi_it_is_said_how_to_get_one(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_MPI_PYTHON", raising=False)
    with pytest.raises(UsageError, match="pip install mpi4py mpich numpy"):
        mpi_python(None)


@pytest.mark.parametrize("made", [None, "exit 0", "echo 'No module named mpi4py' >&2; exit 1"])
def test_a_python_that_cannot_is_said(tmp_path, monkeypatch, made):
    python = tmp_path / "python"
    if made:
        script(python, made)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    if made == "exit 0":
        if os.path.exists("/usr/bin/mpiexec"):
            pytest.skip("this machine has an mpiexec of its own")
        with pytest.raises(UsageError, match="no mpiexec beside"):
            mpi_python(str(python))
    else:
        with pytest.raises(UsageError, match="is no program" if not made else "No module named mp"):
            mpi_python(str(python))


def test_mpiexec_beside_the_python_comes_first(tmp_path):
    found = script(tmp_path / "mpiexec", "exit 0")
    os.symlink(sys.executable, tmp_path / "python")
    assert mpiexec(str(tmp_path / "python")) == str(found)
