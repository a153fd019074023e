"""`lockstep run`: whole scripts, and every way they can end."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

import warm
from lockstep import cli
from lockstep.kernel.errors import FileError, LaunchEnvironmentError, RankError, UsageError
from lockstep.launcher import hang_monitor, run_folder
from lockstep.launcher import launch_script as launch_script_module
from lockstep.launcher.fork_server import check_open_files
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.launch_script import launch_script
from lockstep.launcher.listening_socket import DEFAULT_PORT
from lockstep.record.reader import read_run
from lockstep.tools.commands.run import command, make_config
from lockstep.tools.commands.runs import list_runs
from processes import restoring_handlers

CLI = warm.LOCKSTEP


@pytest.fixture
def run(tmp_path, monkeypatch, capfdbinary):
    """Run a script in an empty folder; what it printed, and its logs by rank."""
    monkeypatch.chdir(tmp_path)

    def run(source, *arguments, flags="-n 2"):
        Path("train.py").write_text(source)
        launch_script(parse([*flags.split(), "train.py", *arguments]))
        return capfdbinary.readouterr()

    return run


def parse(words: list[str]) -> LaunchConfig:
    """Return the settings that the words of a command describe."""
    params = command.make_context("run", words).params
    return make_config(params.pop("script"), params.pop("arguments"), params)


def config_of(*flags: str) -> LaunchConfig:
    return parse([*flags, "train.py"])


def logs(folder: str = "runs") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*/rank-*.log")}


def failure(run, capfdbinary, source, *arguments, **settings) -> tuple[str, str]:
    with pytest.raises(RankError) as caught:
        run(source, *arguments, **settings)
    return str(caught.value), capfdbinary.readouterr().err.decode(errors="replace")


def test_lines_have_a_prefix_and_each_rank_a_log(run):
    printed = run("import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])", "--lr", "1")
    assert sorted(printed.out.splitlines()) == [b"[0] rank 0 --lr 1", b"[1] rank 1 --lr 1"]
    assert logs() == {"rank-0.log": b"rank 0 --lr 1\n", "rank-1.log": b"rank 1 --lr 1\n"}


def test_variables_of_torchrun_are_set(run):
    names = (
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE "
        "GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT "
        "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE "
        "OMP_NUM_THREADS"
    )
    source = f"import os; print(*[os.environ[n] for n in {names.split()!r}])"
    printed = run(source, flags="-n 2 --rdzv_id job").out
    expected = "{0} {0} 0 {0} default 2 2 1 2 127.0.0.1 0 0 job False 1"
    lines = sorted(printed.decode().splitlines())
    assert lines == [f"[{rank}] " + expected.format(rank) for rank in range(2)]


def test_a_stock_script_joins_a_gloo_group(run):
    source = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); t = torch.ones(1); dist.all_reduce(t); print(t.item())\n"
        "dist.destroy_process_group()\n"
    )
    assert sorted(run(source, flags="-n 3").out.splitlines()) == [b"[%d] 3.0" % r for r in range(3)]


def test_a_script_is_main_and_its_folder_is_first_in_sys_path(run):
    Path("beside.py").write_text("word = 'imported'")
    printed = run("import beside\nif __name__ == '__main__': print(beside.word, __file__)")
    assert printed.out.splitlines()[0].endswith(f"imported {Path.cwd()}/train.py".encode())


def test_a_script_that_changes_the_directory_finds_its_file_and_its_source(run):
    source = (
        "import inspect, os\nos.chdir('/')\ndef f(): return 1\n"
        "print(os.path.exists(__file__), inspect.getsource(f))"
    )
    assert b"True def f(): return 1" in run(source, flags="-n 1").out


def test_open_files_are_flushed(run):
    run("f = open('note', 'w'); f.write('kept')\ndef keep(): return f", flags="-n 1")
    assert Path("note").read_text() == "kept"


def test_modules_and_programs(tmp_path, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package/tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    launch_script(parse(["-m", "package.tool", "x"]))
    assert capfdbinary.readouterr().out == b"__main__ ['x']\n"
    launch_script(parse(["--no-python", "sh", "-c", "echo $RANK of $1", "", "two"]))
    assert capfdbinary.readouterr().out == b"0 of two\n"


def test_what_is_not_shown_is_in_the_logs(run):
    source = "import os, sys; print('out'); print('err', file=sys.stderr)"
    printed = run(source, flags="-n 2 --local-ranks-filter 1 --log_dir logs")
    *errors, where = printed.err.splitlines()
    assert (printed.out, errors) == (b"[1] out\n", [b"[1] err"])
    assert re.fullmatch(rb"lockstep: the run is in logs/train-[-\d]+", where)
    assert all(sorted(log.split()) == [b"err", b"out"] for log in logs("logs").values())
    assert len(logs("logs")) == 2


def test_a_megabyte_without_a_newline_and_bytes_that_are_not_text(run):
    source = "import os; os.write(1, b'x' * (1 << 20)); os.write(1, b'\\xff\\xfe\\n')"
    printed = run(source, flags="-n 1")
    assert printed.out.replace(b"\n", b"") == b"x" * (1 << 20) + b"\xff\xfe"
    assert logs()["rank-0.log"] == b"x" * (1 << 20) + b"\xff\xfe\n"


def test_a_launch_ends_when_nobody_reads_its_output_any_more(tmp_path):
    (tmp_path / "train.py").write_text("while True: print('step')")
    with warm.Popen(
        [*CLI, "run", "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout.readline() == b"step\n"
        launcher.stdout.close()
        assert launcher.wait(60) == 128 + signal.SIGPIPE
        assert launcher.stderr.read() == b"lockstep: SIGPIPE: ending rank 0\n"


CLOSED = """
import os, sys
for number in map(int, sys.argv.pop(1)):
    os.close(number)
    name = ("stdin", "stdout", "stderr")[number]
    setattr(sys, name, None)
    setattr(sys, f"__{name}__", None)
