"""A model for tests of DistributedDataParallel, and its arithmetic in plain torch."""

import torch
from torch import nn


class Net(nn.Module):
    """Several layers of several sizes; one is used by some ranks, one by none, one is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.some = nn.Linear(33, 33)
        self.none = nn.Linear(3, 3)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.last = nn.Linear(33, 5)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, inputs, use_some):
        hidden = torch.tanh(self.frozen(self.first(inputs)))
        if use_some:
            hidden = hidden + self.some(hidden)
        return self.last(hidden)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def inputs_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=generator)


def uses_some(rank):
    return rank % 2 == 0


def local_gradients(rank, steps=(0,)):
    """Return the gradients that one rank would have alone, accumulated over `steps`."""
    model = net()
    for step in steps:
        model(inputs_of(rank, step), uses_some(rank)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def tree_mean(columns):
    """Return the mean along the tree over the ranks; None where nobody has a gradient."""
    world = len(columns)

    def add(left, right):
        return left if right is None else right if left is None else left + right

    def node(lo, hi):
        if hi - lo == 1:
            return columns[lo]
        mid = lo + (1 << (hi - lo - 1).bit_length() - 1)
        return add(node(lo, mid), node(mid, hi))

    total = node(0, world)
    return None if total is None else total / world


def expected_gradients(world, steps=(0,)):
    columns = zip(*(local_gradients(rank, steps) for rank in range(world)), strict=True)
    return [tree_mean(column) for column in columns]


def same(gradients, expected):
    return [
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(gradients, expected, strict=True)
    ]
