"""A resumed script takes the same branches and gives the same bits, in any layout."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.checkpoint import writer as writer_module
from lockstep.checkpoint.folder import find_checkpoints
from lockstep.comm.collectives import all_gather_bytes
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.kernel.errors import RankError
from lockstep.record.reader import read_run

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
SAMPLES = 32  # 3 batches per epoch, the last one smaller
BATCH = 12
EPOCHS = 3


# --- what is trained -----------------------------------------------------------------------------


class Pairs(Dataset):
    """Samples that draw noise when they are loaded."""

    def __init__(self, samples=SAMPLES, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, 6, generator=generator)
        self.targets = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


class Stream(IterableDataset):
    """A stream without a length."""

    def __iter__(self):
        pairs = Pairs()
        return (pairs[index] for index in range(SAMPLES))


class Scale(nn.Module):
    """Has a buffer that no state dict of the model has."""

    lockstep_buffer_rules = {"calls": "equal"}

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.calls += 1
        return inputs * (1 + self.calls[0] / 100)


class Probe(nn.Module):
    """A part of the model that tells the trap where the training is."""

    trap: Any = None

    def forward(self, inputs):
        if self.trap is None:
            return inputs
        outputs = inputs * 1
        self.trap.reach("forward" if self.training else "evaluation")
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.trap.reach("backward"))
        return outputs


def network():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), Scale(), nn.Dropout(0.2), Probe(), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


class Loss(nn.Module):
    """Keeps a running mean of itself, and weights by it."""

    lockstep_buffer_rules = {"mean": "mean"}

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss * (1 + self.mean)


class Meter:
    """A registered object."""

    def __init__(self):
        self.total = 0.0
        self.parts = []

    def add(self, value):
        self.total += value
        self.parts.append(value)

    def state_dict(self):
        return {"total": self.total, "parts": list(self.parts)}

    def load_state_dict(self, state):
        self.total = state["total"]
        self.parts = list(state["parts"])


# --- the laboratory ------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Ends a script as if its process were killed: nothing is saved or closed after it."""


class Lab:
    """Where a script runs, and how it is interrupted or resumed.

    Attributes:
        folder: The folder of the run.
        layout: Arguments of the trainer that change no bit.
        stop: The number of steps after which the script is interrupted; 0 for never.
        is_resumed: Whether the script is run again.
        workers: The number of loader workers.
        trap: Kills all ranks at some moment; None for never.
    """

    def __init__(self, folder, layout, stop, is_resumed, workers, trap=None):
        self.folder = folder
        self.layout = layout
        self.stop = stop
        self.is_resumed = is_resumed
        self.workers = workers
        self.trap = trap
        self.every = 1 if trap is None else 3

    def trainer(self, model, loss=None, optimizer=SGD, *, stateful=None, callbacks=(), **options):
        """Return a trainer that saves a checkpoint after every step, or every third one."""
        trainer = ls.Trainer(
            model, loss or nn.CrossEntropyLoss(), optimizer, microbatches=4,
            callbacks=[*callbacks, self.interrupt], loggers=self.folder, **options, **self.layout,
            checkpoint=ls.CheckpointConfig(
                every_steps=self.every, keep=2, stateful=stateful or {}
            ),
        )  # fmt: skip
        if self.trap is not None:
            self.trap.set(trainer)
        self._writer = trainer._run._checkpoints.writer
        if self.is_resumed:
            trainer.resume()
        return trainer

    def interrupt(self, result):
        if self.stop and result.step + 1 == self.stop:
            self._writer.wait()  # so that the step before is the one that is resumed from
            raise Interrupted


def play(script, folder, layout, stop=0, is_resumed=False, workers=0, trap=None):
    """Run a script on this rank; return what it returns, or None if it was interrupted."""
    torch.manual_seed(11)
    random.seed(12)
    numpy.random.seed(13)
    try:
        return script(Lab(folder, layout, stop, is_resumed, workers, trap))
    except Interrupted:
        return None


def play_all(cases):
    """Play cases of one world, one after another."""
    return [play(*case) for case in cases]


def finish(trainer, *more):
    trainer.finish()
    return trainer.digest(), trainer.optimizer_digest(), trainer.steps, *more


# --- scripts -------------------------------------------------------------------------------------


