"""A resumed training finds the modules as the loop's body had left them, and extra modules too."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import UsageError
from processes import restoring_handlers

ADAM = partial(torch.optim.Adam, lr=0.02)
LAYOUTS = [  # of two ranks
    {},
    {"storage": "shared"},
    {"pipeline": ls.PipelineConfig(stages=2, balance=[3, 3])},
    {"pipeline": ls.PipelineConfig(stages=2)},
]


@pytest.fixture(autouse=True)
def as_if_processes_ended():
    """Restore the handlers of trainers that are left in the middle of a training."""
    with restoring_handlers():
        yield


class Interrupted(BaseException):
    """Ends a script as if its process had been killed."""


class Cooled(nn.Module):
    """Has attributes of several types that its outputs depend on."""

    def __init__(self):
        super().__init__()
        self.temperature = 1.0
        self.levels = [1.0, 2.0]
        self.activation = F.relu
        self.anchor = torch.ones(())
        self.state = None
        self.kept = None

    def forward(self, inputs):
        self.kept = F.tanh  # made when it is needed
        level = self.levels[-1] * self.anchor * (1 if self.state is None else self.state[0])
        extra = getattr(self, "extra", 0.0)
        return self.activation(inputs / self.temperature) * level + extra


def network():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), Cooled(), nn.Dropout(0.2), nn.Linear(8, 8),
        nn.Linear(8, 3),
    )  # fmt: skip


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (48,), generator=generator))


def freeze(trainer):
    trainer.model[0].requires_grad_(False)


def unfreeze(trainer):
    trainer.model[0].requires_grad_(True)


def stop_statistics(trainer):
    trainer.model[1].eval()


def drop_more(trainer):
    trainer.model[3].p = 0.6


def smooth(trainer):
    trainer.parallel.loss.label_smoothing = 0.3


def cool(trainer):
    model = trainer.model[2]
    model.temperature = 0.5
    model.extra = 0.25
    model.levels.append(0.75)
    model.anchor.mul_(1.5)
    model.state = (torch.full((), 0.5), "halved")


def warm_up_and_back(trainer):
    """The resumed script sets it before the loop, as the first one did."""
    trainer.model[3].p = 0.2


def set_option(trainer):
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.1


CHANGES = [
    freeze, unfreeze, stop_statistics, drop_more, smooth, cool, warm_up_and_back, set_option
]  # fmt: skip


def train(folder, change, end=9, resume=False, **layout):
    """Train until step `end`; the body makes its change after step 3."""
    model = network()
    if change is unfreeze:
        model[0].requires_grad_(False)
    trainer = ls.Trainer(
        model, nn.CrossEntropyLoss(), ADAM, microbatches=4, progress=False, ema_decay=0.9, **layout,
        checkpoint=ls.CheckpointConfig(every_steps=1, folder=folder),
    )  # fmt: skip
    if resume:
        trainer.resume()
        assert trainer.resumed_from >= 3  # after the change
    if change is warm_up_and_back:
        trainer.model[3].p = 0.5
    for epoch in range(3):
        for batch in trainer.batches(data(), 16, epoch=epoch):
            trainer.step(batch)
            if trainer.steps == 3:
                change(trainer)
            trainer._run._checkpoints.writer.wait()
            if trainer.steps == end < 9:
                raise Interrupted
    trainer.finish()
    return trainer.digest(), trainer.optimizer_digest()


def interrupt(folder, change):
    with pytest.raises(Interrupted):
        train(folder, change, end=5)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_body_changed_is_restored(tmp_path, change):
    """The resumed run had the settings of the beginning, and other weights at the end."""
    expected = train(tmp_path / "whole", change)
    interrupt(tmp_path / "run", change)
    assert train(tmp_path / "run", change, resume=True) == expected


def test_what_the_body_changed_is_restored_in_other_layouts(ranks, tmp_path):
    def change(trainer):
        for each in (freeze, stop_statistics, drop_more, smooth, cool):
            each(trainer)

    ((expected, _),) = ranks(train, 1, tmp_path / "whole", change)

    def begin():
        for number, layout in enumerate(LAYOUTS):
            with pytest.raises(Interrupted):
                train(tmp_path / str(number), change, end=5, **layout)

    def resume():
        others = [*LAYOUTS[1:], LAYOUTS[0]]
        return [
            train(tmp_path / str(number), change, resume=True, **other)[0]
            for number, other in enumerate(others)
        ]

    ranks(begin, 2)
    assert ranks(resume, 2) == [[expected] * len(LAYOUTS)] * 2


@pytest.mark.usefixtures("world_of_one")
def test_what_cannot_be_restored_is_named(tmp_path, capsys):
    def change(trainer):
        trainer.model[2].activation = F.gelu
        trainer.model[4].register_forward_hook(lambda module, inputs, outputs: outputs * 2)

    interrupt(tmp_path, change)
    said = "model.2.activation is .*relu, and was .*gelu when the state was saved"
    with pytest.raises(UsageError, match=said):
        train(tmp_path, change, resume=True)
    Cooled.lockstep_ignore = ("activation",)
    try:
        train(tmp_path, change, resume=True)
    finally:
        del Cooled.lockstep_ignore
    assert "model.4 has the hooks [], and had [the lambda at test_saved" in capsys.readouterr().err


@pytest.mark.usefixtures("world_of_one")
def test_a_setting_of_an_edited_script_is_used(tmp_path, monkeypatch):
    """Only changes since the construction of the trainer are those of the loop's body."""
    interrupt(tmp_path, freeze)
    seen = []
    original = network

    def edited():
        model = original()
        model[3].p = 0.4
        seen.append(model)
        return model

    monkeypatch.setitem(globals(), "network", edited)
    train(tmp_path, freeze, resume=True)
    assert seen[0][3].p == 0.4
    assert not seen[0][0].weight.requires_grad


