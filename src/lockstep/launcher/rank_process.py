"""A rank's process, from its first instruction to its last.

A forked process receives a message and descriptors. The message names a script, module or
program to run, or asks to call a function ("task": "function"). The descriptors are stdin,
stdout, stderr, the socket on which the process reports to the launcher, and an anonymous file
with the pickled function.

The parent-death pipe kills ranks whose fork server was killed. The server holds the only
writing end; when that closes, the kernel sends SIGKILL to the rank's process group, even
if the rank is stopped or deep in a computation.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import io
import os
import pickle
import runpy
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from lockstep.comm.activity import PAGE_BYTES, use_page
from lockstep.comm.native.binding_folder import get_cache_folder
from lockstep.comm.native_module import choose_again
from lockstep.kernel.errors import CommunicationError, FileError, LockstepError
from lockstep.launcher.channel import Channel, Message, open_channel, read_memfd, write_memfd
from lockstep.launcher.failure_codes import find_code
from lockstep.launcher.signals import print_stack_on_signal
from lockstep.launcher.stacks import STACK_SIGNAL
from lockstep.launcher.tracebacks import (
    add_notes,
    find_location,
    find_user_location,
    format_user_frames,
    is_own_error,
)
from lockstep.messages import log, open_missing_streams

__all__ = [
    "ForkedProcess",
    "describe_error",
    "exit_process",
    "fail_at_exit",
    "get_exit_code",
    "get_launch_number",
    "get_task",
    "has_launcher",
    "receive_from_launcher",
    "report_to_launcher",
    "run_code",
    "set_launch_number",
    "take_failure_at_exit",
]

F_SETSIG = 10  # of fcntl, on Linux: the signal that an asynchronous descriptor sends
MAX_REPORT = 1 << 16  # characters of a message or traceback
STORE_TIMEOUT = timedelta(seconds=300)

# The channel to the launcher. Only the rank itself may use it, not its forked children.
_report: Channel | None = None
_report_owner = 0
_exit_code: object = None  # what the program passed to sys.exit()
_task: str | None = None
_launch_number: int | None = None
# The failure with which this process exits once its program has ended by itself, and the process
# in which it was set, not a child that user code forks later.
_failure_at_exit: BaseException | None = None
_failure_owner = 0


@dataclass(frozen=True)
class ForkedProcess:
    """The work of a forked process.

    Attributes:
        message: The launcher's message.
        descriptors: The descriptors that came with it.
        parent_death_pipe: The pipe's reading end.
    """

    message: Message
    descriptors: list[int]
    parent_death_pipe: int

    def run(self) -> int:
        """Run it in this process and return the exit status."""
        with contextlib.suppress(PermissionError):  # the fork server has done it
            os.setpgid(0, 0)
        is_program = self.message.get("task") == "program"
        die_with_parent(self.parent_death_pipe, inherit=is_program)
        if self.message["kind"] == "store":
            return serve_store(self.descriptors[0], self.message)
        *streams, report, work = self.descriptors
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        try:
            os.chdir(self.message["cwd"])
        except OSError as error:
            folder = self.message["cwd"]
            reason = f"the working directory {folder} cannot be entered: {error.strerror}"
            open_channel(report).send(describe_error(FileError(reason)))
            return 1
        if is_program:
            return exec_program(self.message)
        _set_up_interpreter(self.message)
        return run_and_report(self.message, open_channel(report), work)


def die_with_parent(reading: int, *, inherit: bool = False) -> None:
    """Have this process group killed when the parent-death pipe's writing end is closed.

    Args:
        reading: The pipe's reading end.
        inherit: Whether this stays in effect in a program that this process executes.
    """
    try:
        # Open it again: F_SETOWN applies to the open file description, and the ranks share the
        # inherited description.
        own = os.open(f"/proc/self/fd/{reading}", os.O_RDONLY)
        os.set_inheritable(own, inherit)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([own], [], [], 0)[0]:  # it was closed before the kernel watched it
            os.killpg(os.getpgrp(), signal.SIGKILL)
    except OSError:  # not Linux
        threading.Thread(target=_wait_for_parent, args=(reading,), daemon=True).start()


def _wait_for_parent(reading: int) -> None:
    os.read(reading, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def serve_store(listening: int, message: Message) -> int:
    """Serve the ranks' store on the bound socket `listening` until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore(
        message["host"],
        message["port"],
        None,
        True,
        STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    while server:
        signal.pause()
    return 0


