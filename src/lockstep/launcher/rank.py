"""What a rank does from its first instruction to its last.

A task arrives as a message and descriptors: stdin, stdout, stderr, the socket on
which the rank reports to the launcher, and a parcel with the pickled function
(`task` "function"), or a script, module or program to run. It is done here, in
the process that the template forked, or by a fresh interpreter (`fresh`).

The life line is the reading end of a pipe whose only writing end the template
holds. When that breaks, the kernel itself kills the rank's process group: also
when the rank is stopped, or deep in a computation that never looks around.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import io
import json
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from lockstep.errors import LockstepError
from lockstep.launcher.channel import Channel, Message, adopt, parcel, unpack
from lockstep.launcher.stack import answer, is_own
from lockstep.messages import say

__all__ = ["Task", "described", "finish", "main", "run_code", "tell"]

F_SETSIG = 10  # fcntl's number on Linux: which signal an asynchronous descriptor sends
LONGEST_REPORT = 1 << 16  # characters of a message or traceback that are sent on
STORE_PATIENCE = timedelta(seconds=300)

_report: Channel | None = None  # to the launcher, in the rank itself and not in its children
_report_owner = 0


@dataclass(frozen=True)
class Task:
    """One process's work: the launcher's message, its descriptors, the life line."""

    message: Message
    descriptors: list[int]
    life: int

    @property
    def _executes(self) -> bool:
        return bool(self.message["task"] == "program" or self.message["fresh"])

    def run(self) -> int:
        """Do the work in this process and return the exit status."""
        with contextlib.suppress(PermissionError):  # the template was faster
            os.setpgid(0, 0)
        hang_on(self.life, inherit=self.message["kind"] == "rank" and self._executes)
        if self.message["kind"] == "store":
            return serve_store(self.descriptors[0], self.message["port"])
        *streams, report, work = self.descriptors
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(self.message["cwd"])
        if self.message["task"] == "program":
            return execute(self.message)
        if self.message["fresh"]:
            return execute_afresh(self.message, report, work)
        _dress(self.message)
        return work_and_report(self.message, adopt(report), work)


def hang_on(life: int, *, inherit: bool = False) -> None:
    """Have this process group killed when the writing end of `life` is closed.

    `inherit` keeps it so in a program that this process becomes.
    """
    try:
        # A description of its own: the signal's addressee belongs to it, and the
        # other ranks share the one that was inherited.
        own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY)
        os.set_inheritable(own, inherit)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([own], [], [], 0)[0]:  # it broke before the kernel was asked
            os.killpg(os.getpgrp(), signal.SIGKILL)
    except OSError:  # not Linux
        threading.Thread(target=_wait_for_end, args=(life,), daemon=True).start()


def _wait_for_end(life: int) -> None:
    os.read(life, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def serve_store(listening: int, port: int) -> int:
    """Serve the ranks' TCPStore on the bound socket `listening` until killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = "127.0.0.1"  # ignored by the server, which has its socket
    store = TCPStore(
        host, port, None, True, STORE_PATIENCE, wait_for_workers=False, master_listen_fd=listening
    )
    while store:
        signal.pause()
    return 0


def execute(message: Message) -> int:
    """Become another program (`--no-python`)."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, others should not
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(message["target"], [message["target"], *message["argv"]], message["environ"])
    except OSError as error:
        say(f"cannot run {message['target']!r}: {error.strerror}")
        return 127


def execute_afresh(message: Message, report: int, work: int) -> NoReturn:
    """Become a fresh interpreter that does the same task (start method "spawn")."""
    for descriptor in (report, work):
        os.set_inheritable(descriptor, True)
    order = {**message, "environ": None}
    code = (
        f"import sys; sys.path[:] = {_path(message)!r}; from lockstep.launcher.rank import main; "
        f"main({json.dumps(order)!r}, {report}, {work})"
    )
    os.execve(sys.executable, [sys.executable, *message["flags"], "-c", code], message["environ"])


def main(order: str, report: int, work: int) -> None:
    """Do a task in a fresh interpreter; its streams, folder and variables are in place."""
    message = json.loads(order)
    sys.argv[:] = message["argv"]
    finish(work_and_report(message, adopt(report), work))


def tell(message: Message) -> None:
    """Send a message to the launcher, where this process has one that listens."""
    if _report is not None and _is_rank():
        with contextlib.suppress(OSError):
            _report.send(message)


def _is_rank() -> bool:
    """Tell whether this process is the rank itself, not a child that the user's code forked."""
    return _report_owner == os.getpid()


