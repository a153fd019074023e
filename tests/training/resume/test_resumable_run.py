"""What resuming refuses and says; stopping on request; failures beside a checkpoint."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
import warm
from lockstep.checkpoint import writer as writer_module
from lockstep.checkpoint.folder import find_checkpoints
from lockstep.checkpoint.stop_request import StoppedOnRequest
from lockstep.elastic.restart_source import RestartSource
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.launcher import tracebacks
from lockstep.launcher.rank_process import describe_error, take_failure_at_exit
from lockstep.record.reader import read_run
from lockstep.training.resume import unset_variables

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DEADLINE = 60.0


def data(samples=48):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def network(width=8):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3))


def build(folder, *, place=None, resume=True, model=None, optimizer=SGD, loss=None, **options):
    """Return a trainer that saves after every second step, resumed unless told otherwise."""
    every = options.pop("every", 2)
    stateful = options.pop("stateful", {})

    def wait(result):
        """Wait for the last checkpoint, so that those that are due do not depend on the disk."""
        trainer._run._checkpoints.writer.wait()

    if not options.pop("is_asynchronous", False):
        options["callbacks"] = [wait]
    trainer = ls.Trainer(
        model or network(), loss or nn.CrossEntropyLoss(), optimizer, **options,
        checkpoint=ls.CheckpointConfig(every_steps=every, keep=9, folder=folder, stateful=stateful),
    )  # fmt: skip
    if resume:
        trainer.resume(place)
    return trainer


def train(trainer, epochs=2, size=16, **options):
    """Train epochs of 3 steps, each with an evaluation; return the outcome."""
    for epoch in range(epochs):
        for batch in trainer.batches(data(), size, epoch=epoch, **options):
            trainer.step(batch)
        trainer.evaluate(data(16), 16)
    trainer.finish()
    return trainer.digest(), trainer.optimizer_digest(), trainer.steps


def message(function):
    """Return the type and text of the error that a function raises on this rank."""
    try:
        function()
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.usefixtures("world_of_one")
def test_an_iterator_that_outlives_its_loop_is_refused(tmp_path):
    """A resumed run would have begun it again, in the epoch of the outer loop."""
    trainer = build(tmp_path / "run", resume=False)
    more = iter(trainer.batches(data(96), 16, epoch=9))
    for epoch in range(2):
        for batch in trainer.batches(data(), 16, epoch=epoch):
            trainer.step(batch)
            if epoch == 0:
                trainer.step(next(more))
                continue
            with pytest.raises(UsageError, match="epoch 9 began inside of a loop over other"):
                next(more)
            break
    trainer.finish()
    assert trainer.steps == 7


def copies(tmp_path, names):
    return {name: shutil.copytree(tmp_path / "run", tmp_path / name) for name in names}


class Count:
    """What a script registers: a number, which need not be the same on every rank."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def save_with_objects(folder):
    other = ls.Trainer(network(), None, SGD, loggers=[])
    with other.manual_step() as step:
        for (inputs,) in step.microbatches((torch.ones(8, 6),)):
            step.backward(other.model(inputs).square().mean())
    same = Count(1)
    different = Count(ls.rank())
    stateful = {"other": other, "same": same, "different": different}
    trainer = build(folder, resume=False, stateful=stateful)
    for batch in trainer.batches(data(), 16):
        trainer.step(batch)


def test_an_object_that_differs_between_ranks_is_named(tmp_path, ranks, capfd):
    """The times that a registered trainer has measured may differ."""
    ranks(save_with_objects, 2, tmp_path)
    said = [line for line in capfd.readouterr().err.splitlines() if "a different state" in line]
    assert len(said) == 1
    assert "stateful['different'] has a different state on another rank than on rank 0" in said[0]


def test_what_cannot_be_resumed_is_named_on_every_rank(ranks, tmp_path):
    ranks(lambda: train(build(tmp_path / "run", resume=False), 1), 1)

    def evaluate_first(trainer):
        trainer.evaluate(data(16), 16)

    def resume_late(folder):
        trainer = build(folder, place=None)
        list(trainer.batches(data(), 16))
        trainer.resume()

    def in_turns(folder):
        first = build(folder / "a", resume=False)
        second = build(folder / "b", resume=False)
        batch = next(iter(first.batches(data(), 16)))
        second.step(batch)
        first.step(batch)

    adam = partial(torch.optim.Adam, lr=0.1)
    cases: dict[str, tuple[Any, str]] = {
        "optimizer": (lambda f: build(f, optimizer=adam), "optimizer is torch.optim.adam.Adam"),
        "other call": (
            lambda f: evaluate_first(build(f)),
            "the script evaluates on 16 samples where the interrupted run iterates over batches",
        ),
        "too early": (lambda f: build(f).finish(), "UsageError: the script ended before the point"),
        "late": (resume_late, "UsageError: resume before the first call of batches()"),
        "nowhere": (lambda f: build(f, place="no/where"), "there is no run and no checkpoint at"),
        "in turns": (in_turns, "UsageError: two trainers with checkpoint= take turns"),
        "unsaved": (
            lambda f: build(f / "new", resume=False, stateful={"odd": Odd()}),
            "UsageError: stateful.odd.parts.0 is a builtins.object, which a checkpoint cannot",
        ),
        "without": (
            lambda f: ls.Trainer(network(), nn.CrossEntropyLoss(), SGD).resume(),
            "resume() needs the folder and the objects of checkpoints: pass",
        ),
    }  # fmt: skip
    folders = copies(tmp_path, cases)

    def try_all():
        return {name: message(lambda: run(folders[name])) for name, (run, _) in cases.items()}  # noqa: B023

    for found in ranks(try_all, 2):
        for name, (_, words) in cases.items():
            assert words in found[name], name


@pytest.mark.usefixtures("world_of_one")
def test_a_resumed_script_with_fewer_epochs_gets_no_digest_of_another_step(tmp_path, capfd):
    """Neither does its record."""
    folder = tmp_path / "run"

    def train_epoch(trainer, epoch):
        for batch in trainer.batches(data(), 16, epoch=epoch):
            trainer.step(batch)

    first = build(folder, resume=False, loggers=folder)
    train_epoch(first, 0)
    recorded = first.digest()
    train_epoch(first, 1)
    first.finish()

    resumed = build(folder, loggers=folder)
    train_epoch(resumed, 0)
    assert (resumed.steps, resumed.digest()) == (3, recorded)
    with pytest.raises(UsageError) as error:
        resumed.optimizer_digest()
    assert str(error.value).startswith(
        "optimizer_digest() was not called here by rank 0 of the interrupted run, which "
        "iterates over batches of epoch 1 next, "
    )
    resumed.engine.end.finish_alone("done", None)
    record = read_run(folder)
    assert record.state == "failed"
    assert "digest" not in record.end
    assert record.end["message"].startswith("the script ended before the point of the interruption")
    assert record.end["message"] in capfd.readouterr().err

    lost = [{"member": 0, "signal": 9}]
    resumed._run._origin = RestartSource(1, lost, [1], [], noticed=1.0, interrupted=1.0)
    assert resumed.optimizer_digest() == first.optimizer_digest()  # asked by the lost rank alone
    assert "known only to a process that was lost: this is the one after 6" in (
        capfd.readouterr().err
    )
    resumed._run._checkpoints.close()


class Odd:
    """Has a state that cannot be saved."""

    def state_dict(self):
        return {"parts": [object()]}

    def load_state_dict(self, state):
        raise AssertionError