from lockstep.cli import main; main()
"""  # as a shell does: lockstep run train.py >&-


@pytest.mark.parametrize("closed", ["1", "2", "012"])
def test_a_launch_goes_on_without_its_streams(tmp_path, closed):
    (tmp_path / "train.py").write_text("import sys; print('out'); print('error', file=sys.stderr)")
    command = [sys.executable, "-c", CLOSED, closed, "run", "-n", "2", "train.py"]
    done = warm.run(command, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done
    assert b"Traceback" not in done.stderr + done.stdout
    printed = {
        path.name: sorted(path.read_text().split()) for path in tmp_path.glob("runs/*/*.log")
    }
    assert printed == {f"rank-{rank}.log": ["error", "out"] for rank in range(2)}


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_launch_goes_on_when_a_stream_is_on_a_full_disk(tmp_path, full):
    (tmp_path / "train.py").write_text("import sys; print('out'); print('error', file=sys.stderr)")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as disk:
        command = [*CLI, "run", "-n", "2", "train.py"]
        with warm.Popen(command, cwd=tmp_path, **{**streams, full: disk}) as launcher:
            _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    if full == "stdout":
        assert b"standard output cannot be written (No space left on device)" in errors
        assert b"Traceback" not in errors
    printed = {
        path.name: sorted(path.read_text().split()) for path in tmp_path.glob("runs/*/*.log")
    }
    assert printed == {f"rank-{rank}.log": ["error", "out"] for rank in range(2)}


def test_a_function_is_launched_without_streams(tmp_path):
    """In a real interpreter, whose sockets and files get the numbers of the streams."""
    (tmp_path / "launch.py").write_text("""
import lockstep as ls
def double(number):
    print("printed")
    return 2 * number
if __name__ == "__main__":
    open("result", "w").write(str(ls.launch(double, (21,), nprocs=2)))
""")
    command = f"exec {shlex.quote(sys.executable)} launch.py <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == "[42, 42]"


@pytest.mark.parametrize("arguments", [["--help"], ["schedule", "1f1b"]])
def test_a_result_that_cannot_be_printed_is_one_sentence(tmp_path, arguments):
    with open("/dev/full", "wb") as disk:
        command = [*CLI, *arguments]
        with warm.Popen(command, cwd=tmp_path, stdout=disk, stderr=subprocess.PIPE) as shown:
            _, errors = shown.communicate(timeout=60)
    assert shown.returncode == 1
    assert errors == b"lockstep: the output cannot be written: No space left on device\n"


def test_a_message_that_cannot_be_printed_changes_no_status(tmp_path):
    command = [*CLI, "run", "nothing.py"]
    with (
        open("/dev/full", "wb") as disk,
        warm.Popen(command, cwd=tmp_path, stderr=disk) as launcher,
    ):
        assert launcher.wait(60) == 2


@pytest.mark.parametrize("module", ["lockstep.cli", "lockstep.tools.commands.runs"])
def test_ctrl_c_during_the_imports_of_a_command_is_quiet(tmp_path, module):
    program = f"""
import os, signal, sys
from types import SimpleNamespace
def interrupt(name, *_):
    if name == "lockstep.messages" or name == "lockstep.tools.commands.runs":
        os.kill(os.getpid(), signal.SIGINT)
for name in ("lockstep.cli", "lockstep.messages", "lockstep.tools.commands.runs"):
    if name == {module!r} or {module!r} == "lockstep.cli":
        sys.modules.pop(name, None)
sys.meta_path.insert(0, SimpleNamespace(find_spec=interrupt))
from lockstep.cli import main
main()
"""
    done = warm.run([sys.executable, "-c", program, "runs"], cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"", b"")


def test_ranks_without_dev_null_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    with pytest.raises(UsageError, match=r"null cannot be opened \(No such file or directory\)"):
        check_open_files(1)


def test_only_rank_0_reads_standard_input(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(repr(sys.stdin.read()))")
    with open(tmp_path / "input", "w+b") as given:
        given.write(b"hello")
        given.seek(0)
        command = [*CLI, "run", "-n", "2", "train.py"]
        done = warm.run(command, cwd=tmp_path, stdin=given, timeout=60)
    assert sorted(done.stdout.splitlines()) == [b"[0] 'hello'", b"[1] ''"]
    assert done.returncode == 0


FAIL = """
import os, signal, sys
import torch.distributed as dist
dist.init_process_group("gloo")
print("ready", flush=True)
if dist.get_rank() == 1:
    {}
