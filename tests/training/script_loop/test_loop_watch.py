"""What a loop keeps beside its model is found, in loops of `ls.exact` and in manual steps.

Each program would train on other numbers with another number of ranks. One process shows it.
"""

import copy
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.kernel.errors import StateError, UsageError

MICROBATCHES = 4


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def rows(samples=16):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


class Centres(nn.Module):
    """A loss with centres of the classes, which follow the outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(3, 3))

    def forward(self, outputs, targets):
        loss = (outputs - self.centres[targets]).square().mean()
        self.centres[targets] += 0.1 * outputs.detach()
        return loss


class Holder:
    """An object of the script that has a generator."""

    def __init__(self):
        self.generator = random.Random(1)


def nested(compute):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    exact = ls.exact(model, optimizer, microbatches=MICROBATCHES, loggers=[])
    for _ in range(2):
        for batch in exact.batches(rows(), 16):
            for inputs, targets in batch:
                batch.backward(compute(model, inputs, targets, optimizer))
            optimizer.step()
            optimizer.zero_grad()
    return exact.digest()


def flat(compute):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    exact = ls.exact(model, optimizer, microbatches=MICROBATCHES, loggers=[])
    data = rows()
    sampler = exact.sampler(data, 16)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in exact.microbatches(DataLoader(data, batch_sampler=sampler)):
            exact.weigh(compute(model, inputs, targets, optimizer)).backward()
            if exact.is_complete:
                optimizer.step()
                optimizer.zero_grad()
    return exact.digest()


def manual(compute):
    model = network()
    trainer = ls.Trainer(
        model, None, torch.optim.Adam, microbatches=MICROBATCHES, loggers=[], progress=False
    )
    for _ in range(2):
        for batch in trainer.batches(rows(), 16):
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    step.backward(compute(model, inputs, targets, trainer.optimizer))
    return trainer.digest()


LOOPS = pytest.mark.parametrize("loop", [nested, flat, manual])


def plain(model, inputs, targets, optimizer):
    return F.cross_entropy(model(inputs), targets)


def drawing(generator, draw):
    return lambda model, inputs, targets, _: F.cross_entropy(
        model(inputs * draw(generator)), targets
    )


def moving_centres():
    centres = Centres()
    return lambda model, inputs, targets, _: centres(model(inputs), targets)


def normalized_loss():
    norm = nn.BatchNorm1d(3, affine=False)
    return lambda model, inputs, targets, _: F.cross_entropy(norm(model(inputs)), targets)


def momentum_teacher():
    teacher = network().requires_grad_(False)

    def compute(model, inputs, targets, _):
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(other + 0.1, 0.5)
            wanted = teacher(inputs)
        return F.mse_loss(model(inputs), wanted)

    return compute


def average_in_loop():
    averages = {}

    def compute(model, inputs, targets, optimizer):
        average = averages.setdefault(0, copy.deepcopy(model))
        with torch.no_grad():
            average[0].weight.add_(0.1)
        return plain(model, inputs, targets, optimizer)

    return compute


def second_loader(loader):
    iterator = iter(loader)

    def compute(model, inputs, targets, _):
        others, _ = next(iterator)
        return F.cross_entropy(model(torch.cat([inputs, others]))[: len(inputs)], targets)

    return compute


def written_state(model, inputs, targets, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    return plain(model, inputs, targets, optimizer)


FOUND = {
    "a generator of torch": (
        lambda: drawing(torch.Generator(), lambda g: torch.rand(1, generator=g)),
        r"the loop draws from generator \(Generator\)",
    ),
    "a generator of numpy": (
        lambda: drawing(numpy.random.default_rng(1), lambda g: float(g.random())),
        r"the loop draws from generator \(Generator\)",
    ),
    "a generator in an object": (
        lambda: drawing(Holder(), lambda holder: holder.generator.random()),
        r"the loop draws from generator.generator \(Random\)",
    ),
    "centres": (moving_centres, r"changes buffers or parameters of centres \(Centres\)"),
    "batch norm": (normalized_loss, r"changes buffers or parameters of norm \(BatchNorm1d\)"),
    "a teacher": (momentum_teacher, r"changes buffers or parameters of teacher.0 \(Linear\)"),
    "a second loader": (
        lambda: second_loader(DataLoader(rows(64), 4)),
        r"micro-batch 1: a DataLoader was advanced at .* as it was in .*, micro-batch 0",
    ),
    "state": (lambda: written_state, "optimizer.state was written between the micro-batches of a"),
}


@LOOPS
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("case", FOUND)
def test_what_a_loop_keeps_beside_the_model_is_found(loop, case):
    make, said = FOUND[case]
    with pytest.raises((StateError, UsageError), match=said) as caught:
        loop(make())
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("world_of_one")
def test_a_loss_that_depends_on_the_graph_of_another_microbatch_is_found():
    model = network()
    exact = ls.exact(model, microbatches=MICROBATCHES, loggers=[])
    for batch in exact.batches(rows(), 16):
        losses = torch.zeros(())
        with pytest.raises(StateError, match="micro-batch 1 depends on the graph of an earlier"):
            train_on_sums(model, batch, losses)


def train_on_sums(model, batch, losses):
    for inputs, targets in batch:
        losses = losses + plain(model, inputs, targets, None)
        batch.backward(losses, retain_graph=True)


def whole_loader():
    loader = DataLoader(rows(8), 4)

    def compute(model, inputs, targets, optimizer):
        assert sum(len(others) for others, _ in loader) == 8
        return plain(model, inputs, targets, optimizer)

    return compute


def frozen_teacher():
    teacher = network().eval()

    def compute(model, inputs, targets, _):
        with torch.no_grad():
            wanted = teacher(inputs)
        return F.mse_loss(model(inputs), wanted)

    return compute


def seeded_generator():
    def compute(model, inputs, targets, optimizer):
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        noise = torch.randn(inputs.shape, generator=generator)
        return plain(model, inputs + noise, targets, optimizer)

    return compute


@LOOPS
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("make", [lambda: plain, whole_loader, frozen_teacher, seeded_generator])
def test_what_depends_on_the_microbatch_only_is_permitted(loop, make):
    assert len(loop(make())) == 64


def draw_after_the_loop():
    model = network()
    trainer = ls.Trainer(
        model, None, torch.optim.Adam, microbatches=MICROBATCHES, loggers=[], progress=False
    )
    draws = []
    for batch in trainer.batches(rows(32), 16):
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(plain(model, inputs, targets, None))
            draws.append((float(torch.rand(())), random.random(), numpy.random.rand()))
        with trainer.manual_step() as step:
            step.backward_whole_batch(
                lambda data: (model(data[0]), data[1]), F.cross_entropy, batch
            )
            draws.append((float(torch.rand(())), random.random(), numpy.random.rand()))
    return draws


def test_what_a_manual_step_draws_after_its_loop_is_the_same_on_all_ranks(ranks):
    first, second = ranks(draw_after_the_loop, 2)
    assert first == second
    assert len(set(first)) == 4
