"""What is left when the launcher is told to stop, is killed, or is one of many."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import processes
from lockstep.launcher.supervisor import GRACE
from processes import alive

CLI = [sys.executable, "-c", "from lockstep.cli import main; main()", "run"]
PATIENCE = 30.0
until = partial(processes.until, seconds=PATIENCE)

# Each rank starts a grandchild, says who they are, and waits for ever.
WAIT = """
import os, subprocess
child = subprocess.Popen(["sleep", "1000"])
rank = os.environ["RANK"]
with open("new" + rank, "w") as file: file.write(f"{os.getpid()} {child.pid}")
os.rename("new" + rank, "rank" + rank)
child.wait()
"""


def hear_hangups():
    """Undo `nohup`, under which the tests themselves may run and which a launcher honours."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def waiting(tmp_path):
    """A launcher whose two ranks wait, and the process ids of all that it started."""
    (tmp_path / "wait.py").write_text(WAIT)
    launcher = subprocess.Popen(
        [*CLI, "-n", "2", "wait.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=hear_hangups,
    )
    told = [tmp_path / "rank0", tmp_path / "rank1"]
    until(lambda: all(path.exists() for path in told), "the ranks did not start")
    below = {process.pid for process in psutil.Process(launcher.pid).children(recursive=True)}
    named = {int(pid) for path in told for pid in path.read_text().split()}
    assert len(named) == 4
    assert named <= below
    yield launcher, below
    launcher.kill()
    launcher.wait()
    launcher.stderr.close()
    until(lambda: not any(map(alive, below)), "something was left behind")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks_with_one_message(waiting, number):
    launcher, below = waiting
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE) == 128 + number
    said = launcher.stderr.read().decode()
    assert said == f"lockstep: {number.name}: ending ranks 0 and 1\n"
    assert not any(map(alive, below))


def test_a_second_ctrl_c_skips_the_grace_period(tmp_path):
    (tmp_path / "deaf.py").write_text("import signal; signal.signal(15, signal.SIG_IGN)\n" + WAIT)
    with subprocess.Popen(
        [*CLI, "-n", "1", "deaf.py"], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    ) as launcher:
        until((tmp_path / "rank0").exists, "the rank did not start")
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr.readline() == b"lockstep: SIGINT: ending rank 0\n"
        began = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE) == 128 + signal.SIGINT
        assert time.monotonic() - began < GRACE - 1
        assert launcher.stderr.read() == b""
    assert not any(alive(int(pid)) for pid in (tmp_path / "rank0").read_text().split())


def test_ranks_end_with_a_killed_launcher(waiting):
    launcher, below = waiting
    launcher.kill()
    launcher.wait()
    until(lambda: not any(map(alive, below)), "ranks outlived their launcher")


def test_ranks_end_with_a_killed_launcher_even_if_another_child_has_its_sockets():
    program = """
import lockstep, os, signal, sys
pids = lockstep.launch(signal.pause, nprocs=2, join=False).processes
child = os.fork()  # holds a copy of every socket of the launcher
if child == 0: sys.stdin.read(); os._exit(0)
print(child, *pids, flush=True)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as launcher:
        child, *ranks = map(int, launcher.stdout.readline().split())
        assert all(map(alive, ranks))
        launcher.kill()
        until(lambda: not any(map(alive, ranks)), "ranks outlived their launcher")
        assert alive(child)
    until(lambda: not alive(child), "the child did not end with its standard input")


@pytest.mark.parametrize("daemon", [True, False])
def test_a_forked_child_that_exits_does_not_end_its_parents_ranks(daemon):
    program = f"""
import lockstep, os, signal, sys
launched = lockstep.launch(signal.pause, nprocs=1, join=False, daemon={daemon})
[rank] = launched.processes
if (child := os.fork()) == 0:
    signal.alarm(60)
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, launched.exitcodes, os.path.exists(f"/proc/{{rank}}"))
launched.terminate()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert (done.stdout, done.stderr) == ("0 [None] True\n", "")


