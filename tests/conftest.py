"""Every test: real processes where it asks for them, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis
import pytest
import torch

import hosts
import lockstep
import models
import pytest_lockstep
import warm
from lockstep.launcher import fork_server
from lockstep.launcher.fork_server import get_fork_server, get_fork_server_pid
from lockstep.portable.arithmetic import has_portable_bits
from lockstep.portable.kernels import choose_kernels
from lockstep.portable.variables import find_of_numpy

TESTS = str(Path(__file__).parent)
TEMPLATE = "pytest_lockstep.template_main"  # from which ranks of marked tests are forked
PATIENCE = 5.0  # seconds that something may take to disappear after a test

# No test fails because the machine is busy. `make soak` chooses the second profile.
hypothesis.settings.register_profile("lockstep", deadline=None, max_examples=50)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=300)
hypothesis.settings.load_profile("lockstep")

# Variables that pytest changes from test to test, and one that torch's compiler sets when loaded.
PYTESTS_OWN = (b"PYTEST_CURRENT_TEST", b"PYTEST_VERSION", b"COLUMNS", b"TORCHINDUCTOR_CACHE_DIR")


# The suite computes on the CPU, also on a machine with a GPU; `dev/gpu_check.py` is for that.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# As in a launch with portable bits, which would otherwise need another fork server than others.
os.environ |= find_of_numpy()


def _choose_kernels() -> None:
    """Choose kernels as `lockstep.init` does: what tests compute here has the bits of ranks.

    Before the first test computes, since torch keeps its choice.
    """
    before = dict(os.environ)
    choose_kernels(None, torch.device("cpu"), os.environ.__setitem__, lambda reason: None)
    os.environ.clear()
    os.environ.update(before)


_choose_kernels()
HAS_PORTABLE_BITS = has_portable_bits()

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # `init` sets that of SIGUSR1


def pytest_configure() -> None:
    """Hear Ctrl-C, which tests send, also where a shell runs us in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_server.spawn_fork_server = warm.spawn_fork_server
    cloudpickle.cloudpickle._find_imported_submodules = _find_imported_submodules


def _find_imported_submodules(code: types.CodeType, values: Iterable[object]) -> list[Any]:
    """As cloudpickle's own function, which looks at all modules for each function that it pickles.

    A test that sends the functions of its module to ranks would spend 20 ms in it.
    """
    packages = [each for each in values if isinstance(each, types.ModuleType) and each.__package__]
    found: list[Any] = []
    for package in packages:
        waiting = [package.__name__]
        while waiting:
            names = [f"{parent}.{name}" for parent in waiting for name in code.co_names]
            waiting = [name for name in names if name in sys.modules]
            found += [sys.modules[name] for name in waiting]
    return found


LONG = (
    "tests/csrc/",
    "tests/comm/test_contract",
    "tests/tools/commands/test_check",
    "tests/tools/commands/test_train",
    "tests/examples/",
    "tests/launcher/test_hang_monitor",
    "tests/pipeline/test_pipeline",
    "tests/tools/replay/test_bisect",
    "tests/training/test_bugs",
    "tests/training/test_guarantee",
    "tests/training/test_random",
    "tests/training/resume/test_resum",
    "tests/training/storage/test_shard",
    "tests/training/storage/test_shared",
    "tests/training/test_trainer",
    "pytest-lockstep/",
)
"""Files whose few tests take long: where several run at a time, these must not come last."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector pass over torch and thousands of tests: they stay.

    Collecting as often as by default would take 8% of the time. Tests of what is freed collect
    themselves.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files; go on by file name.

    Files of one folder wait for the same things: next to each other, they would leave a machine
    idle that runs several at a time.
    """
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG), item.path.name))


def pytest_collection_finish() -> None:
    """Let functions and classes of the test modules travel to the ranks by value."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(TESTS):
            cloudpickle.register_pickle_by_value(sys.modules[name])


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """Run `fn(*args)` on `n` ranks that have called `lockstep.init`; values in rank order.

    Small models are treated as large ones there: their gradients get places and are exchanged
    early, and each replica computes a part of their norm. Other tests show the rest.

    With `portable=False`, each micro-batch is computed by itself.

    `timeout` is what a rank waits for another one; `deadline`, the same unless given, is that of
    the call. A module's tests share values by a fixture of that scope that calls this one.
    """

    def run(
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        backend: str | None = None,
        timeout: float = 60.0,
        deadline: float | None = None,
        portable: bool | None = None,
    ) -> list[Any]:
        def call() -> Any:
            models.treat_as_large()
            lockstep.init(backend=backend, timeout=timeout, portable=portable)
            try:
                return fn(*args)
            finally:
                lockstep.shutdown()

        get_fork_server()  # one for all tests
        return pytest_lockstep.run(call, ranks=n, timeout=deadline or timeout, init=False)

    return run


@pytest_lockstep.rank_fixture
def world(group: object) -> Iterator[None]:
    """Let the ranks of a test be a world of Lockstep."""
    lockstep.init()
    yield
    lockstep.shutdown()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """Let the test's own process be a world of one rank."""
    lockstep.init()
    yield
    lockstep.shutdown()


@pytest.fixture
def network() -> Iterator[Callable[..., hosts.Network]]:
    """Simulate hosts, as `hosts.network` does, until the test ends."""
    with hosts.closing_networks() as create:
        yield create


