"""Operations of the backend "mpi4py" in progress: who completes them, and until when.

MPI makes progress only inside its calls. Whoever waits for an operation tests it until it is
complete or its time is up. One thread per process tests the asynchronous operations that nobody
waits for, such as those whose futures DistributedDataParallel waits for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.mpi.exited_ranks import exited_ranks
from lockstep.comm.native_module import where
from lockstep.formatting import format_numbered

__all__ = ["MpiWork", "progress", "unfinished"]

# A test moves a piece of a message, and takes 1 to 3 us whether it has moved one or not. With
# MPICH, 8 MiB take five times as long if a rank sleeps after every test.
SPIN = 2e-3  # seconds that a waiting rank tests without sleeping
BURST = 16  # tests between two sleeps afterwards
UNSUSPECTED = 0.5  # seconds until it looks for ranks that have ended
SLEEP = 50e-6  # seconds between tests afterwards
WATCHED_SLEEP = 1e-3  # seconds between the thread's tests while another thread tests too

_abandoned: list[MpiWork] = []
"""Works that failed: MPI may still write to their memory."""

_waiting = 0  # threads of this process that wait for a work, without exactness


class MpiWork(dist.Work):
    """An operation in progress.

    Args:
        name: The operation and its rank, for messages: "rank 0: all_reduce".
        requests: MPI's requests.
        finish: Called once after they are complete.
        outputs: The tensors that the operation writes.
        timeout: The seconds after which waiting fails.
        on_failure: Called with a sentence if the operation fails.
        keep: What must live as long as the requests.
        peers: The global ranks that have to take part.
        needs_all: Whether the operation cannot complete if one of them has ended, or all.
        with_status: Whether `statuses` is filled for `finish`.
    """

    def __init__(
        self,
        mpi: Any,
        name: str,
        requests: Sequence[Any],
        finish: Callable[[], object],
        outputs: list[torch.Tensor],
        timeout: float,
        on_failure: Callable[[str], None],
        keep: object,
        peers: Sequence[int],
        *,
        needs_all: bool = True,
        with_status: bool = False,
    ) -> None:
        super().__init__()
        self._mpi, self._name, self._outputs, self._timeout = mpi, name, outputs, timeout
        self._requests, self._finish = list(requests), finish
        self._on_failure, self._keep = on_failure, keep
        self._peers, self._needs_all = peers, needs_all
        self.statuses: Any = [mpi.Status() for _ in requests] if with_status else None
        self._lock = threading.Lock()
        self._is_done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._overdue = time.monotonic() + timeout
        self.source = -1

    def advance(self, tests: int = 1) -> bool:
        """Test the operation up to `tests` times; return whether it is over."""
        if self._is_done:
            return True
        with self._lock:
            if self._is_over():  # by another thread, in the meantime
                return True
            test, given = self._mpi.Request.Testall, (self._requests, self.statuses)
            try:
                if not any(test(*given) for _ in range(tests)):
                    return False
                self._finish()
            except Exception as error:
                self._error = RuntimeError(f"{self._name} failed: {self._describe(error)}")
                self._error.__cause__ = error
                if self.statuses is None:  # a message that does not fit harms no other call
                    self._on_failure(str(self._error))
            self._is_done = True
            self._requests, self._finish, self._keep = [], _nothing, None
        self._settle()
        return True

    def _is_over(self) -> bool:
        return self._is_done

    def expire(self, now: float) -> bool:
        """Fail the operation if its future cannot come any more; return whether it is over."""
        if self._future is None or self._is_done:
            return self._is_done
        ended = self._find_ended()
        if now < self._overdue and not ended:
            return False
        self._give_up(_reason(ended, self._timeout))
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation is complete.

        Args:
            timeout: The longest wait; 0 for the timeout of the call or of the group.

        Raises:
            RuntimeError: The operation failed, or did not complete in time.
        """
        if not self.advance():
            self._wait(timeout.total_seconds() if timeout > timedelta(0) else self._timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, seconds: float) -> None:
        global _waiting
        started = time.monotonic()
        _waiting += 1
        try:
            while not self.advance(BURST):
                waited = time.monotonic() - started
                if waited < min(SPIN, seconds):
                    os.sched_yield()
                    continue
                ended = self._find_ended() if waited > UNSUSPECTED else []
                if ended or waited > seconds:
                    self._give_up(f" {where(threading.get_ident())}{_reason(ended, seconds)}")
                else:
                    time.sleep(SLEEP)
        except BaseException:  # Ctrl-C: MPI still writes to the memory
            if not self._is_done:
                _abandoned.append(self)
            raise
        finally:
            _waiting -= 1

    def _find_ended(self) -> list[int]:
        """Return ranks that have ended and without which the operation cannot complete."""
        ended = exited_ranks.find(self._peers)
        return ended if self._needs_all or len(ended) == len(self._peers) else []

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self._is_done:
                return
            self._error = RuntimeError(f"{self._name}{reason}")
            self._on_failure(str(self._error))
            _abandoned.append(self)
            self._is_done = True
        self._settle()

    def _describe(self, error: Exception) -> str:
        if self.statuses and isinstance(error, self._mpi.Exception):
            code = self._mpi.Get_error_class(self.statuses[0].Get_error())
            if self._mpi.ERR_TRUNCATE in (code, error.Get_error_class()):
                return "the message has more elements than the tensor"
        return str(error).partition("\n")[0]

    def _settle(self) -> None:
        if self._future is None:
            return
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)

    # The rest of torch's interface.

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs."""
        is_over = True
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            is_over = self._is_done
        if is_over:
            self._settle()
        else:
            self._overdue = time.monotonic() + self._timeout
            progress.add(self)
        return self._future

    def is_completed(self) -> bool:
        """Return whether the operation is over."""
        return self.advance()

    def is_success(self) -> bool:
        """Return whether the operation is complete and has not failed."""
        return self.advance() and self._error is None

    def exception(self) -> Exception | None:
        """Return why the operation failed, or None."""
        return self._error

    def synchronize(self) -> None:
        """Wait until the operation is complete."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank in the group from which a message came."""
        return self.source

    _source_rank = source_rank

    def is_pending(self) -> bool:
        """Return whether MPI still uses the memory, also of an operation that has failed."""
        with self._lock:
            try:
                return not self._mpi.Request.Testall(self._requests)
            except Exception:
                return False


