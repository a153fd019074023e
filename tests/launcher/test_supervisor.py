"""What is left when the launcher is told to stop, is killed, or is one of many."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

import lockstep as ls
import processes
import warm
from lockstep.launcher import launch
from lockstep.launcher.supervisor import GRACE
from processes import alive

CLI = [*warm.LOCKSTEP, "run"]
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
    launcher = warm.Popen(
        [*CLI, "-n", "2", "wait.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
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
    doing = "waiting up to 28 s for the ranks to save a checkpoint and stop"
    doing = doing if number == signal.SIGTERM else "ending ranks 0 and 1"
    assert said == f"lockstep: {number.name}: {doing}\n"
    assert not any(map(alive, below))


def test_a_second_ctrl_c_skips_the_grace_period(tmp_path):
    (tmp_path / "deaf.py").write_text("import signal; signal.signal(15, signal.SIG_IGN)\n" + WAIT)
    with warm.Popen(
        [*CLI, "-n", "1", "deaf.py"], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    ) as launcher:
        until((tmp_path / "rank0").exists, "the rank did not start")
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr.readline() == b"lockstep: SIGINT: ending rank 0\n"
        began = time.monotonic()
        while launcher.poll() is None:  # whenever it comes
            launcher.send_signal(signal.SIGINT)
            time.sleep(0.02)
            assert time.monotonic() - began < PATIENCE
        assert launcher.wait(PATIENCE) == 128 + signal.SIGINT
        assert time.monotonic() - began < GRACE - 1
        assert launcher.stderr.read() == b""
    assert not any(alive(int(pid)) for pid in (tmp_path / "rank0").read_text().split())


# Rank 0 leaves a process behind, in a session of its own, that holds all that the rank held.
LEAVE = """
import os, signal, sys
rank = int(os.environ["RANK"])
if rank == 0:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        with open("left", "w") as file: file.write(str(os.getpid()))
        os.write(writing, b"x")
        while True: signal.pause()
    os.read(reading, 1)
print("end", flush=True)
sys.exit(int(sys.argv[1]) if rank == 0 else 0)
"""


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("flags", [("-n", "2"), ("--min", "1", "--max", "2")])
def test_a_process_that_a_rank_leaves_behind_does_not_delay_the_end(tmp_path, status, flags):
    (tmp_path / "leave.py").write_text(LEAVE)
    try:
        done = warm.run(
            [*CLI, *flags, "leave.py", str(status)],
            cwd=tmp_path, text=True, timeout=PATIENCE,
        )  # fmt: skip
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert done.returncode == bool(status)
    noun = "rank" if flags[0] == "-n" else "member"
    assert f"{noun} 0 ended, but a process started there still runs" in done.stderr
    if status:
        assert f"{noun} 0 exited with status 3" in done.stderr


def test_a_program_inherits_its_standard_streams_alone(tmp_path):
    # Descriptor 3 is the folder that is listed, 4 is the parent-death pipe.
    listed = warm.run(
        [*CLI, "-n", "1", "--no-python", "ls", "-l", "/proc/self/fd"],
        cwd=tmp_path, text=True, timeout=PATIENCE,
    ).stdout  # fmt: skip
    assert listed.count("->") == 5, listed


# Each rank has a worker in its process group, and a way to stop of its own: `stop(rank)`.
STOP = """
import os, signal, subprocess, sys
rank = int(os.environ["RANK"])
worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def next_batch():
    worker.stdin.write(b"batch\\n"); worker.stdin.flush()
    return worker.stdout.readline()
def stop(*_):
    {stop}
signal.signal(signal.SIGTERM, stop)
open(f"ready{{rank}}", "w").close()
while True: signal.pause()
"""
SAVE = 'open(f"saved{rank}", "wb").write(next_batch()); sys.exit(75)'
WAITING = "lockstep: SIGTERM: waiting up to {} s for the ranks to save a checkpoint and stop\n"


@contextmanager
def stopping(folder: Path, source: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run two ranks of a script; give their launcher when they are ready."""
    (folder / "train.py").write_text(source)
    with warm.Popen(
        [*CLI, "-n", "2", *flags, "train.py"],
        cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as launcher:  # fmt: skip
        ready = [folder / "ready0", folder / "ready1"]
        until(lambda: all(path.exists() for path in ready), "the ranks did not start")
        below = [process.pid for process in psutil.Process(launcher.pid).children(recursive=True)]
        try:
            yield launcher
        finally:
            launcher.kill()
        assert launcher.wait(PATIENCE) is not None
        until(lambda: not any(map(alive, below)), "something was left behind")


def continue_with(folder: Path) -> str:
    (run,) = (folder / "runs").iterdir()
    return f"lockstep: stopped on request; continue with: lockstep run --resume runs/{run.name}\n"


def exit_status(folder: Path) -> int | None:
    (run,) = (folder / "runs").iterdir()
    status: int | None = json.loads((run / "launch.json").read_text())["exit_status"]
    return status


def test_ranks_that_stop_on_request_keep_their_workers_until_then(tmp_path):
    with stopping(tmp_path, STOP.format(stop=SAVE)) as launcher:
        assert exit_status(tmp_path) is None
        launcher.terminate()
        assert launcher.wait(PATIENCE) == 75
        assert launcher.stderr.read() == WAITING.format(28) + continue_with(tmp_path)
    assert [(tmp_path / f"saved{rank}").read_bytes() for rank in range(2)] == [b"batch\n"] * 2
    assert exit_status(tmp_path) == 75


def test_ctrl_c_tells_how_to_continue_ranks_that_have_saved_their_state(tmp_path):
    with stopping(tmp_path, STOP.format(stop="sys.exit(75)")) as launcher:
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE) == 128 + signal.SIGINT
        said = launcher.stderr.read()
        assert said == "lockstep: SIGINT: ending ranks 0 and 1\n" + continue_with(tmp_path)
    assert exit_status(tmp_path) == 128 + signal.SIGINT


def test_sigterm_to_every_process_of_a_job_leaves_what_the_ranks_need(tmp_path):
    """As srun and systemd send it: also to the fork server and to the process of the store."""
    stop = 'open(f"saved{rank}", "w").close(); sys.exit(75)'
    with stopping(tmp_path, STOP.format(stop=stop)) as launcher:
        (fork_server,) = psutil.Process(launcher.pid).children()
        others = [process.pid for process in (fork_server, *fork_server.children())]
        for pid in (launcher.pid, *others):  # a launcher whose ranks have ended would not wait
            os.kill(pid, signal.SIGTERM)
        assert launcher.wait(PATIENCE) == 75
        assert launcher.stderr.read().endswith(continue_with(tmp_path))
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))


def test_sigterm_to_a_launcher_whose_ranks_have_stopped_is_too_late(tmp_path):
    """The ranks of a job may end before the launcher gets its signal."""
    (tmp_path / "train.py").write_text("import sys; sys.exit(75)")
    program = (
        "import os, signal; from lockstep.cli import main;"
        "from lockstep.launcher import launch_script;"
        "release = launch_script.release_run;"
        "launch_script.release_run = lambda path: os.kill(os.getpid(), signal.SIGTERM) "
        "or print('signaled') or release(path);"
        "main()"
    )
    command = [sys.executable, "-c", program, "run", "-n", "2", "train.py"]
    ended = warm.run(command, cwd=tmp_path, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("signaled\n", 75)
    assert ended.stderr.endswith(continue_with(tmp_path))


@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        ("sys.exit(0)", 75, None),  # a script's own way to stop
        ("sys.exit(75 * rank)", 75, None),
        ("sys.exit(143)", 143, ""),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(75)", 143, ""),
        (
            "raise OSError('disk full')",
            143,
            "lockstep: rank {} raised OSError: disk full (train.py:9); its log: {}/rank-{}.log\n",
        ),
    ],
)
def test_how_ranks_end_after_sigterm(tmp_path, stop, status, said):
    with stopping(tmp_path, STOP.format(stop=stop)) as launcher:
        launcher.terminate()
        assert launcher.wait(PATIENCE) == status
        shown = launcher.stderr.read()
    (run,) = (tmp_path / "runs").iterdir()
    if said is None:
        said = continue_with(tmp_path)
    endings = [said.format(rank, f"runs/{run.name}", rank) for rank in range(2)]
    assert shown.startswith(WAITING.format(28))
    assert shown.endswith(tuple(endings))
    assert "Traceback" not in shown or "raise" in stop
    assert exit_status(tmp_path) == status


def test_without_a_grace_period_ranks_are_killed(tmp_path):
    with stopping(tmp_path, STOP.format(stop="pass"), "--grace", "0") as launcher:
        launcher.terminate()
        assert launcher.wait(PATIENCE) == 143
        late = "lockstep: ranks 0 and 1 did not stop within 0 s and were killed\n"
        assert launcher.stderr.read() == WAITING.format(0) + late


