"""Side effects: writes of a step to more than gradients and buffers are named, in every layout."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import DisagreementError, LayoutError, StateError
from lockstep.model.held_parameters import HeldParameters

SGD = partial(torch.optim.SGD, lr=0.1)
LAYOUTS = [
    (1, {}),
    (2, {}),
    (3, {}),
    (2, {"storage": "shared"}),
    (2, {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}),
]


class Teacher(nn.Module):
    """A momentum encoder (MoCo, BYOL) that forward moves along."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(6, 4)
        self.teacher = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, inputs):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(inputs) + self.teacher(inputs)


class Codebook(nn.Module):
    """A vector quantizer whose codes are written through `.data`, unseen by autograd."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 4))

    def forward(self, inputs):
        self.codes.data.mul_(0.9)
        return inputs @ self.codes


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 4)

    def forward(self, inputs):
        rows = (inputs.abs() * 5).long().clamp(max=16)
        return F.embedding(rows, self.embedding.weight, max_norm=0.5).mean(dim=1)


def batch():
    return torch.randn(16, 6), torch.randint(0, 4, (16,))


def train(make, over, steps=3):
    torch.manual_seed(1)
    trainer = ls.Trainer(nn.Sequential(nn.Linear(6, 6), make()), F.cross_entropy, SGD, **over)
    for _ in range(steps):
        trainer.step(batch())
    return trainer.digest()


def refusals(over):
    """Return what each kind of side effect leads to, on this rank."""
    found = []
    for make in (Teacher, Codebook, Bag):
        try:
            found.append(train(make, over))
        except StateError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(("n", "over"), LAYOUTS)
def test_parameters_that_forward_writes_are_named(ranks, n, over):
    found = ranks(refusals, n, over)
    assert all(each == found[0] for each in found)
    rank = n - 1 if "pipeline" in over else 0
    written = ["parameter 1.teacher.weight", "parameter 1.codes", "parameter 1.embedding.weight"]
    for said, subject in zip(found[0], written, strict=True):
        assert said.startswith(f"rank {rank}, step 0: {subject} was "), said


class Named(nn.Module):
    """Names blocks, whose composition is compared with its forward before it is cut."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.teacher = Teacher()

    def blocks(self):
        return [self.linear, self.teacher]

    def forward(self, inputs):
        return self.teacher(self.linear(inputs))


def test_a_parameter_that_forward_writes_is_named_when_blocks_are_checked(ranks):
    """The two passes of the check differed, and the blocks were said not to be the model."""

    def refused():
        torch.manual_seed(1)
        trainer = ls.Trainer(Named(), F.cross_entropy, SGD, pipeline=ls.PipelineConfig(stages=2))
        with pytest.raises((StateError, LayoutError)) as raised:
            trainer.step(batch())
        return str(raised.value)

    for said in ranks(refused, 2):
        assert "parameter teacher.teacher.weight was written during forward" in said


class Late(nn.Module):
    """Begins to do something in its fifth step."""

    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.codes = nn.Parameter(torch.ones(7, 50))
        self.act = act
        self.is_late = False

    def forward(self, inputs):
        if self.is_late:
            self.act(self)
        return self.linear(inputs)


def write_one_element(module):
    with torch.no_grad():
        module.codes[3, 7] += 1


def write_by_data(module):
    module.codes.data.mul_(0.9)


def replace_memory(module):
    module.codes.data = module.codes.data * 0.9


@pytest.mark.parametrize("act", [write_one_element, write_by_data, replace_memory])
def test_what_begins_in_a_later_step_is_found_in_that_step(act):
    """It was found in the next hundredth step."""
    module = Late(act)
    held = HeldParameters({"": module})
    for step in range(6):
        module.is_late = step == 5
        assert not held.begin()
        module(torch.randn(2, 6))
        failure = held.finish()
        assert bool(failure) == module.is_late
    assert failure.startswith("parameter codes was ")


@pytest.mark.parametrize("over", [{}, {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}])
def test_weights_that_one_rank_changed_by_itself_are_named(ranks, over):
    def train():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        trainer = ls.Trainer(model, F.cross_entropy, SGD, **over)
        for _ in range(1 if over else 5):  # trained weights are compared in every step
            trainer.step(batch())
        if ls.rank() == 3:
            if not over:
                model[0].bias.data += 1  # more elements than a fault in memory changes
            else:
                model[1].running_mean[2] += 1
        try:
            trainer.step(batch())
        except DisagreementError as error:
            return str(error)
        return trainer.digest()

    said = set(ranks(train, 4))
    assert len(said) == 1
    name = "1.running_mean" if over else "0.bias"
    words = f"{name} has other values on rank 3 than on rank {1 if over else 0} in step "
    assert words in said.pop()
