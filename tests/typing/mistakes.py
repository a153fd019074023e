"""Mistakes that a type checker must find: an ignore that ignores nothing is an error."""

from functools import partial

import torch
from torch import nn

import lockstep as ls
from lockstep.training.history import EpochResult

SGD = partial(torch.optim.SGD, lr=0.1)


def print_epoch(result: EpochResult) -> None:
    """Take an epoch where a step is given."""


def count(start: int) -> int:
    """Count from a number."""
    return start + 1


def make_mistakes(model: nn.Module, batch: torch.Tensor) -> None:
    """Pass what does not fit."""
    ls.Trainer(model, None, SGD(model.parameters()))  # type: ignore[arg-type]
    ls.Trainer(model, None, [SGD, SGD])  # type: ignore[list-item]
    ls.Trainer(model, None, SGD, storage="shard")  # type: ignore[arg-type]
    ls.Trainer(model, None, SGD, pipeline=2)  # type: ignore[arg-type]
    ls.Trainer(model, None, SGD, callbacks=[print_epoch])  # type: ignore[list-item]
    ls.Trainer(model, None, SGD, clip_norm=1.0)  # type: ignore[call-arg]
    trainer = ls.Trainer(model, None, SGD)
    trainer.step()  # type: ignore[call-arg]
    trainer.step(batch).backward()  # type: ignore[attr-defined]
    trainer.manual_step().step(batch)  # type: ignore[attr-defined]
    trainer.batches([batch], 2, shufle=False)  # type: ignore[call-arg]
    trainer.batches([batch], 2, num_workers="two")  # type: ignore[arg-type]
    trainer.evaluate([batch], 2, num_worker=2)  # type: ignore[call-arg]
    trainer.predict([batch], 2, colate_fn=torch.stack)  # type: ignore[call-arg]
    exact = ls.exact(model, SGD(model.parameters()), microbatches=2)
    exact.batches([batch], 2, shufle=False)  # type: ignore[call-arg]
    exact.evaluate([batch], 2, num_worker=2)  # type: ignore[call-arg]
    exact.predict([batch], 2, colate_fn=torch.stack)  # type: ignore[call-arg]
    ls.OptimizerConfig(SGD, scheduler_interval="week")  # type: ignore[arg-type]
    with ls.Driver(nprocs=2) as driver:
        driver.run(count, "ten")  # type: ignore[arg-type]
        names: list[str] = driver.run(count, 10)  # type: ignore[arg-type]
        print(names)
        workers = driver.trainer(lambda: model, None, SGD)
        workers.train(lambda: [batch], 2, 1, shufle=False)  # type: ignore[call-arg]
        workers.evaluate(lambda: [batch], 2, num_worker=2)  # type: ignore[call-arg]
        workers.predict(lambda: [batch], 2, colate_fn=torch.stack)  # type: ignore[call-arg]
    values: list[str] = ls.launch(count, (1,), nprocs=2)  # type: ignore[arg-type]
    print(values)
