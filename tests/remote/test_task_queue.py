"""The queue: whose work is done first."""

from __future__ import annotations

import threading

import pytest

from lockstep.remote.task_queue import TaskQueue


@pytest.fixture
def queue():
    return TaskQueue()


def test_other_workers_come_before_the_driver(queue):
    done = []
    for number in range(2):
        queue.put(lambda number=number: done.append(("driver", number)), of_driver=True)
        queue.put(lambda number=number: done.append(("other", number)), of_driver=False)
    queue.put(queue.end, of_driver=True)
    queue.work()
    assert done == [("other", 0), ("other", 1), ("driver", 0), ("driver", 1)]


def test_while_it_waits_it_does_what_others_ask_and_nothing_of_the_driver(queue):
    done = []
    queue.put(lambda: done.append("driver"), of_driver=True)
    queue.put(lambda: done.append("other"), of_driver=False)
    queue.wait(lambda: bool(done), None)
    assert done == ["other"]


def test_a_wait_ends_at_its_deadline(queue):
    queue.wait(lambda: False, 0.0)


def test_a_wait_on_another_thread_does_no_work(queue):
    queue.put(lambda: pytest.fail("done on the wrong thread"), of_driver=False)
    waiting = threading.Thread(target=queue.wait, args=(lambda: False, 0.0))
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()


def test_an_end_wakes_who_waits(queue):
    waiting = threading.Thread(target=queue.wait, args=(lambda: False, None))
    waiting.start()
    queue.end()
    waiting.join(10)
    assert not waiting.is_alive()