def test_damaged_and_older_checkpoints(ranks, tmp_path, capfd):
    expected = ranks(lambda: train(build(tmp_path / "run", resume=False)), 1)[0]
    names = {"one", "older", "all", "longer"}
    folders = copies(tmp_path, names)
    steps = [path.name for path in find_checkpoints(folders["one"] / "checkpoints")]
    assert steps == ["step-6-2", "step-6", "step-4", "step-2"]
    for name in steps[:2]:
        (folders["one"] / "checkpoints" / name / "model.safetensors").write_bytes(b"x")
    for name in steps:
        (folders["all"] / "checkpoints" / name / "state.json").unlink()

    def resume():
        outcomes = {"one": train(build(folders["one"]))}
        older = folders["older"] / "checkpoints"
        outcomes["older"] = train(build(folders["older"], place=older / "step-2"))
        return outcomes, message(lambda: build(folders["all"]))

    for outcomes, said in ranks(resume, 2):
        assert outcomes == {"one": expected, "older": expected}
        assert said.startswith(
            f"FileError: every checkpoint in {folders['all']}/checkpoints is dam"
        )
    shown = capfd.readouterr().err
    assert "step-6-2 is damaged: the size of model.safetensors differs; the one before" in shown
    assert "renamed to step-6-2.superseded, step-6.superseded; remove them if you" in shown
    older = {path.name for path in (folders["older"] / "checkpoints").iterdir()}
    assert {"step-6-2.superseded", "step-6.superseded", "step-4.superseded", "step-6"} < older

    longer = ranks(lambda: train(build(folders["longer"]), 3), 1)[0]
    assert longer == ranks(lambda: train(build(tmp_path / "whole", resume=False), 3), 1)[0]


