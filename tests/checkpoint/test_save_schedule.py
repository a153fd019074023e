"""When a checkpoint is due, and settings that are refused."""

import pytest

from lockstep.checkpoint.save_schedule import CheckpointConfig, CheckpointSchedule
from lockstep.kernel.errors import UsageError


def due(config, steps, saved=True):
    """Return the steps of `steps` at (step, time) after which one was due."""
    schedule = CheckpointSchedule(config, 0.0)
    found = []
    for step, now in steps:
        if schedule.is_due(step, now):
            found.append(step)
            if saved:
                schedule.saved(step, now)
    return found


def test_by_steps():
    steps = [(step, 0.0) for step in range(1, 13)]
    assert due(CheckpointConfig(every_steps=4), steps) == [4, 8, 12]
    # one that could not be saved at once stays due
    assert due(CheckpointConfig(every_steps=4), steps, saved=False) == list(range(4, 13))
    # late ones do not shift those that follow
    assert due(CheckpointConfig(every_steps=4), [(6, 0.0), (7, 0.0), (8, 0.0)]) == [6, 8]


def test_by_time():
    steps = [(step, 3.0 * step) for step in range(1, 12)]
    assert due(CheckpointConfig(every_seconds=10), steps) == [4, 8]


def test_without_an_interval_writing_takes_little_of_the_time():
    schedule = CheckpointSchedule(CheckpointConfig(), 0.0)
    for cost, seconds in [(0.0, 10), (0.01, 10), (0.5, 100), (1.5, 300), (60.0, 300)]:
        assert not schedule.is_due(1, seconds - 0.1, cost)
        assert schedule.is_due(1, seconds, cost)
    schedule = CheckpointSchedule(CheckpointConfig(every_steps=4), 0.0)
    assert not schedule.is_due(1, 1e6)


def test_by_whichever_comes_first():
    config = CheckpointConfig(every_steps=5, every_seconds=100)
    steps = [(1, 0.0), (2, 101.0), (5, 110.0), (6, 111.0), (7, 211.0)]
    assert due(config, steps) == [2, 5, 7]


def test_a_resumed_training_counts_from_the_checkpoint():
    schedule = CheckpointSchedule(CheckpointConfig(every_steps=10, every_seconds=60), 0.0)
    schedule.saved(25, 1000.0)
    assert [step for step in range(25, 33) if schedule.is_due(step, 1001.0)] == [30, 31, 32]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_steps": 0}, "every_steps=0): expected a positive whole number"),
        ({"every_steps": 2.5}, "every_steps=2.5): expected a positive whole number"),
        ({"every_steps": "10"}, "every_steps='10'): expected a positive whole number"),
        ({"every_steps": True}, "every_steps=True): expected a positive whole number"),
        ({"every_seconds": -1}, "every_seconds=-1): expected a positive number"),
        ({"every_seconds": float("nan")}, "every_seconds=nan): expected a positive number"),
        ({"keep": 0}, "keep=0): expected a positive whole number"),
        ({"keep": None}, "keep=None): expected a positive whole number"),
        ({"stateful": [3]}, "stateful=...): expected objects by name"),
        ({"stateful": {"meter": 3}}, "stateful=...): 'meter' is a int without the methods"),
    ],
)
def test_settings_that_are_refused(options, words):
    with pytest.raises(UsageError) as caught:
        CheckpointConfig(**options)
    assert words in str(caught.value)
