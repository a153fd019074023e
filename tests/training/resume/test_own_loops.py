"""Habits of loops with `ls.exact` that a resumed run could not continue are refused or named."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import UsageError

pytestmark = pytest.mark.usefixtures("world_of_one")
DATA = TensorDataset(torch.ones(24, 4), torch.zeros(24, dtype=torch.long))


class Loop:
    """A handle with its model and optimizer, saved after every step if it has a folder."""

    def __init__(self, folder=None, **stateful):
        torch.manual_seed(1)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        checkpoint = None if folder is None else ls.CheckpointConfig(every_steps=1, folder=folder)
        self.exact = ls.exact(
            self.model, self.optimizer, 2, checkpoint=checkpoint, stateful=stateful or None
        )

    def batches(self, epoch=0):
        return self.exact.batches(DATA, 8, epoch=epoch)

    def compute(self, batch):
        for inputs, targets in batch:
            batch.backward(nn.functional.cross_entropy(self.model(inputs), targets))

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batch):
        self.compute(batch)
        self.update()


def step_later(loop):
    is_computed = False
    for batch in loop.batches():
        if is_computed:
            loop.update()
        loop.compute(batch)
        is_computed = True
    loop.update()


def look_ahead(loop):
    iterator = iter(loop.batches())
    following = next(iterator, None)
    while following is not None:
        batch = following
        following = next(iterator, None)
        loop.train(batch)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (step_later, r"rank 0, step 1: optimizer.step\(\) was called after the next batch was"),
        (look_ahead, r"rank 0, step 0: batch 0 of epoch 0 is trained after the next one was"),
    ],
)
def test_a_step_behind_the_next_request_is_refused_if_the_run_may_be_resumed(tmp_path, train, said):
    loop = Loop()
    train(loop)
    loop.exact.finish()
    assert loop.exact.steps == 3
    with pytest.raises(UsageError, match=said):
        train(logged := Loop(tmp_path / "run"))
    logged.exact.finish("failed")


def test_steps_that_are_left_out_and_batches_that_are_trained_again_are_allowed(tmp_path):
    """As after an overflow, and from a replay buffer."""
    loop = Loop(tmp_path / "run")
    kept = None
    for batch in loop.batches():
        loop.optimizer.zero_grad()
        loop.compute(batch)
        if batch.number != 1:
            loop.optimizer.step()
            loop.exact.evaluate(DATA, 8, loss=nn.functional.cross_entropy)
            loop.optimizer.zero_grad()
        if kept is not None:
            loop.optimizer.zero_grad()
            loop.train(kept)
        kept = batch
    for batch in loop.batches(1):
        loop.optimizer.zero_grad()
        loop.compute(batch)
        loop.exact.evaluate(DATA, 8, loss=nn.functional.cross_entropy)
        loop.optimizer.step()  # after an evaluation, in the same body
    loop.exact.finish()
    assert loop.exact.steps == 8


def test_a_registered_handle_has_no_open_loop_at_a_safe_point(tmp_path):
    other = Loop()
    loop = Loop(tmp_path / "run", other=other.exact)

    def train_both():
        for batch, different in zip(loop.batches(), other.batches(), strict=True):
            loop.train(batch)
            other.train(different)

    with pytest.raises(UsageError, match=r"stateful\['other'\] iterates over batches of its own"):
        train_both()
    loop.exact.finish("failed")
    again = Loop(tmp_path / "again", other=other.exact)
    for batch in again.batches():
        again.train(batch)
        for inner in other.batches(1 + batch.number):
            other.train(inner)
    again.exact.finish()
    assert other.exact.steps == 1 + 3 * 3


def test_an_iterator_that_is_held_at_the_end_is_named(tmp_path, capsys):
    loop = Loop(tmp_path / "run")
    iterator = iter(loop.batches())
    for batch in iterator:
        loop.train(batch)
        break
    loop.exact.finish()
    assert "the loop over batches of epoch 0 has not ended at finish()" in capsys.readouterr().err


def train_groups(folder, place, handles=None):
    """Add a parameter group before the second epoch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), 0.1)
    checkpoint = ls.CheckpointConfig(every_steps=1, keep=9, folder=folder)
    exact = ls.exact(model, optimizer, 2, checkpoint=checkpoint)
    if handles is not None:
        handles.append(exact)
    if place is not None:
        exact.resume(folder / "checkpoints" / place)
    for epoch in range(2):
        if epoch == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
        for batch in exact.batches(DATA, 8, epoch=epoch):
            exact._run._checkpoints.writer.wait()  # so that the next one is due
            for inputs, targets in batch:
                batch.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if handles is not None:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    exact.finish()
    return exact.digest(), exact.optimizer_digest()


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_a_script_adds_a_parameter_group_again_when_it_is_resumed(tmp_path, step):
    whole = train_groups(tmp_path / "run", None)
    assert train_groups(tmp_path / "run", f"step-{step}") == whole


