"""The peers that are measured: ranks that wait for orders, of torch, of MPI, or one thread.

The peers of one measurement meet in one folder: their ranks connect to its
socket, and each peer has a start line of its own. Ranks that are not measured
sleep, so that several peers can live beside each other and take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

import lockstep
from lockstep.bench.lineup import Lineup
from lockstep.bench.measure import CannotError, Order, Task
from lockstep.bench.numpy_calls import CopyLibrary
from lockstep.bench.rank import LINEUP, SOCKET, torch_main
from lockstep.errors import LockstepError, RankError, UsageError, WorkError

__all__ = ["CopyPeer", "Meeting", "MpiPeer", "Peer", "TorchPeer", "mpi_python"]

MPI_PYTHON = "LOCKSTEP_MPI_PYTHON"
START = 60.0  # seconds until all ranks of a peer must have come
END = 10.0  # seconds until they must have gone
PACKAGES = str(Path(lockstep.__file__).parent.parent)

Answer = dict[str, Any]
Main = Callable[[str, str, str, float], None]


class Peer(Protocol):
    """Something that can be measured on a number of ranks."""

    name: str
    library: str

    def ask(self, message: dict[str, Any]) -> list[Answer]:
        """Ask every rank, and return their answers in rank order."""

    def end(self) -> None:
        """Let its ranks leave."""


class Meeting:
    """The folder and socket where the ranks of all peers of a measurement meet."""

    def __init__(self, ranks: int, patience: float) -> None:
        self.ranks = ranks
        self.patience = patience
        self.folder = tempfile.mkdtemp(prefix="lockstep-bench-")  # nobody else may enter it
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(f"{self.folder}/{SOCKET}")
        self.listening.listen(ranks)

    def close(self) -> None:
        """Remove the folder."""
        self.listening.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RankPeer:
    """A peer whose ranks are processes; a subclass starts and ends them."""

    def __init__(self, name: str, meeting: Meeting) -> None:
        self.name = name
        self.library = ""
        self._meeting = meeting
        self._key = secrets.token_hex(4)
        self._streams: dict[int, IO[str]] = {}
        self._sockets: dict[int, socket.socket] = {}
        Lineup.prepare(f"{meeting.folder}/{LINEUP}{self._key}", meeting.ranks)

    def gather(self) -> None:
        """Wait until every rank has come."""
        deadline = time.monotonic() + START
        while len(self._streams) < self._meeting.ranks:
            if select.select([self._meeting.listening], [], [], 0.2)[0]:
                self._welcome()
            elif self.failed() or time.monotonic() > deadline:
                missing = sorted(set(range(self._meeting.ranks)) - self._streams.keys())
                raise self.failure(f"ranks {missing} did not come within {START:g} s")

    def ask(self, message: dict[str, Any]) -> list[Answer]:
        """Ask every rank, and return their answers in rank order."""
        deadline = time.monotonic() + self._meeting.patience
        try:
            for stream in self._streams.values():
                stream.write(json.dumps(message) + "\n")
                stream.flush()
            return [self._answer(rank, deadline) for rank in range(self._meeting.ranks)]
        except ConnectionError:
            raise self.failure("a rank is gone") from None

    def end(self) -> None:
        """Close the connections, upon which the ranks leave."""
        for stream in self._streams.values():
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for connection in self._sockets.values():
            connection.close()
        self._streams.clear()
        self._sockets.clear()

    def failed(self) -> bool:
        """Whether a rank has ended already."""
        raise NotImplementedError

    def failure(self, what: str) -> LockstepError:
        """Return the error that explains why a rank is missing, as well as can be known."""
        raise NotImplementedError

    def _welcome(self) -> None:
        connection, _ = self._meeting.listening.accept()
        stream = connection.makefile("rw", encoding="utf-8")
        hello = json.loads(stream.readline())
        self._streams[hello["hello"]], self._sockets[hello["hello"]] = stream, connection
        self.library = hello["library"]

    def _answer(self, rank: int, deadline: float) -> Answer:
        stream = self._streams[rank]
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._sockets[rank]], [], [], left)[0]:
            raise self.failure(f"rank {rank} did not answer within {self._meeting.patience:g} s")
        line = stream.readline()
        if not line:
            raise self.failure(f"rank {rank} is gone")
        answer: Answer = json.loads(line)
        return answer


class TorchPeer(RankPeer):
    """Ranks that joined a world on one of torch.distributed's backends.

    `main` is what they run: (name, folder, key, patience).
    """

    def __init__(self, name: str, meeting: Meeting, main: Main = torch_main) -> None:
        super().__init__(name, meeting)
        arguments = (name, meeting.folder, self._key, meeting.patience)
        self._launched = lockstep.launch(main, arguments, meeting.ranks, join=False, daemon=True)
        try:
            self.gather()
        except BaseException:
            self._launched.terminate()
            raise

    def end(self) -> None:
        """Let the ranks leave their world; end those that stay."""
        super().end()
        try:
            self._launched.join(END)
        except (TimeoutError, RankError):
            pass
        finally:
            self._launched.terminate()

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        return self._launched.processes

    def failed(self) -> bool:
        """Whether a rank has ended already."""
        return any(status is not None for status in self._launched.exitcodes)

    def failure(self, what: str) -> LockstepError:
        """Return the launcher's own error where it has one."""
        try:
            self._launched.join(3.0)
        except RankError as error:
            return error
        except TimeoutError:
            self._launched.terminate()
        return WorkError(f"{self.name}: {what}")