def exec_program(message: Message) -> int:
    """Replace this process by another program (`--no-python`)."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1):  # ignored in this process
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(message["target"], [message["target"], *message["argv"]], message["environ"])
    except OSError as error:
        log(f"cannot execute {message['target']!r}: {error.strerror}")
        return 127


def get_exit_code() -> object:
    """Return the argument that the program passed to `sys.exit`, for a rank's atexit handlers."""
    return _exit_code


def fail_at_exit(error: BaseException) -> None:
    """Let the program go on, and this process exit with status 1 at its end.

    Under Lockstep's launcher the error is reported then, as if it had been raised.
    """
    global _failure_at_exit, _failure_owner
    _failure_at_exit = error
    _failure_owner = os.getpid()


def take_failure_at_exit() -> BaseException | None:
    """Return what `fail_at_exit` was given, and forget it; None if it was not called."""
    global _failure_at_exit
    error = _failure_at_exit if _failure_owner == os.getpid() else None
    _failure_at_exit = None
    return error


@atexit.register  # atexit is LIFO: after the handlers of modules that import this one
def _exit_with_failure() -> None:
    """Exit with status 1 instead of 0, which nothing else can do at this point."""
    if take_failure_at_exit() is not None:
        _flush_files()
        os._exit(1)


def get_task() -> str | None:
    """Return this rank's kind of task: "function", "script" or "module"; None if not launched."""
    return _task


def get_launch_number() -> int | None:
    """Return the index of the call of `launch` that runs this process, from 0; None without one."""
    return _launch_number


def set_launch_number(number: int | None) -> None:
    """Set the result of `get_launch_number`, if `launch` calls its function in this process."""
    global _launch_number
    _launch_number = number


def has_launcher() -> bool:
    """Return whether this process is a rank that can send messages to its launcher."""
    return _report is not None and _is_rank()


