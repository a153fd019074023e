"""Threads of devices: errors, and an end in every case."""

import os
import sys
import threading

import pytest
import torch

from lockstep.data_parallel.device_threads import Task, ThreadSettings, run_in_threads

CPU = torch.device("cpu")


def tasks(works):
    """Return a queue for each list of functions; micro-batches count on from queue to queue."""
    number, queues = 0, []
    for queue in works:
        queues.append([])
        for work in queue:
            queues[-1].append(Task(number, f"micro-batch {number}", CPU, work))
            number += 1
    return queues


def test_queues_run_at_the_same_time_and_in_their_order():
    both = threading.Barrier(2, timeout=30)
    done = []
    queues = tasks([[both.wait, lambda: done.append(0)], [both.wait, lambda: done.append(1)]])
    run_in_threads([*queues, []], ThreadSettings([CPU]))
    assert sorted(done) == [0, 1]


def test_the_lowest_error_is_raised_and_stops_the_others():
    first, second, done = threading.Event(), threading.Event(), []

    def fail(own, other):
        own.set()
        assert other.wait(30)
        raise ValueError("no")

    queues = tasks(
        [
            [lambda: fail(first, second), lambda: done.append(0)],
            [lambda: fail(second, first), lambda: done.append(1)],
        ]
    )
    with pytest.raises(ValueError, match="no") as caught:
        run_in_threads(queues, ThreadSettings([CPU]))
    assert caught.value.__notes__ == ["in micro-batch 0"]
    assert done == []


def test_an_interrupt_of_the_caller_waits_for_the_threads(monkeypatch):
    started, join = threading.Event(), threading.Thread.join
    interrupts = iter([KeyboardInterrupt])

    def interrupted(thread, timeout=None):
        for each in interrupts:
            raise each
        started.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    done = []
    queues = tasks([[lambda: started.wait(30), lambda: done.append("late")]])
    with pytest.raises(KeyboardInterrupt):
        run_in_threads(queues, ThreadSettings([CPU]))
    assert done == []


def test_settings_are_those_of_the_caller():
    seen = []

    def look():
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        seen.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))

    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        settings = ThreadSettings([CPU])
    run_in_threads(tasks([[look]]), settings)
    assert seen == [(False, True), (torch.float16, False)]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_matrix_products_use_the_number_of_threads_of_the_caller():
    before = torch.get_num_threads()
    matrix, counts = torch.ones(512, 512), []

    def count():
        counts.append(len(os.listdir("/proc/self/task")))

    try:
        torch.set_num_threads(1)
        works = [count, lambda: matrix @ matrix, count]
        run_in_threads(tasks([works]), ThreadSettings([CPU]))
    finally:
        torch.set_num_threads(before)
    assert counts[1] <= counts[0]
