"""Trainable tensors that take part in a loss: the trainer's, those of another one, or none."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import StateError
from lockstep.model.state_mutation_check import GRAPHS_EVERY

SGD = partial(torch.optim.SGD, lr=0.1)
STAGES = {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}


def rows():
    return torch.randn(16, 6), torch.randint(0, 4, (16,))


def steps(trainer, compute, count=3):
    """Take manual steps; `compute` returns the loss of a micro-batch."""
    for _ in range(count):
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(rows()):
                step.backward(compute(inputs, targets))
    return trainer.digest()


class Scaled(nn.Module):
    """A block that reads a parameter which is not registered in it."""

    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.held = [scale]

    def forward(self, inputs):
        return self.linear(inputs) * self.held[0]


def beside(kind, over):
    """Train with a parameter that is not in the model, and return the error."""
    torch.manual_seed(0)
    scale = nn.Parameter(torch.ones(1, 1))
    if kind == "tensor":
        scale = torch.ones(1, 1, requires_grad=True)
    head = Scaled(scale) if kind == "block" else nn.Linear(6, 4)
    model = nn.Sequential(nn.Linear(6, 6), head)

    def loss(outputs, targets):
        return F.cross_entropy(outputs * scale if kind != "block" else outputs, targets)

    trainer = ls.Trainer(model, loss, SGD, microbatches=2, **over)
    own = torch.optim.SGD([scale], lr=0.1)
    try:
        for _ in range(3):
            if kind == "manual":
                steps(trainer, lambda inputs, targets: loss(model(inputs), targets), 1)
            else:
                trainer.step(rows())
            own.step()
    except StateError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("n", [1, 2])
def test_a_trainable_parameter_beside_the_model_is_refused(ranks, n):
    """It got this rank's part of the gradient."""
    cases = [(kind, {}) for kind in ("loss", "manual", "tensor", "block")]
    if n == 2:
        cases += [(kind, STAGES) for kind in ("loss", "tensor", "block")]
    for found in ranks(lambda: [beside(*case) for case in cases], n):
        for (kind, _), said in zip(cases, found, strict=True):
            name = "tensor" if kind == "tensor" else "parameter"
            assert f": a {name} of shape (1, 1) that is not in the model takes part" in said, kind


@pytest.mark.usefixtures("world_of_one")
def test_a_parameter_that_begins_to_take_part_later_is_refused():
    scale = nn.Parameter(torch.ones(()))
    model = nn.Linear(6, 4)
    trainer = ls.Trainer(model, None, SGD)

    def compute(inputs, targets):
        outputs = model(inputs)
        return F.cross_entropy(outputs * scale if trainer.steps >= 5 else outputs, targets)

    with pytest.raises(StateError, match=r"of shape \(\) that is not in the model"):
        steps(trainer, compute, GRAPHS_EVERY + 1)
    assert trainer.steps == GRAPHS_EVERY  # the first later step whose graphs are read


def honest():
    """Train with trainable leaves that are nobody's state."""
    torch.manual_seed(0)
    found = []
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    # inputs that require a gradient, the same ones in every step (a physics-informed network)
    points = torch.randn(16, 6, requires_grad=True)
    targets = torch.zeros(16, 4)
    trainer = ls.Trainer(model, None, SGD)
    border = torch.zeros(3, 6, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            points.uniform_()
        with trainer.manual_step() as step:
            for inputs, wanted in step.microbatches((points, targets)):
                outputs = model(inputs)
                (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
                loss = F.mse_loss(outputs, wanted) + slope.square().mean()
                step.backward(loss + model(border).square().mean())
    found.append(trainer.digest())

    # a perturbation, as a parameter of its own for each micro-batch
    def perturbed(inputs, targets):
        perturbation = nn.Parameter(torch.zeros_like(inputs))
        F.cross_entropy(model(inputs + perturbation), targets).backward()
        return F.cross_entropy(model(inputs + 0.1 * perturbation.grad.sign()), targets)

    found.append(steps(ls.Trainer(model, None, SGD), perturbed))

    return [*found, *adversaries(True), *adversaries(False)]


def adversaries(is_named):
    """Train two models, each through the other; they may be named as extra modules."""
    generator = nn.Linear(6, 6)
    judge = nn.Linear(6, 1)
    of_generator = ls.Trainer(generator, None, SGD, extra_modules=[judge] if is_named else [])
    of_judge = ls.Trainer(judge, None, SGD, extra_modules=[generator] if is_named else [])
    for _ in range(2):
        steps(of_judge, lambda x, _: F.softplus(judge(generator(x).detach())).mean(), 1)
        steps(of_generator, lambda x, _: F.softplus(-judge(generator(x))).mean(), 1)
    return of_generator.digest(), of_judge.digest()


def test_leaves_that_are_no_state_are_accepted(ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [each for n in (1, 2) for each in ranks(honest, n)]
    assert all(each == found[0] for each in found)


@pytest.mark.usefixtures("world_of_one")
def test_an_extra_module_that_nobody_trains_is_named_in_a_warning():
    model = nn.Linear(6, 4)
    extra = nn.Linear(4, 4)
    trainer = ls.Trainer(model, None, SGD, extra_modules=[extra])

    def compute(inputs, targets):
        return F.cross_entropy(extra(model(inputs)), targets)

    with pytest.warns(UserWarning, match="gets a gradient, and no Trainer trains it") as caught:
        steps(trainer, compute)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extra.requires_grad_(False)
        steps(ls.Trainer(model, None, SGD, extra_modules=[extra]), compute)
