"""The ranks of a contender, which are alive during a whole benchmark and take turns.

The ranks connect to the socket of a rendezvous and sleep until the benchmark asks them to measure.
Requests and answers are one JSON object per line.

    {"hello": rank, "library": "torch 2.13.0"}      the rank has connected
    {"block": 50, ...}                              -> {"times": [ns, ...]} or {"error": reason}
    end of file                                     the rank exits
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from lockstep.kernel.errors import LockstepError, RankError, WorkError
from lockstep.launcher.launch import start
from lockstep.tools.bench.start_barrier import StartBarrier

__all__ = [
    "START_BARRIER",
    "Rendezvous",
    "TimingResult",
    "TorchRunner",
    "answer_requests",
    "quantile",
]

SOCKET = "socket"  # file names in the folder of the rendezvous
START_BARRIER = "start-barrier-"
START_TIMEOUT = 60.0  # seconds until all ranks of a runner have connected
END_TIMEOUT = 10.0  # seconds until they have exited

Answer = dict[str, Any]
Main = Callable[[str, str, str, float], None]


def quantile(times: Sequence[float], share: float) -> float:
    """Return a quantile of ascending times, interpolated linearly."""
    return float(np.quantile(times, share))


class TimingResult:
    """Times in ascending order, or the error that prevented them."""

    times: Sequence[float]
    error: str

    @property
    def median(self) -> float:
        """The median, in the unit of the times."""
        return statistics.median(self.times)

    def quantile(self, share: float) -> float:
        """Return the quantile `share`, in the unit of the times."""
        return quantile(self.times, share)


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


class TorchRunner:
    """Ranks of `torch.distributed` on one backend.

    Args:
        name: The name of the backend.
        rendezvous: The rendezvous of the ranks.
        main: The function of each rank: (name, folder, key, timeout).
    """

    def __init__(self, name: str, rendezvous: Rendezvous, main: Main) -> None:
        self.name = name
        self.library = ""
        self._rendezvous = rendezvous
        self._key = secrets.token_hex(4)
        self._streams: dict[int, IO[str]] = {}
        self._sockets: dict[int, socket.socket] = {}
        StartBarrier.prepare(f"{rendezvous.folder}/{START_BARRIER}{self._key}", rendezvous.ranks)
        arguments = (name, rendezvous.folder, self._key, rendezvous.timeout)
        self._launched = start(main, arguments, rendezvous.ranks)
        try:
            self.wait_for_ranks()
        except BaseException:
            self._launched.terminate()
            raise

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
        """Close the connections, so that the ranks exit, and terminate those that do not."""
        for stream in self._streams.values():
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for connection in self._sockets.values():
            connection.close()
        self._streams.clear()
        self._sockets.clear()
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

    def _accept(self) -> None:
        connection, _ = self._rendezvous.listening.accept()
        stream = connection.makefile("rw", encoding="utf-8")
        hello = json.loads(stream.readline())
        self._streams[hello["hello"]] = stream
        self._sockets[hello["hello"]] = connection
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


def answer_requests(
    answer: Callable[[dict[str, Any]], dict[str, Any]], folder: str, hello: dict[str, Any]
) -> None:
    """Send `hello` and answer requests on the socket in `folder` until it is closed.

    An exception is answered with {"error": its message}.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{SOCKET}")
        with connection.makefile("rw", encoding="utf-8") as stream:
            _send(stream, hello)
            for line in stream:
                try:
                    reply = answer(json.loads(line))
                except Exception as error:
                    reply = {"error": f"{type(error).__name__}: {error}"}
                _send(stream, reply)


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