def report_to_launcher(message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message to the launcher, if this process is a rank that has one."""
    if _report is not None and _is_rank():
        with contextlib.suppress(OSError):
            _report.send(message, descriptors)


def send_progress(lines: Sequence[str]) -> None:
    """Send the lines of a live region to the launcher, unless it has not read the earlier ones."""
    if _report is not None and select.select([], [_report], [], 0)[1]:
        report_to_launcher({"kind": "progress", "lines": list(lines)})


def receive_from_launcher(timeout: float | None) -> tuple[Message, list[int]] | None:
    """Wait for a message of the launcher to this rank, and the descriptors that come with it.

    Args:
        timeout: Seconds to wait; None waits without limit.

    Returns:
        None if no message has come, or if there is no launcher.
    """
    if _report is None or not _is_rank() or not select.select([_report], [], [], timeout)[0]:
        return None
    return _report.receive()


def _is_rank() -> bool:
    """Return whether this process is the rank itself, not a child that user code forked."""
    return _report_owner == os.getpid()


def exit_process(status: int) -> NoReturn:
    """Exit as an interpreter does, but without destroying its modules.

    A forked rank shares torch's pages with the fork server; destroying every object in them
    would copy them first, which takes a second. As in any other program, threads are joined,
    atexit handlers run, and open files are flushed.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_files()
    finally:
        os._exit(status)


def _flush_files() -> None:
    """Flush files that the program left open; the fork server's own objects are frozen."""
    for thing in [*gc.get_objects(), sys.stdout, sys.stderr]:
        # type(), not isinstance: an object's __class__ may run code, such as a lazy import.
        if issubclass(type(thing), io.BufferedWriter | io.BufferedRandom | io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                thing.flush()


def _set_up_interpreter(message: Message) -> None:
    """Give a forked process the state that a new interpreter would have."""
    cache = get_cache_folder()
    _update_environ(message["environ"])
    if get_cache_folder() != cache:
        choose_again()
    sys.path[:] = _path(message)
    sys.argv[:] = message["argv"]
    open_missing_streams()  # after a fork of a program without them
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 0:
        # libgomp read the variable before the fork.
        sys.modules["torch"].set_num_threads(int(threads))
    tempfile.tempdir = None  # TMPDIR may have been read before the fork
    # Without a new seed every rank would draw the same numbers. If the module is not imported
    # yet, leave that to its first use: the import takes 15 ms in a rank.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _update_environ(variables: dict[str, str]) -> None:
    """Set this process's variables; those that stay the same keep their shared pages."""
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _path(message: Message) -> list[str]:
    """Return sys.path: the launcher's for a function, that of `python SCRIPT` for a script."""
    return message["path"] or [message["first_path"], *sys.path[1:]]


def run_and_report(message: Message, report: Channel, work: int) -> int:
    """Run, send the value or the error to the launcher, and return the exit status."""
    global _report, _report_owner, _exit_code, _task
    _report = report
    _report_owner = os.getpid()
    _task = message["task"]
    set_launch_number(message.get("launch"))
    stack = write_memfd(b"")
    page = write_memfd(bytes(PAGE_BYTES))
    dump_stack_on_signal(stack)  # before the launcher can ask: by default the signal kills
    print_stack_on_signal()
    report.send({"kind": "stack"}, [stack, page])
    use_page(page)
    os.close(page)
    if os.environ.get("RANK", "0") != "0" and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _skip_breakpoint
    try:
        if message["task"] == "function":
            fn, args = pickle.loads(read_memfd(work))
            value = fn(int(os.environ["RANK"]), *args) if message.get("pass_rank") else fn(*args)
            _raise_failure()
            if _is_rank():
                _send_value(report, value)
        else:
            os.close(work)
            run_code(message["task"], message["target"])
            _raise_failure()
    except SystemExit as error:
        _exit_code = error.code
        return _status(error.code)
    except BaseException as error:
        return _send_error(report, error, shown=message["task"] != "function")
    return 0


def _raise_failure() -> None:
    """Raise the failure of a program that has ended by itself, if there is one."""
    if (failure := take_failure_at_exit()) is not None:
        raise failure


def _skip_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Handle `breakpoint()` in a rank without input: print a note the first time, and continue."""
    sys.breakpointhook = lambda *args, **kwargs: None
    caller = sys._getframe(1)
    log(
        f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}: breakpoint() is skipped "
        f"on rank {os.environ['RANK']}: only rank 0 has the terminal's input; write "
        f"`if ls.rank() == 0: breakpoint()`"
    )


def run_code(kind: str, target: str, source: bytes | None = None) -> None:
    """Run a "module" or a "script" (a file or folder) as the interpreter does.

    Args:
        kind: "module" or "script".
        target: The module, file or folder.
        source: Source code to run instead of the file's content; None for the file's content.
    """
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif source is None and os.path.isdir(target):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_script(target, Path(target).read_bytes() if source is None else source)


def _run_script(path: str, source: bytes) -> None:
    """Run a file as `python FILE` does: its names stay in `__main__` until the process exits."""
    file = os.path.join(os.getcwd(), path)  # absolute: the program may change the directory
    code: CodeType = compile(source, file, "exec")
    module = ModuleType("__main__")
    module.__dict__.update({"__file__": file, "__builtins__": __builtins__, "__spec__": None})
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
    from lockstep.launcher.pickling import dumps  # needed here only

    descriptor = write_memfd(dumps(value))
    report.send({"kind": "value", "time": time.monotonic()}, [descriptor])
    os.close(descriptor)


def describe_error(error: BaseException) -> Message:
    """Return the report of an error that was just raised, in plain values.

    For Lockstep's own errors it contains only the user's frames.
    """
    is_own = is_own_error(error)
    add_notes(error)
    shown = format_user_frames(error) if is_own else "".join(traceback.format_exception(error))
    return {
        "kind": "error",
        "time": time.monotonic(),
        "type": type(error).__name__,
        "message": "\n".join([str(error), *getattr(error, "__notes__", ())])[:MAX_REPORT],
        "where": find_user_location(error) if is_own else find_location(error),
        "traceback": shown[-MAX_REPORT:],
        "plain": is_own,
        "code": find_code(error),
        "operation": error.operation if isinstance(error, CommunicationError) else "",
        "hint": error.hint if isinstance(error, CommunicationError) else "",
    }


def _send_error(report: Channel, error: BaseException, *, shown: bool) -> int:
    sys.last_value = error  # as the interpreter does, for atexit handlers
    error.__traceback__ = _drop_launcher_frames(error.__traceback__)
    report_message = describe_error(error)
    if _is_rank():
        with contextlib.suppress(OSError):
            report.send(report_message)
    else:
        shown = True  # a forked child has no launcher that would show it
    if _is_rank() and report_message["plain"] and shown:
        traceback.print_exception(error)  # into the log; the launcher shows the message
    elif shown:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_status if isinstance(error, LockstepError) else 1


def _drop_launcher_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the launcher's frames, which do not help the user."""
    hidden = (__file__, runpy.__file__, "<frozen runpy>")
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename in hidden:
        kept = kept.tb_next
    return kept or frames


# --- where this rank is, on a signal -----------------------------------------------------------


def dump_stack_on_signal(descriptor: int) -> None:
    """Make this process write its stack to `descriptor` when it receives STACK_SIGNAL."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        # The launcher empties the file, so writing must not continue at the old position.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, descriptor, all_threads=False)
