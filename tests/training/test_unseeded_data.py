"""Data that would give every layout other bits: named in every layout, or made harmless."""

from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls
from lockstep.kernel.errors import DatasetError, DisagreementError

SGD = partial(torch.optim.SGD, lr=0.1)


class Rows(Dataset):
    def __init__(self, shift=0.0):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(32, 6, generator=generator) + shift

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.x[index], index % 4


class Augmented(Rows):
    def __init__(self):
        super().__init__()
        self.rng = numpy.random.default_rng(0)

    def __getitem__(self, index):
        noise = torch.from_numpy(self.rng.normal(size=6)).float()
        return self.x[index] + noise, index % 4


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, inputs):
        return self.linear(inputs.mul_(1.5))


def alone(samples):
    return samples[0][0][None], torch.tensor([samples[0][1]])


def train(dataset, collate=None, workers=0):
    torch.manual_seed(1)
    trainer = ls.Trainer(InPlace(), nn.CrossEntropyLoss(), SGD)
    data = dataset()
    options = {"collate_fn": collate, "num_workers": workers}
    try:
        for epoch in range(3):
            for batch in trainer.batches(data, 8, epoch=epoch, **options):
                trainer.step(batch)
        trainer.evaluate(data, 8, **options)
    except (DatasetError, DisagreementError) as error:
        return str(error)
    return trainer.digest()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_dataset_with_a_generator_of_its_own_is_named_in_every_layout(ranks, n):
    for rank, said in enumerate(ranks(train, n, Augmented)):
        assert "of Augmented, loaded twice with the same random seed, draws from a" in said
        assert "private generator (rng), so its random numbers" in said
        assert f"(rank {rank}, batch 0)" in said


@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_may_write_into_views_that_collate_returns(ranks, workers):
    """It wrote into the dataset's memory, on the rank that had the sample."""
    found = [each for n in (1, 2, 3) for each in ranks(train, n, Rows, alone, workers)]
    assert len(set(found)) == 1
    assert len(found[0]) == 64


def other_rows():
    return Rows(shift=float(dist.get_rank() == 1))


@pytest.mark.parametrize("workers", [0, 1])
def test_datasets_that_differ_between_ranks_are_named_before_the_first_step(ranks, workers):
    for said in ranks(train, 3, other_rows, None, workers):
        assert said.startswith("sample ")
        assert "of rank 1 differs from that of rank 0, although both loaded it" in said


def test_an_evaluation_on_other_data_is_named(ranks):
    def evaluate():
        trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD)
        try:
            trainer.evaluate(other_rows(), 8)
        except DisagreementError as error:
            return str(error)

    for said in ranks(evaluate, 2):
        assert said.startswith("sample 0 of rank 1 differs from that of rank 0")