def finish(status: int) -> NoReturn:
    """End this process as an interpreter does, but without taking the modules apart.

    A forked rank shares torch's pages with the template; destroying every object
    in them would copy them first, which takes a second. What a program may rely
    on is done: threads are joined, exit functions run, files written out.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _write_out()
    finally:
        os._exit(status)


def _write_out() -> None:
    """Write out files that the program left open; the template's own objects are frozen."""
    for thing in [*gc.get_objects(), sys.stdout, sys.stderr]:
        # By type(): asking an object for its class may run code, for example a lazy import's.
        if issubclass(type(thing), io.BufferedWriter | io.BufferedRandom | io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                thing.flush()


def _dress(message: Message) -> None:
    """Give a forked process what a fresh interpreter would have found."""
    os.environ.clear()
    os.environ.update(message["environ"])
    sys.path[:] = _path(message)
    sys.argv[:] = message["argv"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))  # libgomp read it before the fork
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else every rank draws the template's numbers


def _path(message: Message) -> list[str]:
    """Return the launcher's path for a function; for a script what `python SCRIPT` has."""
    return message["path"] or [message["first_path"], *sys.path[1:]]


def work_and_report(message: Message, report: Channel, work: int) -> int:
    """Do the task; send its value or its error to the launcher; return the exit status."""
    global _report, _report_owner
    _report, _report_owner = report, os.getpid()
    stacks = parcel(b"")
    report.send({"kind": "stack"}, [stacks])
    answer(stacks)
    try:
        if message["task"] == "function":
            fn, args = pickle.loads(unpack(work))
            value = fn(*args)
            if _is_rank():
                _send_value(report, value)
        else:
            os.close(work)
            run_code(message["task"], message["target"])
    except SystemExit as error:
        return _status(error.code)
    except BaseException as error:
        return _send_error(report, error, shown=message["task"] != "function")
    return 0


def run_code(kind: str, target: str) -> None:
    """Run a "module" or a "script" (a file or a folder) as the interpreter does."""
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_script(target)


def _run_script(path: str) -> None:
    """Run a file as `python FILE` does: its names stay in `__main__` to the very end."""
    with open(path, "rb") as file:
        code: CodeType = compile(file.read(), path, "exec")
    module = ModuleType("__main__")
    module.__dict__.update({"__file__": path, "__builtins__": __builtins__, "__spec__": None})
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _send_value(report: Channel, value: Any) -> None:
    import cloudpickle  # type: ignore[import-untyped]

    descriptor = parcel(cloudpickle.dumps(value))
    report.send({"kind": "value", "time": time.monotonic()}, [descriptor])
    os.close(descriptor)


def described(error: BaseException) -> Message:
    """Return what is told of an error that was just raised, in plain values."""
    return {
        "kind": "error",
        "time": time.monotonic(),
        "type": type(error).__name__,
        "message": str(error)[:LONGEST_REPORT],
        "where": _where(error),
        "traceback": "".join(traceback.format_exception(error))[-LONGEST_REPORT:],
        "plain": isinstance(error, LockstepError),
    }


def _send_error(report: Channel, error: BaseException, *, shown: bool) -> int:
    error.__traceback__ = _own_frames(error.__traceback__)
    told = described(error)
    if _is_rank():
        with contextlib.suppress(OSError):
            report.send(told)
    else:
        shown = True  # the launcher, which would show it, learns nothing of a forked child
    if shown and told["plain"]:
        say(str(error))
    elif shown:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_status if isinstance(error, LockstepError) else 1


def _where(error: BaseException) -> str:
    """Return "train.py:31": the last line of the user's own that the error went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    last = (own or frames)[-1:]
    return f"{os.path.basename(last[0].filename)}:{last[0].lineno}" if last else ""


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the launcher's own code, which say nothing to the user."""
    hidden = (__file__, runpy.__file__, "<frozen runpy>")
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename in hidden:
        kept = kept.tb_next
    return kept or frames
