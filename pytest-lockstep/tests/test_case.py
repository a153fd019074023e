"""How a test on ranks ends, and what its failure says."""

from __future__ import annotations

import re
import time

OUTCOMES = """
import pytest_lockstep

@pytest.mark.ranks(2)
def test_assertion(rank, group):
    print("out of", rank)
    os.write(2, b"raw error output\\n")
    values = [1, 2, rank]
    if rank == 1:
        assert values == [1, 2, 3]
    dist.all_reduce(torch.ones(4))

@pytest.mark.ranks(3)
def test_all_fail(rank):
    local = rank * 0
    assert local == 5

@pytest.mark.ranks(2)
def test_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), 11)
    dist.barrier()

@pytest.mark.ranks(2)
def test_exits(rank):
    if rank == 1:
        os._exit(0)
    dist.barrier()

@pytest.mark.ranks(2)
def test_exits_alone(rank):
    if rank == 1:
        os._exit(0)

@pytest.mark.ranks(2)
def test_sys_exit(rank):
    raise SystemExit(0)

@pytest.mark.ranks(2)
def test_leaves_early(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
def test_mismatch(rank):
    dist.all_reduce(torch.ones(1 + rank))

@pytest.mark.ranks(2)
def test_skips(rank):
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_some_skip(rank):
    if rank == 1:
        pytest.skip("only here")

@pytest.mark.ranks(2)
def test_xfails_imperatively(rank):
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_xfails(rank):
    1 / 0

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_fails_otherwise(rank):
    [][1]

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_xpasses(rank):
    pass

@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="never")
def test_skipif(rank):
    pass

class LocalError(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.two = two
    def __str__(self):
        return f"local {self.two}"

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=LocalError, strict=True)
def test_xfails_with_own_class(rank):
    raise LocalError(1, 2)

@pytest.mark.ranks(2)
def test_kill(rank):
    with pytest_lockstep.kill(rank=1):
        dist.barrier()

@pytest.mark.ranks(2)
def test_after_all():
    dist.barrier()
"""


def part(output: str, name: str) -> str:
    """Return what pytest shows of one failing test."""
    found = re.search(rf"^_+ {re.escape(name)} _+\n(.*?)(?=^_+ test_|^=+ )", output, re.S | re.M)
    assert found, output
    return found[1]


def test_every_way_to_end(run):
    result = run(OUTCOMES, "-rA", "-W", "error")
    output = result.stdout.str()
    result.assert_outcomes(passed=1, failed=12, skipped=2, xfailed=3)
    shown = part(output, "test_assertion[2ranks]")
    for text in (
        "assert [1, 2, 1] == [1, 2, 3]",
        "At index 2 diff: 1 != 3",
        "rank 1 raised AssertionError: assert [1, 2, 1] == [1, 2, 3] (test_it.py:",
        "rank 0 at that moment: in all_reduce, test_it.py:",
        "Captured stdout (rank 0)",
        "out of 0",
        "Captured stdout (rank 1)",
        "out of 1",
        "Captured stderr (rank 1)",
        "raw error output",
    ):
        assert text in shown, shown
    assert re.search(r"FAILED test_it.py::test_assertion\[2ranks\] - rank 1: assert", output)
    shown = part(output, "test_all_fail[3ranks]")
    assert "rank 0 raised AssertionError: assert 0 == 5 (test_it.py:" in shown
    assert "ranks 1 and 2 failed in the same way" in shown
    shown = part(output, "test_killed[2ranks]")
    assert "rank 1 was killed by SIGSEGV" in shown
    assert "Fatal Python error: Segmentation fault" in shown
    for name in ("test_exits[2ranks]", "test_exits_alone[2ranks]"):
        assert "rank 1 exited with status 0 in the middle of the test" in part(output, name)
    assert "SystemExit: 0" in part(output, "test_sys_exit[2ranks]")
    shown = part(output, "test_leaves_early[2ranks]")
    assert "rank 1 returned while rank 0 still waited in all_reduce" in shown
    assert "rank 1 passed" in shown
    shown = part(output, "test_mismatch[2ranks]")
    assert "1 element" in shown
    assert "2 elements" in shown
    assert "rank 0 passed, rank 1 skipped (only here)" in part(output, "test_some_skip[2ranks]")
    assert "IndexError" in part(output, "test_fails_otherwise[2ranks]")
    assert "rank 1 was killed by pytest_lockstep.kill" in part(output, "test_kill[2ranks]")
    assert "XPASS(strict)" in part(output, "test_xpasses[2ranks]")


