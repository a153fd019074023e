"""The learning rate: a rise, a cosine, steps, or nothing at all."""

import pytest
import torch

from lockstep.kernel.errors import UsageError
from lockstep.tools.recipes.learning_rate import WarmupSchedule


def test_it_rises_over_the_warm_up_and_falls_as_a_cosine_to_nothing():
    rate = WarmupSchedule.of(epochs=4, steps=5, warmup=0.8, decay="cosine")
    shares = [rate.at(step) for step in range(21)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[12] == pytest.approx(0.5)
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert shares[20] == pytest.approx(0)


def test_it_falls_in_steps_that_are_counted_from_the_first_epoch():
    rate = WarmupSchedule.of(epochs=9, steps=2, warmup=1, decay="step", step_size=3, gamma=0.1)
    factors = [rate.at(step) for step in range(18)]
    assert factors == pytest.approx([0.5, *[1] * 5, *[0.1] * 6, *[0.01] * 6])


def test_without_warm_up_and_decay_there_is_no_schedule():
    assert WarmupSchedule.of(epochs=2, steps=5, warmup=0, decay="none") is None


def test_it_moves_an_optimizer():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    schedule = WarmupSchedule.of(epochs=1, steps=4, warmup=0.5, decay="none").scheduler(optimizer)
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == [4.0, 8.0, 8.0, 8.0]


def test_a_warm_up_longer_than_the_training_is_refused():
    with pytest.raises(UsageError, match="--warmup 3 is longer than the training of 2 epochs"):
        WarmupSchedule.of(epochs=2, steps=5, warmup=3, decay="cosine")
