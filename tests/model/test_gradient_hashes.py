"""Gradients of a repeated micro-batch: each is hashed when it is complete, and then freed."""

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from lockstep.checksum import checksum
from lockstep.model.gradient_hashes import (
    LateCallbackError,
    hash_gradients,
    hashing_gradients,
)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Network(nn.Module):
    """Calls a layer twice, another one not at all."""

    def __init__(self):
        super().__init__()
        self.between = nn.Identity()
        self.shared = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.tokens = nn.Embedding(5, 4, sparse=True)

    def forward(self):
        inputs = self.tokens(torch.tensor([0, 3, 3]))
        hidden = self.shared(self.frozen(self.shared(inputs)).tanh())
        return self.head(self.between(hidden)).square().sum()


NAMES = "shared.weight", "shared.bias", "head.weight", "head.bias", "tokens.weight"


def find_hashes(model):
    """Return the hashes with and without freeing, and the most gradients that were held."""
    model().backward()
    named = dict(model.named_parameters())
    expected = {name: checksum(one.grad) for name, one in named.items() if one.grad is not None}
    model.zero_grad()
    loss = model()
    held = [0]

    def count(parameter):
        held.append(sum(one.grad is not None for one in named.values()))

    with hashing_gradients(named.items(), [loss], [model]) as hashed:
        hooks = [
            p.register_post_accumulate_grad_hook(count) for p in named.values() if p.requires_grad
        ]
        loss.backward()
    for hook in hooks:
        hook.remove()
    found = hash_gradients(named.items(), hashed)
    model.zero_grad()
    model().backward()  # the hooks are gone
    assert sum(one.grad is not None for one in named.values()) == len(expected)
    return expected, found, max(held)


def test_each_gradient_is_freed_when_it_is_complete():
    expected, found, held = find_hashes(Network())
    assert [*found] == [*NAMES]
    assert found == expected
    assert held == 0


class Reentrant(nn.Module):
    """Adds to the gradients of a layer in a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        twice = checkpoint(lambda x: self.layer(self.layer(x)), inputs, use_reentrant=True)
        return self.layer(twice)


class ByOwnFunction(nn.Module):
    def forward(self, inputs):
        return Own.apply(inputs)


@pytest.mark.parametrize("between", [Reentrant, ByOwnFunction])
def test_gradients_that_may_come_in_parts_are_kept(between):
    model = Network()
    model.between = between()
    expected, found, held = find_hashes(model)
    assert found == expected
    assert held > 0


def halve(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def on_module(model):
    model.frozen.register_full_backward_hook(lambda *_: halve([model.head.weight]))


def on_parameter(model):
    model.shared.weight.register_post_accumulate_grad_hook(lambda one: halve([one]))


def after_backward(model):
    def queue(gradient):
        Variable._execution_engine.queue_callback(lambda: halve([model.shared.weight]))

    model.head.register_forward_hook(lambda *_: _[2].register_hook(queue) and None)


@pytest.mark.parametrize("place", [on_module, on_parameter, after_backward])
def test_gradients_that_hooks_read_are_kept(place):
    """They were freed before the hooks read them, and the audit blamed the processor."""
    model = Network()
    place(model)
    expected, found, held = find_hashes(model)
    assert found == expected
    assert held > 0


def test_a_callback_that_comes_late_is_noticed():
    model = Network()

    def queue(gradient):
        Variable._execution_engine.queue_callback(lambda: halve([model.shared.weight]))

    # After the gradient of the last layer.
    model.tokens.register_forward_hook(lambda *_: _[2].register_hook(queue) and None)
    with pytest.raises(LateCallbackError):
        find_hashes(model)
