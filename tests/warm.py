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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launcher.channel import Channel, open_channel, open_pair, read_memfd, write_memfd

PRELOADED = (
    "lockstep.cli",
    "lockstep.commands.run",
    "lockstep.launcher.fork_server_main",
    "lockstep.launcher.launch_script",
    "lockstep.launcher.world",
    "lockstep.training.trainer",
    "cloudpickle",
    "torch._dynamo",
)
PR_SET_CHILD_SUBREAPER = 36  # of prctl

_template: tuple[int, Channel] | None = None
_spawn_fork_server: Any = None  # in a program: Lockstep's own


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen([sys.executable, "-c", program, *arguments], ...)`."""

    def _execute_child(self, *given: Any) -> None:
        if sys.platform != "linux":
            super()._execute_child(*given)  # type: ignore[misc]
            return
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        args, environ = call["args"], call["env"]
        assert args[:2] == [sys.executable, "-c"], args
        assert call["preexec_fn"] is None
        order = {
            "argv": [os.fspath(each) for each in args[1:]],
            "cwd": os.fspath(call["cwd"] or os.getcwd()),
            "environ": dict(os.environ if environ is None else environ),
            "session": call["start_new_session"],
        }
        descriptors = [write_memfd(json.dumps(order).encode())]
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            descriptors.append(number if call[name] == -1 else call[name])
        channel = _get_template()
        _adopt_orphans(True)
        try:
            channel.send({"kind": "start"}, descriptors)
            received = channel.receive()
        finally:
            _adopt_orphans(False)
            os.close(descriptors[0])
        assert received is not None, "the template process has exited"
        self.pid = received[0]["pid"]
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))


def run(args: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` with `capture_output=True`, in a warm process."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            printed = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, *printed)


def get_template_pid() -> int | None:
    """Return the process id of the template; None if there is none."""
    return None if _template is None else _template[0]


def _adopt_orphans(adopts: bool) -> None:
    """Let orphans below this process become its children."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) == 0


def _get_template() -> Channel:
    global _template
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
        _template = process.pid, ours
    return _template[1]


def serve(descriptor: int) -> NoReturn:
    """Be the template: fork programs until the tests' process closes its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a third of the time of imports
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
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
    work, *streams = descriptors
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
    _, program, *arguments = order["argv"]
    sys.argv[:] = ["-c", *arguments]
    sys.orig_argv[:] = [sys.executable, *order["argv"]]
    sys.path.insert(0, "")
    tempfile.tempdir = None  # it depends on TMPDIR
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    from lockstep.launcher import fork_server
    from lockstep.launcher.rank_process import exit_process

    global _spawn_fork_server
    _spawn_fork_server = fork_server.spawn_fork_server
    fork_server.spawn_fork_server = _fork_fork_server
    number = 0
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
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


def _fork_fork_server(
    call: str, *, environ: Mapping[str, str] | None = None, for_training: bool = False, **_: Any
) -> Any:
    """Stand for `spawn_fork_server`: fork this process, which has imported what the server does."""
    from lockstep.launcher import fork_server, fork_server_main, rank_process

    if threading.active_count() > 1:  # it cannot be forked
        return _spawn_fork_server(call, environ=environ, for_training=for_training)
    ours, theirs = open_pair()
    pid = os.fork()
    if pid == 0:
        number = os.dup(theirs.fileno())
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.closerange(3, number)
        os.closerange(number + 1, number + 100)
        atexit._clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        names = {"lockstep": sys.modules["lockstep"], "fork_server_main": fork_server_main}
        try:
            eval(call.format(number), names)
        finally:
            rank_process.exit_process(1)
    theirs.close()
    return fork_server.ForkServer(ours, pid, for_training=for_training)
