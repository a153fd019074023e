"""The launcher's side of the fork server, the process that ranks are forked from.

A process starts its fork server once and keeps it. The server has read the environment
variables that Python, torch and the OpenMP library read only when they start; if one of
them changes, a new server is started, and the old one exits after its last launch.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from lockstep.kernel.errors import UsageError
from lockstep.launcher.channel import Channel, open_pair
from lockstep.launcher.environment import DEFAULTS
from lockstep.user_code import PACKAGE

__all__ = [
    "ForkServer",
    "check_open_files",
    "get_fork_server",
    "get_fork_server_pid",
    "interpreter_flags",
    "spawn_fork_server",
]

# Variables that are read once, at startup, before a rank could change them.
READ_ONCE = (
    "PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "GOMP_", "NPY_", "OPENBLAS_", "LD_",
)  # fmt: skip
READ_LATER = (
    "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_DETERMINISTIC",
    "MKL_CBWR",  # by MKL's first computation
)  # fmt: skip

OPEN_FILES = 16  # upper limit of the launcher's own
OPEN_FILES_PER_RANK = 6  # pipes, sockets, stack, activity page and log

# Imported once instead of by every rank. The first step of any optimizer imports torch._dynamo,
# which takes 1.4 s of processor time; the trainer's modules take 0.3 s.
PRELOADED = (
    "lockstep.launcher.world",
    "lockstep.comm.native.binding",
    "lockstep.launcher.pickling",
    "torch._dynamo",
    "lockstep.training.trainer",
)


class ForkServer:
    """The launcher's handle of a running fork server.

    Args:
        channel: Socket on which the launcher announces new launches.
        pid: Process id of the server.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self.pid = pid
        self.channel = channel
        self._launcher = os.getpid()
        self._variables = read_once_variables(os.environ)
        self._lock = threading.Lock()
        self._has_launched = False
        self._has_exited = False

    def is_usable(self) -> bool:
        """Return whether it runs, belongs to this process, and would start the same way now."""
        return (
            self._launcher == os.getpid()
            and self._variables == read_once_variables(os.environ)
            and not self.has_exited()
        )

    def open_launch(self) -> Channel:
        """Return a socket on which the server starts and watches the ranks of one launch."""
        ours, theirs = open_pair()
        with self._lock:
            self._has_launched = True
            self.channel.send({"kind": "launch"}, [theirs.fileno()])
        theirs.close()
        return ours

    def retire(self) -> None:
        """Make the server exit after its last launch."""
        self.channel.close()

    def close(self) -> None:
        """Make the server end its launches and exit; wait until it has exited."""
        if self._launcher != os.getpid():
            self.retire()
            return
        with contextlib.suppress(OSError), self._lock:
            if self._has_launched:
                self.channel.send({"kind": "exit"})
            elif not self.has_exited():
                os.kill(self.pid, signal.SIGKILL)  # it has no ranks, and may be importing torch
        self.retire()
        with contextlib.suppress(KeyboardInterrupt):  # the server exits anyway
            self._wait(0)

    def has_exited(self) -> bool:
        """Return whether it has exited; reaps it in that case."""
        return self._wait(os.WNOHANG)

    def _wait(self, options: int) -> bool:
        if not self._has_exited:
            try:
                self._has_exited = os.waitpid(self.pid, options)[0] == self.pid
            except ChildProcessError:  # reaped by other code
                self._has_exited = True
        return self._has_exited


_current: ForkServer | None = None
_retired: list[ForkServer] = []
_lock = threading.Lock()


def read_once_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that a running fork server cannot adopt."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_ONCE) and not name.startswith(READ_LATER)
    }


def get_fork_server() -> ForkServer:
    """Return this process's fork server; start a new one if none can be used."""
    global _current
    with _lock:
        if _current is not None and not _current.is_usable():
            _current.retire()
            _retired.append(_current)
            _current = None
        if _current is None:
            _current = _start()
            # atexit handlers run in LIFO order: users of the server must register after this.
            atexit.register(_current.close)
        return _current


def check_open_files(nprocs: int) -> None:
    """Check that this process may open enough files to start `nprocs` ranks, and /dev/null.

    Otherwise a rank, or torch in it, fails in the middle of its start.

    Raises:
        UsageError: The limit is too low, or there is no /dev/null.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDWR))
    except OSError as error:
        raise UsageError(
            f"{os.devnull} cannot be opened ({error.strerror}), but ranks without a terminal read "
            f"from it: mount /dev, or create it (mknod -m 666 {os.devnull} c 1 3)"
        ) from None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    needed = opened + OPEN_FILES + OPEN_FILES_PER_RANK * nprocs
    if limit != resource.RLIM_INFINITY and limit < needed:
        ranks = "1 rank" if nprocs == 1 else f"{nprocs} ranks"
        raise UsageError(
            f"a process may open {limit} files (ulimit -n), but starting {ranks} takes up to "
            f"{needed}: raise the limit (ulimit -n {max(1024, 2 * needed)})"
        )


def get_fork_server_pid() -> int | None:
    """Return the process id of this process's fork server; None if there is none.

    Also reaps retired servers that have exited.
    """
    _retired[:] = [server for server in _retired if not server.has_exited()]
    return None if _current is None else _current.pid


def _start() -> ForkServer:
    call = f"lockstep.launcher.fork_server_main.main({{}}, {os.getpid()}, {PRELOADED!r})"
    return spawn_fork_server(call)


def spawn_fork_server(
    call: str,
    *,
    path: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ForkServer:
    """Start a fork server in a new interpreter and session, where Ctrl-C does not reach it.

    Args:
        call: The call that serves launches, such as "package.module.main({})"; the braces are
            replaced by the descriptor of its socket.
        path: Its sys.path; empty for the interpreter's own and Lockstep's folder.
        environ: Its environment; None for this process's.
    """
    ours, theirs = open_pair()
    number = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)  # 0 to 2 may have been closed
    own = os.path.dirname(PACKAGE)
    finds = f"sys.path[:] = {list(path)!r}" if path else f"sys.path.append({own!r})"
    module = call.partition("(")[0].rpartition(".")[0]
    code = f"import sys; {finds}; import {module}; {call.format(number)}"
    process = subprocess.Popen(
        [sys.executable, *interpreter_flags(), "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if sys.__stdout__ is None else None,
        stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
        pass_fds=[number],
        start_new_session=True,
        env={"PYTHONHASHSEED": DEFAULTS["PYTHONHASHSEED"], **(environ or os.environ)},
    )
    process.returncode = 0  # ForkServer reaps it; otherwise Popen would warn
    os.close(number)
    theirs.close()
    return ForkServer(ours, process.pid)


def interpreter_flags() -> list[str]:
    """Return the options (-W, -X, -O, ...) that this interpreter was started with."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags
