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


def test_data_in_every_layout(ranks):
    """A generator of its own is named; the model may write into views that collate returns.

    It wrote into the dataset's memory, on the rank that had the sample.
    """

    def train_all():
        return train(Augmented), {train(Rows, alone, workers) for workers in (0, 1)}

    digests = set()
    for n in (1, 2, 3):
        for rank, (said, found) in enumerate(ranks(train_all, n)):
            assert "of Augmented, loaded twice with the same random seed, gives different" in said
            assert "such as a private generator" in said
            assert f"(rank {rank}, batch 0)" in said
            digests |= found
    (digest,) = digests
    assert len(digest) == 64


def other_rows():
    return Rows(shift=float(dist.get_rank() == 1))


def test_datasets_that_differ_between_ranks_are_named_before_the_first_step(ranks):
    def train_and_evaluate():
        said = [train(other_rows, None, workers) for workers in (0, 1)]
        trainer = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD)
        with pytest.raises(DisagreementError) as raised:
            trainer.evaluate(other_rows(), 8)
        return [*said, str(raised.value)]

    for messages in ranks(train_and_evaluate, 3):
        for said in messages:
            assert said.startswith("sample ")
            assert "of rank 1 differs from that of rank 0, although both loaded it" in said