def test_ctrl_c_ends_the_ranks_of_a_launch_in_a_program():
    program = """
import lockstep, os, signal
def rank():
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
lockstep.launch(rank, nprocs=2)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launcher:
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE) == -signal.SIGINT
        assert b"KeyboardInterrupt" in launcher.stderr.read()
        assert not any(map(alive, ranks))


def test_the_ranks_of_a_killed_fork_server_are_ended(waiting):
    launcher, below = waiting
    (fork_server,) = psutil.Process(launcher.pid).children()
    fork_server.kill()
    assert launcher.wait(PATIENCE) == 1
    assert "the fork server that had started it exited" in launcher.stderr.read().decode()
    until(lambda: not any(map(alive, below)), "ranks outlived their fork server")


def test_concurrent_launches_use_different_ports():
    def meet(launch: int) -> tuple[float, str]:
        ls.init(timeout=60)
        tensor = torch.tensor([float(launch)])
        dist.all_reduce(tensor)
        return tensor.item(), os.environ["MASTER_PORT"]

    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda n: ls.launch(meet, (n,), 2, timeout=90), range(20)))
    assert [values[0][0] for values in results] == [2.0 * n for n in range(20)]
    assert len({values[0][1] for values in results}) == 20


def test_two_launchers_form_one_world_of_two_hosts(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist, lockstep as ls\n"
        "world = ls.init(timeout=60); tensor = torch.ones(1); dist.all_reduce(tensor)\n"
        "print(world.rank, world.local_rank, world.host, tensor.item())\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ["-n", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    launchers = [
        subprocess.Popen(
            [*CLI, *flags, "--node-rank", str(host), "train.py"],
            cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        )
        for host in (1, 0)
    ]  # fmt: skip
    printed = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert sorted("".join(printed).splitlines()) == [
        f"[{rank}] {rank} {rank % 2} {rank // 2} 4.0" for rank in range(4)
    ]


def test_exit_statuses_and_the_last_line_of_output(tmp_path):
    Path(tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")

    def status(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [*CLI, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    assert status("-n", "2", "train.py", "0") == (0, "")
    code, last = status("-n", "2", "train.py", "7")
    assert code == 1
    assert last.startswith("lockstep: rank ")
    assert "exited with status 7; its log: runs/train-" in last
    assert status("-n", "0", "train.py") == (
        2, "lockstep: --nproc-per-node 0: a host needs at least one rank",
    )  # fmt: skip


def test_process_context():
    launched = ls.launch(signal.pause, nprocs=2, join=False)
    pids = launched.processes
    assert len(set(pids)) == 2
    assert all(map(alive, pids))
    assert launched.exitcodes == [None, None]
    with pytest.raises(TimeoutError, match=r"ranks 0 and 1 did not return within 0.2 s"):
        launched.join(timeout=0.2)
    launched.terminate()
    assert launched.exitcodes == [-signal.SIGTERM] * 2
    assert not any(map(alive, pids))
    assert ls.launch(lambda: 7, nprocs=2, join=False).join() == [7, 7]


@pytest.mark.parametrize(("daemon", "expected"), [(True, ""), (False, "done\n" * 2)])
def test_at_exit_ranks_are_joined_and_daemons_terminated(daemon, expected, tmp_path):
    program = f"""
import lockstep, os, time
def rank():
    while not os.path.exists("exiting"): time.sleep(0.01)
    if {daemon}: time.sleep(1000)
    os.write(1, b"done\\n")
launched = lockstep.launch(rank, nprocs=2, join=False, daemon={daemon})
launched.processes
open("exiting", "w").close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


def test_the_world_is_left_at_exit_without_output():
    program = """
import atexit, lockstep, torch.distributed as dist
atexit.register(lambda: print(dist.is_initialized()))  # called after what is registered later
lockstep.init()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (b"False\n", b"", 0)
