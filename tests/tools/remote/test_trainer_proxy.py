"""The trainer proxy: results are bit-identical to those of a script without a driver."""

from __future__ import annotations

import gc
import io
import os
import re
import sys
import threading
import time
from functools import partial
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import LayoutError, LossError, UsageError
from lockstep.model.deferred_init import build
from lockstep.tools.remote.output_forwarder import OutputForwarder

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
        build(BLOCKS, seed=5), nn.CrossEntropyLoss(), SGD, seed=5,
        metrics={"accuracy": ls.accuracy}, max_grad_norm=1.0,
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
        metrics={"accuracy": ls.accuracy}, max_grad_norm=1.0, **options,
    )  # fmt: skip


def trained(trainer) -> list[object]:
    losses = [trainer.step(batch) for batch in batches()]
    trainer.train(samples, 24, 1, seed=3)
    evaluation = trainer.evaluate(samples, 32)
    return [losses, evaluation, trainer.digest(), trainer.optimizer_digest()]


@pytest.fixture(scope="module")
def one_process() -> list[object]:
    def rank():
        ls.init(timeout=60)
        return without_driver()

    (wanted,) = ls.launch(rank, timeout=60)
    return wanted


def test_results_are_bit_identical_to_one_process_without_a_driver(driver, one_process):
    assert trained(trainer_of(driver)) == one_process


def test_results_of_steps_and_epochs(driver, tmp_path):
    trainer = trainer_of(driver)
    with pytest.raises(UsageError, match="no step has been taken"):
        _ = trainer.last_result
    loss = trainer.step(batches()[0])
    assert set(trainer.last_result.metrics) == {"accuracy"}
    assert (trainer.last_result.step, trainer.last_result.loss) == (0, loss)
    told = []
    (epoch,) = trainer.train(samples, 24, 1, on_epoch=told.append)
    assert told == [epoch]
    assert epoch.samples == 70
    assert trainer.last_result.step > 0
    outputs = trainer.predict(samples, 24)
    assert len(outputs) == len(samples())
    trainer.save_weights(tmp_path / "weights.safetensors")
    assert ls.digest(load_file(tmp_path / "weights.safetensors")) == trainer.digest()


def test_two_stages_are_bit_identical(driver, one_process, tmp_path):
    trainer = trainer_of(
        driver, pipeline=ls.PipelineConfig(stages=2, schedule="1f1b", balance=[2, 3])
    )
    assert trained(trainer) == one_process
    trainer.save_weights(tmp_path / "weights.safetensors")
    assert ls.digest(load_file(tmp_path / "weights.safetensors")) == trainer.digest()


def count_trainers() -> int:
    gc.collect()
    return sum(type(thing).__name__ == "TrainerActor" for thing in gc.get_objects())


def test_a_trainer_that_the_driver_drops_is_freed_on_the_workers(driver):
    gc.collect()
    before = driver.run(count_trainers)
    trainer = trainer_of(driver)
    assert driver.run(count_trainers) == [count + 1 for count in before]
    del trainer
    assert driver.run(count_trainers) == before


class Telling(nn.Linear):
    """Says in which process it came to life, and insists on computing there."""

    lockstep_ignore = ("process",)

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.process = os.getpid()
        print("built in", self.process)

    def forward(self, inputs):
        assert os.getpid() == self.process
        return super().forward(inputs)


def open_cell(monkeypatch) -> io.StringIO:
    """Return the standard error of this process, from now on the output of a notebook's cell."""
    output = io.StringIO()
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(sys, "stderr", output)
    return output


def test_output_appears_above_the_line_that_a_notebook_shows(monkeypatch):
    cell = open_cell(monkeypatch)
    forwarder = OutputForwarder()
    forwarder.show_progress(["[bold]epoch[/] 1/3", "loss 0.5", "step 3 ms"])
    worker = threading.Thread(target=forwarder.put, args=("stderr", "[0] printed\n"))

    def is_done() -> bool:
        if worker.ident is None:
            worker.start()  # once the line is drawn
        return forwarder.received > 0

    forwarder.wait(is_done, time.monotonic() + 60)
    worker.join()
    line = "epoch 1/3  loss 0.5"
    erased = f"\r{' ' * len(line)}\r"
    assert cell.getvalue() == f"\r{line}{erased}[0] printed\n"
    forwarder.show_progress(["late"])
    forwarder.show_if_no_caller_waits()
    assert "late" not in cell.getvalue()