class Progress:
    """The thread that completes the operations for which nobody waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._works: list[MpiWork] = []
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def add(self, work: MpiWork) -> None:
        """Let the thread complete `work`."""
        with self._condition:
            if any(known is work for known in self._works):
                return
            self._works.append(work)
            if self._thread is None:
                self._is_stopping = False
                # A daemon, because the interpreter waits for other threads before `stop` is called.
                self._thread = threading.Thread(target=self._run, name="mpi4py", daemon=True)
                self._thread.start()
            self._condition.notify()

    def add_unless_over(self, work: MpiWork) -> None:
        """Let the thread complete `work` if it is not complete already."""
        if not work.advance():
            self.add(work)

    def stop(self) -> list[MpiWork]:
        """End the thread; return the works that are not complete."""
        with self._condition:
            thread, self._thread = self._thread, None
            self._is_stopping = True
            self._condition.notify()
        if thread is not None:
            thread.join()
        works, self._works = self._works, []
        return [work for work in works if not work.advance()]

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._works and not self._is_stopping:
                    self._condition.wait()
                if self._is_stopping:
                    return
                works = list(self._works)
            now = time.monotonic()
            over = [work for work in works if work.advance(BURST) or work.expire(now)]
            if over:
                with self._condition:
                    self._works = [
                        work for work in self._works if not any(work is ended for ended in over)
                    ]
            else:
                time.sleep(WATCHED_SLEEP if _waiting else SLEEP)


def _reason(ended: Sequence[int], seconds: float) -> str:
    if ended:
        return f" cannot complete, because {format_numbered('rank', ended)} ended without it"
    return (
        f" did not complete within {seconds:g} s: another rank has not called it, or does not "
        "respond"
    )


def _nothing() -> None:
    pass


progress = Progress()


def unfinished() -> bool:
    """Return whether MPI still uses memory of works that failed or were abandoned."""
    return any(work.is_pending() for work in _abandoned)
