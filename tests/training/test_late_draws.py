"""Random numbers that nothing draws at first: a unit that begins later, and gradient hooks."""

from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls

SGD = partial(torch.optim.SGD, lr=0.1)
STEPS, LATE = 8, 5


class StochasticDepth(nn.Module):
    """Adds a layer to its input with a probability, which is 1 at first: nothing is drawn then."""

    def __init__(self):
        super().__init__()
        self.layer, self.probability = nn.Linear(6, 6), 1.0

    def forward(self, inputs):
        if self.probability < 1 and torch.rand(()) > self.probability:
            return inputs
        return inputs + self.layer(inputs)


def begin_late(model, step):
    if step == LATE:
        for each in model[:2]:
            each.probability = 0.5


def perturb_late(model, step):
    """Add noise to gradients, of a parameter and of an activation; forward draws nothing."""

    def perturb(gradient):
        return gradient + 0.01 * torch.randn_like(gradient)

    if step == LATE:
        model[0].layer.weight.register_hook(perturb)
        model[1].register_forward_hook(lambda *given: given[2].register_hook(perturb) and None)


def do_nothing(model, step):
    pass


def train(change, pipeline=None):
    torch.manual_seed(0)
    model = nn.Sequential(StochasticDepth(), StochasticDepth(), nn.Linear(6, 3))
    trainer = ls.Trainer(
        model, nn.CrossEntropyLoss(), SGD, microbatches=4, pipeline=pipeline, progress=False
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        change(model, step)
        inputs = torch.randn(11, 6, generator=generator)
        trainer.step((inputs, torch.arange(11) % 3))
    return trainer.digest()


@pytest.mark.parametrize("change", [begin_late, perturb_late])
def test_numbers_that_are_drawn_only_later_have_one_digest(ranks, change):
    (alone,) = ranks(train, 1, change)
    assert alone != ranks(train, 1, do_nothing)[0]
    assert set(ranks(train, 2, change)) == {alone}
    assert set(ranks(train, 3, change)) == {alone}


def test_a_unit_that_draws_later_has_one_digest_in_stages(ranks):
    (alone,) = ranks(train, 1, begin_late)
    pipeline = ls.PipelineConfig(stages=2, schedule="1f1b")
    assert set(ranks(train, 2, begin_late, pipeline)) == {alone}
