"""Batch norm that gets a micro-batch of one sample fails with a sentence."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import RankError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def rows(samples):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))


@pytest.mark.usefixtures("world_of_one")
def test_a_manual_step_says_which_batch_fails():
    judge = nn.Linear(3, 1)
    generator = network().requires_grad_(False)
    trainer = ls.Trainer(judge, None, SGD, microbatches=4, extra_modules=[generator])

    def run_epoch():
        for batch in trainer.batches(rows(17), 8):
            with trainer.manual_step() as step:
                for inputs, _ in step.microbatches(batch):
                    step.backward(judge(generator(inputs)).mean())

    with pytest.raises(UsageError, match=r"step 2, micro-batch 0 holds one .* drop_last="):
        run_epoch()
    assert trainer.steps == 2


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_says_which_batch_fails(ranks, stages):
    """With stages, the first call evaluates one sample per micro-batch, to measure the blocks."""

    def run():
        pipeline = ls.PipelineConfig(stages=stages)
        trainer = ls.Trainer(
            network(), nn.CrossEntropyLoss(), SGD, microbatches=4, pipeline=pipeline
        )
        assert trainer.evaluate(rows(3), 3).samples == 3
        for batch in trainer.batches(rows(17), 8):
            trainer.step(batch)

    words = "step 2, micro-batch 0 holds one sample, and batch norm cannot train on one"
    with pytest.raises(RankError, match=words):
        ranks(run, 2)


class OneRow(nn.Module):
    """A module with one row of outputs, however many samples it gets."""

    def forward(self, x):
        return x.mean(0, keepdim=True)


@pytest.mark.ranks(1)
def test_a_model_that_reduces_its_samples_is_not_told_to_drop_batches():
    model = nn.Sequential(OneRow(), nn.BatchNorm1d(4))
    trainer = ls.Trainer(model, lambda outputs, _: outputs.sum(), SGD, microbatches=2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        trainer.step((torch.ones(4, 4), torch.ones(4)))
