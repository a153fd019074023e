"""Steps of one handle of `ls.exact` beside and inside of those of another."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.kernel.errors import UsageError

DATA = TensorDataset(torch.ones(24, 4), torch.zeros(24, dtype=torch.long))


def make():
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, ls.exact(model, optimizer, 4)


def lose(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs), targets)


def take_inside():
    """Take a step in a micro-batch; ranks have different numbers of them."""
    model, optimizer, exact = make()
    other, stepped, inner = make()
    for batch in exact.batches(DATA, 8):
        for inputs, targets in batch:
            same = inner.use(batch)
            for again, classes in same:
                same.backward(lose(other, again, classes))
            stepped.step()
            stepped.zero_grad()
            batch.backward(lose(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()


def refuse_inside():
    with pytest.raises(UsageError) as caught:
        take_inside()
    return str(caught.value)


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_inside_of_another_is_refused_on_any_number_of_ranks(ranks, n):
    for rank, said in enumerate(ranks(refuse_inside, n)):
        assert said.startswith(f"rank {rank}, step 0")
        assert "a step was taken in the loop over the micro-batches of another handle" in said


def take_beside():
    """Compute the micro-batches of two steps in turns."""
    model, optimizer, exact = make()
    other, stepped, inner = make()
    for batch in exact.batches(DATA, 8):
        same = inner.use(batch)
        for (inputs, targets), (again, classes) in zip(batch, same, strict=True):
            batch.backward(lose(model, inputs, targets))
            same.backward(lose(other, again, classes))
        for each in (optimizer, stepped):
            each.step()
            each.zero_grad()
    return exact.digest(), inner.digest(), inner.steps


def test_steps_side_by_side_are_allowed(ranks):
    expected = ranks(take_beside, 1)[0]
    assert expected[2] == 3
    assert ranks(take_beside, 3) == [expected] * 3


@pytest.mark.usefixtures("world_of_one")
def test_a_parameter_of_two_handles_is_named():
    first, optimizer, exact = make()
    ls.exact(nn.Sequential(first, nn.Linear(2, 2)), 4)
    batch = next(iter(exact.batches(DATA, 8)))
    for inputs, targets in batch:
        batch.backward(lose(first, inputs, targets))
    with pytest.raises(UsageError, match="another handle has some of the same parameters"):
        optimizer.step()
    exact.finish("failed")