def test_a_training_shows_one_line_with_all_epochs_in_a_notebook(monkeypatch):
    cell = open_cell(monkeypatch)
    with ls.Driver(nprocs=1, timeout=60) as driver:
        # An epoch takes longer than the time between two drawings of the line.
        trainer = trainer_of(driver, callbacks=[lambda result: time.sleep(0.1)])
        trainer.train(samples, 24, 3)
    shown = [line.strip() for line in cell.getvalue().split("\r")]
    assert any(re.match(r"epoch [123]/3  ━+─*  \d/\d  .*loss \d", line) for line in shown)
    assert shown[-1] == ""
    assert "\n" not in cell.getvalue()


def test_blocks_are_materialized_on_the_workers_only(driver, capsys):
    trainer = driver.trainer([Telling], nn.CrossEntropyLoss(), SGD)
    trainer.step(batches()[0])
    pids = driver.run(os.getpid)
    said = sorted(capsys.readouterr().out.splitlines())
    assert said == [f"[{rank}] built in {pid}" for rank, pid in enumerate(pids)]


class Weighty(nn.Linear):
    """Says where its weights were made."""

    def __init__(self, number: int, *sizes: int) -> None:
        super().__init__(*sizes)
        print("block", number, "on", self.weight.device)


def test_no_worker_allocates_memory_for_blocks_of_another_stage(driver, capsys):
    blocks = [partial(Weighty, 0, 12, 8), partial(Weighty, 1, 8, 6), partial(Weighty, 2, 6, 4)]
    options = {"ema_decay": 0.5, "seed": 5}
    trainer = driver.trainer(
        blocks,
        nn.CrossEntropyLoss(),
        SGD,
        pipeline=ls.PipelineConfig(stages=2, balance=[2, 1]),
        **options,
    )
    said = sorted(capsys.readouterr().out.splitlines())
    devices = [("cpu", "cpu", "meta"), ("meta", "meta", "cpu")]
    assert said == [
        f"[{rank}] block {number} on {device}"
        for rank, here in enumerate(devices)
        for number, device in enumerate(here)
    ]
    alone = driver.trainer(blocks, nn.CrossEntropyLoss(), SGD, **options)
    assert trainer.digest() == alone.digest()
    assert [trainer.step(batch) for batch in batches()] == [alone.step(b) for b in batches()]
    state = trainer.state_dict()
    other = alone.state_dict()
    assert ls.digest(state["model"]) == ls.digest(other["model"])
    assert ls.digest(state["average"]) == ls.digest(other["average"])
    trainer.load_state_dict(other)
    assert trainer.optimizer_digest() == alone.optimizer_digest()


def test_errors_of_a_trainer_keep_their_class(driver):
    with pytest.raises(LayoutError, match="2 replicas share 1 micro-batches"):
        trainer_of(driver, microbatches=1)
    with pytest.raises(UsageError, match="pass the dataset as a callable"):
        trainer_of(driver).evaluate(samples(), 16)
    trainer = trainer_of(driver)
    before = trainer.digest()
    inputs, targets = batches()[0]
    with pytest.raises(LossError, match="nan"):
        trainer.step((inputs * float("nan"), targets))
    assert trainer.digest() == before


def test_mistakes_are_found_before_any_worker_is_called(driver):
    trainer = trainer_of(driver)
    with pytest.raises(AttributeError, match=r"has no attribute 'digset'"):
        trainer.digset()
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'path'"):
        trainer.save_weights()
    assert trainer.digest() == trainer.digest()


def test_a_run_is_recorded_by_rank_0(driver, tmp_path):
    with trainer_of(driver, loggers=str(tmp_path / "run")) as trainer:
        trainer.step(batches()[0])
    lines = (tmp_path / "run" / "record.jsonl").read_text().splitlines()
    assert '"kind":"end"' in lines[-1].replace(" ", "")
