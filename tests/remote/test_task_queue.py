"""The task queue: which calls run first."""

from __future__ import annotations

import threading

import pytest

from lockstep.remote.task_queue import TaskQueue


@pytest.fixture
def queue():
    return TaskQueue()


def test_calls_of_other_workers_come_before_those_of_the_driver(queue):
    done = []
    for number in range(2):
        queue.put(lambda number=number: done.append(("driver", number)), from_driver=True)
        queue.put(lambda number=number: done.append(("other", number)), from_driver=False)
    queue.put(queue.stop, from_driver=True)
    queue.run()
    assert done == [("other", 0), ("other", 1), ("driver", 0), ("driver", 1)]


def test_a_wait_runs_calls_of_other_workers_and_none_of_the_driver(queue):
    done = []
    queue.put(lambda: done.append("driver"), from_driver=True)
    queue.put(lambda: done.append("other"), from_driver=False)
    queue.wait(lambda: bool(done), None)
    assert done == ["other"]


def waiting_thread(queue, deadline):
    """Start a thread that waits in the queue until the deadline, for nothing else."""
    thread = threading.Thread(target=queue.wait, args=(lambda: False, deadline), daemon=True)
    thread.start()
    return thread


def test_a_wait_ends_at_its_deadline(queue):
    waiting = waiting_thread(queue, 0.0)
    waiting.join(10)
    ended = not waiting.is_alive()
    queue.stop()  # so that a thread that still waits does not outlive the test
    assert ended


def test_a_wait_on_another_thread_runs_no_task(queue):
    done = []
    queue.put(lambda: done.append("task"), from_driver=False)
    waiting = waiting_thread(queue, 0.0)
    waiting.join(10)
    assert not waiting.is_alive()
    assert done == []
    queue.wait(lambda: bool(done), None)  # the task is still there for the main thread
    assert done == ["task"]


def test_stop_ends_a_wait(queue):
    waiting = waiting_thread(queue, None)
    queue.stop()
    waiting.join(10)
    assert not waiting.is_alive()
