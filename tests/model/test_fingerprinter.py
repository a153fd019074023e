"""Fingerprints of steps: what is recorded, under which names, and that nothing stays behind."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

import lockstep as ls
from lockstep.checksum import checksum
from lockstep.model.fingerprint import StepFingerprint
from lockstep.model.fingerprinter import checksums, hookable_modules
from lockstep.tools.check.check_session import CheckSession
from lockstep.tools.check.difference import RankFingerprint
from lockstep.tools.check.layouts import Layout
from lockstep.training.session import SessionComplete, open_session


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x * 2)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), Scaled(), nn.BatchNorm1d(4))


def batches(count=2):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(count)
    ]


def recorded():
    """Return what a session records into, and how."""
    found = RankFingerprint()

    def record(each):
        (found.steps if isinstance(each, StepFingerprint) else found.trainers).append(each)

    return found, record


def trained(model, layout, steps=2, **options):
    """Train under a session as a script would; return what it recorded."""
    found, record = recorded()
    with open_session(CheckSession(layout, steps, record)):
        trainer = ls.Trainer(
            model,
            nn.CrossEntropyLoss(),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            microbatches=4,
            **options,
        )
        try:
            for batch in batches(steps + 3):
                trainer.step(batch)
        except SessionComplete:
            pass
    return found


def test_a_step_is_recorded_whole(ranks):
    def rank():
        found = trained(model(), Layout(1))
        return found.trainers, found.steps

    ((trainers, done),) = ranks(rank, 1)
    assert [(each.trainer, each.step) for each in done] == [(0, 0), (0, 1)]
    assert trainers[0].model == "Sequential"
    assert trainers[0].parameters[:2] == ("0.weight", "0.bias")
    first = done[0]
    assert first.data == {
        leaf: checksums([part[2 * leaf : 2 * leaf + 2] for part in batches()[0]])
        for leaf in range(4)
    }
    calls = first.calls[3, 0]
    assert [(kind, name) for kind, name, _ in calls] == [
        ("enter", "Sequential"),
        ("enter", "0"),
        ("leave", "0"),
        ("enter", "1"),
        ("enter", "1.inner"),
        ("leave", "1.inner"),
        ("leave", "1"),
        ("enter", "2"),
        ("leave", "2"),
        ("leave", "Sequential"),
    ]
    assert calls[2][2] == calls[3][2]  # what `0` returned is what `1` got
    assert calls[3][2] != calls[4][2]  # `1` multiplies it
    assert first.before == trainers[0].initial
    assert first.gradients.keys() == set(trainers[0].parameters)
    assert first.state.keys() == trainers[0].initial.keys()
    assert "2.running_mean" in first.state
    assert first.optimizer.keys() == {f"{name}/momentum_buffer" for name in first.gradients}
    assert float.fromhex(first.loss) > 0
    assert first.losses.keys() == {0, 1, 2, 3}
    assert len(first.digest) == 64
    assert done[1].digest != first.digest


def test_the_session_decides_the_layout_and_nothing_is_recorded_or_saved(ranks, tmp_path):
    def rank():
        with open_session(CheckSession(Layout(2, shared=True), 1, recorded()[1])):
            trainer = ls.Trainer(
                model(),
                nn.CrossEntropyLoss(),
                partial(torch.optim.SGD, lr=0.1),
                pipeline=ls.PipelineConfig(stages=2, schedule="gpipe"),
                loggers=tmp_path / "run",
            )
            trainer.save_weights(tmp_path / "weights.safetensors")
        return trainer.parallel.stages, trainer.engine.setup.optimization.shared is not None

    assert ranks(rank, 2) == [(1, True), (1, True)]
    assert not list(tmp_path.iterdir())


def test_a_run_ends_when_every_trainer_has_its_steps(ranks):
    def rank():
        found, record = recorded()
        with open_session(CheckSession(Layout(1), 2, record)):
            make = partial(ls.Trainer, microbatches=2)
            sgd = partial(torch.optim.SGD, lr=0.1)
            often = make(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)
            seldom = make(nn.Linear(6, 4), nn.CrossEntropyLoss(), sgd)
            try:
                for number in range(100):
                    often.step(batches()[0])
                    if number % 3 == 2:
                        seldom.step(batches()[0])
            except SessionComplete:
                return [(each.trainer, each.step) for each in found.steps]

    ((*_, last),) = (done,) = ranks(rank, 1)
    assert last == (1, 1)
    assert done.count((0, 5)) == 1
    assert len(done) == 8


def test_outside_of_a_step_and_of_a_session_there_are_no_hooks(ranks):
    def rank():
        counts = []
        make = partial(ls.Trainer, microbatches=4)
        given = nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1)
        with open_session(CheckSession(Layout(1), 9, recorded()[1])):
            trainer = make(
                model(),
                *given,
                callbacks=[lambda result: counts.append(len(trainer.module[1]._forward_hooks))],
            )
            trainer.step(batches()[0])
        plain = make(model(), *given)
        plain.step(batches()[0])
        return counts, [len(part._forward_hooks) for part in plain.module.modules()]

    (found,) = ranks(rank, 1)
    assert not any([*found[0], *found[1]])


def test_recomputation_is_not_recorded_twice(ranks):
    def rank():
        done = trained(model(), Layout(1), activation_checkpointing=True).steps
        return [name for _, name, _ in done[0].calls[0, 0]].count("1.inner")

    assert ranks(rank, 1) == [2]


def test_a_compiled_model_is_recorded_under_its_own_names(ranks):
    def rank():
        network = model()
        network[1] = torch.compile(network[1], backend="eager")
        inner = trained(network, Layout(1))
        outer = trained(torch.compile(model(), backend="eager"), Layout(1))
        return inner, outer

    ((inner, outer),) = ranks(rank, 1)
    assert "1.inner.weight" in inner.trainers[0].parameters
    names = [name for kind, name, _ in inner.steps[0].calls[0, 0] if kind == "enter"]
    assert names == ["Sequential", "0", "1", "2"]
    names = [name for kind, name, _ in outer.steps[0].calls[0, 0] if kind == "enter"]
    assert names == ["Sequential"]
    assert outer.trainers[0].parameters == inner.trainers[0].parameters
    assert inner.steps[0].gradients == outer.steps[0].gradients


def test_what_is_inside_a_compiled_module_gets_no_hook():
    """A hook there would become a part of the graph."""
    network = model()
    network.append(Scaled())
    network[1] = torch.compile(network[1], backend="eager")
    network[3].compile(backend="eager")
    assert [name for name, _ in hookable_modules("Net", network, is_root=True)] == [
        "Net",
        "0",
        "1",
        "2",
    ]


def test_checksums_of_nested_values():
    array = np.arange(3)
    tensor = torch.arange(3.0)
    value = {"a": [tensor, "text", 1], "b": (array, None)}
    assert checksums(value) == (checksum(tensor), checksums(array)[0])
    assert checksums(array[::-1]) != checksums(array)
    assert checksums(3) == ()


def test_what_is_inside_vmap_has_no_checksum():
    seen = []
    torch.func.vmap(lambda row: seen.append(checksums(row)) or row)(torch.randn(3, 2))
    assert seen == [()]
