"""Training by the driver: the bits of a script without one."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.errors import LayoutError, LossError, UsageError

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
BLOCKS = [
    partial(nn.Linear, 12, 16),
    partial(nn.BatchNorm1d, 16),
    nn.ReLU,
    partial(nn.Dropout, 0.2),
    partial(nn.Linear, 16, 4),
]


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(70, 12, generator=generator),
        torch.randint(4, (70,), generator=generator),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = samples()
    return [data[start : start + 24] for start in range(0, 70, 24)]


def without_driver() -> list[object]:
    trainer = ls.Trainer(
        ls.build(BLOCKS, seed=5), nn.CrossEntropyLoss(), SGD, seed=5,
        metrics={"accuracy": ls.accuracy}, clip_norm=1.0,
    )  # fmt: skip
    losses = [trainer.step(batch) for batch in batches()]
    for batch in trainer.batches(samples(), 24, seed=3, epoch=0):
        trainer.step(batch)
    evaluation = trainer.evaluate(samples(), 32)
    return [losses, evaluation, trainer.digest(), trainer.optimizer_digest()]


@pytest.fixture(scope="module")
def driver():
    with ls.Driver(nprocs=2, timeout=60) as driver:
        yield driver


def trainer_of(driver, **options):
    return driver.trainer(
        BLOCKS, nn.CrossEntropyLoss(), SGD, seed=5,
        metrics={"accuracy": ls.accuracy}, clip_norm=1.0, **options,
    )  # fmt: skip


def test_the_bits_are_those_of_one_process_without_a_driver(driver, ranks, tmp_path):
    (wanted,) = ranks(without_driver, 1)
    trainer = trainer_of(driver)
    losses = [trainer.step(batch) for batch in batches()]
    assert set(trainer.last.metrics) == {"accuracy"}
    told = []
    (epoch,) = trainer.train(samples, 24, 1, seed=3, on_epoch=told.append)
    assert told == [epoch]
    assert epoch.samples == 70
    evaluation = trainer.evaluate(samples, 32)
    assert [losses, evaluation, trainer.digest(), trainer.optimizer_digest()] == wanted
    trainer.save(tmp_path / "weights.safetensors")
    assert ls.digest(load_file(tmp_path / "weights.safetensors")) == trainer.digest()


def test_a_state_goes_on_elsewhere(driver):
    first, second = trainer_of(driver), trainer_of(driver)
    first.step(batches()[0])
    second.load_state_dict(first.state_dict())
    assert first.step(batches()[1]) == second.step(batches()[1])
    assert first.digest() == second.digest()


def test_epochs_go_on_where_they_ended(driver):
    once, twice = trainer_of(driver), trainer_of(driver)
    numbers = [result.epoch for result in once.train(samples, 24, 2)]
    numbers += [result.epoch for _ in range(2) for result in twice.train(samples, 24, 1)]
    assert numbers == [0, 1, 0, 1]
    assert once.digest() == twice.digest()


class Telling(nn.Linear):
    """Says in which process it came to life, and insists on computing there."""

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.process = os.getpid()
        print("built in", self.process)

    def forward(self, inputs):
        assert os.getpid() == self.process
        return super().forward(inputs)


def test_blocks_come_to_life_on_the_workers_alone(driver, capsys):
    trainer = driver.trainer([Telling], nn.CrossEntropyLoss(), SGD)
    trainer.step(batches()[0])
    pids = driver.run(os.getpid)
    said = sorted(capsys.readouterr().out.splitlines())
    assert said == [f"[{rank}] built in {pid}" for rank, pid in enumerate(pids)]


def test_errors_of_a_trainer_come_back_as_they_are(driver):
    with pytest.raises(LayoutError, match="2 replicas share 1 micro-batches"):
        trainer_of(driver, microbatches=1)
    with pytest.raises(UsageError, match="give the dataset as a callable"):
        trainer_of(driver).evaluate(samples(), 16)
    trainer = trainer_of(driver)
    before = trainer.digest()
    inputs, targets = batches()[0]
    with pytest.raises(LossError, match="nan"):
        trainer.step((inputs * float("nan"), targets))
    assert trainer.digest() == before


def test_a_run_is_recorded_by_rank_0(driver, tmp_path):
    with trainer_of(driver, record=str(tmp_path / "run")) as trainer:
        trainer.step(batches()[0])
    lines = (tmp_path / "run" / "record.jsonl").read_text().splitlines()
    assert '"kind":"end"' in lines[-1].replace(" ", "")
