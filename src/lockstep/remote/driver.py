"""The driver: a script or notebook, outside the world, that commands workers.

    driver ── calls, functions, small values ──> workers 0 .. n-1, one world
                                                 │  tensors, activations, gradients
                                                 └─ from worker to worker

It holds no parameters. Output of the workers appears where it runs, the rank in
front of each line.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep.errors import UsageError
from lockstep.launcher.launch import calls_in_this_process
from lockstep.launcher.listening_socket import LOOPBACK, parse_endpoint
from lockstep.model.deferred_init import Blocks
from lockstep.remote.future import Future
from lockstep.remote.key import make_key
from lockstep.remote.trainer_proxy import TrainerProxy
from lockstep.remote.worker_pool import WorkerPool

__all__ = ["Driver", "Worker"]


class Driver:
    """Starts `nprocs` workers on this host, which join one world, and commands them.

        with ls.Driver(nprocs=4) as driver:
            counter = driver.on(1).create(Counter, 10)     # lives in worker 1
            counter.add(5)                                 # runs there, returns the value
            driver.run(function, argument)                 # on all, a list in rank order

    Functions and classes of a notebook or `__main__` travel by value. Errors of a
    worker are raised here with the worker's traceback as a note. Ctrl-C ends the
    wait for an answer and not the call: the worker goes on, and does the next call
    afterwards.

    Parameters:
        nprocs: workers on this host.
        remote: workers that connect from other hosts, with `lockstep worker --connect`.
        listen: HOST:PORT of this host, where they find it; loopback by default.
        key_file: holds the key that both sides need; made where it is not there.
            Otherwise LOCKSTEP_DRIVER_KEY, or a new key.
        backend, threads, device: as for `lockstep.init`, on every worker.
        timeout: seconds for finding each other, for a collective, and that a worker
            may show no sign of life.

    Leave it with `close`, or use it in a `with` statement; the workers end with it,
    also when it is collected, exits or is killed.

    Raises UsageError for what cannot be, RendezvousError for workers that did not
    come, RankError for one that could not join.
    """

    def __init__(
        self,
        nprocs: int = 1,
        *,
        remote: int = 0,
        listen: str = f"{LOOPBACK}:0",
        key_file: str | Path | None = None,
        backend: str | None = None,
        threads: int = 1,
        device: str | torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        if nprocs < 0 or remote < 0 or nprocs + remote < 1:
            raise UsageError(
                f"Driver(nprocs={nprocs}, remote={remote}): it needs a worker at least"
            )
        if timeout <= 0:
            raise UsageError(f"Driver(timeout={timeout}): a deadline is a number of seconds")
        if calls_in_this_process():
            raise UsageError(
                "lockstep check cannot run a script that uses ls.Driver: call ls.init() and "
                "ls.Trainer in the script itself"
            )
        address, port = parse_endpoint(listen, "listen")
        world = {"backend": backend, "timeout": timeout, "threads": threads}
        world["device"] = None if device is None else str(device)
        self._pool = WorkerPool(nprocs, remote, address, port, make_key(key_file), timeout, world)
        self._finalizer = weakref.finalize(self, self._pool.abandon)
        self._finalizer.atexit = False  # the pool sees to that, in time
        if remote:
            print(
                f"lockstep: waiting for {remote} more from other hosts: lockstep worker --connect "
                f"{address}:{self._pool.port}",
                flush=True,
            )
        try:
            self._pool.gather(time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._pool.size

    def on(self, rank: int) -> Worker:
        """Return one worker; UsageError where there is none of that rank."""
        self._pool.handle(rank)
        return Worker(self._pool, rank)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call `function` on every worker at once and return the values in rank order.

        Raises RankError for the worker that failed first.
        """
        return self._pool.together(self.start(function, *args, **options))

    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Future]:
        """Call `function` on every worker and return a Future of each at once."""
        return [self.on(rank).start(function, *args, **options) for rank in range(self.world_size)]

    def trainer(
        self,
        blocks: Blocks,
        loss: Callable[..., Any] | None,
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        microbatches: int = 8,
        seed: int = 0,
        **options: Any,
    ) -> TrainerProxy:
        """Return a training on all workers, with the same bits as without a driver.

        `blocks` is a list of callables that return a module, or of modules on the meta
        device: they make up an `nn.Sequential`, and come to life on the workers with
        weights that depend on `seed` alone (`lockstep.build`). Or one callable or module,
        for the whole model. The rest is as for `lockstep.Trainer`, whose options
        (metrics, clip_norm, ...) are passed on; their callbacks run on the workers.
        """
        arguments = {"loss": loss, "optimizer": optimizer, **options}
        return TrainerProxy(self._pool, blocks, seed, microbatches, arguments)

    def close(self) -> None:
        """End the workers and all that they hold; harmless when that is done."""
        self._finalizer.detach()
        self._pool.close()

    def __enter__(self) -> Driver:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers."""
        self.close()


class Worker:
    """One worker, as the driver sees it."""

    def __init__(self, pool: WorkerPool, rank: int) -> None:
        self._pool, self.rank = pool, rank

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `function` there and return its value."""
        return self.start(function, *args, **options).result()

    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future:
        """Call `function` there and return a Future at once."""
        return self._pool.calls.start(self.rank, _name(function), function, args, options)

    def create(self, factory: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `factory`, a class or function, there; the value stays, return a reference."""
        calls = self._pool.calls
        return calls.start(self.rank, _name(factory), factory, args, options, keep=True).result()


def _name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # of a partial
    return str(getattr(inner, "__qualname__", type(function).__qualname__))
