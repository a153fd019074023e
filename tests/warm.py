"""Python programs that start in milliseconds: forks of a process that has imported torch.

A test of a command starts two interpreters, the command's and that of its fork server, which
imports torch for two seconds. Here both are forks:

    the test                     template                        the program
       │ ── arguments, streams ───> │ forks twice                  │
       │ <─ process id ──────────── │ ───────────────────────────> │ a child of the test, by
       │                                                           │ adoption; forks its fork server

The program runs in a process of its own, is waited for, signalled and killed as any other. What
differs: it has imported torch, and its fork server does not read `PYTHON...` and `TORCH...`
variables anew. `subprocess` proves the rest (`tests/launcher/test_launch_script.py`).

The fork server of the tests' own process is such a program too (`spawn_fork_server`), unless one
of the variables that it reads once is another one now; `tests/launcher/test_fork_server.py` proves
the real one. A program that has threads when it starts its fork server, or that runs pytest, is
not what that may be a fork of: `SparePopen` forks the server before the program begins.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep import user_code
from lockstep.comm import backend, native_module
from lockstep.launcher import fork_server, fork_server_main
from lockstep.launcher.channel import Channel, open_channel, open_pair, read_memfd, write_memfd
from lockstep.launcher.huge_pages import collapse_memory

LOCKSTEP = [sys.executable, "-c", "from lockstep.cli import main; main()"]
"""The beginning of a command, for `Popen` and `run`."""

PRELOADED = (
    "lockstep.cli",
    "lockstep.tools.commands.run",
    "lockstep.launcher.fork_server_main",
    "lockstep.launcher.launch_script",
    "lockstep.launcher.world",
    "lockstep.comm.native.binding",
    "lockstep.training.trainer",
    "lockstep.tools.replay.replay_session",
    "lockstep.launcher.pickling",
    "encodings.idna",
    "functorch.compile",
    "torch.distributed.fsdp",
    "pytest",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
)
PR_SET_NAME = 15  # of prctl
PR_SET_CHILD_SUBREAPER = 36

# The frames of this file are below those of every rank, and no user's.
user_code.NOT_USER_CODE = (*user_code.NOT_USER_CODE, __file__)

READ_LATER = ("OMP_NUM_THREADS",)
SPAWN_FORK_SERVER = fork_server.spawn_fork_server

_template: tuple[int, Channel] | None = None
_variables: dict[str, str] = {}  # that it has read
_starting = threading.Lock()
_adopted: set[int] = set()


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen([sys.executable, "-c", program, *arguments], ...)`."""

    has_spare = False  # whether its first fork server is a fork of what it was when it started

    def _execute_child(self, *given: Any) -> None:
        if sys.platform != "linux":
            super()._execute_child(*given)  # type: ignore[misc]
            return
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        args = call["args"]
        environ = call["env"]
        assert args[:2] == [sys.executable, "-c"], args
        assert call["preexec_fn"] is None
        streams = enumerate(call[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        self.pid = _start(
            args[2:],
            [number if given == -1 else given for number, given in streams],
            cwd=call["cwd"],
            environ=environ,
            session=call["start_new_session"],
            has_spare=self.has_spare,
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))


class PytestPopen(Popen):
    """The same for a program that runs pytest, which it must not share with its fork server."""

    has_spare = True


def run(
    args: list[str],
    *,
    timeout: float,
    input: str | bytes | None = None,
    start: type[Popen] = Popen,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` with `capture_output=True`, in a warm process."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            printed = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, *printed)


def spawn_fork_server(
    call: str,
    *,
    path: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> fork_server.ForkServer:
    """As Lockstep's own function, in a warm process unless it would read other variables."""
    if path or not _has_read(os.environ if environ is None else environ):
        return SPAWN_FORK_SERVER(call, path=path, environ=environ)
    ours, theirs = open_pair()
    with open(os.devnull, "rb") as nothing:
        program = f"import sys, {call.partition('(')[0].rpartition('.')[0]}; "
        pid = _start(
            [program + call.format("int(sys.argv[1])")],
            [nothing.fileno(), 1, 2, theirs.fileno()],
            environ=environ,
            session=True,
        )
    theirs.close()
    return fork_server.ForkServer(ours, pid)


def get_template_pid() -> int | None:
    """Return the process id of the template; None if there is none."""
    return None if _template is None else _template[0]


def _has_read(environ: Mapping[str, str]) -> bool:
    """Return whether the template has read the variables that a new fork server would read."""
    if sys.platform != "linux":
        return False
    _get_template()
    return _read_once(environ) == _variables


def _read_once(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork of the template cannot adopt, unlike a new interpreter.

    Ranks set their number of threads themselves.
    """
    found = fork_server.read_once_variables(environ)
    return {name: value for name, value in found.items() if name not in READ_LATER}


def _start(
    argv: Sequence[str | os.PathLike[str]],
    descriptors: Sequence[int],
    *,
    cwd: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    session: bool = False,
    has_spare: bool = False,
) -> int:
    """Start a program as a child of this process, and return its process id.

    `descriptors` are its three streams, and others whose numbers become its last arguments.
    """
    order = {
        "argv": [os.fspath(each) for each in argv],
        "cwd": os.fspath(cwd or os.getcwd()),
        "environ": dict(os.environ if environ is None else environ),
        "session": session,
        "has_spare": has_spare,
    }
    work = write_memfd(json.dumps(order).encode())
    channel = _get_template()
    with _starting:
        before = _list_children()
        _adopt_orphans(True)
        try:
            channel.send({"kind": "start"}, [work, *descriptors])
            received = channel.receive()
        finally:
            _adopt_orphans(False)
            os.close(work)
    assert received is not None, "the template process has exited"
    pid: int = received[0]["pid"]
    others = _list_children() - before - {pid}
    _adopted.update(each for each in others if _is_of_another_session(each))
    return pid


def reap_adopted() -> None:
    """Wait for orphans that became children of this process while a program was started.

    A fork server that is replaced exits at that moment, and leaves what its ranks have started.
    """
    for pid in list(_adopted):
        try:
            has_ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            has_ended = True
        if has_ended:
            _adopted.discard(pid)


def _list_children() -> set[int]:
    if sys.platform != "linux":
        return set()
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found |= set(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except OSError:  # the thread has ended
            continue
    return found


def _is_of_another_session(pid: int) -> bool:
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def _adopt_orphans(adopts: bool) -> None:
    """Let orphans below this process become its children."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) == 0


def _get_template() -> Channel:
    global _template, _variables
    if _template is None:
        ours, theirs = open_pair()
        path = [str(Path(__file__).parent), *filter(None, sys.path)]
        code = f"import sys; sys.path[:] = {path!r}; import warm; warm.serve({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        process.returncode = 0  # it exits with this process
        theirs.close()
        atexit.register(ours.close)
        _template = (process.pid, ours)
        _variables = _read_once(os.environ)
    return _template[1]


def serve(descriptor: int) -> NoReturn:
    """Be the template: fork programs until the tests' process closes its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a third of the time of imports
    fork_server_main.import_for_ranks(PRELOADED)
    backend.available()
    gc.enable()
    gc.freeze()
    collapse_memory()
    channel = open_channel(descriptor)
    while (received := channel.receive()) is not None:
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(writing, str(pid).encode())
                os._exit(0)
            for each in (reading, writing):
                os.close(each)
            channel.close()
            _run(*received)
        os.waitpid(between, 0)  # the program is adopted before the test gets its number
        for each in (writing, *received[1]):
            os.close(each)
        channel.send({"kind": "started", "pid": int(os.read(reading, 20))})
        os.close(reading)
    os._exit(0)


def _run(message: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the program."""
    work, *streams = descriptors[:4]
    order = json.loads(read_memfd(work))
    atexit._clear()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for each in streams:
        os.close(each)
    if order["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    native_module.choose_again()  # the variables may be other ones
    program, *arguments = order["argv"]
    sys.argv[:] = ["-c", *arguments, *map(str, descriptors[4:])]
    sys.orig_argv[:] = [sys.executable, *sys.argv[:1], program, *sys.argv[1:]]
    sys.path.insert(0, "")
    tempfile.tempdir = None  # it depends on TMPDIR
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    del sys.modules[__name__]  # no part of the program
    from lockstep.launcher.rank_process import exit_process

    fork_server.spawn_fork_server = _Spare().spawn if order["has_spare"] else _fork_fork_server
    number = 0
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    if number:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    exit_process(status)


class _Spare:
    """A fork of this process as it is now, which becomes its fork server."""

    def __init__(self) -> None:
        self._ours: Channel | None
        self._ours, theirs = open_pair()
        launcher = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            _detach(f"spare-of-{launcher}")
            received = theirs.receive()
            if received is None:
                os._exit(0)
            order = json.loads(read_memfd(received[1][0]))
            os.environ.clear()
            os.environ.update(order["environ"])
            sys.path[:] = order["path"] or sys.path
            _serve(order["call"], received[1][1])
        theirs.close()

    def spawn(
        self,
        call: str,
        *,
        path: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> fork_server.ForkServer:
        """Stand for `spawn_fork_server`."""
        if self._ours is None:
            return SPAWN_FORK_SERVER(call, path=path, environ=environ)
        channel = self._ours
        self._ours = None
        ours, theirs = open_pair()
        order = {"call": call, "path": list(path), "environ": dict(environ or os.environ)}
        work = write_memfd(json.dumps(order).encode())
        channel.send({"kind": "serve"}, [work, theirs.fileno()])
        for each in (channel, theirs):
            each.close()
        os.close(work)
        return fork_server.ForkServer(ours, self._pid)


def _fork_fork_server(call: str, *, environ: Mapping[str, str] | None = None, **_: Any) -> Any:
    """Stand for `spawn_fork_server`: fork this process, which has imported what the server does."""
    if threading.active_count() > 1:  # it cannot be forked
        return SPAWN_FORK_SERVER(call, environ=environ)
    ours, theirs = open_pair()
    pid = os.fork()
    if pid == 0:
        number = os.dup(theirs.fileno())
        _detach()
        os.closerange(3, number)
        os.closerange(number + 1, number + 100)
        _serve(call, number)
    theirs.close()
    return fork_server.ForkServer(ours, pid)


def _detach(name: str = "") -> None:
    """Leave the session, the input and the signals of the process that this is a fork of."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    atexit._clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if name:
        assert ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()) == 0


def _serve(call: str, descriptor: int) -> NoReturn:
    """Be a fork server: call "package.module.main({})"."""
    from lockstep.launcher import rank_process

    name = call.partition("(")[0].rpartition(".")[0]
    importlib.import_module(name)
    try:
        eval(call.format(descriptor), {name.partition(".")[0]: sys.modules[name.partition(".")[0]]})
    finally:
        rank_process.exit_process(1)
