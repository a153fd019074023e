"""Splitting: the gradients of a backward in two parts are those of one, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.pipeline.split_backward import GraphInput, SplitBackward, is_splittable
from lockstep.portable.arithmetic import has_portable_bits


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        return x + torch.relu_(self.norm(self.conv(x))) * self.scale


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(8, 8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Unrolled(nn.Module):
    """One weight at many junctions: it belongs to the first part."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        hidden = torch.zeros(len(x), 8)
        for time in range(x.shape[1]):
            hidden = self.cell(x[:, time], hidden)
        return hidden


def tied():
    linear = nn.Linear(8, 8)
    return nn.Sequential(linear, nn.Tanh(), linear, nn.LayerNorm(8), nn.Linear(8, 8))


def convolutions():
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.GroupNorm(2, 4),
    )


PICTURES = (2, 3, 9, 9)
WORDS = (3, 5, 8)
# What is split: the model, its input, how many parameters wait for the second part:
# those that only a convolution or a matrix product uses, and only one.
CASES = {
    "convolutions": (convolutions, PICTURES, 3),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), PICTURES, 4),
    "channels last": (lambda: Residual().to(memory_format=torch.channels_last), PICTURES, 2),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), WORDS, 7,
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), WORDS, 0),
    "gru": (lambda: Recurrent(nn.GRU), WORDS, 3),
    "unrolled": (Unrolled, WORDS, 0),
    "tied": (tied, WORDS, 2),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), WORDS, 3,
    ),
}  # fmt: skip


def computed(model, inputs, split, precision):
    """Return the gradients of inputs and parameters, and how many came with the second part."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    graph_input = GraphInput([inputs.clone()], [True])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision, cache_enabled=False):
        output = model(graph_input.tensors[0])
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    gradient = gradient.to(output.dtype)
    waiting = 0
    if split:
        halves = SplitBackward([output], graph_input.anchor)
        halves.backward_inputs([gradient])
        waiting = sum(parameter.grad is None for parameter in model.parameters())
        halves.backward_weights()
    else:
        torch.autograd.backward([output], [gradient])
    return [*graph_input.gradients, *(parameter.grad for parameter in model.parameters())], waiting


def has_bfloat16_lstm():
    """Return whether torch computes an LSTM in bfloat16 here; oneDNN cannot with AVX2 alone."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            Recurrent(nn.LSTM)(torch.randn(WORDS))
    except RuntimeError:  # could not create a primitive descriptor
        return False
    return True


@pytest.mark.parametrize("precision", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_parts_give_the_bits_of_one(name, precision):
    if name == "lstm" and precision and not has_bfloat16_lstm():
        pytest.skip("torch has no bfloat16 LSTM for this processor")
    make, shape, late = CASES[name]
    if name == "lstm" and precision and has_portable_bits():  # it is composed, as the others
        late = 3
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(shape)
    whole, _ = computed(model, inputs, False, precision)
    parts, waiting = computed(model, inputs, True, precision)
    assert waiting == late
    for one, other in zip(whole, parts, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    ("compute", "allowed"),
    [
        (lambda layer, x: layer(x), True),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=False), False),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=True), False),
        (lambda layer, x: Own.apply(layer(x)), False),
    ],
)
def test_what_may_not_run_twice_is_not_split(compute, allowed):
    graph_input = GraphInput([torch.randn(2, 8)], [True])
    output = compute(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), graph_input.tensors[0])
    assert is_splittable([output * 3]) is allowed


def test_an_entry_takes_an_in_place_operation_and_keeps_the_gradient_as_it_came():
    graph_input = GraphInput(
        [torch.randn(3, 4), torch.ones(2), torch.randn(3)], [True, False, True]
    )
    changed = graph_input.tensors[0].mul_(2).relu_()
    changed.sum().backward()
    gradient, unused = graph_input.gradients
    assert gradient.shape == (3, 4)
    assert unused is None
    summed = GraphInput([torch.randn(3, 4)], [True])
    summed.tensors[0].sum().backward()
    assert summed.gradients[0].stride() == (0, 0)  # as autograd expands it: not laid out anew
