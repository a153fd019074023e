"""Collective calls of the script inside of a step are refused by name, those of the trainer not."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
import pytest_lockstep
from lockstep.kernel.errors import LockstepError

SGD = partial(torch.optim.SGD, lr=0.1)

CALLS = {
    "all_reduce": dist.all_reduce,
    "barrier": lambda _: dist.barrier(),
    "all_gather_object": lambda _: dist.all_gather_object([None] * dist.get_world_size(), 3),
    "all_gather": differentiable.all_gather,
    "broadcast": lambda rows: functional.broadcast(rows, 0, dist.group.WORLD),
    "allreduce": lambda rows: dist.group.WORLD.allreduce([rows]).wait(),
}


class Calling(nn.Linear):
    """Calls a function in forward or in backward."""

    def __init__(self, call, where):
        super().__init__(6, 6)
        self.call = call
        self.where = where

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if self.where == "forward":
            self.call(outputs.detach().clone())
        if self.where == "backward":
            outputs.register_hook(lambda gradient: self.call(gradient.clone()) and None)
        return outputs


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.arange(12) % 6


def refused(call, where, **options):
    """Return the error that a call in a step or an evaluation raises."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Calling(call, where))
    loss = nn.CrossEntropyLoss()

    def calling(outputs, targets):
        call(outputs.detach().clone())
        return loss(outputs, targets)

    used = calling if where == "loss" else loss
    trainer = ls.Trainer(model, used, SGD, microbatches=4, progress=False, loggers=[], **options)
    if where == "evaluate":
        model[1].where = "forward"
        run = partial(trainer.evaluate, TensorDataset(*data()), 4)
    elif where == "manual":

        def run():
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(data()):
                    step.backward(loss(model(inputs), targets))
                    call(torch.ones(3))
    else:
        run = partial(trainer.step, data())
    with pytest.raises(LockstepError) as caught:
        run()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", CALLS)
def test_any_call_is_named_on_one_process(name):
    """The results depended on the number of ranks, or the ranks waited for each other."""
    sentence = refused(CALLS[name], "forward")
    assert f"rank 0, step 0, micro-batch 0: {name} was called at test_collective_calls" in sentence


def refused_anywhere(places, stages):
    pipeline = ls.PipelineConfig(stages=stages, balance=(1,) * stages)
    return [refused(dist.all_reduce, where, pipeline=pipeline) for where in places]


@pytest.mark.parametrize("stages", [1, 2])
def test_calls_are_refused_anywhere_in_a_step_and_an_evaluation(ranks, stages):
    places = ("forward", "loss", "evaluate", "backward", "manual")[: 3 if stages == 2 else 5]
    for sentences in ranks(refused_anywhere, 2, places, stages):
        for sentence in sentences:
            assert ": all_reduce was called at test_collective_calls.py" in sentence


def test_calls_between_micro_batches_and_of_the_trainer_are_permitted():
    def train(backend):
        ls.init(backend=backend)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 6))
        trainer = ls.Trainer(model, None, SGD, microbatches=4, progress=False, loggers=[])
        seen = torch.zeros(())
        for _ in range(2):
            with trainer.manual_step() as step:
                for inputs, targets in step.microbatches(data()):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    step.backward(loss, final=True)
                    seen += len(inputs)
                dist.all_reduce(seen)
            trainer.digest()
            dist.barrier()
        digest = trainer.digest()
        ls.shutdown()
        return digest

    found = {
        digest
        for backend in ("lockstep", "gloo")
        for n in (1, 2)
        for digest in pytest_lockstep.run(train, backend, ranks=n, init=False)
    }
    assert len(found) == 1