def test_a_rank_that_does_not_stop_in_time_is_named(tmp_path):
    source = STOP.format(stop="rank or sys.exit(75)")
    with stopping(tmp_path, source, "--grace", "0.5") as launcher:
        launcher.terminate()
        assert launcher.wait(PATIENCE) == 143
        assert launcher.stderr.read() == (
            WAITING.format(0.5) + "lockstep: rank 1 did not stop within 0.5 s and was killed\n"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_skips_the_grace_period(tmp_path, number):
    with stopping(tmp_path, STOP.format(stop="pass"), "--grace", "600") as launcher:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stderr.readline() == WAITING.format(600)
        launcher.send_signal(number)
        assert launcher.wait(PATIENCE) == 128 + number
        assert launcher.stderr.read() == f"lockstep: {number.name}: ending ranks 0 and 1\n"


@pytest.mark.parametrize("grace", [0.3, 600])
def test_a_rank_that_stops_by_itself_gives_the_others_the_grace_period(tmp_path, grace):
    """The signal may reach the ranks directly; rank 1 stops after rank 0, or not in time."""
    source = """
import os, sys, time
rank = int(os.environ["RANK"])
open(f"ready{rank}", "w").close()
while rank and not os.path.exists("go"): time.sleep(0.01)
sys.exit(75)
"""
    with stopping(tmp_path, source, "--grace", str(grace)) as launcher:
        if grace == 600:
            (tmp_path / "go").touch()
        assert launcher.wait(PATIENCE) == 75
        late = "lockstep: rank 1 did not stop within 0.3 s and was ended\n"
        assert launcher.stderr.read() == late * (grace < 1) + continue_with(tmp_path)


# A program whose two ranks say that they are ready, and then do `stop` on SIGTERM.
LAUNCH = """
import atexit, os, signal, sys, time
import click, lockstep
from lockstep.cli import run

@click.command()
def program():
    def rank():
        def stop(*_):
            {stop}
        signal.signal(signal.SIGTERM, stop)
        os.write(1, b"ready\\n")
        while True: signal.pause()
    atexit.register(lambda: os.write(1, b"at exit\\n"))
    try:
        lockstep.launch(rank, nprocs=2)
    finally:
        os.write(1, b"default" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else b"")

run(program)
"""


@contextmanager
def launching(stop: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    with warm.Popen(
        [sys.executable, "-c", LAUNCH.format(stop=stop)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        try:
            assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            below = psutil.Process(launcher.pid).children(recursive=True)
            yield launcher
        finally:
            launcher.kill()
        until(lambda: not any(alive(each.pid) for each in below), "something was left behind")


@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        ("sys.exit(75)", 75, "lockstep: stopped on request\n"),
        ("sys.exit(143)", -signal.SIGTERM, ""),
        ("raise ValueError('no')", -signal.SIGTERM, "lockstep: rank {} raised ValueError: no"),
    ],
)
def test_sigterm_stops_the_ranks_of_a_command_that_launches_a_function(
    tmp_path, stop, status, said
):
    with launching(f"open(str(os.getpid()), 'w').close(); {stop}", tmp_path) as launcher:
        launcher.terminate()
        assert launcher.wait(PATIENCE) == status
        shown = launcher.stderr.read().removeprefix(WAITING.format(28))
        printed = launcher.stdout.read()
    assert len(list(tmp_path.iterdir())) == 2  # both ranks had the time to write a file
    assert shown == said or shown.startswith((said.format(0) or "?", said.format(1) or "?"))
    assert printed == ("defaultat exit\n" if status == 75 else "")


def test_a_second_sigterm_ends_the_ranks_of_a_function_at_once(tmp_path):
    with launching("os.write(1, b'asked\\n')", tmp_path) as launcher:
        launcher.terminate()
        assert [launcher.stdout.readline() for _ in range(2)] == ["asked\n"] * 2
        launcher.terminate()
        assert launcher.wait(PATIENCE) == -signal.SIGTERM
        assert launcher.stderr.read() == WAITING.format(28)


def test_a_program_with_its_own_sigterm_handler_keeps_it():
    def handler(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with launch._catch_sigterm():
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ls.launch, lambda: 7, nprocs=1).result() == [7]


def test_ranks_of_a_closed_terminal_save_and_end(tmp_path):
    save = 'print("saving"); open(f"saved{rank}", "wb").write(b"x" * 9); sys.exit(75)'
    (tmp_path / "train.py").write_text(STOP.format(stop=save))
    pid, terminal = pty.fork()
    if pid == 0:
        hear_hangups()
        os.chdir(tmp_path)
        os.execv(sys.executable, [*CLI, "-n", "2", "train.py"])
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), "no ranks")
    below = [process.pid for process in psutil.Process(pid).children(recursive=True)]
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert [(tmp_path / f"saved{rank}").read_bytes() for rank in range(2)] == [b"x" * 9] * 2
    assert exit_status(tmp_path) == 128 + signal.SIGHUP
    until(lambda: not any(map(alive, below)), "something was left behind")


