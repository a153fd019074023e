"""Trainings on the backend "mpi4py": the same bits as on others, and DistributedDataParallel."""

import functools

import pytest

import mpi_ranks
import pytest_lockstep
from contract.training import train

pytestmark = mpi_ranks.needed


@functools.cache
def on_gloo():
    return pytest_lockstep.run(train, "gloo", ranks=2, init=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_training_has_the_same_digest_as_on_gloo(n):
    found = mpi_ranks.run(train, "mpi4py", ranks=n)
    assert {digest for digest, _ in found} == {on_gloo()[0][0]}
    assert all(gradients == found[0][1] for _, gradients in found)
    if n == 2:  # a sum of two numbers has only one order
        assert found[0][1] == on_gloo()[0][1]
