"""The node agent starts and watches another host's workers, as `lockstep worker --connect` does.

driver                               this process                    workers
  <── host {workers} ──────────────────│
  ── welcome {host, session} ─────────>│ starts them ──────────────────> │
  <══ hello, calls, answers: each worker has a link of its own ═════════>│
  <── output {index, stream, text} ────│ <── what they print ────────────│
  <── ended {index, how, status} ──────│ <── how one ended ──────────────│
  ── end ─────────────────────────────>│ ends what has not ended by itself
"""

from __future__ import annotations

import io
import os
import threading
import time
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from lockstep.errors import RendezvousError, UsageError
from lockstep.launcher.channel import write_memfd
from lockstep.launcher.failure_attribution import describe_end
from lockstep.launcher.fork_server import get_fork_server
from lockstep.launcher.launch import function_task
from lockstep.launcher.output import RankOutput
from lockstep.launcher.supervisor import GRACE, TICK, RankSupervisor
from lockstep.messages import say
from lockstep.remote.connection import dial
from lockstep.remote.frame import Frame
from lockstep.remote.identity import UNKNOWN, Credentials, Identity, Role
from lockstep.remote.key import VARIABLE
from lockstep.remote.link import Link

__all__ = ["NodeAgent", "start_worker"]


class NodeAgent:
    """Serves the driver at `address`:`port` with `nprocs` workers of this host.

    Raises RendezvousError where nobody answers within `timeout` seconds, or where the
    driver is lost; UsageError where it has another key or needs no more workers.
    """

    def __init__(self, address: str, port: int, key: bytes, nprocs: int, timeout: float) -> None:
        self._address, self._port, self._key, self._timeout = address, port, key, timeout
        self._nprocs = nprocs
        self._heard = threading.Condition()
        self._number, self._session = 0, UNKNOWN  # until the driver gives them
        self._refusal = self._lost = ""
        self._ended = False
        own = Credentials(key, Identity(Role.HOST))
        wire = dial(address, port, own, Identity(Role.DRIVER), timeout, timeout)
        self._link = Link(wire, self._take, self._lose).begin()

    def serve(self) -> None:
        """Serve until the driver ends."""
        try:
            self._link.post(Frame({"kind": "host", "workers": self._nprocs}))
            with self._heard:
                self._heard.wait_for(lambda: self._number or self._over, self._timeout)
            if self._number:
                self._say(f"serving the driver at {self._place}; workers: {self._nprocs}")
                self._work()
        finally:
            self._link.close()
        if self._refusal:
            raise UsageError(f"the driver at {self._place} refused: {self._refusal}")
        if not self._ended:
            how = self._lost or "said nothing"
            raise RendezvousError(f"the driver at {self._place} {how}, so its workers were ended")

    def _work(self) -> None:
        job = RankSupervisor(get_fork_server(for_training=True).open_launch(), range(self._nprocs))
        try:
            for index in range(self._nprocs):
                consoles = (
                    Forward(self._link, index, "stdout"),
                    Forward(self._link, index, "stderr"),
                )
                output = RankOutput(index, None, consoles, prefixed=False)  # type: ignore[arg-type]
                own = Identity(Role.WORKER, self._number, index)
                credentials = Credentials(self._key, own, self._session)
                arguments = (self._address, self._port, credentials, self._timeout)
                start_worker(job, index, arguments, output)
            told: set[int] = set()
            while not self._over and job.running:
                job.process_events(TICK)
                self._tell_ends(job, told)
            until = time.monotonic() + (GRACE if self._ended else 0)
            while job.running and time.monotonic() < until:
                job.process_events(TICK)
        finally:
            job.terminate()

    def _tell_ends(self, job: RankSupervisor, told: set[int]) -> None:
        for index, outcome in job.outcomes.items():
            if outcome.status is not None and index not in told:
                told.add(index)
                how = {"how": describe_end(outcome), "status": outcome.status}
                self._link.post(Frame({"kind": "ended", "index": index, **how}))

    # --- what comes, on the link's thread -------------------------------------------------

    def _take(self, link: Link, frame: Frame) -> None:
        with self._heard:
            match frame.kind:
                case "welcome":
                    self._session = bytes.fromhex(frame.header["session"])
                    self._number = frame.header["host"]
                case "refused":
                    self._refusal = frame.header["reason"]
                case "end":
                    self._ended = True
            self._heard.notify_all()

    def _lose(self, link: Link, reason: str) -> None:
        with self._heard:
            self._lost = reason
            self._heard.notify_all()

    @property
    def _over(self) -> bool:
        return bool(self._ended or self._lost or self._refusal)

    @property
    def _place(self) -> str:
        return f"{self._address}:{self._port}"

    def _say(self, sentence: str) -> None:
        say(sentence)


class Forward(io.RawIOBase):
    """One stream of a worker, whose lines are shown where the driver is."""

    def __init__(self, link: Link, index: int, stream: str) -> None:
        super().__init__()
        self._link, self._index, self._stream = link, index, stream

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Send whole lines to the driver."""
        header = {"kind": "output", "index": self._index, "stream": self._stream}
        self._link.post(Frame({**header, "text": content.decode(errors="replace")}))
        return len(content)


def start_worker(
    job: RankSupervisor,
    rank: int,
    arguments: tuple[str, int, Credentials, float],
    output: RankOutput,
) -> None:
    """Start a worker with the arguments of `attend`; its key is in no variable of its own."""
    order = function_task({})
    order["environ"].pop(VARIABLE, None)
    work = write_memfd(cloudpickle.dumps((work_for_driver, arguments)))
    job.start_rank(rank, order, work, output)
    os.close(work)


def work_for_driver(*arguments: Any) -> None:
    """Work in a process that has torch, which this one does not need."""
    from lockstep.remote.worker import attend

    attend(*arguments)