class MpiPeer(RankPeer):
    """Ranks that `mpiexec` started, in an environment of their own."""

    def __init__(self, python: str, meeting: Meeting) -> None:
        super().__init__("mpi", meeting)
        code = (
            f"import sys; sys.path.append({PACKAGES!r}); "
            "from lockstep.bench.rank import mpi_main; mpi_main()"
        )
        program = [python, "-c", code, meeting.folder, self._key, str(meeting.patience)]
        self._said = tempfile.TemporaryFile(  # noqa: SIM115 - closed in end()
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [mpiexec(python), "-n", str(meeting.ranks), *program],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            env=mpi_environment(),
            start_new_session=True,
        )
        try:
            self.gather()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let the ranks leave; end those that stay, with what mpiexec started."""
        super().end()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
        self._said.close()

    def failed(self) -> bool:
        """Whether mpiexec has ended already."""
        return self._process.poll() is not None

    def failure(self, what: str) -> LockstepError:
        """Return an error with the last thing that mpiexec said."""
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return WorkError(f"mpi: {what}" + (f"; its last words: {lines[-1]}" if lines else ""))


class CopyPeer:
    """One thread of this process, which copies the bytes of the message."""

    name = "memcpy"
    library = "numpy.copyto, one thread"

    def __init__(self) -> None:
        self._task: Task | None = None

    def ask(self, message: dict[str, Any]) -> list[Answer]:
        """Prepare or measure a copy, here and now."""
        if "prepare" in message:
            ordered = message["order"]
            order = Order("send_recv", ordered["count"], ordered["dtype"], ordered["op"])
            try:
                self._task = Task(CopyLibrary(), order, 0, 2)
            except CannotError as error:
                return [{"cannot": str(error)}]
        elif "block" in message:
            assert self._task is not None
            times, _ = self._task.block(message["calls"], lambda: None)
            return [{"times": times, "wrong": 0}]
        else:
            self._task = None
        return [{}]

    def end(self) -> None:
        """Let the buffers go."""
        self._task = None


def ordered(order: Order) -> dict[str, Any]:
    """Return an order as a message carries it."""
    return asdict(order)


def mpi_python(asked: str | None) -> str:
    """Return the Python that has mpi4py; UsageError that says how to get one."""
    python = asked or os.environ.get(MPI_PYTHON)
    if not python:
        raise UsageError(
            "--vs mpi needs mpi4py and an MPI in an environment of their own: python3 -m venv mpi; "
            "mpi/bin/pip install mpi4py mpich numpy; then --mpi-python mpi/bin/python or "
            f"{MPI_PYTHON}=mpi/bin/python"
        )
    tried = subprocess.run(
        [python, "-c", "import mpi4py, numpy"], capture_output=True, text=True, check=False
    ) if shutil.which(python) else None  # fmt: skip
    if tried is None or tried.returncode:
        why = "is no program" if tried is None else tried.stderr.strip().splitlines()[-1]
        raise UsageError(
            f"--vs mpi: {python} {why}; get one with python3 -m venv mpi; "
            "mpi/bin/pip install mpi4py mpich numpy"
        )
    mpiexec(python)
    return os.path.abspath(python)


def mpiexec(python: str) -> str:
    """Return the `mpiexec` beside that Python, else the one on the path."""
    beside = Path(os.path.abspath(python)).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError(f"--vs mpi: there is no mpiexec beside {python}: pip install mpich there")
    return found


def mpi_environment() -> dict[str, str]:
    """Return the environment for mpiexec: without this Python's own variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Open MPI starts more ranks than cores only when asked to; others take no notice.
    more = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    return kept | more