@pytest.fixture(autouse=True)
def portable_bits() -> Iterator[None]:
    """Choose portable kernels again after a test that has left its world or chosen others."""
    yield
    if HAS_PORTABLE_BITS and not has_portable_bits():
        _choose_kernels()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, shared memory, a port, a thread, variable or handler."""
    began = _ticks_since_boot()
    before = _left()
    yield
    deadline = time.monotonic() + PATIENCE
    while (more := _news(before, _left(before))) and time.monotonic() < deadline:
        time.sleep(0.01)
    if more:  # the kernel's list of children may have lacked one while another child exited
        before["processes"] |= _started_before(began, _processes(before["processes"]))
        more = _news(before, _left(before))
    assert not more, f"left behind: {more}"


def _left(before: dict[str, dict[Any, Any]] | None = None) -> dict[str, dict[Any, Any]]:
    """Return what is there; with `before`, of processes and sockets what was not there then."""
    processes = _processes(before["processes"] if before else ())
    sockets = {inode: "" for pid in [str(os.getpid()), *processes] for inode in _sockets(pid)}
    return {
        "processes": processes,
        "shared memory": _shared_memory(before["shared memory"] if before else None),
        "listening ports": _ports(sockets.keys() - before["listening ports"].keys())
        if before
        else sockets,
        "threads": {str(thread.ident): thread.name for thread in threading.enumerate()},
        "environment": _environment(),
        "signals": {each.name: str(signal.getsignal(each)) for each in SIGNALS},
    }


def _news(before: dict[str, dict[Any, Any]], after: dict[str, dict[Any, Any]]) -> list[str]:
    news = []
    for what, things in after.items():
        changed = sorted(things.items() - before[what].items())
        news += [f"{what}: {' '.join(map(os.fsdecode, pair))}".strip() for pair in changed]
    gone = before["environment"].keys() - after["environment"].keys()
    return news + [f"environment: {os.fsdecode(name)} is gone" for name in sorted(gone)]


def _shared_memory(before: Collection[str] | None = None) -> dict[str, str]:
    """Return the files in shared memory; MPICH names and removes its own, also of other users.

    Files that are new since `before` and mapped by tests that run beside are theirs.
    """
    names = os.listdir("/dev/shm") if sys.platform == "linux" else []
    names = [name for name in names if not name.startswith("mpich_shm_")]
    if before is not None and (new := set(names) - set(before)):
        theirs = _mapped_elsewhere()
        own = {str(os.getpid()), *_processes()}
        names = [
            name
            for name in names
            if name not in new
            or not (f"/dev/shm/{name}" in theirs or _belongs_to_another_launcher(name, own))
        ]
    return dict.fromkeys(names, "")


def _belongs_to_another_launcher(name: str, own: Collection[str]) -> bool:
    """Return whether this is the folder of a launcher that runs and is none of ours."""
    words = name.split("-", 2)  # "lockstep", its process, a random text
    is_of_launcher = words[0] == "lockstep" and len(words) == 3
    return is_of_launcher and words[1] not in own and os.path.exists(f"/proc/{words[1]}")


def _mapped_elsewhere() -> str:
    """Return the memory maps of all processes that are not descendants of this one."""
    own = {str(os.getpid()), str(get_fork_server_pid()), *_processes()}
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in own]
    return "".join("".join(_lines(f"/proc/{pid}/maps")) for pid in others)


def _processes(others: Collection[str] = ()) -> dict[str, str]:
    """Return this process's descendants except `others`, the fork server and the template process.

    These two are kept; the kernel's list of children may lack one while another child exits.

    What `others` start is theirs: a browser that a whole module uses opens, renames and ends
    renderers when it likes.
    """
    warm.reap_adopted()
    kept = {get_fork_server_pid(), warm.get_template_pid(), _resource_tracker()}
    found: dict[str, str] = {}
    waiting = [str(os.getpid())]
    while waiting:
        for child in _children(waiting.pop()):
            if child in others:
                continue
            waiting.append(child)
            command = _command(child)
            if int(child) not in kept and TEMPLATE not in command:
                found[child] = command[:200]
    return found


def _ticks_since_boot() -> int:
    """Return the clock that `/proc/PID/stat` gives the start of a process in; 0 without /proc."""
    if sys.platform != "linux":
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _started_before(ticks: int, processes: dict[str, str]) -> dict[str, str]:
    """Return the processes that started before this tick."""
    found = {}
    for pid, command in processes.items():
        fields = "".join(_lines(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        if fields and int(fields[19]) < ticks:
            found[pid] = command
    return found


def _environment() -> dict[bytes, bytes]:
    """Return the variables as the system has them; to decode them takes as long as many a test."""
    variables: dict[bytes, bytes] = {**os.environ._data}
    for name in PYTESTS_OWN:
        variables.pop(name, None)
    return variables


def _children(pid: str) -> list[str]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [
            child.decode()
            for task in tasks
            for child in _read(f"/proc/{pid}/task/{task}/children").split()
        ]
    except OSError:
        return []


def _read(path: str) -> bytes:
    """Return the beginning of a file of the kernel, in a third of the time of `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _resource_tracker() -> int | None:
    """Return the process that Python's multiprocessing keeps for itself, once used."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return None if tracker is None else tracker._resource_tracker._pid


def _ports(sockets: Collection[str]) -> dict[str, str]:
    """Return the ports that these sockets listen on, by inode; the kernel's tables are long."""
    listening: dict[str, str] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6") if sockets else ():
        for line in _lines(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                listening[fields[9]] = str(int(fields[1].rpartition(":")[2], 16))
    return listening


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _sockets(pid: str) -> set[str]:
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found
