"""A training that goes on with a sampler of its own generator takes the same order."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, TensorDataset

import lockstep as ls
from lockstep.kernel.errors import DatasetError

SGD = partial(torch.optim.SGD, lr=0.1)
EPOCHS = 4


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (48,), generator=generator))


def train(stop=None, state=None):
    """Train EPOCHS epochs; with `stop` (epoch, batches) return the states there."""
    torch.manual_seed(0)
    dataset = data()
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD)
    losses, first, position = [], 0, None
    if state is not None:
        trainer.load_state_dict(state["trainer"])
        position, first = state["batches"], trainer.epoch + (state["batches"] is None)
    for epoch in range(first, EPOCHS):
        batches = trainer.batches(dataset, 16, epoch=epoch, sampler=sampler)
        if position is not None:
            batches.load_state_dict(position)
            position = None
        for number, batch in enumerate(batches, start=1):
            losses.append(trainer.step(batch))
            if stop == (epoch, number):
                return {"trainer": trainer.state_dict(), "batches": batches.state_dict()}, losses
    return losses, trainer.digest()


@pytest.mark.parametrize(
    ("stop", "with_batches"), [((1, 2), True), ((1, 3), True), ((1, 3), False)]
)
def test_training_goes_on_as_if_it_had_not_been_broken_off(ranks, stop, with_batches):
    """In the middle of an epoch, at its end, and with the trainer's state alone."""
    losses, digest = ranks(train, 1)[0]
    state, before = ranks(train, 2, stop)[0]
    if not with_batches:
        state["batches"] = None
    after, resumed = ranks(train, 3, None, state)[0]
    assert before + after == losses
    assert resumed == digest


def test_a_training_that_cannot_go_on_in_the_same_order_says_so(ranks):
    def late(state):
        trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD)
        trainer.load_state_dict(state["trainer"])
        sampler = RandomSampler(data(), generator=torch.Generator().manual_seed(0))
        try:
            next(iter(trainer.batches(data(), 16, epoch=3, sampler=sampler)))
        except DatasetError as error:
            return str(error)

    state, _ = ranks(train, 1, (1, 2))[0]
    for message in ranks(late, 2, state):
        assert "whose state was saved in epoch 1 and is unknown for epoch 3" in message
