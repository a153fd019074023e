"""A resumed run reports that the content of its dataset has changed."""

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep as ls
from lockstep.training.resume.script_log import ScriptLog

pytestmark = pytest.mark.usefixtures("world_of_one")

CHANGED = "samples of epoch 0 are not those of the interrupted run"


class Lines(IterableDataset):
    def __init__(self, factor):
        self.source = iter(pairs(factor))

    def __iter__(self):
        return self.source


def pairs(factor):
    inputs = torch.arange(24.0).reshape(12, 2) / 24
    return TensorDataset(inputs * factor, inputs)


def train(folder, dataset, stop=-1, epochs=2, **options):
    """Train epochs of 3 batches, or up to a step; without it, resume."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoint = ls.CheckpointConfig(every_steps=1)
    exact = ls.exact(model, optimizer, 2, loggers=folder, checkpoint=checkpoint)
    if stop < 0:
        exact.resume()
    for epoch in range(epochs):
        for batch in exact.batches(dataset, 4, epoch=epoch, **options):
            if exact.steps == stop:
                exact._run._checkpoints.writer.wait()
                return
            for inputs, targets in batch:
                batch.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        exact.evaluate(pairs(1), 4, loss=nn.MSELoss())
    assert exact.steps == 3 * epochs
    exact.finish()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [2, 3, 4, 7])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_other_samples_are_reported(tmp_path, capfd, stop, num_workers, is_mapped):
    """A run continued with other data of the same length, without a message."""
    datasets = [pairs(1), pairs(2)]
    if is_mapped:
        datasets = [list(dataset) for dataset in datasets]
    train(tmp_path, datasets[0], stop, epochs=3, num_workers=num_workers)
    train(tmp_path, datasets[1], epochs=3, num_workers=num_workers)
    assert capfd.readouterr().err.count(CHANGED) == 1
    assert CHANGED in (tmp_path / "record.jsonl").read_text()


@pytest.mark.parametrize("make_sampler", [lambda: None, lambda: iter(range(12))])
def test_the_same_samples_are_not_reported(tmp_path, capfd, make_sampler):
    for stop in (2, -1):
        train(tmp_path, pairs(1), stop, epochs=1, sampler=make_sampler())
    assert CHANGED not in capfd.readouterr().err


def test_a_stream_that_can_be_read_only_once_is_not_read_before(tmp_path, capfd):
    train(tmp_path, Lines(1), 2, epochs=1)
    train(tmp_path, Lines(1), epochs=1)
    assert CHANGED not in capfd.readouterr().err


def test_checkpoints_of_earlier_versions_have_no_samples(tmp_path, capfd, monkeypatch):
    load = ScriptLog.load_state_dict

    def load_old(log, state):
        for entry in state["entries"]:
            entry.get("state", {}).pop("content", None)
        load(log, state)

    train(tmp_path, pairs(1), 4)
    monkeypatch.setattr(ScriptLog, "load_state_dict", load_old)
    train(tmp_path, pairs(2))
    assert CHANGED not in capfd.readouterr().err