def test_a_parameter_group_of_a_loop_s_body_is_refused_before_it_is_saved(tmp_path):
    handles = []
    with pytest.raises(UsageError, match="was called in the body of a loop over batches"):
        train_groups(tmp_path / "run", None, handles)
    handles[0].finish("failed")


def follow(loop, other):
    for batch in loop.batches():
        loop.train(batch)
        other.train(other.exact.use(batch))


def step_a_trainer(loop, _):
    trainer = ls.Trainer(
        nn.Linear(4, 2), nn.CrossEntropyLoss(), torch.optim.SGD, microbatches=2, loggers=[]
    )
    for batch in loop.batches():
        loop.train(batch)
        trainer.step((torch.ones(8, 4), torch.zeros(8, dtype=torch.long)))


def step_manually(loop, _):
    other = nn.Linear(4, 2)
    trainer = ls.Trainer(other, None, torch.optim.SGD, microbatches=2, loggers=[])
    for batch in loop.batches():
        loop.train(batch)
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch.data):
                step.backward(nn.functional.cross_entropy(other(inputs), targets))


@pytest.mark.parametrize("train", [follow, step_a_trainer, step_manually])
def test_a_step_of_another_training_that_a_resumed_run_would_lose_is_refused(tmp_path, train):
    train(Loop(), Loop())
    loop = Loop(tmp_path / "run")
    with pytest.raises(UsageError, match="would begin again when the run is continued: register"):
        train(loop, Loop())
    loop.exact.finish("failed")


def test_an_elastic_run_without_checkpoints_may_train_several_models():
    """Its trainers are replaced together, from its beginning if none of them saves the others."""
    loop = Loop()
    loop.exact._run.safe_points.is_logged = True
    follow(loop, other := Loop())
    other.exact.finish()
    assert other.exact.steps == 3


def train_a_probe(loop, _):
    for batch in loop.batches():
        loop.train(batch)
        probe = Loop()
        for inner in probe.batches(batch.number):
            probe.train(inner)


def evaluate_only(loop, other):
    for batch in loop.batches():
        loop.train(batch)
        other.exact.evaluate(DATA, 8, loss=nn.functional.cross_entropy)


def train_between(loop, other):
    for batch in loop.batches():
        loop.train(batch)
    for batch in other.batches():
        other.train(batch)


def train_after_the_end(loop, other):
    iterator = iter(loop.batches())
    loop.train(next(iterator))
    loop.exact.finish()
    for batch in other.batches():
        other.train(batch)


@pytest.mark.parametrize(
    "train", [follow, train_a_probe, evaluate_only, train_between, train_after_the_end]
)
def test_another_training_that_loses_no_step_is_allowed(tmp_path, train):
    other = Loop()
    stateful = {"other": other.exact} if train is follow else {}
    loop = Loop(tmp_path / "run", **stateful)
    train(loop, other)
    loop.exact.finish()
