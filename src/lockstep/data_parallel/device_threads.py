"""Threads of one process that compute on several devices: one thread per device and pass.

A thread computes its micro-batches one after another. An error ends the others at their next
micro-batch; the error of the lowest micro-batch is raised in the calling thread. No thread
outlives the call.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch

from lockstep.devices import is_accelerator

__all__ = ["Task", "ThreadSettings", "run_in_threads", "run_one_by_one"]


class Task(NamedTuple):
    """One piece of work.

    Attributes:
        microbatch: The number of the micro-batch.
        place: The micro-batch and its device, for messages.
        device: The device that is current during the work.
        work: The function that does it.
    """

    microbatch: int
    place: str
    device: torch.device
    work: Callable[[], object]


class ThreadSettings:
    """The settings of torch that each thread has for itself, as they are in the calling thread.

    Args:
        devices: The devices that the threads use.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        accelerators = [each for each in devices if is_accelerator(each)]
        self._streams = {each: torch.accelerator.current_stream(each) for each in accelerators}
        self._has_gradients = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in {"cpu", *(each.type for each in accelerators)}
            if torch.is_autocast_enabled(kind)
        }
        self._threads = torch.get_num_threads()

    @contextmanager
    def select(self, device: torch.device) -> Iterator[None]:
        """Make an accelerator, and the stream that the caller uses on it, current in the body."""
        if device not in self._streams:
            yield
            return
        with torch.accelerator.device_index(device.index), self._streams[device]:
            yield

    def apply(self) -> AbstractContextManager[object]:
        """Return a context with these settings.

        The cache of autocast is disabled, because a cached weight would belong to the graph of one
        micro-batch.
        """
        stack = ExitStack()
        # Asking is enough in a new thread, and necessary: until then its matrix products use the
        # default number of threads, not that of torch.set_num_threads.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        stack.enter_context(torch.inference_mode(self._is_inference))
        stack.enter_context(torch.set_grad_enabled(self._has_gradients))
        for kind, dtype in self._autocast.items():
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        return stack


def run_in_threads(queues: Sequence[Sequence[Task]], settings: ThreadSettings) -> None:
    """Run each queue of tasks in a thread of its own, and wait for all."""
    failures: dict[int, BaseException] = {}
    stop = threading.Event()

    def run(queue: Sequence[Task]) -> None:
        with settings.apply():
            for task in queue:
                if stop.is_set():
                    return
                try:
                    _run(task, settings)
                except BaseException as error:
                    failures[task.microbatch] = error
                    stop.set()
                    return

    started: list[threading.Thread] = []
    try:
        for queue in filter(None, queues):
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(run, queue), name=f"ls.DataParallel {queue[0].device}"
            )
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:  # such as Ctrl-C
        stop.set()
        for thread in started:
            thread.join()
        raise
    if failures:
        raise failures[min(failures)]


def run_one_by_one(queues: Sequence[Sequence[Task]], settings: ThreadSettings) -> None:
    """Run all tasks in the calling thread, in the order of the queues."""
    with settings.apply():
        for queue in queues:
            for task in queue:
                _run(task, settings)


def _run(task: Task, settings: ThreadSettings) -> None:
    try:
        with settings.select(task.device):
            task.work()
    except BaseException as error:
        if "micro-batch" not in str(error):
            error.add_note(f"in {task.place}")
        raise