def test_differences_are_said_and_recorded(ranks, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    ranks(lambda: train(build(folder, resume=False, loggers=folder), 1), 1)

    def resume():
        quicker = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
        trainer = build(folder, optimizer=quicker, loggers=folder, max_grad_norm=9.0)
        rate = trainer.optimizer.param_groups[0]["lr"]
        train(trainer, 2)
        return rate

    assert ranks(resume, 2) == [0.1, 0.1]
    lines = map(json.loads, (folder / "record.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if line["kind"] == "resume"]
    assert line["step"] == 3
    assert "max_grad_norm is 9.0, it was None" in line["differences"]
    assert any(
        "lr is 0.5, it was 0.1 (the checkpoint's is used; " in x for x in line["differences"]
    )


# --- failures beside a checkpoint ---------------------------------------------------------------


def fail_while_writing(folder, how):
    """Train until the fifth step fails while the checkpoint of the fourth is being written."""
    written = threading.Event()

    def write_until_given_up(*arguments):
        written.set()
        check = arguments[-1]
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            check()

    class Failing(nn.Module):
        def forward(self, outputs, targets):
            if trainer.steps == 4 and ls.rank() == 0:
                assert written.wait(DEADLINE)
                if how == "raises":
                    raise ValueError("no")
                outputs = outputs * float("nan")
            return nn.functional.cross_entropy(outputs, targets)

    trainer = build(folder, resume=False, loss=Failing(), is_asynchronous=True)
    try:
        for epoch in range(2):
            for batch in trainer.batches(data(), 16, epoch=epoch):
                trainer.step(batch)
                if trainer.steps == 3 and ls.rank() == 0:
                    trainer._run._checkpoints.writer.wait()
                    writer_module._complete = write_until_given_up
    except Exception as error:
        return type(error).__name__, sorted(
            each.name for each in (folder / "checkpoints").iterdir()
        )
    return "nothing was raised", []


@pytest.mark.parametrize("how", ["not finite", "raises"])
def test_a_checkpoint_that_is_written_while_a_step_fails_is_given_up(ranks, tmp_path, how):
    assert ranks(fail_while_writing, 1, tmp_path / how, how) == [("LossError", ["step-2"])]


def test_a_finished_run_can_be_trained_longer_whatever_follows_its_loop(ranks, tmp_path, capfd):
    """The weights are saved again, and the bits are those of a long run from the beginning."""

    def run(folder, epochs):
        trainer = build(folder, loggers=folder)
        for epoch in range(epochs):
            for batch in trainer.batches(data(), 16, epoch=epoch):
                trainer.step(batch)
        trainer.save_weights(tmp_path / "weights.safetensors")
        evaluation = trainer.evaluate(data(), 16)
        trainer.finish()
        return trainer.digest(), evaluation, trainer.steps

    assert ranks(run, 2, tmp_path / "run", 1)[0][2] == 3
    assert ranks(run, 2, tmp_path / "run", 2) == ranks(run, 2, tmp_path / "longer", 2)
    printed = capfd.readouterr().err
    note = "the script trains longer than the interrupted run, which saves weights here"
    assert printed.count(note) == 1


class Epochs:
    """Counts the calls that follow each epoch."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def change_after_epochs(folder, epochs, kind):
    """Change the weights, a registered object and the generators after each epoch."""
    model = network()
    epoch_count = Epochs()
    optimizer = SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if kind == "exact":
        checkpoint = ls.CheckpointConfig(folder=folder)
        objects = {"epochs": epoch_count}
        trainer = ls.exact(model, optimizer, 4, scheduler=scheduler, stateful=objects,
                           checkpoint=checkpoint)  # fmt: skip
        trainer.resume()
    else:
        trainer = build(folder, model=model, stateful={"epochs": epoch_count})
    torch.manual_seed(3)
    for epoch in range(epochs):
        if kind == "exact":
            for batch in trainer.batches(data(), 16, epoch=epoch):
                for inputs, targets in batch:
                    batch.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        elif kind == "steps":
            for inputs in torch.ones(2, 16, 6):
                trainer.step((inputs, torch.zeros(16, dtype=torch.long)))
        else:
            for batch in trainer.batches(data(), 16, epoch=epoch):
                trainer.step(batch)
        with torch.no_grad():
            model[0].weight.add_(torch.randn(8, 6), alpha=0.1)
        epoch_count.count += 1
    trainer.finish()
    rate = optimizer.param_groups[0]["lr"]
    return trainer.digest(), trainer.optimizer_digest(), epoch_count.count, rate, torch.rand(())


@pytest.mark.parametrize("kind", ["exact", "batches", "steps"])
def test_what_follows_the_last_epoch_of_a_finished_run_counts_once(ranks, tmp_path, kind):
    def run(name, epochs):
        return change_after_epochs(tmp_path / name, epochs, kind)

    whole = ranks(run, 2, "whole", 2)
    assert ranks(run, 2, "run", 1) != whole
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    assert ranks(run, 2, "run", 2) == whole
    once = ranks(run, 2, "once", 1)
    assert [ranks(run, 2, "again", 1) for _ in range(2)] == [once, once]
    assert ranks(run, 1, "again", 2) == whole[:1]


@pytest.mark.usefixtures("world_of_one")
def test_a_script_may_change_the_state_before_it_trains_longer(tmp_path, capsys):
    """The first run has changed nothing after its last epoch, so nothing counts twice."""

    def run(epochs):
        epoch_count = Epochs()
        trainer = build(tmp_path / "run", stateful={"epochs": epoch_count})
        for epoch in range(epochs):
            if epoch == 1:
                epoch_count.count = 7
            for batch in trainer.batches(data(), 16, epoch=epoch):
                trainer.step(batch)
        trainer.finish()
        return epoch_count.count

    assert (run(1), run(2)) == (0, 7)
    assert "restored" not in capsys.readouterr().err


def test_a_full_disk_ends_no_training(ranks, tmp_path):
    def run():
        trainer = build(tmp_path / "run", model=network(4000), loggers=tmp_path / "run")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for batch in trainer.batches(data(), 16):
            trainer._run._checkpoints.writer.wait()  # for the checkpoint before this batch
            full = trainer.steps == 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if full else before[0], before[1]))
            trainer.step(batch)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        trainer.finish()
        return trainer.steps

    def fill():
        trainer = build(tmp_path / "full", model=network(4000), loggers=tmp_path / "full")
        train_one(trainer)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        trainer.finish()  # the rest of the script may be able to do without the disk
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return str(take_failure_at_exit())

    def train_one(trainer):
        for batch in trainer.batches(data(16), 16):
            trainer.step(batch)

    assert ranks(run, 2) == [3, 3]
    assert [each.name for each in find_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-3"]
    lines = map(json.loads, (tmp_path / "run" / "record.jsonl").read_text().splitlines())
    (warning,) = [line["message"] for line in lines if line["kind"] == "warning"]
    assert warning.startswith("no checkpoint after step 2 (File too large); training continues")
    assert read_run(tmp_path / "run").state == "done"
    for said in ranks(fill, 2):  # the last one is an error on every rank, once all is recorded
        assert said.startswith("rank 0: the checkpoint after step 1 could not be written")
    full = read_run(tmp_path / "full")
    assert full.state == "failed"
    (warning,) = full.warnings
    assert warning["message"] == (
        "no checkpoint after step 1 (File too large); the script continues, and its process exits "
        "with status 1, and there is no other one"
    )


FULL_DISK = """
import resource, sys
from functools import partial
import torch
import lockstep as ls

ls.init()
config = ls.CheckpointConfig(every_steps=100)
loss, optimizer = torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1)
trainer = ls.Trainer(
    torch.nn.Linear(200, 200), loss, optimizer, microbatches=2, checkpoint=config,
    loggers="run", progress=False,
)
trainer.step((torch.ones(4, 200), torch.ones(4, 200)))
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
trainer.finish()
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print("the rest of the script")
"""


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_full_disk_at_the_end_is_the_exit_status_of_a_script_that_goes_on(tmp_path, is_launched):
    (tmp_path / "train.py").write_text(FULL_DISK)
    options: dict[str, Any] = {"timeout": 120, "cwd": tmp_path, "text": True}
    if is_launched:
        done = warm.run([*warm.LOCKSTEP, "run", "-n", "1", "train.py"], **options)
    else:  # the status is set after the last handler of the interpreter
        done = subprocess.run([sys.executable, "train.py"], capture_output=True, **options)
    assert done.returncode == 1, done.stderr
    assert "the rest of the script" in done.stdout
    assert "no checkpoint after step 1 (File too large); the script continues" in done.stderr
    assert "Traceback" not in done.stderr
    if is_launched:
        assert "the checkpoint after step 1 could not be written to" in done.stderr


# --- stopping on request ------------------------------------------------------------------------


class Drawn(Dataset):
    """Samples that draw noise when they are loaded."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        inputs, target = data()[index]
        return inputs + 0.1 * torch.randn(6), target


def stop_while(folder, layout, when, is_resumed):
    """Train; a SIGTERM comes to one rank in the fifth step, or as `when` says."""
    own = os.getpid()

    def terminate():
        sender = 0 if when == "writing" else ls.world_size() - 1
        if trainer.resumed_from is None and ls.rank() == sender:
            os.kill(own, signal.SIGTERM)

    class Sender(nn.Module):
        """Sends the signal while it computes."""

        def forward(self, inputs):
            is_now = trainer.steps == 4 and when in ("step", "workers")
            if when == "evaluation":
                is_now = trainer.steps == 3 and not self.training
            if is_now:
                terminate()
                if when == "workers" and trainer.resumed_from is None:
                    workers = [str(each.pid) for each in psutil.Process().children()]
                    assert len(workers) == 2
                    subprocess.run(["kill", "-TERM", *workers], check=True)
            return inputs

    def send_and_write(*arguments, **options):
        terminate()
        return write_files(*arguments, **options)

    write_files = writer_module._write_files
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3), Sender())
    trainer = build(folder, resume=is_resumed, model=model, loggers=folder, **layout)
    if when == "writing":
        writer_module._write_files = send_and_write
    try:
        for epoch in range(2):
            workers = 2 if when == "workers" else 0
            for batch in trainer.batches(Drawn(), 16, epoch=epoch, num_workers=workers):
                trainer.step(batch)
            trainer.evaluate(data(16), 16)
    except StoppedOnRequest as stop:
        return stop.code, trainer.steps, str(stop)
    finally:
        writer_module._write_files = write_files
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trainer.finish()
    return trainer.digest(), trainer.optimizer_digest(), trainer.steps