def with_everything(lab):
    """Early stopping on averaged weights, draws between the calls, a learning rate by hand."""
    meter = Meter()
    draws = Meter()
    trainer = lab.trainer(
        network(), Loss(), ls.OptimizerConfig(ADAMW, scheduler=partial(
            lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=60)),
        ema_decay=0.9, max_grad_norm=1.0, metrics={"accuracy": ls.accuracy},
        stateful={"meter": meter, "draws": draws},
    )  # fmt: skip
    best = math.inf
    bad = 0
    seen = []
    for epoch in range(9):
        meter.load_state_dict({"total": float(epoch), "parts": []})  # it is reset every epoch
        draws.add(torch.rand(()).item())
        for batch in trainer.batches(Pairs(), BATCH, epoch=epoch, num_workers=lab.workers):
            loss = trainer.step(batch)
            meter.add(loss * torch.rand(()).item() + random.random() + numpy.random.rand())
            trainer.log("own loss", loss)
        evaluation = trainer.evaluate(Pairs(16, seed=5), 8, ema=True)
        seen.append((evaluation.loss, evaluation.metrics["accuracy"], trainer.digest()[:8]))
        last = trainer.last_result
        seen.append((last.step, last.epoch, last.loss, last.metrics, last.norm, last.samples))
        trainer.log("own accuracy", evaluation.metrics["accuracy"])
        draws.add(random.random())
        if evaluation.loss < best - 0.01:
            best = evaluation.loss
            trainer.save_weights(f"{lab.folder}/best.safetensors", ema=True)
        else:
            bad += 1
        if bad == 2:
            break
        trainer.optimizer.param_groups[0]["weight_decay"] *= 0.5
    return finish(trainer, best, seen, meter.state_dict(), draws.state_dict(), numpy.random.rand())


def with_a_plateau(lab):
    """A schedule of epochs, a DataLoader, and a stream."""
    loader = DataLoader(Pairs(), BATCH, shuffle=True)
    plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)
    trainer = lab.trainer(network(), None, ls.OptimizerConfig(SGD, scheduler=plateau))
    for epoch in range(EPOCHS):
        if epoch == 1:
            batches = trainer.batches(Stream(), BATCH, epoch=epoch, num_workers=lab.workers)
        else:
            batches = trainer.batches(loader, epoch=epoch)
        for batch in batches:
            trainer.step(batch)
    return finish(trainer, trainer.optimizer.param_groups[0]["lr"])


def with_raw_batches(lab):
    """Steps on batches of the script's own, evaluations between them, and two digests."""
    generator = torch.Generator().manual_seed(2)
    trainer = lab.trainer(network(), None, ADAMW)
    losses = []
    digests = [trainer.digest()]
    for number in range(8):
        inputs = torch.randn(BATCH, 6, generator=generator)
        targets = torch.randint(0, 3, (BATCH,), generator=generator)
        losses.append(trainer.step((inputs, targets)))
        losses.append((trainer.last_result.step, trainer.last_result.loss))
        digests.append(trainer.digest())
        if number % 3 == 1:
            losses.append(trainer.evaluate(Pairs(8), 8).loss)
    assert trainer.folder == Path(lab.folder).absolute()
    return finish(trainer, losses, digests, torch.rand(()).item())


