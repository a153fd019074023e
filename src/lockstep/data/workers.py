"""Preparation of the items of an epoch, in this process or in torch's loader workers."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lockstep.data.map_dataset import LoadedItem
from lockstep.data.microbatch import align_tensors, map_tensors
from lockstep.data.shared_batch import remedy, share_batch
from lockstep.foreign_messages import LOADER_TERMINATED, LOADER_TIMEOUT
from lockstep.kernel.errors import SampleError
from lockstep.kernel.seeds import isolated
from lockstep.messages import log
from lockstep.processor_core import one_thread

__all__ = ["Items", "load_in_process", "load_in_workers", "load_isolated"]

Items = Generator[LoadedItem, None, None]

POLL_SECONDS = 2.0  # between two checks that the workers are alive


def load_in_process(source: Iterable[LoadedItem], pin_memory: bool) -> Items:
    """Yield the items; each is prepared in this process on demand."""
    for item in source:
        yield map_tensors(torch.Tensor.pin_memory, item) if pin_memory else item


def load_isolated(source: Iterable[LoadedItem], pin_memory: bool) -> Items:
    """Yield the items, prepared in this process with one thread and isolated generators."""
    with closing(load_in_process(source, pin_memory)) as items:
        while True:
            with isolated(everything=True), one_thread():
                item = next(items, None)
            if item is None:
                return
            yield align_tensors(item)


def load_in_workers(
    source: Any, numbers: range | None, workers: int, pin_memory: bool, timeout: float, seed: int
) -> Items:
    """Yield the items, which torch's loader workers prepare, or this process without workers.

    The workers are stopped when the generator ends, even after an exception. If SIGTERM ended a
    worker, this process prepares the remaining items itself: systemd and srun send SIGTERM to every
    process of a job to stop it, and the training can then still save a checkpoint.

    Args:
        source: A map-style or iterable source.
        numbers: The numbers of the items of a map-style source; None for an iterable source.
        workers: The number of workers.
        pin_memory: Whether to copy tensors to pinned memory.
        timeout: The longest wait for an item, in seconds.
        seed: The seed of the workers' own generators.

    Raises:
        SampleError: The workers could not be started, a worker died, or there was no item for
            `timeout` seconds.
    """
    if not workers:
        yield from load_isolated(_remaining(source, numbers, 0), pin_memory)
        return
    try:
        loader: DataLoader[LoadedItem] = DataLoader(
            source,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            collate_fn=share_batch,
            pin_memory=pin_memory,
            timeout=min(timeout, POLL_SECONDS),
            # torch draws the seed of the workers from this generator instead of the default one.
            generator=torch.Generator().manual_seed(seed),
        )
        items = iter(loader)
    except (OSError, RuntimeError) as error:
        raise SampleError(
            f"the loader workers cannot be started ({error}); "
            f"{remedy(error, 'use fewer workers')}, or pass num_workers=0"
        ) from None
    _install_signal_handler()
    count = 0
    try:
        while (item := _wait_for_item(items, timeout)) is not None:
            yield align_tensors(item)  # after the transfer, which changes the alignment
            count += 1
        return
    except SampleError:
        raise
    except Exception as error:  # a dead worker can also cause a broken pipe
        workers_found: Sequence[BaseProcess] = cast(Any, items)._workers
        failure = _worker_error(error, workers_found)
        if not _was_terminated(workers_found):
            raise failure from None
        ended = next(_exit(worker) for worker in workers_found if worker.exitcode)
    finally:
        cast(Any, items)._shutdown_workers()
    log(f"loader worker {ended}; its rank loads the remaining batches of the epoch itself")
    yield from load_isolated(_remaining(source, numbers, count), pin_memory)


def _remaining(source: Any, numbers: range | None, count: int) -> Iterable[LoadedItem]:
    """Return the items of a source after the first `count`."""
    if numbers is None:
        return cast("Iterable[LoadedItem]", dataclasses.replace(source, start=source.start + count))
    return (source[number] for number in numbers[count:])


def _was_terminated(workers: Sequence[BaseProcess]) -> bool:
    """Return whether SIGTERM ended a worker, and no worker ended with another failure."""
    return {worker.exitcode or 0 for worker in workers} - {0} == {-signal.SIGTERM}


def _exit(worker: BaseProcess) -> str:
    code = worker.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"process {worker.pid} {how}"


def _wait_for_item(items: Iterator[LoadedItem], timeout: float) -> LoadedItem | None:
    """Wait for the next item; return None at the end of the epoch.

    torch checks whether its workers are alive only when its own timeout expires, and SIGCHLD can
    get lost (one of 40 kills was not noticed for 600 s). Therefore torch's timeout is short, and
    the wait is repeated.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return next(items, None)
        except RuntimeError as error:
            if LOADER_TIMEOUT not in str(error):
                raise
            if time.monotonic() >= end:
                raise SampleError(
                    f"the loader workers returned no batch within {timeout:g} s; "
                    "check for a sample that blocks, or increase the timeout of the loader"
                ) from None


def _worker_error(error: Exception, workers: Sequence[BaseProcess] = ()) -> SampleError:
    """Return an error that names the dead worker; if there is none, torch's message."""
    end = time.monotonic() + (1.0 if workers else 0.0)
    while not any(worker.exitcode for worker in workers) and time.monotonic() < end:
        time.sleep(0.005)  # the pipes of a killed process break before its exit code is known
    # torch's message ends with the traceback of the worker, and so with the error in it.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    words = ": ".join(dict.fromkeys(line.strip().rstrip(".") for line in (lines[0], lines[-1])))
    words = next((_exit(worker) for worker in workers if worker.exitcode), words)
    return SampleError(
        f"a loader worker failed: {words}; "
        "usual causes are a lack of memory and a crash in the code of the dataset"
    )


def _install_signal_handler() -> None:
    """Make torch's handler of SIGCHLD raise SampleError when a worker is killed.

    torch installs its handler with the first workers. That handler raises a RuntimeError in the
    main thread, often in the middle of a training step.
    """
    torch_handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(torch_handler):
        return
    if getattr(torch_handler, "raises_sample_error", False):
        return

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            torch_handler(number, frame)
        except RuntimeError as error:
            if LOADER_TERMINATED in str(error):
                return  # the generator detects the death when it waits for the next item
            raise _worker_error(error) from None

    handler.raises_sample_error = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handler)