HANGS = """
import sys
import threading
import time

@pytest.mark.ranks(3, timeout=1.5)
def test_hang(rank):
    if rank == 2:
        dist.recv(torch.ones(1), 0)
    dist.all_reduce(torch.ones(7))

@pytest.mark.ranks(2, timeout=1.5)
def test_busy(rank):
    def spin_for_ever():
        while True:
            pass
    if rank == 1:
        spin_for_ever()
    dist.barrier()

@pytest.mark.ranks(2, timeout=1.5)
def test_stopped(rank):
    if rank == 1:
        import signal
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

@pytest.mark.ranks(2)
def test_option(rank):
    threading.Event().wait()
"""


def test_a_hang_says_who_waits_for_whom(run):
    began = time.monotonic()
    result = run(HANGS, "--ranks-timeout=2", "--durations=0")
    output = result.stdout.str()
    result.assert_outcomes(failed=4)
    shown = part(output, "test_hang[3ranks]")
    assert "the test did not end within 1.5 s: " in shown
    assert re.search(r"ranks 0 and 1 have waited \d s in all_reduce", shown)
    assert re.search(r"rank 2 has waited \d s in recv from rank 0", shown)
    assert re.search(r"> .*test_it.py:\d+ in test_hang\nrank", shown)
    assert "pluggy" not in shown
    shown = part(output, "test_busy[2ranks]")
    assert re.search(r"rank 1 .* is at test_it.py:\d+", shown)
    assert "in spin_for_ever" in shown
    assert re.search(r"rank 0 has waited \d s in barrier", shown)
    shown = part(output, "test_stopped[2ranks]")
    assert re.search(r"rank 1 \(process \d+\) has been stopped by a signal for \d s, while", shown)
    assert "did not end within 2 s" in part(output, "test_option[2ranks]")
    assert time.monotonic() - began < 60  # not the 120 s and more of the backend's timeouts


def test_a_hang_is_also_named_on_gloo(run):
    result = run(HANGS, "--ranks-backend=gloo", "-k", "test_hang or test_busy")
    output = result.stdout.str()
    result.assert_outcomes(failed=2)
    assert re.search(r"in all_reduce, test_it.py:\d+", part(output, "test_hang[3ranks]"))
    shown = part(output, "test_busy[2ranks]")
    assert re.search(r"rank 0 .*barrier", shown)
    assert "in spin_for_ever" in shown


LEAKS = """
import multiprocessing.shared_memory
import subprocess
import sys
import threading

kept = []

@pytest.mark.ranks(2)
def test_thread(rank):
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

@pytest.mark.ranks(2)
def test_process(rank):
    kept.append(subprocess.Popen(["sleep", "1000"]))

@pytest.mark.ranks(2)
def test_detached_process(rank):
    if rank == 0:
        code = "import subprocess; subprocess.Popen(['sleep', '1001'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], check=True)

@pytest.mark.ranks(2)
def test_group(rank):
    kept.append(dist.new_group([0, 1]))

@pytest.mark.ranks(2)
def test_memory(rank):
    if rank == 1:
        with open(f"/dev/shm/leaked-{os.getppid()}", "w") as file:
            file.write("x")

@pytest.mark.ranks(2, allow_leaks=("groups", "threads"))
def test_allowed(rank):
    dist.new_group([0, 1])
    kept.append(threading.Thread(target=threading.Event().wait))
    kept[0].start()

@pytest.mark.ranks(2)
def test_tidy(rank):
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    thread = threading.Thread(target=int)
    thread.start()
    subprocess.run(["true"], check=True)
"""


def test_what_a_test_leaves_behind_fails_it(run):
    result = run(LEAKS)
    output = result.stdout.str()
    result.assert_outcomes(failed=5, passed=2)
    for name, what in {
        "thread": r"the test left the thread 'forgotten' behind on rank \d",
        "process": r"the test left the process \d+ \(sleep 1000\) behind on rank \d",
        "detached_process": r"the test left the process \d+ \(sleep 1001\) behind$",
        "group": r"the test left the process group .* behind on rank \d",
        "memory": r"the test left /dev/shm/leaked-\d+ behind$",
    }.items():
        assert re.search(what, part(output, f"test_{name}[2ranks]"), re.M), output