class Judge(nn.Module):
    """A module that a step calls and that its trainer does not train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs):
        return self.layers(inputs)


def with_manual_steps(lab):
    """Steps that the script computes itself, with a module and a loss that have buffers."""
    model = network()
    judge = Judge()
    loss = Loss()
    trainer = lab.trainer(model, loss, extra_modules=[judge])
    for epoch in range(EPOCHS):
        for batch in trainer.batches(Pairs(), BATCH, epoch=epoch):
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    outputs = model(inputs + 0.1 * torch.randn_like(inputs))
                    step.backward(loss(outputs, targets) + judge(outputs).square().mean())
    buffers = [value.tolist() for value in (*judge.buffers(), *loss.buffers())]
    return finish(trainer, buffers)


def with_two_trainers(lab):
    """A GAN: the judge's trainer is registered with the generator's."""
    torch.manual_seed(7)
    generator = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    judge = Judge()
    of_judge = ls.Trainer(judge, None, ADAMW, microbatches=4, extra_modules=[generator])
    trainer = lab.trainer(
        generator, None, ADAMW, extra_modules=[judge], stateful={"judge": of_judge}
    )
    for epoch in range(EPOCHS):
        for batch in trainer.batches(Pairs(), BATCH, epoch=epoch):
            with of_judge.manual_step() as step:
                for inputs, targets in step.microbatches(batch):
                    fake = judge(generator(inputs).detach()).square().mean()
                    real = judge(nn.functional.one_hot(targets, 3).float()) - 1
                    step.backward(fake + real.square().mean())
            with trainer.manual_step() as step:
                for inputs, _ in step.microbatches(batch):
                    step.backward((judge(generator(inputs)) - 1).square().mean())
    return finish(trainer, of_judge.digest(), of_judge.optimizer_digest(), of_judge.steps)


def with_loops_of_all_kinds(lab):
    """Loops in step, a loop that is left, a loop inside a loop, batches that are skipped."""
    meter = Meter()
    trainer = lab.trainer(network(), None, SGD, stateful={"meter": meter})
    first = Pairs()
    second = Pairs(32, seed=9)
    pairs = zip(
        trainer.batches(first, BATCH, epoch=0),
        trainer.batches(second, BATCH, epoch=10, num_workers=lab.workers),
        strict=False,
    )
    for one, two in pairs:
        meter.add(trainer.step(one))
        if len(meter.parts) != 3:
            meter.add(trainer.step(two))
    for batch in trainer.batches(first, BATCH, epoch=1):
        meter.add(trainer.step(batch))
        if trainer.steps == 7:
            break
    for batch in trainer.batches(first, BATCH, epoch=2):
        meter.add(trainer.evaluate(second, 10).loss)
        for inner in trainer.batches(Pairs(16, seed=8), 8, epoch=20):
            meter.add(trainer.step(inner))
        trainer.step(batch)
    return finish(trainer, meter.state_dict())


class Chunks(Dataset):
    """Three chunks of 12 lanes: samples that know their lane."""

    def __len__(self):
        return 36

    def __getitem__(self, index):
        return torch.randn(6), index % 12


def with_lanes(lab):
    """Hidden states of lanes, pairs of batches, and a loss over the whole batch."""
    model = network()
    cell = nn.GRUCell(6, 6)
    lanes = Judge()
    lanes.register_buffer("hidden", torch.zeros(12, 6))
    trainer = lab.trainer(nn.ModuleList([model, cell]), None, SGD, extra_modules=[lanes])

    def encode(data):
        (inputs, lane), _ = data
        return model(cell(inputs, lanes.hidden[lane]))

    for epoch in range(EPOCHS):
        pairs = zip(
            trainer.batches(Chunks(), 12, epoch=epoch, shuffle=False),
            trainer.batches(Pairs(), BATCH, epoch=epoch),
            strict=False,
        )
        for chunks, batch in pairs:
            hidden = []
            with trainer.manual_step() as step:
                assert step.total(lambda data: len(data[1][1]), chunks, batch) == batch.size
                for (inputs, lane), (others, targets) in step.microbatches(chunks, batch):
                    hidden.append(cell(inputs, lanes.hidden[lane]))
                    step.backward(hidden[-1].square().mean(), share=1 / 4)
                    loss = nn.functional.cross_entropy(model(others), targets)
                    step.backward(loss, share=len(others) / batch.size)
                hidden = step.gather(hidden)
            with trainer.manual_step() as step:
                step.backward_whole_batch(encode, lambda rows: (rows @ rows.T).var(), chunks, batch)
            lanes.hidden.copy_(hidden)
    return finish(trainer, lanes.hidden.tolist())


class OfEpochs:
    """A callback with a state, which is registered."""

    def __init__(self):
        self.seen = []

    def on_epoch(self, result):
        self.seen.append((result.epoch, result.loss, result.samples))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def with_half_precision(lab):
    """float16, activation checkpointing, parameter groups, a schedule by evaluations."""

    def groups(name, parameter):
        return {"weight_decay": 0.1 if parameter.dim() > 1 else 0.0}

    callback = OfEpochs()
    optimizer = ls.OptimizerConfig(
        ADAMW, parameter_groups=groups, scheduler_interval="manual",
        scheduler=partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5),
    )  # fmt: skip
    trainer = lab.trainer(
        network(), None, optimizer, autocast_dtype=torch.float16, activation_checkpointing=True,
        callbacks=[callback], stateful={"callback": callback},
    )  # fmt: skip
    scale = trainer.parallel.loss_scale
    scale.interval = 2
    for epoch in range(EPOCHS):
        for batch in trainer.batches(TensorDataset(*vars(Pairs()).values()), BATCH, epoch=epoch):
            trainer.step(batch)
        trainer.scheduler.step(trainer.evaluate(Pairs(8), 8).loss)
    rate = trainer.optimizer.param_groups[0]["lr"]
    return finish(trainer, callback.seen, rate, scale.state_dict())


# --- every boundary, from layout to layout -------------------------------------------------------

ONE_F_ONE_B = {"pipeline": ls.PipelineConfig(stages=2, schedule="1f1b", balance=[3, 4])}
PROFILED = {"pipeline": ls.PipelineConfig(stages=2)}
SHARED = {"storage": "shared"}
ONE, TWO, THREE, FOUR = ((n, None, {}) for n in (1, 2, 3, 4))
GLOO = (2, "gloo", {})
SHARED_BY_2 = (2, None, SHARED)
SHARED_BY_1 = (1, None, SHARED)
STAGES = (2, None, ONE_F_ONE_B)
MEASURED = (2, None, PROFILED)
PAIRS_OF_STAGES = (4, None, PROFILED)
ANY = [STAGES, ONE, MEASURED, TWO, PAIRS_OF_STAGES, THREE, SHARED_BY_2, FOUR, GLOO]
SCRIPTS: list[tuple[Any, Any, int, list[int]]] = [  # script, layouts, steps, interrupted after
    (with_everything, ANY, 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    (with_a_plateau, [TWO, STAGES, SHARED_BY_2], 9, [2, 4, 5, 6, 7, 9]),
    (with_raw_batches, [ONE, MEASURED, TWO], 8, [1, 3, 4, 8]),
    (with_manual_steps, [TWO, SHARED_BY_1, ONE, SHARED_BY_2], 9, [3, 4, 8, 9]),
    (with_two_trainers, [ONE, SHARED_BY_2, TWO], 9, [2, 4, 9]),
    (with_lanes, [TWO, ONE, SHARED_BY_2, THREE], 18, [2, 5, 6, 11, 18]),
    (with_loops_of_all_kinds, [STAGES, TWO, SHARED_BY_2], 16, [2, 3, 5, 6, 7, 8, 9, 10, 16]),
    (with_half_precision, [STAGES, THREE, ONE], 9, [4, 5, 9]),
]


def in_worlds(ranks, cases):
    """Play cases, those of one world in one launch; return rank 0's results by number."""
    worlds: dict[Any, list[int]] = {}
    for number, (world, _) in enumerate(cases):
        worlds.setdefault(world, []).append(number)
    found: dict[int, Any] = {}
    for (n, backend), numbers in worlds.items():
        everywhere = ranks(
            play_all, n, [cases[number][1] for number in numbers], backend=backend, timeout=90
        )
        for each in everywhere[1:]:
            assert str(each) == str(everywhere[0])  # what ranks return is equal everywhere
        found |= zip(numbers, everywhere[0], strict=True)
    return [found[number] for number in range(len(cases))]


