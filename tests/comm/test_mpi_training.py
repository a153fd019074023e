"""Trainings on the backend "mpi4py": the same bits as on others, and DistributedDataParallel."""

import functools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import mpi_ranks
import pytest_lockstep

pytestmark = mpi_ranks.needed
WIDTHS = (1, 2, 3, 4)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def digest():
    """Train with the Trainer; return the digest of the weights."""
    generator = torch.Generator().manual_seed(5)
    inputs, labels = torch.randn(24, 6, generator=generator), torch.arange(24) % 3
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    trainer = ls.Trainer(network(), torch.nn.CrossEntropyLoss(), optimizer, microbatches=4)
    data = torch.utils.data.TensorDataset(inputs, labels)
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(batch)
    return trainer.digest()


def gradients():
    """Return the gradients of DistributedDataParallel, which waits for futures of buckets."""
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=1e-4)
    model(torch.full((2, 6), float(dist.get_rank() + 1))).square().sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def train(backend):
    ls.init(backend=backend, timeout=60)
    found = digest(), gradients() if ls.world_size() > 1 else None
    ls.shutdown()
    return found


@functools.cache
def on_gloo():
    return pytest_lockstep.run(train, "gloo", ranks=2, init=False)


@pytest.mark.parametrize("n", WIDTHS)
def test_training_has_the_same_digest_as_on_gloo(n):
    found = mpi_ranks.run(train, "mpi4py", ranks=n)
    assert {each[0] for each in found} == {on_gloo()[0][0]}
    assert all(each[1] == found[0][1] for each in found)
    if n == 2:  # a sum of two numbers has only one order
        assert found[0][1] == on_gloo()[0][1]
