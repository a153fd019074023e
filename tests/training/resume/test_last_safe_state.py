"""What a rank hands over, at once or at its next safe point, and who continues from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.checkpoint.folder import find_checkpoints
from lockstep.elastic.restart_source import RestartSource, find_restart_source
from lockstep.launcher.environment import HANDOVER, ROUND
from lockstep.launcher.run_folder import RESUME
from lockstep.record.reader import read_run
from lockstep.training import state as training_state
from lockstep.training.resume import last_safe_state
from processes import restoring_handlers

ADAMW = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(autouse=True)
def as_if_processes_ended():
    """Restore the handlers of trainers that are left in the middle of a training."""
    with restoring_handlers():
        yield


def begin_process():
    """Let a script find what it would in a new process."""
    last_safe_state._made = 0
    last_safe_state._known.clear()
    training_state._trainers = 0


class Replaced(BaseException):
    """Ends a script as if its process exited."""


class Member:
    """Stands for this process in an elastic run: steps are its operations."""

    def __init__(self):
        self.transfer_folder = None
        self.trainer = None

    @property
    def operation(self):
        return self.trainer.steps

    def leave(self):
        raise Replaced


class Meter:
    def __init__(self):
        self.total = 0.0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def data(samples=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def train(folder, member, lose=lambda steps, trainer: None, *, checkpoint=None):
    """Train two epochs on batches of 10; `lose` is called before each step, and after it."""
    begin_process()
    torch.manual_seed(11)
    trainer = ls.Trainer(
        network(), nn.CrossEntropyLoss(), ADAMW, microbatches=4, loggers=folder, ema_decay=0.9,
        checkpoint=checkpoint, progress=False,
    )  # fmt: skip
    member.trainer = trainer
    trainer._run.safe_points.take_part(member, trainer._run)
    drawn = {}
    seen = []
    for epoch in range(2):
        for batch in trainer.batches(data(), 10, epoch=epoch):
            drawn[trainer.steps] = torch.rand(()).item()
            lose("before", trainer)
            trainer.step(batch)
            lose("after", trainer)
        seen.append(trainer.evaluate(data(16, seed=2), 8).loss)
    loose = data(8, seed=3)[:]
    lose("outside", trainer)
    seen.append(trainer.step(loose))
    trainer.finish()
    return trainer.digest(), trainer.optimizer_digest(), trainer.steps, seen, drawn


def set_origin(monkeypatch, state=None):
    origin = RestartSource(2, [{"member": 1, "signal": 9}], [2], [0], 5.0, 4.5, [0], state)
    for name, value in {**origin.variables(), RESUME: "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("moment", "steps"), [("before", 5), ("after", 5), ("outside", 8)])
def test_what_is_handed_over_continues_with_the_same_bits(
    world_of_one, tmp_path, monkeypatch, capsys, moment, steps
):
    """Undone before a step; committed, and written at the next safe point; outside of loops."""
    expected = train(tmp_path / "undisturbed", Member())
    member = Member()
    state = tmp_path / "state"
    state.mkdir()

    def lose(at, trainer):
        if (at, trainer.steps) == (moment, steps):
            if moment == "after":  # the step was committed: the rest of the body is executed
                member.transfer_folder = state
            else:
                assert trainer._run.safe_points.can_transfer_state
                trainer._run.safe_points.transfer_state(state)
                raise Replaced

    with pytest.raises(Replaced):
        train(tmp_path / "run", member, lose)
    assert [path.name for path in find_checkpoints(state)] == [f"step-{steps}"]

    set_origin(monkeypatch, state)
    digest, optimizer, count, seen, drawn = train(tmp_path / "run", Member())
    assert (digest, optimizer, count, seen) == expected[:4]
    assert drawn == {step: expected[4][step] for step in range(steps, 8)}
    assert (
        f"round 2 continues from step {steps}, handed over by member 0" in capsys.readouterr().err
    )
    run = read_run(tmp_path / "run")
    assert [line["step"] for line in run.rounds] == [steps]
    assert run.rounds[0]["lost"] == [{"member": 1, "signal": 9}]
    assert run.steps.step.tolist() == list(range(9))
    assert run.end["digest"] == digest
    assert not (tmp_path / "run-2").exists()


def test_what_the_script_changes_before_a_step_prevents_the_hand_over(world_of_one, tmp_path):
    """The new processes would execute the whole body: what it has done would be done twice."""
    meter = Meter()
    possible = []
    config = ls.CheckpointConfig(stateful={"meter": meter})

    def lose(at, trainer):
        run = trainer._run.safe_points
        if at != "before":
            possible.append((at, trainer.steps, run.can_transfer_state))
            return
        assert run.can_transfer_state
        if trainer.steps == 1:
            meter.total += 1
            assert not run.can_transfer_state
        if trainer.steps == 2:
            trainer.optimizer.param_groups[0]["lr"] *= 0.5
            assert not run.can_transfer_state
        if trainer.steps == 3:
            with torch.no_grad():
                trainer.module[0].weight.mul_(0.5)
            assert not run.can_transfer_state
        if trainer.steps == 4:
            trainer.model[2].p *= 0.5
            assert not run.can_transfer_state
        if trainer.steps == 5:
            trainer.optimizer.state[trainer.module[0].weight]["exp_avg"].mul_(0.5)
            assert not run.can_transfer_state
        if trainer.steps == 6:
            trainer.optimizer.state.clear()
            assert not run.can_transfer_state

    train(tmp_path / "run", Member(), lose, checkpoint=config)
    assert possible == [("after", step, False) for step in range(1, 9)] + [("outside", 8, True)]


def test_a_second_trainer_must_be_registered(world_of_one, tmp_path, monkeypatch):
    """Its calls cannot be answered; registered, its state is a part of the other's."""
    member = Member()
    state = tmp_path / "state"
    state.mkdir()

    def build(is_registered, **options):
        begin_process()
        other = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), ADAMW, loggers=[], **options)
        stateful = {"other": other} if is_registered else {}
        config = ls.CheckpointConfig(folder=tmp_path / "run", stateful=stateful)
        trainer = ls.Trainer(
            network(), nn.CrossEntropyLoss(), ADAMW, loggers=[], checkpoint=config, progress=False
        )
        member.trainer = trainer
        other._run.safe_points.take_part(member, other._run)
        trainer._run.safe_points.take_part(member, trainer._run)
        return trainer, other

    trainer, other = build(is_registered=False)
    for _ in trainer.batches(data(), 20):
        assert not trainer._run.safe_points.can_transfer_state
    trainer.finish()
    del trainer, other

    trainer, other = build(is_registered=True, storage="sharded")  # gathered from all ranks
    for _ in trainer.batches(data(), 20):
        assert not trainer._run.safe_points.can_transfer_state
    trainer.finish()
    del trainer, other

    trainer, other = build(is_registered=True)
    digests = []
    for batch in trainer.batches(data(), 20, epoch=0):
        if trainer.steps == 1:
            assert trainer._run.safe_points.can_transfer_state
            digests = [trainer.digest(), other.digest()]
            trainer._run.safe_points.transfer_state(state)
        trainer.step(batch)
        other.step((torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))
    del trainer, other

    set_origin(monkeypatch, state)
    trainer, other = build(is_registered=True)
    assert trainer.resumed_from == 1
    assert other.resumed_from is None
    batches = trainer.batches(data(), 20, epoch=0)
    next(iter(batches))
    assert [trainer.digest(), other.digest()] == digests