def read_losses(folder):
    """Return the losses of steps and epochs in a record, in which every step occurs once."""
    run = read_run(Path(folder))
    assert run.steps.step.tolist() == list(range(len(run.steps)))
    epochs = [{**line, "t": 0, "seconds": 0, "memory_bytes": []} for line in run.epochs]
    logged = {(line["name"], line["step"]): line["value"] for line in run.logged}
    return [value.hex() for value in run.steps.loss.tolist()], epochs, logged


def parts():
    """Return every script twice: some interruptions, the last one too, and the others.

    Those are every third one of a script with many, except of that which uses all layouts, and
    otherwise every second one.
    """
    for script, (function, layouts, _, stops) in enumerate(SCRIPTS):
        name = function.__name__
        last = len(stops) - 1
        period = 3 if len(stops) > 4 and layouts is not ANY else 2
        some = [number for number in range(len(stops)) if (last - number) % period == 0]
        others = [number for number in range(len(stops)) if number not in some]
        yield pytest.param(script, some, id=name)
        yield pytest.param(script, others, id=f"{name}, otherwise", marks=pytest.mark.stress)


@pytest.mark.parametrize(("script", "numbers"), [*parts()])
def test_interrupted_anywhere_and_resumed_in_another_layout(ranks, tmp_path, script, numbers):
    function, layouts, count, stops = SCRIPTS[script]
    chosen = [(number, stops[number]) for number in numbers]
    (expected,) = ranks(play, 1, function, str(tmp_path / "whole"), {})
    assert expected[2] == count
    losses = read_losses(tmp_path / "whole")
    begun = []
    resumed = []
    for number, stop in chosen:
        folder = str(tmp_path / str(stop))
        n, backend, layout = layouts[number % len(layouts)]
        begun.append(((n, backend), (function, folder, layout, stop, False, number % 2)))
        n, backend, layout = layouts[(number + 1 + number // len(layouts)) % len(layouts)]
        resumed.append(((n, backend), (function, folder, layout, 0, True, (number + 1) % 2)))
    assert in_worlds(ranks, begun) == [None] * len(chosen)
    for (_, stop), found in zip(chosen, in_worlds(ranks, resumed), strict=True):
        where = f"{function.__name__} after {stop} steps"
        assert found == expected, where
        folder = tmp_path / str(stop)
        assert read_losses(folder) == losses, where
        lines = map(json.loads, (folder / "record.jsonl").read_text().splitlines())
        (line,) = [line for line in lines if line["kind"] == "resume"]
        assert line["step"] < stop, where  # some of its work was lost
        assert len(find_checkpoints(folder / "checkpoints")) <= 2
        best = tmp_path / "whole" / "best.safetensors"
        if best.exists():
            assert (folder / "best.safetensors").read_bytes() == best.read_bytes()


# --- killed at any moment -----------------------------------------------------------------------

POINTS = [
    "forward", "backward", "evaluation", "exchange", "reduction", "update", "committed",
    "copying", "writing", "renaming", "renamed",
]  # fmt: skip


class Trap:
    """Kills all ranks and their loader workers at a point of the first step from some step on."""

    def __init__(self, step=0, point="never"):
        self.step = step
        self.point = point
        self._trainer: Any = None
        self._pids: list[int] = []

    def set(self, trainer):
        """Set the trap in this process, which trains once."""
        self._trainer = trainer
        here = str(os.getpid()).encode()
        self._pids = [int(each) for each in all_gather_bytes(here, "a test", dist.group.WORLD)]
        Probe.trap = self
        writer = trainer._run._checkpoints.writer
        for owner, name, before, after in (
            (trainer._steps.optimizer_step, "exchange_statuses", "exchange", ""),
            (GradientReducer, "reduce", "reduction", ""),
            (trainer.engine.setup.optimization, "step", "update", "committed"),
            (writer, "_copy", "copying", ""),
            (writer_module, "_write_files", "writing", ""),
            (writer_module, "_complete", "renaming", "renamed"),
        ):
            setattr(owner, name, self._watch(getattr(owner, name), before, after))

    def reach(self, point):
        """Note that the training has come to a point."""
        if point != self.point or self._trainer is None or self._trainer.steps < self.step:
            return
        others = [psutil.Process(pid) for pid in self._pids if pid != os.getpid()]
        workers = [each for pid in self._pids for each in psutil.Process(pid).children()]
        for each in (*others, *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def _watch(self, function, before, after):
        def call(*arguments, **options):
            self.reach(before)
            result = function(*arguments, **options)
            self.reach(after)
            return result

        return call


class Places:
    """The batches that were trained, in order."""

    def __init__(self):
        self.places = []

    def state_dict(self):
        return {"places": list(self.places)}

    def load_state_dict(self, state):
        self.places = list(state["places"])


def of_a_user(lab):
    """Loader workers, a schedule, averaged weights, batch norm, early stopping."""
    trained = Places()
    schedule = partial(lr_scheduler.StepLR, step_size=2, gamma=0.7)
    trainer = lab.trainer(
        network(), Loss(),
        ls.OptimizerConfig(ADAMW, scheduler=schedule, scheduler_interval="epoch"),
        ema_decay=0.9, max_grad_norm=1.0, stateful={"trained": trained},
    )  # fmt: skip
    best = math.inf
    bad = 0
    for epoch in range(12):
        for batch in trainer.batches(Pairs(48), BATCH, epoch=epoch, num_workers=lab.workers):
            trainer.step(batch)
            trained.places.append((batch.epoch, batch.identity.position))
        loss = trainer.evaluate(Pairs(16, seed=5), 8, ema=True).loss
        if loss < best - 0.001:
            best = loss
            trainer.save_weights(f"{lab.folder}/best.safetensors", ema=True)
        else:
            bad += 1
        if bad == 3:
            break
    return finish(trainer, best, trained.places)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [18, 81])
def test_everything_is_killed_at_random_moments(ranks, tmp_path, seed):
    """Each run is resumed in another layout, and a third of them is killed again before."""
    draw = random.Random(seed)
    script = of_a_user
    whole = str(tmp_path / "whole")
    (expected,) = ranks(play, 1, script, whole, {}, 0, False, 0, Trap())
    losses = read_losses(whole)
    places = expected[-1]
    assert places == sorted(set(places))
    assert len(places) == expected[2] > 16
    for number, point in enumerate(POINTS):
        folder = str(tmp_path / str(number))
        step = draw.randrange(0, expected[2] - 6)
        kills = [(step, point)]
        if number % 3 == 0:
            kills.append((draw.randrange(step, expected[2] - 4), draw.choice(POINTS)))
        layouts = draw.sample(ANY, len(kills) + 1)
        for again, (kill, (n, backend, layout)) in enumerate(zip(kills, layouts, strict=False)):
            workers = draw.randrange(3)
            trap = Trap(*kill)
            with pytest.raises(RankError, match="SIGKILL"):
                ranks(play, n, script, folder, layout, 0, again > 0, workers, trap, backend=backend)
        n, backend, layout = layouts[-1]
        workers = draw.randrange(3)
        found = ranks(play, n, script, folder, layout, 0, True, workers, Trap(), backend=backend)
        where = f"{script.__name__}, {number}: {kills} in {layouts}"
        assert all(each == expected for each in found), where
        assert read_losses(folder) == losses, where


# --- loops with `ls.exact` -----------------------------------------------------------------------


def with_two_loops(folder, stop, is_resumed):
    """A GAN of two handles, the last step of one of which is counted at its next call."""
    torch.manual_seed(7)
    model = nn.Linear(6, 3)
    other = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3))
    first = torch.optim.SGD(model.parameters(), 0.1)
    second = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    of_other = ls.exact(other, second, 2)
    checkpoint = ls.CheckpointConfig(every_steps=1, stateful={"other": of_other})
    exact = ls.exact(model, first, 2, loggers=folder, checkpoint=checkpoint)
    if is_resumed:
        exact.resume()
    for batch in exact.batches(Pairs(), BATCH, epoch=0):
        if exact.steps == stop:
            exact._run._checkpoints.writer.wait()
            return None
        for inputs, targets in batch:
            batch.backward(nn.functional.cross_entropy(model(inputs), targets))
        first.step()
        first.zero_grad()
        same = of_other.use(batch)
        for inputs, _ in same:
            same.backward(other(torch.randn(len(inputs), 3)).square().mean())
        second.step()
        second.zero_grad()
    exact.finish()
    return exact.digest(), of_other.digest(), of_other.steps


@pytest.mark.usefixtures("world_of_one")
def test_a_handle_that_another_one_saves_continues_after_its_last_step(tmp_path):
    whole = with_two_loops(tmp_path / "whole", 9, False)
    with_two_loops(tmp_path / "resumed", 1, False)
    assert with_two_loops(tmp_path / "resumed", 9, True) == whole


@pytest.mark.usefixtures("world_of_one")
def test_a_registered_handle_needs_its_optimizers():
    other = ls.exact(nn.Linear(6, 3), microbatches=2)
    model = nn.Linear(6, 3)
    checkpoint = ls.CheckpointConfig(stateful={"other": other})
    with pytest.raises(ls.LockstepError, match=r"stateful\['other'\] .* without optimizers"):
        ls.exact(model, SGD(model.parameters()), 2, checkpoint=checkpoint)
