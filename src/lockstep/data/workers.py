"""The workers: who prepares the items of an epoch, this process or torch's workers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lockstep.data.microbatch import aligned, mapped
from lockstep.data.samples import Item
from lockstep.errors import SampleError
from lockstep.randomness import isolated

__all__ = ["Items", "in_process", "in_workers", "seeded_in_process"]

Items = Generator[Item, None, None]

GLANCE = 2.0  # seconds between two looks at whether the workers live


def in_process(source: Iterable[Item], pin_memory: bool) -> Items:
    """Prepare the items in this process, one when it is asked for."""
    for item in source:
        yield mapped(torch.Tensor.pin_memory, item) if pin_memory else item


def seeded_in_process(source: Iterable[Item], pin_memory: bool) -> Items:
    """Do so without touching the random numbers of the user's own code, once an item."""
    with closing(in_process(source, pin_memory)) as items:
        while True:
            with isolated(everything=True), _one_thread():
                item = next(items, None)
            if item is None:
                return
            yield aligned(item)


def in_workers(
    source: Any, numbers: range | None, workers: int, pin_memory: bool, timeout: float, seed: int
) -> Items:
    """Let torch's workers prepare `source[number]`, or iterate `source` where there is no number.

    The workers have ended when the generator has, however it ends. Raises
    SampleError where one dies, or gives nothing for `timeout` seconds.
    """
    loader: DataLoader[Item] = DataLoader(
        source,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        timeout=min(timeout, GLANCE),
        # torch draws the workers' seed here, and not from the user's generator
        generator=torch.Generator().manual_seed(seed),
    )
    items = iter(loader)
    _translate_deaths()
    try:
        while (item := _awaited(items, timeout)) is not None:
            yield aligned(item)  # here, and not in the worker: moving to this process moves it
    except SampleError:
        raise
    except Exception as error:  # a dead worker shows as broken pipes, too: whatever it is
        raise _failed(error, cast(Any, items)._workers) from None
    finally:
        cast(Any, items)._shutdown_workers()


def _exit(worker: BaseProcess) -> str:
    code = worker.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"process {worker.pid} {how}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute as torch's workers do, so that their number does not show in the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _unchanged(item: Any) -> Any:
    return item


def _awaited(items: Iterator[Item], timeout: float) -> Item | None:
    """Wait for the next item; None at the end. SampleError after `timeout` seconds.

    torch looks whether its workers live only when its own timeout is over, and the
    signal of a death can get lost: so it is given a short one, again and again.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return next(items, None)
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            if time.monotonic() >= end:
                raise SampleError(
                    f"the loader workers gave no batch within {timeout:g} s; "
                    "look for a sample that blocks, or raise the loader's timeout"
                ) from None


def _failed(error: Exception, workers: Sequence[BaseProcess] = ()) -> SampleError:
    """Say it by the exit of a worker where there is one, else by torch's words."""
    end = time.monotonic() + (1.0 if workers else 0.0)
    while not any(worker.exitcode for worker in workers) and time.monotonic() < end:
        time.sleep(0.005)  # the pipes of a killed process break before it is dead
    words = str(error).strip().splitlines() or [type(error).__name__]
    words = [_exit(worker) for worker in workers if worker.exitcode] or words
    return SampleError(
        f"a loader worker failed: {words[0].strip().rstrip('.')}; "
        "out of memory, or a crash in the dataset's own code, are the usual reasons"
    )


def _translate_deaths() -> None:
    """Let a killed worker raise SampleError, wherever this process is when it hears of it.

    torch's handler of SIGCHLD, set with the first workers, raises a plain
    RuntimeError in the main thread: often in the middle of a training step.
    """
    torchs = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(torchs):
        return
    if getattr(torchs, "translates_deaths", False):
        return

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            torchs(number, frame)
        except RuntimeError as error:
            raise _failed(error) from None

    handler.translates_deaths = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handler)