STAGES = {"pipeline": ls.PipelineConfig(stages=2, balance=[2, 2])}


def test_on_sigterm_every_rank_saves_and_exits_with_status_75(ranks, tmp_path):
    cases = [("step", 5), ("evaluation", 3), ("writing", None), ("workers", 5)]
    layouts: list[Any] = [{}, STAGES, {}, {}]

    def stop_all(is_resumed, order):
        return [
            stop_while(tmp_path / when, layouts[number * order], when, is_resumed)
            for number, (when, _) in enumerate(cases)
        ]

    whole = ranks(stop_while, 1, tmp_path / "whole", {}, "never", False)[0]
    for found in ranks(stop_all, 2, False, 1):
        for (when, step), (status, steps, said) in zip(cases, found, strict=True):
            assert status == 75, when
            assert steps == step or step is None, when
            assert said.startswith(f"stopped on request after step {steps}")
    for when, _ in cases:
        assert read_run(tmp_path / when).state == "stopped"
    for found in ranks(stop_all, 3, True, 0):
        assert found == [whole] * len(cases)


class Unusual(nn.Module):
    """Has what a checkpoint stores otherwise than a state dict has it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.tied = self.body[0].weight
        image = torch.randn(1, 4, 3, 3).contiguous(memory_format=torch.channels_last)
        self.register_buffer("image", image)
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("coarse", torch.randn(5).bfloat16())

    def get_extra_state(self):
        return 0.5

    def set_extra_state(self, state):
        assert state == 0.5

    def forward(self, inputs):
        return self.body(inputs)


def test_a_checkpoint_is_recorded_with_its_digest(ranks, world_of_one, tmp_path):
    torch.manual_seed(2)
    trainer = build(tmp_path / "run", model=Unusual(), resume=False, every=1)
    digests = []
    for batch in trainer.batches(data(), 16):
        trainer._run._checkpoints.writer.wait()  # while it writes, none is due
        trainer.step(batch)
        digests.append(trainer.digest())
    trainer.finish()
    found = {line["step"]: line["digest"] for line in read_run(tmp_path / "run").checkpoints}
    assert found == dict(enumerate(digests, 1))
    assert len({*digests}) == 3

    def train_in_stages():
        train(build(tmp_path / "stages", pipeline=ls.PipelineConfig(2, balance=[2, 1])))

    ranks(train_in_stages, 2)
    checkpoints = read_run(tmp_path / "stages").checkpoints
    assert {line["digest"] for line in checkpoints} == {None}, "each stage wrote its part"


SKIPPED = """
import sys, torch, lockstep as ls
from functools import partial
from torch.utils.data import TensorDataset
ls.init()
torch.manual_seed(1)
data = TensorDataset(torch.ones(8, 2), torch.ones(8, 2))
trainer = ls.Trainer(
    torch.nn.Linear(2, 2), torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1),
    loggers="run", checkpoint=ls.CheckpointConfig(), progress=False,
)
trainer.resume()
for epoch in range(2):
    for batch in trainer.batches(data, 4, epoch=epoch):
        loss = trainer.step(batch)
    if not trainer.is_replaying:
        print(epoch, trainer.last_result.loss)