def test_ranks_end_with_a_killed_launcher():
    """Also if they ignore SIGTERM, and if another child of the launcher has its sockets."""
    program = """
import lockstep, os, signal, sys
from lockstep.launcher.launch import start
def rank():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ready\\n")
    while True: signal.pause()
pids = start(rank, nprocs=2).processes
child = os.fork()  # holds a copy of every socket of the launcher
if child == 0: sys.stdin.read(); os._exit(0)
os.write(1, b"%d %d %d\\n" % (child, *pids))
signal.pause()
"""
    with warm.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as launcher:
        lines = sorted(launcher.stdout.readline() for _ in range(3))
        assert lines[1:] == [b"ready\n"] * 2
        child, *ranks = map(int, lines[0].split())
        assert all(map(alive, ranks))
        launcher.kill()
        until(lambda: not any(map(alive, ranks)), "ranks outlived their launcher")
        assert alive(child)
    until(lambda: not alive(child), "the child did not end with its standard input")


def test_a_forked_child_that_exits_does_not_end_its_parents_ranks():
    program = """
import os, signal, sys
from lockstep.launcher.launch import start
launched = start(signal.pause)
[rank] = launched.processes
if (child := os.fork()) == 0:
    signal.alarm(60)
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, launched.exitcodes, os.path.exists(f"/proc/{rank}"))
launched.terminate()
"""
    done = warm.run([sys.executable, "-c", program], text=True, timeout=90)
    assert (done.stdout, done.stderr) == ("0 [None] True\n", "")


def test_a_second_ctrl_c_ends_the_ranks_of_a_launch_in_a_program_at_once():
    program = """
import lockstep, os, signal
def rank():
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
    os.write(1, b"%d\\n" % os.getpid())
    while True: signal.pause()
lockstep.launcher.supervisor.GRACE = 600.0
lockstep.launch(rank, nprocs=2)
"""
    with warm.Popen(
        [sys.executable, "-c", "import lockstep.launcher.supervisor\n" + program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as launcher:  # fmt: skip
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGINT)
        assert [launcher.stdout.readline() for _ in range(2)] == [b"asked\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE) == -signal.SIGINT
        shown = launcher.stderr.read().decode()
        assert shown.count("KeyboardInterrupt") == shown.count("Traceback") == 1
        assert not any(map(alive, ranks))


def test_a_file_that_hides_a_module_of_python_is_named(tmp_path):
    (tmp_path / "re.py").touch()
    (tmp_path / "train.py").touch()
    command = Path(sys.executable).with_name("lockstep")  # does not import from this folder itself
    done = subprocess.run(
        [command, "run", "-n", "2", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "rank 0 could not be started" in last
    assert ": rename re.py, which Python imports instead of" in last


def test_the_ranks_of_a_killed_fork_server_are_ended(waiting):
    launcher, below = waiting
    (fork_server,) = psutil.Process(launcher.pid).children()
    fork_server.kill()
    assert launcher.wait(PATIENCE) == 1
    assert "the fork server that had started it exited" in launcher.stderr.read().decode()
    until(lambda: not any(map(alive, below)), "ranks outlived their fork server")


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
        warm.Popen(
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
        done = warm.run([*CLI, *arguments], cwd=tmp_path, text=True, timeout=60)
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    code, last = status("-n", "2", "train.py", "0")
    assert code == 0
    assert last.startswith("lockstep: the run is in runs/train-")
    code, last = status("-n", "2", "train.py", "7")
    assert code == 1
    assert last.startswith("lockstep: rank ")
    assert "exited with status 7; its log: runs/train-" in last
    assert status("-n", "0", "train.py") == (
        2, "lockstep: --nproc-per-node 0: a host needs at least one rank",
    )  # fmt: skip


def test_process_context():
    launched = launch.start(signal.pause, nprocs=2)
    pids = launched.processes
    assert len(set(pids)) == 2
    assert all(map(alive, pids))
    assert launched.exitcodes == [None, None]
    with pytest.raises(TimeoutError, match=r"ranks 0 and 1 did not return within 0.2 s"):
        launched.join(timeout=0.2)
    launched.terminate()
    assert launched.exitcodes == [-signal.SIGTERM] * 2
    assert not any(map(alive, pids))


def test_ranks_that_nobody_waits_for_end_with_the_program():
    program = """
import signal
from lockstep.launcher.launch import start
print(*start(signal.pause, nprocs=2).processes)
"""
    done = warm.run([sys.executable, "-c", program], text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    assert not any(alive(int(pid)) for pid in done.stdout.split())


def test_the_world_is_left_at_exit_without_output():
    program = """
import atexit, lockstep, torch.distributed as dist
atexit.register(lambda: print(dist.is_initialized()))  # called after what is registered later
lockstep.init()
"""
    done = warm.run([sys.executable, "-c", program], timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (b"False\n", b"", 0)