@pytest.mark.usefixtures("world_of_one")
def test_a_state_without_settings_is_loaded_as_before():
    trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), ADAM, loggers=[])
    state = trainer.state_dict()
    drop_more(trainer)
    del state["module_settings"]
    trainer.load_state_dict(state)
    assert trainer.model[3].p == 0.6


# --- the state in memory ------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_a_state_in_memory_is_a_copy_and_stays_one():
    """It held the live tensors, and the optimizer went on in those that it was given."""
    trainer = ls.Trainer(network(), nn.CrossEntropyLoss(), ADAM, loggers=[], ema_decay=0.5)
    batch = data()[:16]

    def outcome():
        average = ls.digest(trainer.ema_model)
        return trainer.digest(), trainer.optimizer_digest(), average, trainer.model[3].p

    trainer.step(batch)
    best = trainer.state_dict()
    expected = outcome()
    for _ in range(2):
        trainer.step(batch)
        drop_more(trainer)
        trainer.load_state_dict(best)
        assert outcome() == expected


# --- extra modules ------------------------------------------------------------------------------


def distill(folder, end=9, resume=False):
    """Train with a teacher that averages the student through `.data`; return both digests."""
    student = network()
    teacher = copy.deepcopy(student).requires_grad_(False)
    teacher[5] = student[5]  # shared with the student
    trainer = ls.Trainer(
        student, None, ADAM, microbatches=4, progress=False, extra_modules=[teacher],
        checkpoint=ls.CheckpointConfig(every_steps=1, folder=folder),
    )  # fmt: skip
    if resume:
        trainer.resume()
        assert trainer.resumed_from >= 3  # after the change
    for epoch in range(3):
        for batch in trainer.batches(data(), 16, epoch=epoch):
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    with torch.no_grad():
                        wanted = teacher(inputs)
                    outputs = student(inputs)
                    loss = F.cross_entropy(outputs, targets)
                    step.backward(loss + (outputs - wanted).square().mean())
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                if mine is not theirs:
                    mine.data = mine.data.lerp(theirs.data, 0.1)
            trainer._run._checkpoints.writer.wait()
            if trainer.steps == end < 9:
                raise Interrupted
    trainer.finish()
    return trainer.digest(), ls.digest(teacher)


@pytest.mark.usefixtures("world_of_one")
def test_a_teacher_that_the_script_updates_is_restored(tmp_path):
    expected = distill(tmp_path / "whole")
    with pytest.raises(Interrupted):
        distill(tmp_path / "run", end=5)
    assert distill(tmp_path / "run", resume=True) == expected


@pytest.mark.usefixtures("world_of_one")
def test_parameters_that_the_model_has_are_saved_once():
    student = network()
    trainer = ls.Trainer(student, None, ADAM, loggers=[], extra_modules=[nn.Sequential(student[0])])
    assert trainer.state_dict()["buffers"]["extra_modules[0]"] == {}
