"""The driver: a script or notebook, outside the world, that controls workers.

    driver ── calls, functions, small values ──> workers 0 .. n-1, one world
                                                 │  tensors, activations, gradients
                                                 └─ from worker to worker

It holds no parameters. The output of the workers appears where it runs, each line with the
rank as prefix.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from lockstep.call_checks import check_call
from lockstep.comm.transport.secret import make_key
from lockstep.kernel.errors import UsageError
from lockstep.launcher.launch import calls_in_this_process
from lockstep.launcher.listening_socket import LOOPBACK, parse_endpoint
from lockstep.launcher.target import check_working_directory
from lockstep.model.deferred_init import BlocksLike
from lockstep.tools.remote.calls import Future
from lockstep.tools.remote.trainer_proxy import TrainerProxy
from lockstep.tools.remote.worker_pool import WorkerPool
from lockstep.training.optimizer_config import OptimizerConfig, OptimizerFactory

__all__ = ["Driver", "Worker"]

P = ParamSpec("P")
T = TypeVar("T")


class Driver:
    """Starts `nprocs` workers on this host, which join one world, and controls them.

        with ls.Driver(nprocs=4) as driver:
            driver.run(function, argument)           # on all, values in rank order
            driver.on(1).run(function, argument)     # on one
            trainer = driver.trainer(blocks, loss, optimizer)

    Functions and classes of a notebook or `__main__` are sent by value. An error in a worker
    is raised here, with the worker's traceback as a note. Ctrl-C ends the wait for a call, but
    not the call: the worker continues it, and runs the next call afterwards.

    The workers end with `close`, with the `with` block, when the driver is garbage-collected,
    and when its process exits or is killed.

    Args:
        nprocs: Number of workers on this host.
        remote: Number of workers that connect from other hosts (`lockstep worker --connect`).
        listen: HOST:PORT of this host at which they connect; 127.0.0.1 and a free port by
            default.
        key_file: File with the key that both sides need; created if it does not exist. None
            uses LOCKSTEP_DRIVER_KEY or a new key.
        backend: As for `lockstep.init`, on every worker.
        threads: As for `lockstep.init`, on every worker.
        device: As for `lockstep.init`, on every worker.
        timeout: Seconds to wait for the workers to connect, and for each collective. A worker
            that sends nothing for this time counts as lost.

    Raises:
        UsageError: An argument is not valid.
        RendezvousError: Workers did not connect before the timeout.
        RankError: A worker could not join the world.
    """

    @check_call("ls.Driver")
    def __init__(
        self,
        nprocs: int = 1,
        *,
        remote: int = 0,
        listen: str = f"{LOOPBACK}:0",
        key_file: str | Path | None = None,
        backend: str | None = None,
        threads: int | None = None,
        device: str | torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        if nprocs < 0 or remote < 0 or nprocs + remote < 1:
            raise UsageError(
                f"Driver(nprocs={nprocs}, remote={remote}): at least one worker is needed"
            )
        if timeout <= 0:
            raise UsageError(f"Driver(timeout={timeout}): expected a positive number of seconds")
        if calls_in_this_process():
            raise UsageError(
                "lockstep check and lockstep replay cannot run a script that uses ls.Driver: call "
                "ls.init() and ls.Trainer in the script itself"
            )
        check_working_directory()
        address, port = parse_endpoint(listen, "listen")
        world = {"backend": backend, "timeout": timeout, "threads": threads}
        world["device"] = None if device is None else str(device)
        self._key_file = key_file
        self._timeout = timeout
        key = make_key(key_file)
        self._make_pool = partial(
            WorkerPool,
            nprocs,
            remote,
            address=address,
            port=port,
            key=key,
            silence=timeout,
            world=world,
        )
        self._start_workers(remote)

    def _start_workers(self, remote: int) -> None:
        self._pool = self._make_pool()
        self._finalizer = weakref.finalize(self, self._pool.abandon)
        self._finalizer.atexit = False  # the pool registers with atexit itself, in the right order
        if remote:
            workers = "1 worker" if remote == 1 else f"{remote} workers"
            key = "" if self._key_file is None else f" --key-file {self._key_file}"
            address, port = self._pool.address
            print(
                f"lockstep: waiting for {workers} on other hosts: lockstep worker --connect "
                f"{address}:{port}{key}",
                flush=True,
            )
        try:
            self._pool.wait_for_workers(time.monotonic() + self._timeout)
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """End the workers and start new ones, for example after their world has ended.

        What the workers held, such as trainers, is lost. Workers on other hosts have to be
        started again there.

        Raises:
            RendezvousError: Workers did not connect before the timeout.
            RankError: A worker could not join the world.
        """
        self.close()
        self._start_workers(self._pool.remote)

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._pool.size

    def on(self, rank: int) -> Worker:
        """Return one worker; raise UsageError if there is no such rank."""
        self._pool.find_worker(rank)
        return Worker(self._pool, rank)

    def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> list[T]:
        """Call `function` on every worker at once and return the values in rank order.

        Raises:
            RankError: A worker failed; the first one is named.
        """
        return self._pool.gather_values(self.start(function, *args, **options))

    def start(
        self, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> list[Future[T]]:
        """Call `function` on every worker and return a Future for each at once."""
        ranks = range(self.world_size)
        return self._pool.calls.start(ranks, _function_name(function), function, args, options)

    def trainer(
        self,
        blocks: BlocksLike,
        loss: Callable[..., Any] | None,
        optimizer: OptimizerFactory | OptimizerConfig | Sequence[OptimizerConfig],
        *,
        microbatches: int = 8,
        seed: int = 0,
        **options: Any,
    ) -> TrainerProxy:
        """Return a trainer on all workers, with the same results as without a driver.

        Args:
            blocks: A list of callables that return a module, or of modules on the meta
                device: the blocks of an `nn.Sequential`. The workers materialize them with
                weights that depend on `seed` only (`lockstep.model.deferred_init.build`). Or
                one callable or module, for the whole model.
            loss: As for `lockstep.Trainer`.
            optimizer: As for `lockstep.Trainer`.
            microbatches: As for `lockstep.Trainer`.
            seed: As for `lockstep.Trainer`.
            options: Further options of `lockstep.Trainer`; callbacks run on the workers.
        """
        arguments = {"loss": loss, "optimizer": optimizer, "microbatches": microbatches}
        return TrainerProxy(self._pool, blocks, seed, {**arguments, **options})

    def close(self) -> None:
        """End the workers; may be called again."""
        self._finalizer.detach()
        self._pool.close()

    def __enter__(self) -> Driver:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the workers."""
        self.close()


class Worker:
    """One worker, from the driver's point of view."""

    def __init__(self, pool: WorkerPool, rank: int) -> None:
        self._pool = pool
        self.rank = rank

    def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `function` there and return its value."""
        return self.start(function, *args, **options).result()

    def start(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
        """Call `function` there and return a Future at once."""
        what = _function_name(function)
        (future,) = self._pool.calls.start([self.rank], what, function, args, options)
        return future


def _function_name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # unwraps functools.partial
    return str(getattr(inner, "__qualname__", type(function).__qualname__))