dist.barrier()
dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "sentence", "status"),
    [
        ("raise KeyError('lr')", "rank 1 raised KeyError: 'lr' (train.py:7)", 1),
        ("sys.exit(3)", "rank 1 exited with status 3", 3),
        ("sys.exit('bad data')", "rank 1 exited with status 1", 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "rank 1 was killed by SIGSEGV", -11),
        ("import no_such_module", "rank 1 raised ModuleNotFoundError: No module named "
         "'no_such_module' (train.py:7)", 1),
    ],
)  # fmt: skip
def test_the_first_failure_is_reported_last(run, capfdbinary, how, sentence, status):
    told, shown = failure(run, capfdbinary, FAIL.format(how), flags="-n 3")
    log = next(Path("runs").glob("*/rank-1.log"))
    assert told == f"{sentence}; its log: {log}"
    assert "lockstep: the last lines of rank 1:\n" in shown
    assert "    ready\n" in shown.partition("the last lines of rank 1")[2]


def test_a_rank_that_exits_0_early_is_named(run, capfdbinary):
    told, _ = failure(run, capfdbinary, FAIL.format("sys.exit(0)"), flags="-n 3")
    assert told.startswith("rank 1 returned while rank ")
    assert "still waited in a collective (train.py:" in told


def test_errors_of_the_backend_are_shown_once_with_the_users_line(run, capfdbinary):
    source = """
import lockstep as ls, torch, torch.distributed as dist
rank = ls.init().rank
dist.all_reduce(torch.ones(2 + rank))
"""
    told, shown = failure(run, capfdbinary, source, flags="-n 2")
    folder = next(Path("runs").glob("*"))
    assert told.startswith("train.py:4: the ranks of group default disagree in call #1: rank 0 ")
    assert told.endswith(f"; ranks 0 and 1 raised this, see {folder}/rank-*.log")
    assert "Traceback" not in shown
    assert "DistBackendError" not in shown
    for rank in (0, 1):
        assert "in <module>\n    dist.all_reduce" in (folder / f"rank-{rank}.log").read_text()
    source = """
import lockstep as ls, torch, torch.distributed as dist
if ls.init().rank == 0:
    dist.recv(torch.ones(2), 1)
"""
    told, shown = failure(run, capfdbinary, source, flags="-n 2")
    assert told.startswith("rank 1 returned while rank 0 still waited in recv from rank 1 ")
    assert "(train.py:4); the log of rank 0: " in told
    assert "lost the connection to another rank (train.py:4)" in shown
    assert "Traceback" not in shown


def test_an_error_of_lockstep_is_shown_once_with_the_users_line(run, capfdbinary):
    source = """
from lockstep.launcher import world
def train():
    world.world()
try:
    train()
finally:
    print("before it ends")
"""
    told, shown = failure(run, capfdbinary, source, flags="-n 2")
    (folder,) = Path("runs").iterdir()
    assert told == (
        f"train.py:4: this process has not joined a world: call lockstep.init() first; ranks 0 "
        f"and 1 raised this, see {folder}/rank-*.log"
    )
    assert shown == ""  # the caller shows the error
    for log in logs().values():
        assert b'train.py", line 4, in train' in log
        assert b"launcher/world.py" in log


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(
    run, capfdbinary, monkeypatch
):
    monkeypatch.setattr("lockstep.launcher.supervisor.GRACE", 0.3)
    source = """
import os, signal, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: print("not me", flush=True))
    open("deaf", "w").close()
    while True: signal.pause()
while not os.path.exists("deaf"): time.sleep(0.01)
raise ValueError("enough")
"""
    told, _ = failure(run, capfdbinary, source)
    assert told.startswith("rank 1 raised ValueError: enough")
    assert logs()["rank-0.log"] == b"not me\n"


def test_processes_that_a_rank_started_end_with_it(run, capfdbinary):
    source = """
import os, subprocess, time
if os.environ["RANK"] == "0":
    child = subprocess.Popen(["sleep", "1000"])
    with open("new", "w") as file: file.write(str(child.pid))
    os.rename("new", "child")
    child.wait()
while not os.path.exists("child"): time.sleep(0.01)
raise ValueError("enough")
"""
    failure(run, capfdbinary, source)
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_processes_that_a_rank_leaves_running_are_ended(run):
    source = """
import subprocess
with open("child", "w") as file: file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
"""
    run(source, flags="-n 1")
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_stopped_rank_is_named(run, capfdbinary, monkeypatch):
    def log_and_go_on(sentence: str) -> None:
        log(sentence)
        os.kill(int(re.search(r"process (\d+)", sentence)[1]), signal.SIGCONT)

    log = hang_monitor.log
    monkeypatch.setattr(hang_monitor, "log", log_and_go_on)
    monkeypatch.setattr(hang_monitor, "REMARK_INTERVAL", 0.1)
    source = """
import os, signal
pid = os.getpid()
if os.environ["RANK"] == "1":
    os.kill(pid, signal.SIGSTOP)
"""
    shown = run(source).err.decode()
    assert "lockstep: rank 1 (process " in shown
    assert shown.count("is stopped; continue it with kill -CONT") == 1


def test_a_rank_that_returned_while_a_stock_script_waits_is_named(run, capfdbinary):
    os.mkfifo("end")
    source = """
import os, datetime, torch.distributed as dist
if os.environ["RANK"] == "0":
    open("end").read()  # until rank 1 has exited
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
else:
    held = os.open("end", os.O_WRONLY)
"""
    flags = "-n 2 --hang-timeout 1 --on-hang end"
    said, _ = failure(run, capfdbinary, source, flags=flags)
    assert said.startswith("rank 1 returned, while rank 0 has waited ")