trainer.finish()
print(unknown if len(sys.argv) > 1 else loss)
"""


def test_a_variable_that_a_finished_epoch_does_not_set_is_explained(tmp_path):
    """Without the note, `NameError: name 'loss' is not defined` blames a correct script."""
    command = [sys.executable, "-c", SKIPPED]
    first, again = (warm.run(command, cwd=tmp_path, text=True, timeout=60) for _ in range(2))
    typo = warm.run([*command, "typo"], cwd=tmp_path, text=True, timeout=60)
    lines = first.stdout.splitlines()
    assert first.returncode == 0, first.stderr
    assert [line[0] for line in lines[:2]] == ["0", "1"]
    assert again.stdout.splitlines() == lines[1:2]  # those of earlier epochs are not repeated
    said = again.stderr.replace("[rank0]: ", "")
    assert "NameError: name 'loss' is not defined\nthe run was resumed, and epoch 0" in said
    assert "write trainer.last_result.loss" in said
    assert "NameError: name 'unknown'" in typo.stderr
    assert "resumed, and" not in typo.stderr


def test_a_variable_that_is_not_set_is_found_without_the_message(monkeypatch):
    def train(batches):
        for loss in batches:
            print(loss)
        return loss

    monkeypatch.setattr(unset_variables, "_first", [0])
    with pytest.raises(UnboundLocalError) as raised:
        train([])
    raised.value.args = ("reworded",)
    assert "has not set 'loss'" in unset_variables._explain(raised.value)


def test_a_launcher_reports_the_notes_of_an_error(monkeypatch):
    monkeypatch.setattr(tracebacks, "explanations", [lambda error: f"note on {error}"])
    report = describe_error(NameError("x"))
    assert report["message"] == "x\nnote on x"
    assert report["traceback"].endswith("NameError: x\nnote on x\n")