def test_without_a_state_a_round_begins_again(world_of_one, tmp_path, monkeypatch, capsys):
    def lose(at, trainer):
        if trainer.steps == 2:
            raise Replaced

    config = ls.CheckpointConfig(every_steps=1000)
    for name, each in {"saving": config, "plain": None}.items():
        expected = train(tmp_path / f"{name}-undisturbed", Member(), checkpoint=each)
        with pytest.raises(Replaced):
            train(tmp_path / name, Member(), lose, checkpoint=each)
        with monkeypatch.context() as patch:
            set_origin(patch)
            assert train(tmp_path / name, Member(), checkpoint=each) == expected
        said = capsys.readouterr().err
        assert "round 2 continues from the beginning: no checkpoint" in said
        assert ("pass checkpoint=" in said) == (each is None)
        run = read_run(tmp_path / name)
        assert [line["step"] for line in run.rounds] == [0]
        assert run.steps.step.tolist() == list(range(9))


def test_a_state_that_cannot_be_written_is_said_and_left(world_of_one, tmp_path, capsys):
    """The launcher, which is not told that it is written, looks for another one."""
    (tmp_path / "file").write_text("")

    def lose(at, trainer):
        if at == "before" and trainer.steps == 1:
            trainer._run.safe_points.transfer_state(tmp_path / "file")

    train(tmp_path / "run", Member(), lose)
    said = capsys.readouterr().err
    assert "the state cannot be handed over" in said
    assert "File exists" in said or "Not a directory" in said


def test_the_variables_of_a_round_come_back_as_they_were():
    origin = RestartSource(
        3, [{"member": 2, "signal": 9}], [4, 5], [0, 1], 1.5, 1.25, [0], Path("/a")
    )
    assert set(origin.variables()) == {ROUND, HANDOVER}
    assert find_restart_source(origin.variables()) == origin
    assert find_restart_source({}) is None


def test_modules_that_the_body_has_changed_are_handed_over(world_of_one, tmp_path, monkeypatch):
    """A new process has them as the script makes them, and does not execute the body again."""

    def change(trainer):
        trainer.model[2].p = 0.5
        trainer.model[0].requires_grad_(False)

    def lose(at, trainer):
        if (at, trainer.steps) == ("after", 3):
            change(trainer)
        if (at, trainer.steps) == ("before", 5) and state.exists():
            trainer._run.safe_points.transfer_state(state)
            raise Replaced

    state = tmp_path / "state"
    expected = train(tmp_path / "undisturbed", Member(), lose)
    state.mkdir()
    with pytest.raises(Replaced):
        train(tmp_path / "run", Member(), lose)
    set_origin(monkeypatch, state)
    assert train(tmp_path / "run", Member())[:4] == expected[:4]