def test_ranks_that_hang_are_reported_and_ended_on_request(run, capfdbinary):
    source = """
import os, torch, lockstep as ls
from torch import distributed as dist
world = ls.init()
open(f"pid-{world.rank}", "w").write(str(os.getpid()))
while world.rank == 1: open("spins", "w").close()
while not os.path.exists("spins"): pass
dist.all_reduce(torch.ones(1))
"""
    flags = "-n 2 --hang-timeout 2 --on-hang end"  # more than two ranks take to connect
    said, shown = failure(run, capfdbinary, source, flags=flags)
    assert re.match(r"rank 1 \(process \d+\) is at train.py:6, while rank 0 has waited ", said)
    assert "; its log: runs/" in said
    assert "  > train.py:8 in <module>" in shown
    pids = [int(Path(f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("print('a'", "train.py, line 1 is not valid Python: '(' was never closed"),
        ("x = 'a\0b'", "train.py"),  # with a line or without, depending on the Python version
    ],
)
def test_a_syntax_error_is_reported_once_and_nothing_starts(run, source, start):
    with pytest.raises(UsageError, match="is not valid Python: ") as caught:
        run(source)
    assert str(caught.value).startswith(start)
    assert logs() == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-n 0", "--nproc-per-node 0"),
        ("-n -1", "--nproc-per-node -1"),
        ("-n many", "--nproc-per-node many: expected a number"),
        ("--nnodes 1:4", "--nnodes 1:4: lockstep run starts a fixed number"),
        ("--nnodes 0", "--nnodes 0: expected the number of hosts, 1 or more"),
        ("--nnodes 2", "--nnodes 2 needs --master-addr"),
        ("--nnodes 2 --master-addr a", "--nnodes 2 needs --node-rank (PET_NODE_RANK) on every"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a", "--nnodes 2 needs --node-rank"),
        ("--nnodes 2 --node-rank 2 --master-addr a", "--node-rank 2: with --nnodes 2"),
        ("-n 2 --local-ranks-filter 2", "--local-ranks-filter names local rank 2"),
        ("--max-restarts 3", "--max-restarts 3: lockstep run does not restart"),
        ("--min 3 --max 2", "--min 3: expected a number of ranks from 1 to --max (2)"),
        ("--min 0", "--min 0: expected a number of ranks from 1 to --max (1)"),
        ("--max 0", "--nproc-per-node 0: a host needs at least one rank"),
        ("-n 2 --max 3", "-n 2 and --max 3: both are the number of ranks to begin with"),
        ("-m --no-python", "--module and --no-python cannot be combined"),
        ("--name a/b", "--name a/b: expected a name without a slash"),
        ("--name a --resume auto", "--name names a new run"),
    ],
)
def test_invalid_options(run, flags, words):
    with pytest.raises(UsageError) as caught:
        run("", flags=flags)
    assert str(caught.value).startswith(words)


def test_the_option_comes_before_the_variable_with_a_file_of_the_secret(monkeypatch):
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--max", "4", "a.py"]
    assert parse(words).secret_file is None
    monkeypatch.setenv("LOCKSTEP_SECRET_FILE", "of-variable")
    assert parse(words).secret_file == "of-variable"
    assert parse(["--secret-file", "of-option", *words]).secret_file == "of-option"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run train.py", "lockstep: the working directory has been deleted: change to another one"),
    ],
)
def test_unusual_folders_and_names_are_one_sentence(
    tmp_path, monkeypatch, capfd, arguments, sentence
):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if arguments.startswith("run"):
        folder.rmdir()
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    os.chdir(tmp_path)
    assert ended.value.code == 2
    shown = capfd.readouterr().err
    assert shown.startswith(sentence)
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere.py", r"^there is no script 'nowhere.py' in /"),
        ("-m no.such.module", r"^there is no module 'no' \(searched from /"),
        ("-m json.nothing", r"^there is no module 'json.nothing'"),
        ("-m json", r"^'json' is a package without a __main__ module$"),
        ("--no-python no-such-program", r"^'no-such-program' is not an executable program$"),
        ("empty", r"^'empty' is a folder without a __main__\.py$"),
    ],
)
def test_missing_targets_are_reported_before_anything_starts(
    tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=words):
        launch_script(parse(arguments.split()))
    assert logs() == {}


def test_logs_that_cannot_be_written(run):
    Path("taken").write_text("")
    with pytest.raises(FileError, match=r"^taken is not a folder, so no run can be kept"):
        run("", flags="--log-dir taken")
    Path("runs").write_text("a file where the folder should be")
    with pytest.raises(FileError, match=r"^runs is not a folder, .*--log-dir"):
        run("", flags="-n 1")


def test_options_from_variables(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert config_of("--master-addr", "a").node_rank == 1
    monkeypatch.delenv("PET_NODE_RANK")
    config = config_of("--nnodes", "1")
    assert (config.nprocs, config.nnodes) == (3, 1)


def test_master_address_and_port():
    two = ("--nnodes", "2", "--node_rank", "1")
    assert config_of("--master-port", "5").master_port == 5
    assert config_of(*two, "--master-addr", "a").master_port == DEFAULT_PORT
    assert config_of(*two, "--master-addr", "[::1]").master_addr == "::1"
    found = config_of(*two, "--rdzv-endpoint", "a:7", "--rdzv-backend", "c10d")
    assert (found.master_addr, found.master_port, found.node_rank) == ("a", 7, 1)
    alone = config_of(*two, "--master-addr", "a", "--master-port", "5", "--standalone")
    assert (alone.master_addr, alone.master_port) == ("127.0.0.1", 0)
    assert (alone.nnodes, alone.node_rank) == (1, 0)


@pytest.mark.parametrize("name", ["srun-2-hosts", "mpich-2-hosts"])
def test_a_launcher_may_start_the_command_once_on_each_host(name, monkeypatch):
    text = (Path(__file__).parent / "environments" / f"{name}.json").read_text()
    tasks = json.loads(text)
    for index, environ in enumerate(tasks):
        with monkeypatch.context() as patch:
            for variable, value in environ.items():
                patch.setenv(variable, value)
            size = ("--nnodes", str(len(tasks)))
            assert config_of(*size, "--master-addr", "a").node_rank == index
            assert config_of("--nnodes", "9", "--master-addr", "a", "--node-rank", "8").nnodes == 9
            assert config_of("-n", "2").nnodes == 1
            if name == "mpich-2-hosts":
                with pytest.raises(LaunchEnvironmentError, match="MASTER_ADDR is not set"):
                    config_of(*size)
            else:
                assert config_of(*size).master_addr == "gpu01"


def test_one_rank_per_core():
    assert config_of("-n", "cpu").nprocs == len(os.sched_getaffinity(0))
    assert config_of("-n", "auto").nprocs >= 1


# --- the folder of a run ------------------------------------------------------------------

TRAINS = """
import os, sys, torch
from functools import partial
import lockstep as ls

ls.init()
torch.manual_seed(1)
loss, sgd = torch.nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1)
folder = sys.argv[1] if sys.argv[1:] else None
trainer = ls.Trainer(torch.nn.Linear(4, 2), loss, sgd, loggers=folder,
                     checkpoint=ls.CheckpointConfig(every_steps=1))
for epoch in range(2):
    for batch in trainer.batches([(torch.ones(4), 0)] * 16, 8, epoch=epoch):
        trainer.step(batch)
    if ls.rank() == 0 and os.path.exists("fail"):
        raise KeyError("mine")
"""


def states() -> dict[str, str]:
    """Return the state of each run in the order of `lockstep runs`."""
    return {each.name: each.summary.state for each in list_runs(Path("runs")) if each.summary}


def test_a_run_has_one_folder(run, capfdbinary):
    """Rank logs, record and checkpoints are together, under one name, at every start."""
    said = run(TRAINS, "runs/mine").err.decode().splitlines()
    assert said == ["lockstep: the run is in runs/mine"]
    assert {"rank-0.log", "rank-1.log", "launch.json", "record.jsonl", "checkpoints"} <= {
        path.name for path in Path("runs/mine").iterdir()
    }
    assert states() == {"mine": "done"}
    Path("fail").touch()
    message, _ = failure(run, capfdbinary, TRAINS, "runs/mine")
    assert message.endswith("its log: runs/mine-2/rank-0.log")
    assert (description("mine")["exit_status"], description("mine-2")["exit_status"]) == (0, 1)
    Path("fail").unlink()
    resumed = run(TRAINS, "runs/mine", flags="-n 1 --resume mine-2").err.decode().splitlines()
    assert re.fullmatch(r"lockstep: resumed after step \d from runs/mine-2/.*", resumed[0])
    assert resumed[1:] == ["lockstep: the run is in runs/mine-2"]
    assert states() == {"mine": "done", "mine-2": "done"}
    assert {path.name for path in Path("runs").iterdir()} == {"mine", "mine-2"}
    records = [read_run(Path("runs", name)) for name in ("mine", "mine-2")]
    assert records[0].steps.loss.tolist() == records[1].steps.loss.tolist()


def test_a_run_without_a_name_is_recorded_in_the_folder_of_its_launch(run):
    run(TRAINS, flags="-n 1 --name night")
    said = run(TRAINS, flags="-n 1 --name night").err.decode().splitlines()
    assert said == [
        "lockstep: runs/night holds an earlier run: this one is in runs/night-2",
        "lockstep: the run is in runs/night-2",
    ]
    assert states() == {"night": "done", "night-2": "done"}


def test_the_old_name_that_a_killed_launcher_left_is_not_another_run(lockstep_run):
    name = interrupted(lockstep_run, "train.py")
    Path("runs", name).rename("runs/mine")
    Path("runs", name).symlink_to("mine")
    assert lockstep_run("--resume", "auto", "train.py") == (0, ["mine", "1", "1"])


def test_a_link_of_the_user_to_a_run_stays(lockstep_run):
    name = interrupted(lockstep_run, "train.py")
    Path("runs", "latest").symlink_to(name)
    assert lockstep_run("--resume", "latest", "train.py") == (0, [name, "1", "1"])
    assert Path("runs", "latest").is_symlink()


# --- continuing a run ---------------------------------------------------------------------

# Says what it was given, and ends with the status in the file "status".
TELL = """
import os, sys
resumed, run = os.environ.get("LOCKSTEP_RESUME"), os.environ["LOCKSTEP_RUN"]
print(os.path.basename(run), resumed, os.environ["WORLD_SIZE"], *sys.argv[1:])
status = int(open("status").read()) if os.path.exists("status") else 0
sys.exit(status)
"""


@pytest.fixture
def lockstep_run(tmp_path, monkeypatch, capfdbinary):
    """Run `lockstep run` in this process; its exit status, and what rank 0 printed."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TELL)

    def lockstep_run(*arguments: str) -> tuple[int, list[str]]:
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            command.main([*arguments], standalone_mode=False)
        lines = capfdbinary.readouterr().out.decode().splitlines()
        told = [line.removeprefix("[0] ") for line in lines if not line.startswith("[1]")]
        return int(ended.value.code or 0), told[0].split() if told else []

    with restoring_handlers():  # a command that has stopped ignores signals
        yield lockstep_run


def interrupted(lockstep_run, *arguments: str) -> str:
    """Start a run that stops on request; return its name."""
    Path("status").write_text("75")
    status, (name, resumed, *_) = lockstep_run(*arguments)
    assert (status, resumed) == (75, "None")
    Path("status").unlink()
    return name


def description(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(Path("runs", name, "launch.json").read_text())
    return found


def test_what_was_launched_is_recorded(lockstep_run, tmp_path):
    name = interrupted(lockstep_run, "-n", "2", "train.py", "--lr", "1")
    found = description(name)
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:", str(found.pop("started")))
    assert found == {
        "version": 1, "kind": "script", "target": "train.py", "arguments": ["--lr", "1"],
        "nprocs": 2, "nnodes": 1, "cwd": str(tmp_path), "python": sys.executable,
        "exit_status": 75, "is_redacted": False, "min_nprocs": None, "portable": None,
    }  # fmt: skip
    for file in ("launch.json", "run.lock"):
        assert stat.S_IMODE(Path("runs", name, file).stat().st_mode) == 0o600


@pytest.mark.parametrize(("source", "status"), [("", 0), ("raise KeyError", 1)])
def test_the_exit_status_is_recorded_at_the_end(run, source, status):
    Path("train.py").touch()
    source = "import os; print(open(os.environ['LOCKSTEP_RUN'] + '/launch.json').read())\n" + source
    if status:
        with pytest.raises(RankError):
            run(source, flags="-n 1")
    else:
        run(source, flags="-n 1")
    (log,) = logs().values()
    assert json.loads(log.partition(b"Traceback")[0])["exit_status"] is None
    (folder,) = Path("runs").iterdir()
    assert description(folder.name)["exit_status"] == status


def test_a_run_is_continued_with_its_recorded_command(lockstep_run, tmp_path, monkeypatch):
    name = interrupted(lockstep_run, "-n", "2", "train.py", "--lr", "1")
    assert lockstep_run("--resume", name) == (0, [name, "1", "2", "--lr", "1"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = lockstep_run("--resume", f"../runs/{name}", "-n", "1")[1]
    assert again == [name, "1", "1", "--lr", "1"]
    monkeypatch.chdir(elsewhere)
    again = lockstep_run("--log-dir", f"{tmp_path}/runs", "--resume", name)[1]
    assert again[:3] == [name, "1", "1"]
    monkeypatch.chdir(tmp_path)
    first, *resumed = logs()["rank-0.log"].decode().split("\n\n--- resumed at ")
    assert first == f"{name} None 2 --lr 1"
    assert [part.split(" ---\n")[1].strip() for part in resumed] == [
        f"{name} 1 {n} --lr 1" for n in (2, 1, 1)
    ]
    assert [path.name for path in Path("runs").iterdir()] == [name]


def test_a_module_is_continued_with_the_number_of_ranks_of_a_variable(lockstep_run, monkeypatch):
    name = interrupted(lockstep_run, "-n", "2", "-m", "train", "x")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    assert lockstep_run("--resume", name)[1] == [name, "1", "1", "x"]


def test_a_run_is_continued_with_another_command(lockstep_run):
    name = interrupted(lockstep_run, "train.py", "--lr", "1")
    Path("other.py").write_text(TELL)
    assert lockstep_run("--resume", name, "other.py", "2") == (0, [name, "1", "1", "2"])
    assert description(name)["target"] == "other.py"
    Path("empty").mkdir()  # any folder will do
    assert lockstep_run("--resume", "empty", "other.py")[1] == ["empty", "1", "1"]


SHOWN = """
import os
from lockstep.record.progress import Progress
if os.environ["RANK"] == "0":
    now = 0.0
    progress = Progress(True, epochs=2, title="[mine]", clock=lambda: now)
    for epoch in range(2):
        progress.begin_epoch(epoch, 3, 0)
        for step in range(3):
            now += 1.0
            progress.step(epoch=epoch, loss=0.5, samples=8, metrics={"accuracy": 0.5})
            print("printed", epoch, step, flush=True)
        progress.epoch(epoch=epoch, loss=0.5)
"""


def test_the_progress_of_rank_0_is_drawn_below_the_output_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    Path("train.py").write_text(SHOWN)
    ours, theirs = pty.openpty()
    seen = []
    lines = ["[0] epoch 1/2  loss 0.5000", "[0] epoch 2/2  loss 0.5000"]
    with (
        open(theirs, "w", encoding="utf-8") as terminal,
        closing(os.fdopen(ours, "rb", 0)) as screen,
    ):
        reader = threading.Thread(target=lambda: seen.extend(iter(lambda: read_pty(screen), b"")))
        reader.start()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, terminal)
        launch_script(parse(["-n", "2", "train.py"]))
        assert sys.stdout is sys.stderr is terminal
        monkeypatch.undo()
        terminal.close()
        reader.join()
    text = b"".join(seen).decode().replace("\r", "")
    printed = [f"[0] printed {epoch} {step}" for epoch in range(2) for step in range(3)]
    shown = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).split("\n")
    assert [line for line in shown if line in printed] == printed
    assert [line for line in shown if line in lines] == lines
    assert "[mine]" in shown
    assert any(re.match(r"epoch 2/2  ━+─*  \d/3", line) for line in shown)
    assert "━" not in text[text.rindex("\x1b[J") :]  # it is erased at the end
    (log,) = tmp_path.glob("runs/*/rank-0.log")
    assert "mine" in log.read_text()  # the title, as in any log
    assert "━" not in log.read_text()


def read_pty(screen) -> bytes:
    """Read what was written to a terminal; nothing if it is closed."""
    try:
        return screen.read(1 << 16)
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--resume none", "--resume none: there is no run runs/none and no folder none;"),
        ("--resume a/b", "--resume a/b: there is no run a/b and no folder runs/a/b;"),
        ("--resume empty", "empty has no launch.json, so its command is not known; give it again: "
         "lockstep run --resume empty SCRIPT"),
        ("--resume broken", "broken/launch.json is damaged, so the command of this run is not "
         "known; give it again: lockstep run --resume broken SCRIPT"),
        ("--resume NAME", "there is no script 'train.py' in "),
        ("--resume moved", "moved ran in /none, which cannot be entered (No such file or directory)"
         "; give the command again in another directory: lockstep run --resume /"),
        ("--resume auto", "--resume auto needs SCRIPT"),
        ("--resume NAME -m", "--module and --no-python need SCRIPT"),
        ("--resume auto --nnodes 2 --node-rank 0 --master-addr a other.py",
         "--resume auto: with --nnodes 2 hosts could choose different runs; name the run on every"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_continued(lockstep_run, arguments, sentence):
    name = interrupted(lockstep_run, "train.py")
    for folder in ("empty", "broken", "moved"):
        Path(folder).mkdir()
    Path("broken/launch.json").write_text('{"kind": "script"')
    Path("moved/launch.json").write_text(json.dumps({**description(name), "cwd": "/none"}))
    Path("train.py").rename("other.py")
    with pytest.raises(UsageError) as caught:
        lockstep_run(*arguments.replace("NAME", name).split())
    assert str(caught.value).startswith(sentence)
    assert [path.name for path in Path("runs").iterdir()] == [name]


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"arguments": [1]}, {"nprocs": "2"}, {"started": "today"}, {"target": 0}],
)
def test_a_description_with_wrong_values_is_damaged(lockstep_run, change):
    name = interrupted(lockstep_run, "train.py")
    Path("runs", name, "launch.json").write_text(json.dumps({**description(name), **change}))
    with pytest.raises(UsageError, match=r"launch\.json is damaged"):
        lockstep_run("--resume", name)
    # As the message advises.
    assert lockstep_run("--resume", name, "-n", "2", "train.py") == (0, [name, "1", "2"])
    assert description(name)["target"] == "train.py"


def test_auto_continues_the_newest_run_of_the_command(lockstep_run, capfdbinary, tmp_path):
    auto = ("--resume", "auto", "-n", "2", "train.py", "--lr", "1")
    older = interrupted(lockstep_run, "train.py", "--lr", "1")
    newer = interrupted(lockstep_run, "train.py", "--lr", "1")
    other = interrupted(lockstep_run, "train.py", "--lr", "2")
    assert len({older, newer, other}) == 3
    assert lockstep_run(*auto)[1] == [newer, "1", "2", "--lr", "1"]
    assert lockstep_run(*auto)[1][:2] == [older, "1"]  # now the newer one is done
    third, resumed, *_ = lockstep_run(*auto)[1]  # now both are
    assert resumed == "None"
    assert third not in {older, newer, other}
    changed = {**description(other), "cwd": "/elsewhere"}
    Path("runs", other, "launch.json").write_text(json.dumps(changed))
    assert lockstep_run("--resume", "auto", "train.py", "--lr", "2")[1][1] == "None"


def test_auto_says_what_it_chose(lockstep_run, capfdbinary):
    name = interrupted(lockstep_run, "train.py")
    config = LaunchConfig("train.py", resumes_newest=True)
    assert launch_script(config) == 0
    assert (
        f"lockstep: --resume auto: continuing runs/{name}\n"
        in capfdbinary.readouterr().err.decode()
    )
    assert launch_script(config) == 0
    new = "lockstep: --resume auto: runs has no run of this command to continue; a new one starts\n"
    assert new in capfdbinary.readouterr().err.decode()


USE = """
import sys
from lockstep.launcher.run_folder import hold_run
hold_run(sys.argv[1]); print(flush=True); sys.stdin.read()
"""


def test_a_run_that_is_running_is_not_continued(lockstep_run, monkeypatch):
    wait = partial(run_folder.wait_until_free, timeout=0.1)
    monkeypatch.setattr(launch_script_module, "wait_until_free", wait)
    monkeypatch.setattr(run_folder, "EXIT_TIMEOUT", 0.1)
    name = interrupted(lockstep_run, "train.py")
    with subprocess.Popen(
        [sys.executable, "-c", USE, f"runs/{name}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        user.stdout.readline()
        with pytest.raises(UsageError, match=rf"^runs/{name} is still in use after 0\.1 s \(the "):
            lockstep_run("--resume", name)
        assert lockstep_run("--resume", "auto", "train.py")[1][1] == "None"
        user.stdin.close()
    assert lockstep_run("--resume", name)[1][:2] == [name, "1"]


def test_a_secret_is_not_stored(lockstep_run, capfdbinary):
    arguments = ("train.py", "--api-key", "planted-secret")
    name = interrupted(lockstep_run, *arguments)
    assert "planted" not in Path("runs", name, "launch.json").read_text()
    assert description(name)["is_redacted"] is True
    with pytest.raises(UsageError) as caught:
        lockstep_run("--resume", name)
    assert str(caught.value) == (
        f"the command of runs/{name} contained a secret, which is not stored; give it again: "
        f"lockstep run --resume runs/{name} SCRIPT"
    )
    told = [name, "1", "1", "--api-key", "planted-secret"]
    assert lockstep_run("--resume", "auto", *arguments) == (0, told)
    Path("status").write_text("75")
    assert launch_script(LaunchConfig(arguments[0], arguments[1:])) == 75
    assert (
        " SCRIPT ARGUMENTS (they contain a secret, which is not stored)\n"
        in capfdbinary.readouterr().err.decode()
    )


def test_variables_of_another_run_do_not_reach_a_new_one(lockstep_run, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    monkeypatch.setenv("LOCKSTEP_RUN", "/another")
    name, resumed, *_ = lockstep_run("train.py")[1]
    assert (name[:6], resumed) == ("train-", "None")


def test_the_launcher_of_another_host_neither_waits_nor_writes(lockstep_run):
    name = interrupted(lockstep_run, "train.py")
    folder = Path("runs", name)
    config = LaunchConfig(
        "other.py", nnodes=2, node_rank=1, master_addr="a", master_port=1, resumed_run=folder
    )
    before = description(name)
    with subprocess.Popen(
        [sys.executable, "-c", USE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host_0:
        host_0.stdout.readline()
        opened = launch_script_module._open_run_folder(config)
        opened.record(0)
        host_0.stdin.close()
    assert opened.variables() == {"LOCKSTEP_RUN": str(folder.resolve()), "LOCKSTEP_RESUME": "1"}
    assert description(name) == before


def test_a_log_that_cannot_be_continued(lockstep_run):
    name = interrupted(lockstep_run, "train.py")
    log = Path("runs", name, "rank-0.log")
    log.unlink()
    log.mkdir()
    with pytest.raises(FileError, match=rf"^runs/{name}/rank-0.log cannot be written: Is a direc"):
        lockstep_run("--resume", name)
    assert description(name)["exit_status"] == 1


def test_a_launch_that_cannot_start_ends_at_once(tmp_path, monkeypatch):
    """It must not wait for ranks that were never started."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("lockstep.launcher.supervisor.GRACE", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="in use"):
        launch_script(LaunchConfig("train.py", master_port=taken.getsockname()[1]))


def test_a_launch_whose_description_cannot_be_written_goes_on(run, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch_script_module, "write_description", fail)
    printed = run("print('works')", flags="-n 1")
    assert printed.out == b"works\n"
    assert b"/launch.json cannot be written: No space left on device\n" in printed.err


DELETES_FOLDER = """
import os, shutil, sys
from lockstep.cli import main
from lockstep.launcher import fork_server, launch_script

name = sys.argv.pop()
function = getattr(launch_script, name)

def delete_then(*arguments, **options):
    result = function(*arguments, **options)
    if name == "_script_task":  # torch has been imported, which cannot be done afterwards
        launch = fork_server.get_fork_server().open_launch()
        launch.send({"kind": "end"})
        assert launch.receive() is None
    shutil.rmtree(os.environ["FOLDER"], ignore_errors=True)
    return result

setattr(launch_script, name, delete_then)
sys.argv[:] = ["lockstep", "run", "-n", "1", os.environ["SCRIPT"]]
main()
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("check_open_files", "the working directory has been deleted: change to another one"),
        ("open_supervisor", "the working directory has been deleted: change to another one"),
        ("open_store", "the working directory has been deleted: change to another one"),
        ("_script_task", "the working directory FOLDER cannot be entered: No such file"),
    ],
)
def test_a_working_directory_that_is_deleted_during_the_start_is_one_sentence(
    tmp_path, name, sentence
):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "train.py").touch()
    environ = {**os.environ, "FOLDER": str(folder), "SCRIPT": str(tmp_path / "train.py")}
    command = [sys.executable, "-c", DELETES_FOLDER, name]
    done = warm.run(command, timeout=60, cwd=folder, env=environ, text=True)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lockstep: ")
    assert sentence.replace("FOLDER", str(folder)) in last
