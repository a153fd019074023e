"""The fixture that fails a test which leaves something behind, seen failing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEAVERS = """
import os, signal, socket, subprocess, threading
import conftest, pytest

def test_clean():
    pass

@pytest.fixture(scope="module")
def shell():
    with subprocess.Popen(
        ["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        yield started
        os.killpg(started.pid, signal.SIGKILL)

def test_process_of_a_process_that_others_use_too(shell):
    shell.stdin.write(b"tail -f /dev/null & echo started\\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == b"started\\n"

@pytest.fixture(scope="module")
def an_incomplete_list(shell):
    complete = conftest._children
    def incomplete(pid):
        conftest._children = complete
        return []
    conftest._children = incomplete

def test_process_that_the_kernels_list_lacked(an_incomplete_list):
    assert conftest._children.__name__ == "_children"

def test_process():
    global reader
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with this process

def test_port():
    global kept
    kept = socket.create_server(("127.0.0.1", 0))

def test_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_signal():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def test_shared_memory():
    with open(f"/dev/shm/lockstep-test-{os.getpid()}", "w"):
        pass
"""


@pytest.mark.stress  # a pytest of its own
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")
def test_each_kind_of_leftover_fails_its_test(tmp_path):
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("PATIENCE = 5.0", "PATIENCE = 0.05"))
    (tmp_path / "test_leavers.py").write_text(LEAVERS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)),
            *("-o", f"pythonpath={Path(__file__).parent}"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    for file in Path("/dev/shm").glob("lockstep-test-*"):
        file.unlink()
    assert "9 passed, 6 errors" in done.stdout, done.stdout
    kinds = ("processes", "listening ports", "threads", "environment", "signals", "shared memory")
    for kind in kinds:
        assert f"left behind: ['{kind}: " in done.stdout
