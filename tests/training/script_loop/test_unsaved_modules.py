"""Modules beside the model that a continued run would begin again are found between two batches."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import StateError
from lockstep.training.script_loop.unsaved_modules import PERIOD

pytestmark = pytest.mark.usefixtures("world_of_one")
DATA = TensorDataset(torch.randn(24, 4), torch.zeros(24, dtype=torch.long))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Holder:
    """An object of the script that has a module, and its state."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return self.module.state_dict()

    def load_state_dict(self, state):
        self.module.load_state_dict(state)


@torch.no_grad()
def follow(teacher, model):
    for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
        mine.lerp_(other, 0.1)


def assign(teacher, model):
    for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
        mine.data = mine.data * 0.9 + other.data * 0.1


def average(averaged, model):
    averaged.update_parameters(model)


def nothing(module, model):
    """Change nothing."""


def take_exact(folder, make, update, *, has_checkpoint=True, is_saved=False, first=0, samples=24):
    """Train an epoch with `ls.exact`; `update` changes a module after each step."""
    model = network()
    other = make(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saving = ls.CheckpointConfig(folder=folder) if has_checkpoint else None
    stateful = {"other": other} if is_saved else {}
    exact = ls.exact(model, optimizer, 2, checkpoint=saving, stateful=stateful, loggers=[])
    data = TensorDataset(torch.randn(samples, 4), torch.zeros(samples, dtype=torch.long))
    try:
        for batch in exact.batches(data, 4, epoch=0):
            for inputs, targets in batch:
                batch.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if batch.number >= first:
                update(other, model)
    finally:
        exact.finish("done" if exact.steps == samples // 4 else "failed")
    return exact.steps


def take_trainer(folder, make, update):
    model = network()
    other = make(model)
    loss = nn.CrossEntropyLoss()
    saving = ls.CheckpointConfig(folder=folder)
    sgd = torch.optim.SGD
    trainer = ls.Trainer(model, loss, sgd, microbatches=2, checkpoint=saving, loggers=[])
    try:
        for batch in trainer.batches(DATA, 4, epoch=0):
            trainer.step(batch)
            update(other, model)
    finally:
        trainer.finish("done" if trainer.steps == 6 else "failed")


CHANGED = {
    "a mean teacher": (copy.deepcopy, follow, r"other.0 \(Linear\)"),
    "new memory": (copy.deepcopy, assign, r"other.0 \(Linear\)"),
    "an average": (AveragedModel, average, r"other \(AveragedModel\)"),
    "a module in an object": (
        lambda model: Holder(copy.deepcopy(model)),
        lambda holder, model: follow(holder.module, model),
        r"other.module.0 \(Linear\)",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("train", [take_exact, take_trainer])
def test_a_module_that_changes_between_two_batches_and_is_not_saved_is_refused(
    tmp_path, train, case
):
    make, update, name = CHANGED[case]
    with pytest.raises(StateError, match=f"step 1: the loop changes {name} between two batches"):
        train(tmp_path / "run", make, update)


@pytest.mark.parametrize("case", CHANGED)
def test_it_may_change_if_it_is_saved_or_if_no_run_is_continued(tmp_path, case):
    make, update, _ = CHANGED[case]
    assert take_exact(tmp_path / "run", make, update, is_saved=True) == 6
    assert take_exact(None, make, update, has_checkpoint=False) == 6


def test_a_change_that_begins_later_is_found(tmp_path):
    make, update, name = CHANGED["an average"]
    samples = 4 * (PERIOD + 3)
    with pytest.raises(StateError, match=f"step {PERIOD}: the loop changes {name}"):
        take_exact(tmp_path / "run", make, update, first=10, samples=samples)


def tied(model):
    head = nn.Linear(4, 2)
    head.weight = model[2].weight
    return head


UNCHANGED = {
    "a frozen teacher in eval mode": (
        lambda model: copy.deepcopy(model).eval(),
        lambda teacher, _: teacher(torch.ones(2, 4)),
    ),
    "a part of the model": (lambda model: model[0], nothing),
    "a wrapper of the model": (nn.Sequential, nothing),
    "a weight of the model": (tied, nothing),
}


@pytest.mark.parametrize("case", UNCHANGED)
@pytest.mark.parametrize("train", [take_exact, take_trainer])
def test_modules_that_do_not_change_and_those_of_the_model_are_permitted(tmp_path, train, case):
    train(tmp_path / "run", *UNCHANGED[case])


def make_trainer(folder, **options):
    saving = ls.CheckpointConfig(folder=folder)
    loss = nn.CrossEntropyLoss()
    sgd = torch.optim.SGD
    return ls.Trainer(
        network(), loss, sgd, microbatches=2, checkpoint=saving, loggers=[], **options
    )


def test_the_average_of_the_trainer_is_permitted(tmp_path):
    """A checkpoint has it."""
    trainer = make_trainer(tmp_path / "run", ema_decay=0.9)
    average = trainer.ema_model
    before = ls.digest(average)
    for batch in trainer.batches(DATA, 4):
        trainer.step(batch)
    trainer.finish()
    assert ls.digest(average) != before


@pytest.mark.parametrize("has_epochs", [True, False])
def test_what_changes_outside_of_a_loop_over_batches_is_permitted(tmp_path, has_epochs):
    """A resumed script changes it again."""
    scale = nn.Module()
    scale.register_buffer("value", torch.zeros(()))
    trainer = make_trainer(tmp_path / "run")
    for epoch in range(3):
        scale.value.fill_(epoch)
        for batch in trainer.batches(DATA, 24, epoch=epoch) if has_epochs else [DATA[:]]:
            trainer.step(batch)
    trainer.finish()
