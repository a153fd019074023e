"""The launcher's side of the template: started once for each process, and kept.

A template has read the environment variables that Python, torch and the OpenMP
library read once, when they start; when one of those changed, a new template is
started and the old one ends after its last launch.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from lockstep.launcher.channel import Channel, pair

__all__ = ["Preloaded", "fork", "interpreter_flags", "template", "template_pid", "trains"]

# Variables that are read once, before a rank could change them.
READ_ONCE = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_")
READ_LATER = ("TORCHELASTIC_", "TORCHINDUCTOR_")

ALWAYS = ("lockstep.launcher.world", "cloudpickle")
# The first step of any optimizer imports this, in 1.4 seconds: once here, or in every rank.
WITH_OPTIMIZER = "torch._dynamo"
SPEAKS_OF_TRAINING = (b"optim", b"Trainer", b"lockstep.training", b"lockstep.recipes")
PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Preloaded:
    """A running template: its process id, the variables it started with, whom it serves."""

    def __init__(self, channel: Channel, pid: int, *, trains: bool) -> None:
        self.pid = pid
        self._trains = trains
        self._channel = channel
        self._launcher = os.getpid()
        self._variables = read_once(os.environ)
        self._lock = threading.Lock()
        self._ended = False

    def fits(self, *, trains: bool) -> bool:
        """Whether it is alive, is this process's own, and would start the same way now."""
        return (
            self._launcher == os.getpid()
            and self._trains >= trains
            and self._variables == read_once(os.environ)
            and not self.ended()
        )

    def open_job(self) -> Channel:
        """Return a socket on which it starts and watches the ranks of one launch."""
        ours, theirs = pair()
        with self._lock:
            self._channel.send({"kind": "job"}, [theirs.fileno()])
        theirs.close()
        return ours

    def retire(self) -> None:
        """Let it end after its last job."""
        self._channel.close()

    def end(self) -> None:
        """Let it end after its last job, and wait for that."""
        self.retire()
        if self._launcher == os.getpid():
            self._wait(0)

    def ended(self) -> bool:
        """Whether it has ended; then it is no zombie any more either."""
        return self._wait(os.WNOHANG)

    def _wait(self, options: int) -> bool:
        if not self._ended:
            try:
                self._ended = os.waitpid(self.pid, options)[0] == self.pid
            except ChildProcessError:  # somebody else waited for it
                self._ended = True
        return self._ended


_current: Preloaded | None = None
_retired: list[Preloaded] = []
_lock = threading.Lock()


def read_once(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of `environ` that a running template cannot take over."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_ONCE) and not name.startswith(READ_LATER)
    }


def template(*, trains: bool = False) -> Preloaded:
    """Return this process's template; start it where there is none that fits.

    `trains` asks for one that has imported what optimizers need.
    """
    global _current
    with _lock:
        if _current is not None and not _current.fits(trains=trains):
            _current.retire()
            _retired.append(_current)
            _current = None
        if _current is None:
            _current = _start(trains)
            atexit.register(_current.end)
        return _current


def trains(text: bytes) -> bool:
    """Guess whether a program (source or pickle) trains: a wrong guess costs a second."""
    return any(word in text for word in SPEAKS_OF_TRAINING)


def template_pid() -> int | None:
    """Return the process id of this process's template; None where there is none yet.

    Retired ones that have ended are waited for on the way.
    """
    _retired[:] = [each for each in _retired if not each.ended()]
    return None if _current is None else _current.pid


def _start(trains: bool) -> Preloaded:
    ours, theirs = pair()
    number = theirs.fileno()
    modules = (*ALWAYS, WITH_OPTIMIZER) if trains else ALWAYS
    code = (
        f"import sys; sys.path.append({PACKAGES!r}); from lockstep.launcher.template import main; "
        f"main({number}, {os.getpid()}, {modules!r})"
    )
    pid = _spawn([sys.executable, *interpreter_flags(), "-c", code], number)
    theirs.close()
    return Preloaded(ours, pid, trains=trains)


def _spawn(command: list[str], descriptor: int) -> int:
    """Start `command` in a session of its own, so that Ctrl-C reaches the launcher alone."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True
    )
    process.returncode = 0  # Preloaded waits for it; Popen must not warn that nobody did
    return process.pid


def interpreter_flags() -> list[str]:
    """Return the options (-W, -X, -O ...) that this interpreter was started with."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def fork() -> Preloaded:
    """Return a template that is a fork of this process (start method "fork")."""
    from lockstep.launcher.template import serve_fork  # before the fork

    ours, theirs = pair()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve_fork(theirs, launcher)
    theirs.close()
    return Preloaded(ours, pid, trains=True)
