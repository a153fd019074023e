"""Runners: the ranks of torch's backends and of MPI.

The ranks of all runners connect to the socket of one rendezvous, and each runner has its
own start barrier. Ranks sleep while they are not measured, so that several runners can be
alive and take turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from lockstep.kernel.errors import LockstepError, RankError, UsageError, WorkError
from lockstep.launcher.launch import start
from lockstep.tools.bench.bench_worker import SOCKET, START_BARRIER, torch_main
from lockstep.tools.bench.workload import StartBarrier

__all__ = ["MpiRunner", "Rendezvous", "Runner", "TorchRunner", "find_mpiexec"]

START_TIMEOUT = 60.0  # seconds until all ranks of a runner have connected
END_TIMEOUT = 10.0  # seconds until they have exited
PACKAGES = str(Path(__file__).parents[3])
# Open MPI starts more ranks than cores only with these settings; others ignore them.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}

Answer = dict[str, Any]
Main = Callable[[str, str, str, float], None]


class Runner(Protocol):
    """The interface of a runner, which measures workloads on a number of ranks."""

    name: str
    library: str

    def ask(self, message: dict[str, Any]) -> list[Answer]:
        """Send a request to every rank, and return the answers in rank order."""

    def end(self) -> None:
        """Stop the ranks."""


class Rendezvous:
    """The folder and the socket to which the ranks of all runners connect.

    Args:
        ranks: The number of ranks of each runner.
        timeout: The longest wait for an answer, in seconds.
    """

    def __init__(self, ranks: int, timeout: float) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.folder = tempfile.mkdtemp(prefix="lockstep-bench-")  # private to this user
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(f"{self.folder}/{SOCKET}")
        self.listening.listen(ranks)

    def close(self) -> None:
        """Remove the folder."""
        self.listening.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ProcessRunner:
    """A runner whose ranks are processes; subclasses start and stop them."""

    def __init__(self, name: str, rendezvous: Rendezvous) -> None:
        self.name = name
        self.library = ""
        self._rendezvous = rendezvous
        self._key = secrets.token_hex(4)
        self._streams: dict[int, IO[str]] = {}
        self._sockets: dict[int, socket.socket] = {}
        StartBarrier.prepare(f"{rendezvous.folder}/{START_BARRIER}{self._key}", rendezvous.ranks)

    def wait_for_ranks(self) -> None:
        """Wait until every rank has connected."""
        deadline = time.monotonic() + START_TIMEOUT
        while len(self._streams) < self._rendezvous.ranks:
            if select.select([self._rendezvous.listening], [], [], 0.2)[0]:
                self._accept()
            elif self.has_failed() or time.monotonic() > deadline:
                missing = sorted(set(range(self._rendezvous.ranks)) - self._streams.keys())
                raise self.explain_failure(
                    f"ranks {missing} did not connect within {START_TIMEOUT:g} s"
                )

    def ask(self, message: dict[str, Any]) -> list[Answer]:
        """Send a request to every rank, and return the answers in rank order."""
        deadline = time.monotonic() + self._rendezvous.timeout
        try:
            for stream in self._streams.values():
                stream.write(json.dumps(message) + "\n")
                stream.flush()
            return [self._answer(rank, deadline) for rank in range(self._rendezvous.ranks)]
        except ConnectionError:
            raise self.explain_failure("a rank has exited") from None

    def end(self) -> None:
        """Close the connections, which makes the ranks exit."""
        for stream in self._streams.values():
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for connection in self._sockets.values():
            connection.close()
        self._streams.clear()
        self._sockets.clear()

    def has_failed(self) -> bool:
        """Return whether a rank has already exited."""
        raise NotImplementedError

    def explain_failure(self, what: str) -> LockstepError:
        """Return an error that explains why a rank is missing."""
        raise NotImplementedError

    def _accept(self) -> None:
        connection, _ = self._rendezvous.listening.accept()
        stream = connection.makefile("rw", encoding="utf-8")
        hello = json.loads(stream.readline())
        self._streams[hello["hello"]], self._sockets[hello["hello"]] = stream, connection
        self.library = hello["library"]

    def _answer(self, rank: int, deadline: float) -> Answer:
        stream = self._streams[rank]
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._sockets[rank]], [], [], left)[0]:
            raise self.explain_failure(
                f"rank {rank} did not answer within {self._rendezvous.timeout:g} s"
            )
        line = stream.readline()
        if not line:
            raise self.explain_failure(f"rank {rank} has exited")
        answer: Answer = json.loads(line)
        return answer


class TorchRunner(ProcessRunner):
    """Ranks of `torch.distributed` on one backend.

    Args:
        name: The name of the backend.
        rendezvous: The rendezvous of the ranks.
        main: The function of each rank: (name, folder, key, timeout).
    """

    def __init__(self, name: str, rendezvous: Rendezvous, main: Main = torch_main) -> None:
        super().__init__(name, rendezvous)
        arguments = (name, rendezvous.folder, self._key, rendezvous.timeout)
        self._launched = start(main, arguments, rendezvous.ranks)
        try:
            self.wait_for_ranks()
        except BaseException:
            self._launched.terminate()
            raise

    def end(self) -> None:
        """Let the ranks exit, and terminate those that do not."""
        super().end()
        try:
            self._launched.join(END_TIMEOUT)
        except (TimeoutError, RankError):
            pass
        finally:
            self._launched.terminate()

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in rank order."""
        return self._launched.processes

    def has_failed(self) -> bool:
        """Return whether a rank has already exited."""
        return any(status is not None for status in self._launched.exitcodes)

    def explain_failure(self, what: str) -> LockstepError:
        """Return the error of the launcher, if it has one."""
        try:
            self._launched.join(3.0)
        except RankError as error:
            return error
        except TimeoutError:
            self._launched.terminate()
        return WorkError(f"{self.name}: {what}")


class MpiRunner(ProcessRunner):
    """Ranks of `mpiexec`, which call MPI through mpi4py.

    Args:
        rendezvous: The rendezvous of the ranks.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__("mpi", rendezvous)
        code = (
            f"import sys; sys.path.append({PACKAGES!r}); "
            "from lockstep.tools.bench.bench_worker import mpi_main; mpi_main()"
        )
        ranks, timeout = str(rendezvous.ranks), str(rendezvous.timeout)
        program = [sys.executable, "-c", code, ranks, rendezvous.folder, self._key, timeout]
        self._output = tempfile.TemporaryFile(  # noqa: SIM115 - closed in end()
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [find_mpiexec(), "-n", ranks, *program],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=os.environ | OVERSUBSCRIBE,
            start_new_session=True,
        )
        try:
            self.wait_for_ranks()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let the ranks exit, and terminate mpiexec and its processes if they do not."""
        super().end()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
        self._output.close()

    def has_failed(self) -> bool:
        """Return whether mpiexec has already exited."""
        return self._process.poll() is not None

    def explain_failure(self, what: str) -> LockstepError:
        """Return an error with the last line that mpiexec printed."""
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().splitlines() if line.strip()]
        return WorkError(f"{self.name}: {what}" + (f"; last output: {lines[-1]}" if lines else ""))


def find_mpiexec() -> str:
    """Return the `mpiexec` beside this Python, or else the first one on PATH.

    Raises:
        UsageError: mpi4py or mpiexec is not installed.
    """
    beside = Path(os.path.abspath(sys.executable)).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or program is None:
        raise UsageError("--vs mpi needs mpi4py and an MPI: pip install mpi4py mpich")
    return program
